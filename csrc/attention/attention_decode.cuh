// Attention forward of few queries and many keys, as in generation, on sm_80 and newer.
//
// The 16 rows of a product are queries of all the heads that share a key head: row i is query i /
// group of head i % group of these. Keys are split: a block of threads has one of `splits` parts of
// what its rows see, and within it each warp every kWarps-th block of kN keys, with a softmax of
// its own. What bounds all this is memory, so a warp has a ring of kStages blocks that cp.async
// fills, and waits for no other warp until the end.
//
//   Shared memory: kWarps kStages blocks of kN keys and their values; at the end, each warp's O,
//   maxima and sums. Registers of a thread: Q (kDim / 4), S (kN / 2), O (kDimV / 2).
//
// Then the warps' rows are put together. With one split that is the output; else it is a part of
// it, which decode_combine adds to the others.
#pragma once

#include "attention/attention_mma.cuh"

namespace flexops::attention {

struct DecodeParams {
  ForwardParams call;  // tiles: of 16 rows, per sequence and key head
  int splits;
  float* parts;       // [splits, batch, heads_q, length_q, head_dim_v]; not used by one split
  float* parts_sums;  // [splits, batch, heads_q, length_q]: log2 of the sum of 2^score
};

/// kMost: bytes of shared memory; 96 KiB are what sm_86 and sm_89 have, too.
template <class T, int kDim, int kDimV, int kWarps_, int kN, int kMost = 96 * 1024>
struct Decode {
  static constexpr int kM = 16, kColumns = kDim, kColumnsV = kDimV, kKeys = kN, kWarps = kWarps_,
                       kThreads = 32 * kWarps;
  using K = Panels<kN, kDim>;
  using V = Panels<kN, kDimV>;
  static constexpr int kStages = kMost / (kWarps * (K::kBytes + V::kBytes)),
                       kStage = K::kBytes + V::kBytes, kBytes = kStages * kWarps * kStage;
  // At the end, in floats: rows of O, four more of each than there are columns, so that a quad's
  // rows lie in different banks.
  static constexpr int kRow = kDimV + 4, kMaxima = kWarps * kM * kRow,
                       kSums = kMaxima + kWarps * kM;
  static_assert(kStages >= 2 && (kSums + kWarps * kM) * 4 <= kBytes,
                "room for the pipeline, and for the end");
  /// A lane's row r of O.
  static FLEXOPS_DEVICE void store_row(float* row, const float (&out)[kDimV / 2], int r) {
#pragma unroll
    for (int j = 0; j < kDimV / 8; ++j)
      *reinterpret_cast<float2*>(row + 8 * j + lane_column()) =
          float2{out[4 * j + 2 * r], out[4 * j + 2 * r + 1]};
  }
};

/// Starts a warp's copies of a tile's rows, of which `rows` are there, and `columns` of each row (a
/// multiple of 8); the others become zeros.
template <class Tile, class T>
FLEXOPS_DEVICE void load_rows_by_warp(u32 tile, const T* from, i64 stride, int rows, int columns) {
  constexpr int kVectors = Tile::kColumns / 8, kTotal = Tile::kRows * kVectors;
  static_assert(kTotal % 32 == 0, "all lanes copy equally much");
#pragma unroll
  for (int i = 0; i < kTotal / 32; ++i) {
    const int at = 32 * i + lane_id(), row = at / kVectors, vector = at % kVectors;
    const bool there = row < rows && 8 * vector < columns;
    async_copy16(Tile::place(tile, row, vector), there ? from + row * stride + 8 * vector : from,
                 there);
  }
}

/// What parts of a row have in common: their exponents' maximum, and a sink's, and the sum relative
/// to it.
struct Total {
  float shift, sum;
  FLEXOPS_DEVICE Total(float most, const float* sink)
      : shift(sink ? fmaxf(most, *sink * kLog2E) : most), sum(0) {
    if (shift == -infinity()) shift = 0;
    if (sink) sum = exp2_approx(*sink * kLog2E - shift);
  }
  FLEXOPS_DEVICE float log2_sum() const { return sum > 0 ? log2f(sum) + shift : -infinity(); }
  FLEXOPS_DEVICE float factor() const { return sum > 0 ? 1.0f / sum : sum == sum ? 0.0f : sum; }
};

/// A lane's two rows of a tile: their queries and what these see.
template <class Shape, class Modifier>
struct DecodeRows {
  u32 q[Shape::kColumns / 16][4];
  int query[2];
  Modifier modifier[2];
  Visible visible[2];
};

/// Adds kKeys keys from `first` on, and their values, to a warp's online softmax. `k` and `v`:
/// where they lie in shared memory.
template <class T, class Shape, class Modifier>
FLEXOPS_DEVICE void attend_block(const DecodeRows<Shape, Modifier>& own, u32 k, u32 v, int first,
                                 float scale, Rows& rows, float (&out)[Shape::kColumnsV / 2]) {
  constexpr int kDim = Shape::kColumns, kDimV = Shape::kColumnsV, kN = Shape::kKeys;
  // S = Q K^T, modified and masked.
  float scores[kN / 2] = {};
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      u32 right[4];
      Shape::K::load_right(right, k, 16 * j, 16 * step);
      mma_pair<T>(&scores[8 * j], own.q[step], right);
    }
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int r = i / 2 % 2, key = first + lane_column() + i / 4 * 8 + i % 2;
    if constexpr (!Modifier::kPlain)
      scores[i] = own.modifier[r].value(scores[i], own.query[r], key);
    if (!own.visible[r](key)) scores[i] = -infinity();
  }
  // O += P V.
  float correction[2];
  u32 weights[kN / 4];
  rows.update(scores, scale, correction);
  pack<T>(weights, scores);
  scale_rows(out, correction);
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    const u32 left[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                         weights[4 * step + 3]};
#pragma unroll
    for (int j = 0; j < kDimV / 16; ++j) {
      u32 right[4];
      Shape::V::load_right_transposed(right, v, 16 * step, 16 * j);
      mma_pair<T>(&out[8 * j], left, right);
    }
  }
}

/// Combines the warps' rows, which each has put into shared memory: O, and the maxima and sums of
/// exponents. `write(row, column, o, total)` gets 8 columns of each of the tile's `rows_there`
/// rows. `sink_of(row)`: see Total.
template <class Shape, class Sink, class Write>
FLEXOPS_DEVICE void combine_parts(const float* parts, int rows_there, int columns,
                                  const Sink& sink_of, const Write& write) {
  constexpr int kM = Shape::kM, kWarps = Shape::kWarps, kVectors = Shape::kColumnsV / 8;
  const float *const maxima = parts + Shape::kMaxima, *const sums = parts + Shape::kSums;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kM * kVectors; i += Shape::kThreads) {
    const int at = i / kVectors, column = i % kVectors * 8;
    if (at >= rows_there || column >= columns) continue;
    float most = maxima[at];
    for (int w = 1; w < kWarps; ++w) most = fmaxf(most, maxima[w * kM + at]);
    Total total(most, sink_of(at));
    float o[8] = {};
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_approx(maxima[w * kM + at] - total.shift);
      total.sum = fmaf(weight, sums[w * kM + at], total.sum);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        o[j] = fmaf(weight, parts[(w * kM + at) * Shape::kRow + column + j], o[j]);
    }
    const float factor = total.factor();
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] *= factor;
    write(at, column, o, total);
  }
}

/// Puts a warp's rows into shared memory, whose contents no thread uses any more, and combines
/// them.
template <class Shape, class Sink, class Write>
FLEXOPS_DEVICE void combine_warps(float* parts, const Rows& rows,
                                  const float (&out)[Shape::kColumnsV / 2], float scale,
                                  int rows_there, int columns, const Sink& sink_of,
                                  const Write& write) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = warp * Shape::kM + lane_row() + 8 * r;
    const float sum = quad_sum(rows.sum[r]);
    if (lane_id() % 4 == 0) {
      parts[Shape::kMaxima + at] = rows.max[r] == -infinity() ? -infinity() : rows.max[r] * scale;
      parts[Shape::kSums + at] = sum;
    }
    Shape::store_row(parts + at * Shape::kRow, out, r);
  }
  combine_parts<Shape>(parts, rows_there, columns, sink_of, write);
}

FLEXOPS_DEVICE void store_part(float* to, const float (&o)[8]) {
  float4* const vectors = reinterpret_cast<float4*>(to);
  vectors[0] = float4{o[0], o[1], o[2], o[3]}, vectors[1] = float4{o[4], o[5], o[6], o[7]};
}
/// 8 columns of a query's output.
template <class T>
FLEXOPS_DEVICE void store_columns(const ForwardParams& p, const Sequence& s, int query, int column,
                                  const float (&o)[8]) {
  const uint4 packed = {pack2<T>(o[0], o[1]), pack2<T>(o[2], o[3]), pack2<T>(o[4], o[5]),
                        pack2<T>(o[6], o[7])};
  *reinterpret_cast<uint4*>(s.rows_q<T>(p.o, query) + column) = packed;
}
FLEXOPS_DEVICE void store_log_sum(const ForwardParams& p, const Sequence& s, int query,
                                  float log2_sum) {
  if (p.lse)
    p.lse[s.coordinate * p.lse_batch + s.head * p.lse_head + s.first_q + query] = log2_sum * kLn2;
}
FLEXOPS_DEVICE i64 part_row(const DecodeParams& p, int split, const Sequence& s, int query) {
  const Problem& problem = p.call.problem;
  return ((static_cast<i64>(split) * problem.batch + s.batch) * problem.heads_q + s.head) *
             problem.length_q +
         query;
}

/// grid: tiles * splits * batch * heads_k blocks; tiles that have the same keys are neighbours, and
/// meet in the L2 cache.
template <class T, int kDim, int kDimV, int kWarps, int kN, class Modifier>
__global__ void __launch_bounds__(32 * kWarps, 2)
    decode(const FLEXOPS_GRID_CONSTANT DecodeParams p) {
  using Shape = Decode<T, kDim, kDimV, kWarps, kN>;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kM = Shape::kM, kStages = Shape::kStages, kStage = K::kBytes + V::kBytes;
  __align__(1024) extern __shared__ u8 memory[];

  const Problem& problem = p.call.problem;
  const int tile = static_cast<int>(blockIdx.x) % p.call.tiles,
            part = static_cast<int>(blockIdx.x) / p.call.tiles;
  const int split = part % p.splits, both = part / p.splits, group = problem.group;
  const Sequence s(problem, both / problem.heads_k, both % problem.heads_k * group);
  const int first = tile * kM, rows_there = s.length_q * group;
  if (first >= rows_there) return;

  // The keys that any of the rows sees, and of these the part.
  const int lowest = max(0, first / group + s.offset - problem.window_left) / kN;
  const int last = (min(first + kM, rows_there) - 1) / group;
  const int highest =
      ceil_div(max(0, min(s.length_k, last + s.offset + problem.window_right + 1)), kN);
  const int each = ceil_div(max(0, highest - lowest), p.splits), begin = lowest + split * each,
            end = min(begin + each, highest);

  // Start the copies of this warp's first blocks of keys and values.
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const u32 ring = static_cast<u32>(__cvta_generic_to_shared(memory)) + warp * kStages * kStage;
  const auto load = [&](int n, int stage) {
    if (n < end) {
      load_rows_by_warp<K>(ring + stage * kStage, s.rows_k<const T>(p.call.k, n * kN), p.call.k.row,
                           s.length_k - n * kN, problem.head_dim);
      load_rows_by_warp<V>(ring + stage * kStage + K::kBytes, s.rows_k<const T>(p.call.v, n * kN),
                           p.call.v.row, s.length_k - n * kN, problem.head_dim_v);
    }
    async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(begin + warp + i * kWarps, i);

  // This lane's two rows.
  const int row[2] = {first + lane_row(), first + lane_row() + 8},
            query[2] = {row[0] / group, row[1] / group};
  const Sequence of_row[2] = {Sequence(problem, s.batch, s.head + row[0] % group),
                              Sequence(problem, s.batch, s.head + row[1] % group)};
  DecodeRows<Shape, Modifier> own = {
      {},
      {query[0], query[1]},
      {Modifier(problem, of_row[0]), Modifier(problem, of_row[1])},
      {Visible(problem, s, query[0]), Visible(problem, s, query[1])}};
  // Load Q into registers.
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int r = i % 2, column = i / 2 * 8 + lane_column();
    const bool there = row[r] < rows_there && column < problem.head_dim;
    own.q[i / 4][i % 4] =
        there
            ? *reinterpret_cast<const u32*>(of_row[r].rows_q<const T>(p.call.q, query[r]) + column)
            : 0;
  }

  const float scale = exponent_scale<Modifier>(problem);
  float out[kDimV / 2] = {};
  Rows rows;
  int stage = 0;
  // Online softmax over this warp's blocks.
#pragma unroll 1
  for (int n = begin + warp; n < end; n += kWarps) {
    async_wait(kStages - 2);
    __syncwarp();  // block n is there, and the one before no longer used
    load(n + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
    const u32 k = ring + stage * kStage, v = k + K::kBytes;
    attend_block<T>(own, k, v, n * kN, scale, rows, out);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // Combine the warps, and write the result, or the split's part.
  async_wait(0);
  __syncthreads();
  combine_warps<Shape>(
      reinterpret_cast<float*>(memory), rows, out, scale, rows_there - first, problem.head_dim_v,
      [&](int at) {
        return p.splits == 1 && p.call.sinks ? p.call.sinks + s.head + (first + at) % group
                                             : nullptr;
      },
      [&](int at, int column, const float (&o)[8], const Total& total) {
        const Sequence of(problem, s.batch, s.head + (first + at) % group);
        const int of_query = (first + at) / group;
        if (p.splits == 1) {
          store_columns<T>(p.call, of, of_query, column, o);
          if (column == 0) store_log_sum(p.call, of, of_query, total.log2_sum());
          return;
        }
        const i64 to = part_row(p, split, of, of_query);
        store_part(p.parts + to * problem.head_dim_v + column, o);
        if (column == 0) p.parts_sums[to] = total.log2_sum();
      });
}

/// Writes a query of one head: its splits' rows, weighed by their sums, by a block of 128 threads.
/// Warp w has splits w, w + 4, ...
template <class T>
FLEXOPS_DEVICE void combine_splits(const DecodeParams& p, const Sequence& s, int query,
                                   int splits) {
  constexpr int kWarps = 4, kColumns = 256;
  __shared__ float maxima[kWarps], sums[kWarps], rows[kWarps][kColumns];
  const Problem& problem = p.call.problem;
  const int warp = static_cast<int>(threadIdx.x) / 32, column = lane_id() * 8,
            mine = warp + kWarps * lane_id();
  const i64 first = part_row(p, 0, s, query), step = part_row(p, 1, s, query) - first;

  const float exponent = mine < splits ? p.parts_sums[first + mine * step] : -infinity();
  // This warp's first row is asked for before it is known what the rows weigh.
  const bool inside = column < problem.head_dim_v;
  float part[8] = {};
  const auto load = [&](int split) {
    const float4* const vectors = reinterpret_cast<const float4*>(
        p.parts + (first + split * step) * problem.head_dim_v + column);
    const float4 low = vectors[0], high = vectors[1];
    part[0] = low.x, part[1] = low.y, part[2] = low.z, part[3] = low.w;
    part[4] = high.x, part[5] = high.y, part[6] = high.z, part[7] = high.w;
  };
  if (inside && warp < splits) load(warp);
  float most = exponent;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, shuffle_xor(most, lanes));
  if (lane_id() == 0) maxima[warp] = most;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, maxima[w]);
  Total total(most, p.call.sinks ? p.call.sinks + s.head : nullptr);

  const float weight = exp2_approx(exponent - total.shift);
  float o[8] = {}, sum = weight;
#pragma unroll 4
  for (int split = warp; split < splits; split += kWarps) {
    const float factor = shuffle(weight, split / kWarps);
    if (!inside) continue;
    if (split != warp) load(split);
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] = fmaf(factor, part[j], o[j]);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
  if (lane_id() == 0) sums[warp] = sum;
#pragma unroll
  for (int j = 0; j < 8; ++j) rows[warp][column + j] = o[j];
  __syncthreads();
  if (warp != 0 || !inside) return;
  total.sum += sums[0] + sums[1] + sums[2] + sums[3];
  const float factor = total.factor();
#pragma unroll
  for (int j = 0; j < 8; ++j)
    o[j] = factor *
           (rows[0][column + j] + rows[1][column + j] + rows[2][column + j] + rows[3][column + j]);
  store_columns<T>(p.call, s, query, column, o);
  if (column == 0) store_log_sum(p.call, s, query, total.log2_sum());
}

/// Grid: batch * heads_q * length_q blocks of 128, one for each query and head.
template <class T>
__global__ void __launch_bounds__(128) decode_combine(const FLEXOPS_GRID_CONSTANT DecodeParams p) {
  const Problem& problem = p.call.problem;
  const int query = static_cast<int>(blockIdx.x) % problem.length_q,
            both = static_cast<int>(blockIdx.x) / problem.length_q;
  const Sequence s(problem, both / problem.heads_q, both % problem.heads_q);
  if (query < s.length_q) combine_splits<T>(p, s, query, p.splits);
}

}  // namespace flexops::attention
