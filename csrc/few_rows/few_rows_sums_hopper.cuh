// How kernels for Hopper put the sums of products of a few rows together: over a block's warps and
// a cluster's blocks, which share columns, then with biases, an activation and a residual.
//
// A block has rows of one weight. Of a gate and what it gates, blocks of even and of odd rank in a
// cluster have the same rows.
#pragma once

#include "common/hopper.cuh"
#include "few_rows/few_rows.cuh"

namespace flexops::few_rows {

struct Result {
  struct Weight {
    const void* bias;
    int end;             // of its blocks (clusters), beside each other
    int columns, start;  // of the result
  };
  Weight weights[kMaxWeights];
  const void* norm;      // [k], or null
  const void* residual;  // [rows, width], or null
  void* out;             // [rows, width]
  float eps, offset;
  int rows, width, k;
  int activation;
  int cluster;  // blocks that share columns, those of a gate and of what it gates together
  int blocks;   // clusters that have work: others do the last one's once more
};

/// What of it a block has.
struct Share {
  int rank, which, block;
  int part;  // of the columns

  FLEXOPS_DEVICE explicit Share(const Result& p) {
    rank = hopper::cluster_rank(), block = min(hopper::cluster_index(), p.blocks - 1);
    if (p.activation) {
      which = rank % 2, part = rank / 2;
      return;
    }
    which = 0, part = rank;
    while (which < kMaxWeights - 1 && block >= p.weights[which].end) ++which;
    if (which > 0) block -= p.weights[which - 1].end;
  }
};

/// Four results of a row of x, from column `n` of a weight's on: with its bias, activated, added
/// to. `up`: those that a gate's are multiplied by.
template <class T>
FLEXOPS_DEVICE void write_quad(const Result& p, int which, int row, int n, const float4& sum,
                               const float4& up) {
  const Result::Weight& weight = p.weights[which];
  if (n >= weight.columns) return;
  const float sums[2][4] = {{sum.x, sum.y, sum.z, sum.w}, {up.x, up.y, up.z, up.w}};
  const i64 place = static_cast<i64>(row) * p.width + weight.start + n;
  const bool whole = n + 4 <= weight.columns && p.width % 4 == 0 && weight.start % 4 == 0;
  u32 words[2] = {};
  if (p.residual && whole) {
    const uint2 added = *reinterpret_cast<const uint2*>(static_cast<const T*>(p.residual) + place);
    words[0] = added.x, words[1] = added.y;
  }
  float total[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool inside = n + j < weight.columns;
    const auto with_bias = [&](int i, int of) {
      const T* const bias = static_cast<const T*>(p.weights[of].bias);
      return bias && inside ? sums[i][j] + to_float(bias[n + j]) : sums[i][j];
    };
    total[j] = with_bias(0, which);
    if (p.activation)
      total[j] = activate(round_to<T>(total[j]), p.activation) * round_to<T>(with_bias(1, 1));
    if (p.residual && inside) {
      const float added = whole ? half_of<T>(words[j / 2], j % 2)
                                : to_float(static_cast<const T*>(p.residual)[place + j]);
      total[j] = round_to<T>(total[j]) + added;
    }
  }
  T* const out = static_cast<T*>(p.out) + place;
  if (whole) {
    *reinterpret_cast<uint2*>(out) = {pack2<T>(total[0], total[1]), pack2<T>(total[2], total[3])};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (n + j < weight.columns) out[j] = from_float<T>(total[j]);
  }
}

FLEXOPS_DEVICE float4 times(const float4& x, float y) {
  return {x.x * y, x.y * y, x.z * y, x.w * y};
}
/// What a row's results are multiplied by, of the sum of its squares.
FLEXOPS_DEVICE float factor_of(const Result& p, float square) {
  return p.norm ? rsqrtf(square / static_cast<float>(p.k) + p.eps) : 1.0f;
}

/// Floats from one row's sums to the next: 8 lanes write to different banks.
template <int kLines>
inline constexpr int kSumsStride = kLines + 4;

/// Stores a warp's accumulators of 16 lines of W and kEights eights of rows of x.
template <int kLines, int kEights>
FLEXOPS_DEVICE void store_sums(float* part, int line, const float (&acc)[kEights][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const to = part + 2 * (lane % 4) * kSumsStride<kLines> + lane / 4 + line;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(8 * n + i % 2) * kSumsStride<kLines> + i / 2 * 8] = acc[n][i];
  }
}

/// Stores a warp's sum of the squares of a row of x, behind that row's sums.
template <int kLines>
FLEXOPS_DEVICE void store_square(float* part, int row, float square) {
  part[row * kSumsStride<kLines> + kLines] = square;
}

/// Adds, in one order, what store_sums() has put into `parts`, one of kRows rows for each warp, and
/// writes the results; behind a barrier. `sums`: room for one part more. With a norm, results are
/// those of normalized rows, whose squares store_square() has put there.
template <class T, int kWarps, int kRows, int kLines>
FLEXOPS_DEVICE void write_sums(const Result& p, const Share& s, const float* parts, float* sums) {
  constexpr int kStride = kSumsStride<kLines>, kQuads = kLines / 4, kThreads = 32 * kWarps;
  const int thread = static_cast<int>(threadIdx.x), quads = p.rows * kQuads;
#pragma unroll 1
  for (int i = thread; i < quads; i += kThreads) {
    const int row = i / kQuads, line = i % kQuads * 4, place = row * kStride + line;
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 part = *reinterpret_cast<const float4*>(parts + w * kRows * kStride + place);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    float square = 0;
    if (p.norm && (p.cluster == 1 || line == 0)) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        square += parts[w * kRows * kStride + row * kStride + kLines];
    }
    if (p.cluster > 1) {
      *reinterpret_cast<float4*>(sums + place) = sum;
      if (line == 0) sums[row * kStride + kLines] = square;
    } else {
      sum = times(sum, factor_of(p, square));
      write_quad<T>(p, s.which, row, s.block * kLines + line, sum, sum);
    }
  }
  if (p.cluster == 1) return;
  hopper::cluster_sync();
  // Each block of the cluster writes its part of the results.
#pragma unroll 1
  for (int i = thread + kThreads * s.rank; i < quads; i += kThreads * p.cluster) {
    const int row = i / kQuads, line = i % kQuads * 4;
    const auto* const from = reinterpret_cast<const float4*>(sums + row * kStride + line);
    float4 part[hopper::kMostClusterBlocks], even = {}, odd = {};
#pragma unroll
    for (int other = 0; other < hopper::kMostClusterBlocks; ++other) {
      if (other < p.cluster) part[other] = hopper::cluster_load(from, other);
    }
#pragma unroll
    for (int other = 0; other < hopper::kMostClusterBlocks; ++other) {
      if (other >= p.cluster) break;
      float4& to = other % 2 ? odd : even;
      to.x += part[other].x, to.y += part[other].y;
      to.z += part[other].z, to.w += part[other].w;
    }
    if (!p.activation) even = {even.x + odd.x, even.y + odd.y, even.z + odd.z, even.w + odd.w};
    if (p.norm) {  // a gate's blocks have the same rows of x as what it gates
      float square = 0;
      for (int other = 0; other < p.cluster; other += p.activation ? 2 : 1)
        square += hopper::cluster_load(sums + row * kStride + kLines, other);
      const float factor = factor_of(p, square);
      even = times(even, factor), odd = times(odd, factor);
    }
    write_quad<T>(p, p.activation ? 0 : s.which, row, s.block * kLines + line, even, odd);
  }
  hopper::cluster_leave();
}

}  // namespace flexops::few_rows
