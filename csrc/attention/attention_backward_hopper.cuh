// Attention backward on Hopper (sm_90a), between backward_before and backward_after (attention_backward_rows.cuh).
//
//   P = 2^(S - LSE)   dP = dO V^T   dS = P (dP - delta)   dV = P^T dO   dK = scale dS^T Q   dQ = scale dS K
//
// A block of threads has kN keys of one key head and goes over all queries that see them, of all heads that share it: dK and dV stay in
// registers and no other block adds to them. To dQ many blocks add, in float32. A producer thread loads; two consumer warpgroups have 64
// keys each. They compute S and dP transposed (keys by queries), so that P^T and dS^T are left operands as they lie in registers; dS goes
// through shared memory too, for dQ, which sums over the keys of both.
//
//   Shared memory: K and V; rings of kStages tiles of kM queries (with their exponents) and of kDoStages tiles of dO (with delta); dS
//   twice; dQ in float32, on its way to memory. Registers of a consumer: dK, dV (kDim / 2, kDimV / 2), S^T and dP^T (kM / 2 each; dQ's
//   fragment takes dP's place), P^T, dS^T in T.
//
//   Consumer, for tile i of queries, what the tensor cores do | and the other units beside it:
//     dP(i)                    S(i), dK(i - 1) are under way  |  P(i) = 2^(S(i) - LSE)
//     dV(i)                                                   |  dS(i), to shared memory; both warpgroups meet
//     dQ(i), S(i + 1), dK(i)                                  |  dQ(i) to memory, as soon as it is there
//
// S(i) is waited for with dQ(i - 1): only one accumulator may be under way where the loop begins again, or ptxas serializes all (C7514).
#pragma once

#include "attention/attention_backward_rows.cuh"
#include "attention/attention_softmax.cuh"
#include "common/hopper.cuh"

namespace flexops::attention {

struct BackwardHopperParams {
  hopper::TensorMap q, k, v, d_o;  // as in ForwardHopperParams; boxes of kM rows of q and d_o, of kN rows of k and v
  BackwardParams call;
};

template <class T, int kDim, int kDimV, int kM_>
struct BackwardHopper {
  static constexpr int kM = kM_, kN = 128, kGroups = 2, kStages = 3, kDoStages = 2, kThreads = (kGroups + 1) * hopper::kWarpgroup;
  using Q = hopper::Tile<kM, kDim>;
  using Do = hopper::Tile<kM, kDimV>;
  using K = hopper::Tile<kN, kDim>;
  using V = hopper::Tile<kN, kDimV>;
  using Ds = hopper::Tile<kN, kM>;  // transposed: keys by queries
  /// Registers are left: K and V are held in them; dQ goes to memory from them, not through shared memory; and S(i + 1) starts before dS(i)
  /// is stored. Together 12 % at 64 columns. At 128 columns there are no registers for the first and the last, and with the second the next
  /// product would wait for registers that are still to be read (4 to 6 %). One H200.
  static constexpr bool kSmall = kDim + kDimV <= 128;
  /// dQ's fragment of a warpgroup: 64 rows of the tile, or, if it has no more, half of the columns.
  static constexpr int kDqColumns = kM == 64 ? kDim / 2 : kDim, kDqBytes = 64 * kDqColumns * 4;
  static constexpr int kRowBytes = kM * 4;
  static constexpr int kK = 0, kV = kK + K::kBytes, kQ = kV + V::kBytes, kDo = kQ + kStages * Q::kBytes, kDs = kDo + kDoStages * Do::kBytes;
  static constexpr int kDq = kDs + 2 * Ds::kBytes, kExponent = kDq + (kSmall ? 0 : kGroups * kDqBytes),
                       kDelta = kExponent + kStages * kRowBytes;
  static constexpr int kBarriers = kDelta + kDoStages * kRowBytes, kBytes = kBarriers + 8 * (1 + 2 * kStages + 2 * kDoStages);
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");

  u32 memory;
  FLEXOPS_DEVICE explicit BackwardHopper(u32 address) : memory(address) {}
  FLEXOPS_DEVICE u32 barrier(int i) const { return memory + kBarriers + 8 * i; }
  FLEXOPS_DEVICE u32 kv_full() const { return barrier(0); }
  FLEXOPS_DEVICE u32 q_full(int stage) const { return barrier(1 + stage); }
  FLEXOPS_DEVICE u32 q_empty(int stage) const { return barrier(1 + kStages + stage); }
  FLEXOPS_DEVICE u32 do_full(int stage) const { return barrier(1 + 2 * kStages + stage); }
  FLEXOPS_DEVICE u32 do_empty(int stage) const { return barrier(1 + 2 * kStages + kDoStages + stage); }
  FLEXOPS_DEVICE u32 k() const { return memory + kK; }
  FLEXOPS_DEVICE u32 v() const { return memory + kV; }
  FLEXOPS_DEVICE u32 q(int stage) const { return memory + kQ + stage * Q::kBytes; }
  FLEXOPS_DEVICE u32 d_o(int stage) const { return memory + kDo + stage * Do::kBytes; }
  FLEXOPS_DEVICE u32 ds(int which) const { return memory + kDs + which * Ds::kBytes; }
  FLEXOPS_DEVICE u32 dq(int group) const { return memory + kDq + group * kDqBytes; }
  FLEXOPS_DEVICE u32 exponent(int stage) const { return memory + kExponent + stage * kRowBytes; }
  FLEXOPS_DEVICE u32 delta(int stage) const { return memory + kDelta + stage * kRowBytes; }

  FLEXOPS_DEVICE void init_barriers() const {
    using hopper::init;
    constexpr int kConsumers = 4 * kGroups;  // warps
    init(kv_full(), 1);
    for (int i = 0; i < kStages; ++i) init(q_full(i), 1), init(q_empty(i), kConsumers);
    for (int i = 0; i < kDoStages; ++i) init(do_full(i), 1), init(do_empty(i), kConsumers);
    hopper::fence_init();
  }
};

template <class Shape>
FLEXOPS_DEVICE void backward_produce(const BackwardHopperParams& p, const Shape& shape, int batch, int head_k, int n) {
  using namespace hopper;
  constexpr int kM = Shape::kM;
  Turn<Shape::kStages> turn_q;
  Turn<Shape::kDoStages> turn_do;
  const int first_head = head_k * p.call.problem.group;
  const Sequence s(p.call.problem, batch, first_head);
  const Blocks blocks = seeing_queries<kM, Shape::kN>(p.call.problem, s, n);
  if (blocks.none()) return;
  expect(shape.kv_full(), Shape::K::kBytes + Shape::V::kBytes);
  Shape::K::load(shape.k(), p.k, shape.kv_full(), s.first_k + n * Shape::kN, head_k, s.coordinate);
  Shape::V::load(shape.v(), p.v, shape.kv_full(), s.first_k + n * Shape::kN, head_k, s.coordinate);
  const i64 padded = padded_row(p.call.problem, s);
#pragma unroll 1
  for (int head = first_head; head < first_head + p.call.problem.group; ++head) {
#pragma unroll 1
    for (int m = blocks.begin; m < blocks.end; ++m) {
      const int row = s.first_q + m * kM;
      const i64 at = head * p.call.padded_rows + padded + m * kM;
      const u32 q_full = shape.q_full(turn_q.stage), do_full = shape.do_full(turn_do.stage);
      wait(shape.q_empty(turn_q.stage), turn_q.parity ^ 1);
      expect(q_full, Shape::Q::kBytes + Shape::kRowBytes);
      Shape::Q::load(shape.q(turn_q.stage), p.q, q_full, row, head, s.coordinate);
      load_bytes(shape.exponent(turn_q.stage), p.call.exponent + at, Shape::kRowBytes, q_full);
      turn_q.next();
      wait(shape.do_empty(turn_do.stage), turn_do.parity ^ 1);
      expect(do_full, Shape::Do::kBytes + Shape::kRowBytes);
      Shape::Do::load(shape.d_o(turn_do.stage), p.d_o, do_full, row, head, s.coordinate);
      load_bytes(shape.delta(turn_do.stage), p.call.delta + at, Shape::kRowBytes, do_full);
      turn_do.next();
    }
  }
}

FLEXOPS_DEVICE void add_to_memory(float* to, const float* four) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
}
FLEXOPS_DEVICE void store_shared(u32 address, const float* four) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
}

template <class T, class Modifier, class Shape>
FLEXOPS_DEVICE void backward_consume(const BackwardHopperParams& p, const Shape& shape, int batch, int head_k, int n, int group) {
  using namespace hopper;
  using Q = typename Shape::Q;
  using Do = typename Shape::Do;
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Ds = typename Shape::Ds;
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const Problem& problem = p.call.problem;
  const float scale = exponent_scale<Modifier>(problem);
  const auto release = [](u32 barrier) {  // by one lane, when the others have read exponents and deltas, too
    __syncwarp();
    if (lane_id() == 0) arrive(barrier);
  };
  const int first_head = head_k * problem.group, thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int warp_row = group * 64 + thread / 32 * 16;  // of the tile
  const Sequence s(problem, batch, first_head);
  const Blocks blocks = seeing_queries<kM, kN>(problem, s, n);
  const int first_key = n * kN, key = first_key + warp_row + lane_row();

  float scores[kM / 2], dp[kM / 2], dk[K::kColumns / 2] = {}, dv[V::kColumns / 2] = {};
  u32 weights[kM / 4], ds[kM / 4];
  Turn<Shape::kStages> turn_q, turn_used;  // the tile whose S is next; the tile whose Q is released next
  Turn<Shape::kDoStages> turn_do;
  // Where there are registers for them, K and V are left operands in registers: the tensor cores then read half as much shared memory.
  constexpr bool kHeld = Shape::kSmall;
  u32 held_k[kHeld ? K::kColumns / 16 : 1][4], held_v[kHeld ? V::kColumns / 16 : 1][4];
  const auto start_scores = [&] {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K::kColumns / 16; ++step) {
      const u64 right = Q::rows(shape.q(turn_q.stage), 0, step);
      if constexpr (kHeld) {
        wgmma<T, false>(scores, held_k[step], right, step > 0);
      } else {
        wgmma<T, false, false>(scores, K::rows(shape.k(), group * 64, step), right, step > 0);
      }
    }
    wgmma_commit();
  };
  if (!blocks.none()) {
    const int tiles = (blocks.end - blocks.begin) * problem.group;
    int head = first_head, m = blocks.begin;
    const auto start_next_scores = [&](int i) {
      if (i + 1 < tiles) {
        wait(shape.q_full(turn_q.stage), turn_q.parity);
      } else {
        turn_q = turn_used;  // the last time S is not used
      }
      start_scores();
    };
    wait(shape.kv_full(), 0);
    if constexpr (kHeld) {
#pragma unroll
      for (int step = 0; step < K::kColumns / 16; ++step) K::load_left(held_k[step], shape.k(), warp_row, 16 * step);
#pragma unroll
      for (int step = 0; step < V::kColumns / 16; ++step) V::load_left(held_v[step], shape.v(), warp_row, 16 * step);
    }
    pin(dk), pin(dv);
    wait(shape.q_full(turn_q.stage), turn_q.parity);
    start_scores();
    wgmma_wait<0>(scores);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const int first = m * kM;
      wait(shape.do_full(turn_do.stage), turn_do.parity);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < V::kColumns / 16; ++step) {
        const u64 right = Do::rows(shape.d_o(turn_do.stage), 0, step);
        if constexpr (kHeld) {
          wgmma<T, false>(dp, held_v[step], right, step > 0);
        } else {
          wgmma<T, false, false>(dp, V::rows(shape.v(), group * 64, step), right, step > 0);
        }
      }
      wgmma_commit();

      float slope[Modifier::kPlain ? 1 : kM / 2];
      modify_transposed<Modifier>(scores, slope, problem, batch, head, key, first + lane_column());
      if (is_partial(problem, s, first, kM, first_key, kN)) mask_transposed(scores, problem, s, key, first + lane_column());
      weigh(scores, scale, shape.exponent(turn_q.stage) + lane_column() * 4);
      turn_q.next();
      pack<T>(weights, scores);
      wgmma_wait<0>(dp, dk);
      if (i > 0) {
        release(shape.q_empty(turn_used.stage));
        turn_used.next();
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kM / 16; ++step)
        wgmma<T, true>(dv, weights + 4 * step, Do::columns(shape.d_o(turn_do.stage), 0, step), true);
      wgmma_commit();

      score_gradient<Modifier>(dp, scores, slope, shape.delta(turn_do.stage) + lane_column() * 4);
      if (Shape::kSmall) start_next_scores(i);
      pack<T>(ds, dp);
      Ds::store_matrices(shape.ds(i % 2), warp_row, ds);
      fence_async();
      if (!Shape::kSmall && thread == 0) wait_added();
      barrier(1, 2 * kWarpgroup);  // dS is there, dQ's place is free

      float dq[Shape::kDqColumns / 2];
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kN / 16; ++step)
        wgmma<T, true, true>(dq, Ds::columns(shape.ds(i % 2), kM == 64 ? 0 : group * 64, step),
                             K::columns(shape.k(), kM == 64 ? group * Shape::kDqColumns : 0, step), step > 0);
      wgmma_commit();
      if (!Shape::kSmall) start_next_scores(i);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kM / 16; ++step)
        wgmma<T, false, true>(dk, Ds::rows(shape.ds(i % 2), group * 64, step), Q::columns(shape.q(turn_used.stage), 0, step), true);
      wgmma_commit();

      wgmma_wait<1>(dq, dv, scores);
      release(shape.do_empty(turn_do.stage));
      turn_do.next();
      const auto sums = [&] {
        const i64 row = head * p.call.padded_rows + padded_row(problem, s) + first;
        return p.call.dq_sums + row * K::kColumns + group * (64 * Shape::kDqColumns);
      };
      if constexpr (Shape::kSmall) {
        float* to = sums();
#pragma unroll
        for (int j = 0; j < Shape::kDqColumns / 8; ++j) add_to_memory(to + (j * kWarpgroup + thread) * 4, &dq[4 * j]);
      } else {
#pragma unroll
        for (int j = 0; j < Shape::kDqColumns / 8; ++j) store_shared(shape.dq(group) + (j * kWarpgroup + thread) * 16, &dq[4 * j]);
        fence_async();
        barrier(2 + group, kWarpgroup);
        if (thread == 0) add_bytes(sums(), shape.dq(group), Shape::kDqBytes);
      }
      if (++m == blocks.end) m = blocks.begin, ++head;
    }
    wgmma_wait<0>(dk, dv);
    if (!Shape::kSmall && thread == 0) wait_added();
  }

  store_key_gradient<T>(p.call.dk, s, key, dk, problem.scale, problem.head_dim);
  store_key_gradient<T>(p.call.dv, s, key, dv, 1.0f, problem.head_dim_v);
}

/// grid: tiles * batch * heads_k blocks, those with the most queries (a causal mask's first keys) first.
template <class T, int kDim, int kDimV, int kM, class Modifier>
__global__ void __launch_bounds__(384, 1) backward_hopper(const FLEXOPS_GRID_CONSTANT BackwardHopperParams p) {
  using Shape = BackwardHopper<T, kDim, kDimV, kM>;
  __align__(1024) extern __shared__ u8 memory[];
  const Shape shape(hopper::shared_address(memory));
  const Problem& problem = p.call.problem;
  const TileNumber number(blockIdx.x, problem.batch, problem.heads_k, p.call.tiles, p.call.section);
  const int n = p.call.first_tile + number.tile;
  if (threadIdx.x == 0) {
    hopper::prefetch(p.q), hopper::prefetch(p.k), hopper::prefetch(p.v), hopper::prefetch(p.d_o);
    shape.init_barriers();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::leave_registers<24>();
    if (threadIdx.x == 0) backward_produce(p, shape, number.batch, number.head, n);
  } else {
    hopper::take_registers<240>();
    backward_consume<T, Modifier>(p, shape, number.batch, number.head, n, warpgroup - 1);
  }
}

}  // namespace flexops::attention
