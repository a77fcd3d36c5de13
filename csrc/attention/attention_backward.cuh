// Attention backward on sm_80 and newer, between backward_before and backward_after_mma.
//
// As on Hopper (attention_backward_hopper.cuh, which has the formulas), a block of threads has kN
// keys of one key head and goes over all queries that see them; S and dP are transposed. Its eight
// warps are kN / 16 along the keys times kSplit: a warp computes the scores of 16 keys and kM /
// kSplit queries, and has dK and dV of 16 keys and kDim / kSplit columns. Without a split P^T and
// dS^T are left operands as they lie in registers; with it they go through shared memory. dQ's tile
// is cut into 16 rows times as many columns as make eight parts.
//
//   Shared memory: K, V; kStages tiles of kM queries, of dO, of exponents and deltas; dS^T; with a
//   split P^T. Where 99 KB are all that a block gets, of more than 128 columns (tiles of 32
//   queries), each warp has its 16 rows of V in registers, and the next queries are loaded under
//   dQ's product.
#pragma once

#include "attention/attention_backward_rows.cuh"
#include "attention/attention_mma.cuh"

namespace flexops::attention {

/// Whether a warp has its rows of V in registers.
template <int kDimV, int kM>
FLEXOPS_DEVICE constexpr bool holds_v() {
  return kDimV > 128 && kM < 64;
}

template <class T, int kDim, int kDimV, int kM_, int kN_, int kStages_>
struct BackwardShape {
  static constexpr int kM = kM_, kN = kN_, kStages = kStages_, kThreads = 256;
  static constexpr int kKeyWarps = kN / 16, kSplit = 8 / kKeyWarps,
                       kQueries = kM / kSplit;  // queries: of a warp's scores
  static constexpr int kDqRowWarps = kM / 16, kDqColumns = kDim / (8 / kDqRowWarps);
  static_assert(kKeyWarps * kSplit == 8 && kQueries % 16 == 0 && kDim / kSplit % 32 == 0 &&
                    kDqColumns % 32 == 0,
                "whole fragments");
  using Q = Panels<kM, kDim>;
  using Do = Panels<kM, kDimV>;
  using K = Panels<kN, kDim>;
  using V = Panels<kN, kDimV>;
  using Ds = Panels<kN, kM>;
  static constexpr int kV = K::kBytes, kQ = kV + (holds_v<kDimV, kM>() ? 0 : V::kBytes),
                       kDo = kQ + kStages * Q::kBytes, kDs = kDo + kStages * Do::kBytes;
  static constexpr int kP = kDs + Ds::kBytes, kExponent = kP + (kSplit > 1 ? Ds::kBytes : 0),
                       kDelta = kExponent + kStages * kM * 4;
  static constexpr int kBytes = kDelta + kStages * kM * 4;
  static_assert(!holds_v<kDimV, kM>() || (kStages == 1 && V::kBytes <= kDs - kQ),
                "V comes by way of the queries' place");
};

/// acc += left^T right: 16 keys by a part of right's columns. Left, keys by queries, is in
/// registers, or, with a split, in `left_tile`.
template <class T, class Left, class Right, int kSplit, int N, int M>
FLEXOPS_DEVICE void add_keys_product(float (&acc)[N], const u32 (&left_words)[M], u32 left_tile,
                                     int key, u32 right_tile, int split) {
  constexpr int kColumns = Right::kColumns / kSplit;
#pragma unroll
  for (int step = 0; step < Right::kRows / 16; ++step) {
    u32 left[4], right[4];
    if constexpr (kSplit == 1) {
#pragma unroll
      for (int w = 0; w < 4; ++w) left[w] = left_words[4 * step + w];
    } else {
      Left::load_left(left, left_tile, key, 16 * step);
    }
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      Right::load_right_transposed(right, right_tile, 16 * step, split * kColumns + 16 * j);
      mma_pair<T>(&acc[8 * j], left, right);
    }
  }
}

/// grid: tiles * batch * groups of query heads blocks, those with the most queries (a causal mask's
/// first keys) first.
template <class T, int kDim, int kDimV, int kM, int kN, int kStages, class Modifier>
__global__ void __launch_bounds__(256) backward(const FLEXOPS_GRID_CONSTANT BackwardParams p) {
  using Shape = BackwardShape<T, kDim, kDimV, kM, kN, kStages>;
  using Q = typename Shape::Q;
  using Do = typename Shape::Do;
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Ds = typename Shape::Ds;
  constexpr int kThreads = Shape::kThreads, kSplit = Shape::kSplit, kQueries = Shape::kQueries;
  constexpr bool kHoldsV = holds_v<kDimV, kM>();
  __align__(1024) extern __shared__ u8 memory[];
  u32 k = static_cast<u32>(__cvta_generic_to_shared(memory));

  const Problem& problem = p.problem;
  const TileNumber number(blockIdx.x, problem.batch, problem.heads_q / p.group, p.tiles, p.section);
  const int n = p.first_tile + number.tile, first_head = number.head * p.group;
  const Sequence s(problem, number.batch, first_head);
  if (n * kN >= s.length_k) return;
  const Blocks blocks = seeing_queries<kM, kN>(problem, s, n);
  const float scale = exponent_scale<Modifier>(problem);
  const i64 padded = padded_row(problem, s);
  const int warp = static_cast<int>(threadIdx.x) / 32, warp_key = warp % Shape::kKeyWarps * 16,
            split = warp / Shape::kKeyWarps;
  const int key = n * kN + warp_key + lane_row();

  const auto load_queries = [&](int head, int m, int stage) {
    const Sequence mine(problem, number.batch, head);
    const int left = s.length_q - m * kM;
    load_rows<Q, kThreads>(k + Shape::kQ + stage * Q::kBytes, mine.rows_q<const T>(p.q, m * kM),
                           p.q.row, left, problem.head_dim);
    load_rows<Do, kThreads>(k + Shape::kDo + stage * Do::kBytes,
                            mine.rows_q<const T>(p.d_o, m * kM), p.d_o.row, left,
                            problem.head_dim_v);
    const int i = static_cast<int>(threadIdx.x) % (kM / 4),
              which = static_cast<int>(threadIdx.x) / (kM / 4);
    if (which < 2) {
      const float* from = (which ? p.delta : p.exponent) + head * p.padded_rows + padded + m * kM;
      async_copy16(k + (which ? Shape::kDelta : Shape::kExponent) + (stage * kM + 4 * i) * 4,
                   from + 4 * i, true);
    }
    async_commit();
  };

  // Load K and V, and the first tile of queries.
  float dk[kDim / kSplit / 2] = {}, dv[kDimV / kSplit / 2] = {};
  [[maybe_unused]] u32 held_v[kHoldsV ? kDimV / 16 : 1][4];
  if (!blocks.none()) {
    const u32 v = k + (kHoldsV ? Shape::kQ : Shape::kV);
    load_rows<K, kThreads>(k, s.rows_k<const T>(p.k, n * kN), p.k.row, s.length_k - n * kN,
                           problem.head_dim);
    load_rows<V, kThreads>(v, s.rows_k<const T>(p.v, n * kN), p.v.row, s.length_k - n * kN,
                           problem.head_dim_v);
    if constexpr (kHoldsV) {
      async_commit(), async_wait(0);
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kDimV / 16; ++step)
        V::load_left(held_v[step], v, warp_key, 16 * step);
      __syncthreads();
    }
    load_queries(first_head, blocks.begin, 0);
  }
  int head = first_head, m = blocks.begin;
  const int tiles = blocks.none() ? 0 : (blocks.end - blocks.begin) * p.group;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const int stage = i % kStages, first = m * kM + split * kQueries, now_head = head, now_m = m;
    obscure(
        k);  // addresses are computed where they are used: there are more of them than registers
    const u32 v = k + Shape::kV, weights_tile = k + Shape::kP, ds_tile = k + Shape::kDs;
    const u32 q = k + Shape::kQ + stage * Q::kBytes, d_o = k + Shape::kDo + stage * Do::kBytes;
    if (++m == blocks.end) m = blocks.begin, ++head;
    // Wait for the tile, and load the next one.
    async_wait(0);
    __syncthreads();  // the tile is there, the one before no longer used
    if (kStages > 1 && i + 1 < tiles) load_queries(head, m, (i + 1) % kStages);

    // S and dP, transposed.
    float scores[kQueries / 2] = {}, dp[kQueries / 2] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      u32 left[4], right[4];
      K::load_left(left, k, warp_key, 16 * step);
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        Q::load_right(right, q, split * kQueries + 16 * j, 16 * step);
        mma_pair<T>(&scores[8 * j], left, right);
      }
    }
#pragma unroll
    for (int step = 0; step < kDimV / 16; ++step) {
      u32 left[4], right[4];
      if constexpr (!kHoldsV) V::load_left(left, v, warp_key, 16 * step);
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        Do::load_right(right, d_o, split * kQueries + 16 * j, 16 * step);
        mma_pair<T>(&dp[8 * j], kHoldsV ? held_v[kHoldsV ? step : 0] : left, right);
      }
    }
    // dS: modify, mask, softmax.
    const u32 row_bytes = (stage * kM + split * kQueries + lane_column()) * 4;
    subtract(dp, k + Shape::kDelta + row_bytes);
    modify_transposed<Modifier>(scores, dp, problem, number.batch, now_head, key,
                                first + lane_column());
    if (is_partial(problem, s, first, kQueries, n * kN, kN))
      mask_transposed(scores, problem, s, key, first + lane_column());
    weigh(scores, scale, k + Shape::kExponent + row_bytes);
    multiply(dp, scores);
    u32 weights[kQueries / 4], ds[kQueries / 4];
    pack<T>(weights, scores), pack<T>(ds, dp);
    Ds::store_words(ds_tile, warp_key, split * kQueries, ds);
    if (kSplit > 1) Ds::store_words(weights_tile, warp_key, split * kQueries, weights);
    __syncthreads();

    // Add to dV and dK.
    add_keys_product<T, Ds, Do, kSplit>(dv, weights, weights_tile, warp_key, d_o, split);
    add_keys_product<T, Ds, Q, kSplit>(dk, ds, ds_tile, warp_key, q, split);
    if (kHoldsV && i + 1 < tiles) {
      __syncthreads();
      load_queries(head, m, 0);
    }

    // dQ of this block of keys, added up in memory.
    float dq[Shape::kDqColumns / 2] = {};
    const int dq_row = warp % Shape::kDqRowWarps * 16,
              dq_column = warp / Shape::kDqRowWarps * Shape::kDqColumns;
#pragma unroll
    for (int step = 0; step < kN / 16; ++step) {
      u32 left[4], right[4];
      Ds::load_left_transposed(left, ds_tile, 16 * step, dq_row);
#pragma unroll
      for (int j = 0; j < Shape::kDqColumns / 16; ++j) {
        K::load_right_transposed(right, k, 16 * step, dq_column + 16 * j);
        mma_pair<T>(&dq[8 * j], left, right);
      }
    }
    float* to = p.dq_sums + (now_head * p.padded_rows + padded + now_m * kM) * kDim +
                warp * (16 * Shape::kDqColumns) + lane_id();
#pragma unroll
    for (int j = 0; j < Shape::kDqColumns / 2; ++j) atomicAdd(to + 32 * j, dq[j]);
    if (kStages == 1 && !kHoldsV && i + 1 < tiles) {
      __syncthreads();
      load_queries(head, m, 0);
    }
  }
  // Write dK and dV.
  store_key_gradient<T>(p.dk, s, number.head, key, dk, problem.scale, problem.head_dim,
                        split * (kDim / kSplit));
  store_key_gradient<T>(p.dv, s, number.head, key, dv, 1.0f, problem.head_dim_v,
                        split * (kDimV / kSplit));
}

/// grid: (tiles of kM rows, heads_q, batch).
template <class T, int kDim, int kM>
__global__ void __launch_bounds__(256)
    backward_after_mma(const FLEXOPS_GRID_CONSTANT BackwardRowsParams p) {
  constexpr int kRowWarps = kM / 16, kColumns = kDim / (8 / kRowWarps);
  const Sequence s(p.problem, blockIdx.z, blockIdx.y);
  const int first = blockIdx.x * kM, warp = static_cast<int>(threadIdx.x) / 32;
  if (first >= s.length_q) return;
  const float* sums = p.dq_sums +
                      (s.head * p.padded_rows + padded_row(p.problem, s) + first) * kDim +
                      warp * (16 * kColumns) + lane_id();
  // Load the sums of dQ and scale them.
  float dq[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) dq[i] = sums[32 * i] * p.problem.scale;
  // Write dQ in T.
  store_query_gradient<T>(p.dq, s, first + warp % kRowWarps * 16 + lane_row(), dq,
                          p.problem.head_dim, warp / kRowWarps * kColumns);
}

}  // namespace flexops::attention
