// Attention forward on sm_80 and newer.
//
// Four warps have 16 kTiles queries each: kM = 64 kTiles of a block of threads. Two blocks share a
// multiprocessor, so that one computes while the other waits.
//
//   Shared memory: Q's tile, one block of kN keys, one of their values.
//   Registers of a thread, for each of its kTiles tiles of 16 rows: S (kN / 2), O (kDimV / 2), P
//   (kN / 4, in T).
//
//   For block n from the last one to the first:
//     copies under way:  V(n)            |  K(n - 1)
//     tensor cores:      S = Q K(n)^T    |  P = softmax(mask(S)), O = correction O + P V(n)
#pragma once

#include "attention/attention_mma.cuh"

namespace flexops::attention {

template <class T, int kDim, int kDimV, int kTiles, int kN>
struct ForwardShape {
  static constexpr int kThreads = 128, kM = 64 * kTiles;
  using Q = Panels<kM, kDim>;
  using K = Panels<kN, kDim>;
  using V = Panels<kN, kDimV>;
  static constexpr int kBytes = Q::kBytes + K::kBytes + V::kBytes;
};

/// grid: tiles * batch * heads_q blocks, those with the most keys (a causal mask's last rows)
/// first.
template <class T, int kDim, int kDimV, int kTiles, int kN, class Modifier>
__global__ void __launch_bounds__(128) forward(const FLEXOPS_GRID_CONSTANT ForwardParams p) {
  using Shape = ForwardShape<T, kDim, kDimV, kTiles, kN>;
  using Q = typename Shape::Q;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kM = Shape::kM, kThreads = Shape::kThreads;
  __align__(1024) extern __shared__ u8 memory[];
  const u32 q = static_cast<u32>(__cvta_generic_to_shared(memory)), k = q + Q::kBytes,
            v = k + K::kBytes;

  const Problem& problem = p.problem;
  const TileNumber number(blockIdx.x, problem.batch, problem.heads_q, p.tiles, p.section);
  const Sequence s(problem, number.batch, number.head);
  const int m = p.tiles - 1 - number.tile;
  if (m * kM >= s.length_q) return;
  const Blocks blocks = visible_keys<kM, kN>(problem, s, m);
  const Modifier modifier(problem, s);
  const float scale = exponent_scale<Modifier>(problem);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * (16 * kTiles);
  const auto load_k = [&](int n) {
    load_rows<K, kThreads>(k, s.rows_k<const T>(p.k, n * kN), p.k.row, s.length_k - n * kN,
                           problem.head_dim);
    async_commit();
  };
  const auto load_v = [&](int n) {
    load_rows<V, kThreads>(v, s.rows_k<const T>(p.v, n * kN), p.v.row, s.length_k - n * kN,
                           problem.head_dim_v);
    async_commit();
  };

  // Start the copies of Q and the last block of keys.
  float out[kTiles][kDimV / 2] = {};
  Rows rows[kTiles];
  if (!blocks.none()) {
    load_rows<Q, kThreads>(q, s.rows_q<const T>(p.q, m * kM), p.q.row, s.length_q - m * kM,
                           problem.head_dim);
    load_k(blocks.end - 1);
  }
#pragma unroll 1
  for (int n = blocks.end - 1; n >= blocks.begin; --n) {
    async_wait(0);
    __syncthreads();  // K(n) is there, V(n + 1) no longer used
    load_v(n);
    // S = Q K^T.
    float scores[kTiles][kN / 2] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      u32 left[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) Q::load_left(left[t], q, warp_row + 16 * t, 16 * step);
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        u32 right[4];
        K::load_right(right, k, 16 * j, 16 * step);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) mma_pair<T>(&scores[t][8 * j], left[t], right);
      }
    }
    async_wait(0);
    __syncthreads();  // V(n) is there, K(n) no longer used
    if (n > blocks.begin) load_k(n - 1);
    // Modify, mask, softmax.
    u32 weights[kTiles][kN / 4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int first = m * kM + warp_row + 16 * t, row = first + lane_row(),
                key = n * kN + lane_column();
      modify(scores[t], modifier, row, key);
      if (is_partial(problem, s, first, 16, n * kN, kN)) mask(scores[t], problem, s, row, key);
      float correction[2];
      rows[t].update(scores[t], scale, correction);
      pack<T>(weights[t], scores[t]);
      scale_rows(out[t], correction);
    }
    // O += P V.
#pragma unroll
    for (int step = 0; step < kN / 16; ++step) {
#pragma unroll
      for (int j = 0; j < kDimV / 16; ++j) {
        u32 right[4];
        V::load_right_transposed(right, v, 16 * step, 16 * j);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const u32 left[4] = {weights[t][4 * step], weights[t][4 * step + 1],
                               weights[t][4 * step + 2], weights[t][4 * step + 3]};
          mma_pair<T>(&out[t][8 * j], left, right);
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    store_output<T>(p, s, rows[t], scale, m * kM + warp_row + 16 * t + lane_row(), out[t]);
}

}  // namespace flexops::attention
