// dQ alone on Hopper (sm_90a), for gradients that are the same bits every time: each query's is
// summed by one block of threads.
//
//   P = 2^(S - LSE)   dP = dO V^T   dS = P (dP - delta)   dQ = scale dS K
//
// A block of threads has kM queries of one head and goes over all blocks of kN keys that they see,
// in order. It computes S and dP once more than is needed where dQ is added up in memory
// (attention_backward_hopper.cuh): 7 products instead of 5, without the atomics.
//
//   Shared memory: Q's and dO's tile; rings of kStages blocks of keys and of kStagesV blocks of
//   values. Registers of a consumer warpgroup, which has 64 queries: dQ (kDim / 2), S and dP (kN /
//   2 each), then dS in T. A query's exponent and delta stay in registers.
//
//   Consumer, for block n of keys, what the tensor cores do | and the other units beside it:
//     dP(n)                    |  P(n) = 2^(S(n) - LSE)
//                              |  dS(n)
//     dQ(n), S(n + 1)          |
#pragma once

#include "attention/attention_backward_hopper.cuh"
#include "common/wgmma.cuh"

namespace flexops::attention {

template <int kDim_, int kDimV_, int kN_, int kStages_, int kStagesV_>
struct QueryGradient {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kN = kN_, kStages = kStages_,
                       kStagesV = kStagesV_, kGroups = 2, kM = 64 * kGroups;
  static constexpr int kThreads = (kGroups + 1) * hopper::kWarpgroup;
  using Q = hopper::Tile<kM, kDim>;
  using Do = hopper::Tile<kM, kDimV>;
  using K = hopper::Tile<kN, kDim>;
  using V = hopper::Tile<kN, kDimV>;
  static constexpr int kQ = 0, kDo = kQ + Q::kBytes, kK = kDo + Do::kBytes,
                       kV = kK + kStages * K::kBytes;
  static constexpr int kBarriers = kV + kStagesV * V::kBytes,
                       kBytes = kBarriers + 8 * (1 + 2 * kStages + 2 * kStagesV);
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");

  u32 memory;
  FLEXOPS_DEVICE explicit QueryGradient(u32 address) : memory(address) {}
  FLEXOPS_DEVICE u32 barrier(int i) const { return memory + kBarriers + 8 * i; }
  FLEXOPS_DEVICE u32 q_full() const { return barrier(0); }
  FLEXOPS_DEVICE hopper::Ring<kStages> k_ring() const { return {memory + kBarriers, 1}; }
  FLEXOPS_DEVICE hopper::Ring<kStagesV> v_ring() const {
    return {memory + kBarriers, 1 + 2 * kStages};
  }
  FLEXOPS_DEVICE u32 q() const { return memory + kQ; }
  FLEXOPS_DEVICE u32 d_o() const { return memory + kDo; }
  FLEXOPS_DEVICE u32 k(int stage) const { return memory + kK + stage * K::kBytes; }
  FLEXOPS_DEVICE u32 v(int stage) const { return memory + kV + stage * V::kBytes; }

  FLEXOPS_DEVICE void init_barriers() const {
    constexpr int kConsumers = 4 * kGroups;  // warps
    hopper::init(q_full(), 1);
    k_ring().init(kConsumers), v_ring().init(kConsumers);
    hopper::fence_init(), hopper::fence_async();
  }
};

template <class Shape>
FLEXOPS_DEVICE void query_gradient_produce(const BackwardHopperParams& p, const Shape& shape,
                                           const Sequence& s, int m, const Blocks& blocks) {
  using namespace hopper;
  RingState<Shape::kStages> turn;
  RingState<Shape::kStagesV> turn_v;
  const int row = s.first_q + m * Shape::kM;
  expect(shape.q_full(), Shape::Q::kBytes + Shape::Do::kBytes);
  Shape::Q::load(shape.q(), p.q, shape.q_full(), row, s.head, s.coordinate);
  Shape::Do::load(shape.d_o(), p.d_o, shape.q_full(), row, s.head, s.coordinate);
#pragma unroll 1
  for (int n = blocks.begin; n < blocks.end; ++n) {
    const int key = s.first_k + n * Shape::kN;
    Shape::K::load(shape.k(turn.stage), p.k, shape.k_ring().fill(turn, Shape::K::kBytes), key,
                   s.head_k, s.coordinate);
    Shape::V::load(shape.v(turn_v.stage), p.v, shape.v_ring().fill(turn_v, Shape::V::kBytes), key,
                   s.head_k, s.coordinate);
    turn.next(), turn_v.next();
  }
}

template <class T, class Modifier, class Shape>
FLEXOPS_DEVICE void query_gradient_consume(const BackwardHopperParams& p, Shape shape,
                                           const Sequence& s, int m, const Blocks& blocks,
                                           int group, int thread) {
  using namespace hopper;
  using Q = typename Shape::Q;
  using Do = typename Shape::Do;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kN = Shape::kN;
  const Problem& problem = p.call.problem;
  const Modifier modifier(problem, s);
  const float scale = exponent_scale<Modifier>(problem);
  const auto release = [](u32 barrier) {
    __syncwarp();
    if (lane_id() == 0) arrive(barrier);
  };
  const int first_row = m * Shape::kM + group * 64, row = first_row + thread / 32 * 16 + lane_row();
  float exponent[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 at = s.head * p.call.padded_rows + padded_row(problem, s) + row + 8 * r;
    exponent[r] = p.call.exponent[at], delta[r] = p.call.delta[at];
  }

  float scores[kN / 2], dp[kN / 2], dq[K::kColumns / 2] = {};
  RingState<Shape::kStages> turn;
  RingState<Shape::kStagesV> turn_v;
  const auto start_scores = [&](int stage) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K::kColumns / 16; ++step)
      wgmma<T, false, false>(scores, Q::rows(shape.q(), group * 64, step),
                             K::rows(shape.k(stage), 0, step), step > 0);
    wgmma_commit();
  };
  if (!blocks.none()) {
    wait(shape.q_full(), 0);
    pin(dq);
    shape.k_ring().wait(turn);
    start_scores(0);
    wgmma_wait<0>(scores);
#pragma unroll 1
    for (int n = blocks.begin; n < blocks.end; ++n) {
      obscure(shape.memory);  // descriptors are computed where they are used: there are more of
                              // them than registers
      const int key = n * kN + lane_column();
      shape.v_ring().wait(turn_v);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < V::kColumns / 16; ++step)
        wgmma<T, false, false>(dp, Do::rows(shape.d_o(), group * 64, step),
                               V::rows(shape.v(turn_v.stage), 0, step), step > 0);
      wgmma_commit();

      if constexpr (!Modifier::kPlain) {
        wgmma_wait<0>(dp);
        modify(scores, dp, delta, modifier, row, key);
      }
      if (is_partial(problem, s, first_row, 64, n * kN, kN)) mask(scores, problem, s, row, key);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i)
        scores[i] = exp2_approx(fmaf(scores[i], scale, -exponent[i / 2 % 2]));
      if constexpr (Modifier::kPlain) {
        pin(scores);
        shape.v_ring().wait(turn_v);  // a branch, without which ptxas waits for dP first
        wgmma_wait<0>(dp);
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) dp[i] -= delta[i / 2 % 2];
      }
      release(shape.v_ring().empty(turn_v.stage));
      turn_v.next();
      multiply(dp, scores);
      u32 ds[kN / 4];
      pack<T>(ds, dp);

      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kN / 16; ++step)
        wgmma<T, true>(dq, ds + 4 * step, K::columns(shape.k(turn.stage), 0, step), true);
      wgmma_commit();
      RingState<Shape::kStages> next = turn;
      next.next();
      if (n + 1 < blocks.end) {
        shape.k_ring().wait(next);
      } else {
        next = turn;  // the last time S is not used
      }
      start_scores(next.stage);
      wgmma_wait<1>(dq);
      if (n + 1 < blocks.end) release(shape.k_ring().empty(turn.stage));
      wgmma_wait<0>(scores);
      turn = next;
    }
  }
  scale_rows(dq, {problem.scale, problem.scale});
  store_query_gradient<T>(p.call.dq, s, row, dq, problem.head_dim, 0);
}

/// grid: tiles * batch * heads_q blocks, those with the most keys (a causal mask's last rows)
/// first.
template <class T, int kDim, int kDimV, int kN, int kStages, int kStagesV, class Modifier>
__global__ void __launch_bounds__(384, 1)
    backward_queries_hopper(const FLEXOPS_GRID_CONSTANT BackwardHopperParams p) {
  using Shape = QueryGradient<kDim, kDimV, kN, kStages, kStagesV>;
  __align__(1024) extern __shared__ u8 memory[];
  const Shape shape(hopper::shared_address(memory));
  const Problem& problem = p.call.problem;
  // Find the tile of queries.
  const TileNumber number(blockIdx.x, problem.batch, problem.heads_q, p.call.tiles, p.call.section);
  const Sequence s(problem, number.batch, number.head);
  const int m = p.call.tiles - 1 - number.tile;
  const Blocks seen = visible_keys<Shape::kM, Shape::kN>(problem, s, m),
               blocks = {shuffle(seen.begin, 0), shuffle(seen.end, 0)};
  if (m * Shape::kM >= s.length_q) return;
  // Set up the barriers.
  if (threadIdx.x == 0) {
    hopper::prefetch(p.q), hopper::prefetch(p.k), hopper::prefetch(p.v), hopper::prefetch(p.d_o);
    shape.init_barriers();
  }
  __syncthreads();
  // The producer loads; the consumers compute.
  const int warpgroup = shuffle(static_cast<int>(threadIdx.x) / hopper::kWarpgroup, 0);
  if (warpgroup == 0) {
    hopper::leave_registers<24>();
    if (threadIdx.x == 0 && !blocks.none()) query_gradient_produce(p, shape, s, m, blocks);
  } else {
    hopper::take_registers<240>();
    query_gradient_consume<T, Modifier>(p, shape, s, m, blocks, warpgroup - 1,
                                        static_cast<int>(threadIdx.x) % hopper::kWarpgroup);
  }
}

}  // namespace flexops::attention
