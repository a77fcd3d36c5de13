// What the kernels of products with 4-bit weights share: operands of mma.sync from packed words,
// and the sum over warps and blocks. Formulas and the layout of the weight:
// flexops/ops/int4_linear.py.
//
// The weight is the left operand, 16 rows of it, and x the right one, 8 rows (tokens): out^T = W
// x^T. So one token costs little more than the weight's bytes. A thread's lane is 4 g + t: it has
// rows g and g + 8 of a tile, and tokens 2 t and 2 t + 1 of the accumulator. Which column of the
// tile is which column of an mma is free, as long as both operands agree: words 2 h and 2 h + 1 of
// a thread are columns 32 h + 8 t on, so that it reads its part of x as vectors of 16 bytes.
#pragma once

#include "common/async.cuh"
#include "common/once.cuh"
#include "common/vec.cuh"
#include "int4_linear/int4_codes.cuh"

namespace flexops::int4 {

struct Params {
  const void* x;  // [m, k]
  const u8* packed;
  const u16 *scales, *zeros;  // float16 or bfloat16; float16 or null
  const void* bias;
  void* out;  // [m, n]
  int m, n, k;
  int tiles_n, tiles_k, groups;
  int group_shift;  // log2 of the group size
  int cluster;      // blocks that share the columns of one tile of the result
  int token_tiles;
  int warps_n;   // warps beside each other along n
  int log_rows;  // log2 of the rows of W that a block has
};

/// The zero points of rows g (half 0) and g + 8 (half 1).
FLEXOPS_DEVICE float zero_of(const Params& p, u32 word, int half) {
  return p.zeros ? half_of<f16>(word, half) : 8.0f;
}

/// Which part of the result a block computes; blocks of a cluster follow each other.
struct Place {
  int rank, token_tile, n_tile;
  FLEXOPS_DEVICE explicit Place(const Params& p) {
    const int block = static_cast<int>(blockIdx.x), rest = block / p.cluster;
    rank = block - rest * p.cluster;
    n_tile = rest / p.token_tiles;
    token_tile = rest - n_tile * p.token_tiles;
  }
};

/// Adds the accumulators of all warps that share a part of the result, then those of the cluster's
/// blocks, each in a fixed order, and writes the sums with the bias. `parts`: shared memory, for
/// each warp kRows * kTokens * 128 floats.
template <class T, int kRows, int kTokens>
FLEXOPS_DEVICE void finish(const Params& p, const Place& place, float* parts,
                           const float (&acc)[kRows][kTokens][4]) {
  constexpr int kPart = kRows * kTokens * 128;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / 32, lane = thread % 32, warps = threads / 32;
  // Each warp writes its accumulators as they lie in its threads.
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      reinterpret_cast<float4*>(parts + warp * kPart)[(r * kTokens + t) * 32 + lane] = {
          acc[r][t][0], acc[r][t][1], acc[r][t][2], acc[r][t][3]};
  }
  __syncthreads();
  // Warps along k: the first one's part becomes the block's sum.
  const int all = p.warps_n * kPart, depth = warps / p.warps_n;
  if (depth > 1) {
    for (int i = thread; i < all; i += threads) {
      float sum = parts[i];
      for (int w = 1; w < depth; ++w) sum += parts[i + w * all];
      parts[i] = sum;
    }
    __syncthreads();
  }
  if (p.cluster > 1) cluster_sync();
  // Each block of the cluster writes every p.cluster-th element, neighbouring rows of W by
  // neighbouring threads.
  const int rows = 1 << p.log_rows, first_row = place.n_tile * rows;
  const int first_token = place.token_tile * kTokens * 8;
  const int tokens = min(p.m - first_token, kTokens * 8);
  for (int i = thread + place.rank * threads; i < tokens * rows; i += threads * p.cluster) {
    const int token = i >> p.log_rows, row = i & (rows - 1), n = first_row + row;
    const int tile = row / 16, g = row % 8, high = row / 8 % 2;
    const int at = tile / kRows * kPart +
                   ((tile % kRows * kTokens + token / 8) * 32 + 4 * g + token % 8 / 2) * 4 +
                   2 * high + token % 2;
    if (n >= p.n) continue;
    float sum = parts[at];
    if (p.cluster > 1) {
      sum = cluster_load(parts + at, 0);
      for (int rank = 1; rank < p.cluster; ++rank) sum += cluster_load(parts + at, rank);
    }
    if (p.bias) sum += to_float(static_cast<const T*>(p.bias)[n]);
    static_cast<T*>(p.out)[static_cast<i64>(first_token + token) * p.n + n] = from_float<T>(sum);
  }
  if (p.cluster > 1) cluster_sync();  // others may still read this block's shared memory
}

}  // namespace flexops::int4
