// Attention forward on Hopper (sm_90a).
//
// A block of threads is one per multiprocessor and stays there (persistent). It has a producer
// warpgroup, of which one thread works, and kGroups consumer warpgroups, each with 64 of the tile's
// kM = 64 kGroups queries.
//
//   Shared memory: Q's tile; a ring of kStages blocks of kN keys, and one of their values; barriers
//   "full" (the copy engine has delivered) and "empty" (every consumer warp is done) for each of
//   them; the numbers of the next tiles. Registers: a producer's thread keeps kProducerRegisters. A
//   consumer's has S (64 x kN, in float32: kN / 2 registers), P (S in T, the second product's left
//   operand: kN / 4) and O (64 x kDimV: kDimV / 2).
//
//   Consumer, for block n from the last one to the first:
//     starts S' = Q K(n)^T and O += P V(n + 1), one after the other without a wait;
//     P' = softmax(mask(S')), O *= correction.
//
// Warpgroups start their products in turn (named barriers, "ping-pong"), so that the softmax of one
// runs beside the products of the others.
//
// Tiles are handed out longest first (a causal mask's last rows), within as many heads as the L2
// cache holds keys and values of; the producer takes the next one's number from a counter and loads
// its Q while consumers end the one before.
#pragma once

#include "attention/attention_softmax.cuh"
#include "common/wgmma.cuh"

namespace flexops::attention {

struct ForwardHopperParams {
  hopper::TensorMap q, k, v;  // 4 dimensions, from the inner: head_dim, length, heads, batch; boxes
                              // of Tile::kPanel x rows
  ForwardParams call;
  int*
      counter;  // zero at the launch; null if there are at most two tiles for each block of threads
};

template <class T, int kDim, int kDimV, int kGroups, int kN>
struct ForwardHopper {
  static constexpr int kM = 64 * kGroups, kStages = 2,
                       kThreads = (kGroups + 1) * hopper::kWarpgroup;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 24,
                       kConsumerRegisters = kGroups == 3 ? 160 : 240;
  using Q = hopper::Tile<kM, kDim>;
  using K = hopper::Tile<kN, kDim>;
  using V = hopper::Tile<kN, kDimV>;
  // Shared memory, in bytes.
  static constexpr int kQ = 0, kK = kQ + Q::kBytes, kV = kK + kStages * K::kBytes,
                       kBarriers = kV + kStages * V::kBytes;
  static constexpr int kBytes = kBarriers + 8 * (2 + 4 * kStages + 4) + 8;
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");

  u32 memory;
  FLEXOPS_DEVICE explicit ForwardHopper(u32 address) : memory(address) {}
  FLEXOPS_DEVICE u32 barrier(int i) const { return memory + kBarriers + 8 * i; }
  FLEXOPS_DEVICE hopper::Ring<1> q_ring() const { return {memory + kBarriers, 0}; }
  FLEXOPS_DEVICE hopper::Ring<kStages> k_ring() const { return {memory + kBarriers, 2}; }
  FLEXOPS_DEVICE hopper::Ring<kStages> v_ring() const {
    return {memory + kBarriers, 2 + 2 * kStages};
  }
  FLEXOPS_DEVICE hopper::Ring<2> tile_ring() const { return {memory + kBarriers, 2 + 4 * kStages}; }
  FLEXOPS_DEVICE u32 tile(int slot) const { return barrier(6 + 4 * kStages) + 4 * slot; }
  FLEXOPS_DEVICE u32 q() const { return memory + kQ; }
  FLEXOPS_DEVICE u32 k(int stage) const { return memory + kK + stage * K::kBytes; }
  FLEXOPS_DEVICE u32 v(int stage) const { return memory + kV + stage * V::kBytes; }

  FLEXOPS_DEVICE void init_barriers() const {
    constexpr int kConsumers = 4 * kGroups;  // warps
    q_ring().init(kConsumers), k_ring().init(kConsumers), v_ring().init(kConsumers);
    tile_ring().init(kConsumers);
    hopper::fence_init(), hopper::fence_async();
  }
};

template <class Shape>
FLEXOPS_DEVICE void forward_produce(const ForwardHopperParams& p, const Shape& shape) {
  using namespace hopper;
  constexpr int kM = Shape::kM, kN = Shape::K::kRows;
  const Problem& problem = p.call.problem;
  const int tiles = p.call.tiles * problem.batch * problem.heads_q;
  RingState<Shape::kStages> turn_k, turn_v;
  RingState<2> turn;
  RingState<1> turn_q;
  // The barrier is named before the wait: ring.fill() here spills one register more in consumers.
  const auto load_k = [&](const Sequence& s, int n) {
    const u32 full = shape.k_ring().full(turn_k.stage);
    shape.k_ring().acquire(turn_k), expect(full, Shape::K::kBytes);
    Shape::K::load(shape.k(turn_k.stage), p.k, full, s.first_k + n * kN, s.head_k, s.coordinate);
    turn_k.next();
  };
  const auto load_v = [&](const Sequence& s, int n) {
    const u32 full = shape.v_ring().full(turn_v.stage);
    shape.v_ring().acquire(turn_v), expect(full, Shape::V::kBytes);
    Shape::V::load(shape.v(turn_v.stage), p.v, full, s.first_k + n * kN, s.head_k, s.coordinate);
    turn_v.next();
  };
  for (int tile = blockIdx.x;; turn.next()) {
    shape.tile_ring().acquire(turn);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shape.tile(turn.stage)), "r"(tile) : "memory");
    arrive(shape.tile_ring().full(turn.stage));
    if (tile >= tiles) return;
    const int blocks = static_cast<int>(gridDim.x);
    // Without a counter who had the first tile, the longest, has the last one: the shortest.
    const int next = p.counter       ? blocks + atomicAdd(p.counter, 1)
                     : tile < blocks ? 2 * blocks - 1 - tile
                                     : tiles;
    const TileNumber number(tile, problem.batch, problem.heads_q, p.call.tiles, p.call.section);
    const Sequence s(problem, number.batch, number.head);
    const int m = p.call.tiles - 1 - number.tile;
    const Blocks seen = visible_keys<kM, kN>(problem, s, m);
    if (!seen.none()) {
      const u32 full = shape.q_ring().fill(turn_q, Shape::Q::kBytes);
      turn_q.next();
      Shape::Q::load(shape.q(), p.q, full, s.first_q + m * kM, s.head, s.coordinate);
      load_k(s, seen.end - 1);
#pragma unroll 1
      for (int n = seen.end - 2; n >= seen.begin; --n) load_k(s, n), load_v(s, n + 1);
      load_v(s, seen.begin);
    }
    tile = next;
  }
}

template <class T, class Modifier, class Shape>
FLEXOPS_DEVICE void forward_consume(const ForwardHopperParams& p, const Shape& shape, int group) {
  using namespace hopper;
  using Q = typename Shape::Q;
  using K = typename Shape::K;
  using V = typename Shape::V;
  constexpr int kM = Shape::kM, kN = K::kRows, kGroups = kM / 64;
  const Problem& problem = p.call.problem;
  const int tiles = p.call.tiles * problem.batch * problem.heads_q;
  const float scale = exponent_scale<Modifier>(problem);
  const bool leader = lane_id() == 0;  // arrives for its warp
  const auto take_turn = [&] { barrier(1 + group, 2 * kWarpgroup); };
  const auto pass_turn = [&] { barrier_pass(1 + (group + 1) % kGroups, 2 * kWarpgroup); };
  if (group == kGroups - 1) pass_turn();

  RingState<Shape::kStages> turn_k, turn_v;
  RingState<2> turn;
  RingState<1> turn_q;
  for (;; turn.next()) {
    shape.tile_ring().wait(turn);
    int tile;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tile) : "r"(shape.tile(turn.stage)) : "memory");
    __syncwarp();
    if (leader) arrive(shape.tile_ring().empty(turn.stage));
    if (tile >= tiles) return;
    const TileNumber number(tile, problem.batch, problem.heads_q, p.call.tiles, p.call.section);
    const Sequence s(problem, number.batch, number.head);
    const Modifier modifier(problem, s);
    const int m = p.call.tiles - 1 - number.tile;
    const Blocks blocks = visible_keys<kM, kN>(problem, s, m);
    const int first_row = m * kM + group * 64,
              row = first_row + static_cast<int>(threadIdx.x % kWarpgroup / 32) * 16 + lane_row();

    float scores[kN / 2], out[V::kColumns / 2] = {}, correction[2];
    u32 weights[kN / 4];
    Rows rows;
    const auto start_scores = [&] {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < Q::kColumns / 16; ++step)
        wgmma<T, false, false>(scores, Q::rows(shape.q(), group * 64, step),
                               K::rows(shape.k(turn_k.stage), 0, step), step > 0);
      wgmma_commit();
    };
    const auto start_out = [&] {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kN / 16; ++step)
        wgmma<T, true>(out, weights + 4 * step, V::columns(shape.v(turn_v.stage), 0, step), true);
      wgmma_commit();
    };
    const auto end_scores = [&](int n) {
      if (leader) {
        arrive(shape.k_ring().empty(turn_k.stage));
        if (n == blocks.begin) arrive(shape.q_ring().empty());
      }
      turn_k.next();
      modify(scores, modifier, row, n * kN + lane_column());
      if (is_partial(problem, s, first_row, 64, n * kN, kN))
        mask(scores, problem, s, row, n * kN + lane_column());
      rows.update(scores, scale, correction);
    };
    const auto end_out = [&] {
      if (leader) arrive(shape.v_ring().empty(turn_v.stage));
      turn_v.next();
    };

    if (!blocks.none()) {
      shape.q_ring().wait(turn_q);
      turn_q.next();
      shape.k_ring().wait(turn_k);
      take_turn();
      start_scores();
      pass_turn();
      wgmma_wait<0>(scores);
      end_scores(blocks.end - 1);
      pack<T>(weights, scores);
#pragma unroll 1
      for (int n = blocks.end - 2; n >= blocks.begin; --n) {
        shape.k_ring().wait(turn_k);
        take_turn();
        start_scores();
        shape.v_ring().wait(turn_v);
        start_out();
        pass_turn();
        wgmma_wait<1>(scores);
        end_scores(n);
        // Weights are computed beside O. A branch that needs their sums, without which ptxas waits
        // for O first.
        wait(shape.v_ring().full(turn_v.stage), turn_v.phase ^ (rows.sum[0] + rows.sum[1] < 0));
        wgmma_wait<0>(out);
        end_out();
        pack<T>(weights, scores);
        if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f))
          scale_rows(out, correction);  // later, maxima seldom change
      }
      shape.v_ring().wait(turn_v);
      start_out();
      wgmma_wait<0>(out);
      end_out();
    }

    store_output<T>(p.call, s, rows, scale, row, out);
  }
}

template <class T, int kDim, int kDimV, int kGroups, int kN, class Modifier>
__global__ void __launch_bounds__((kGroups + 1) * 128, 1)
    forward_hopper(const FLEXOPS_GRID_CONSTANT ForwardHopperParams p) {
  using Shape = ForwardHopper<T, kDim, kDimV, kGroups, kN>;
  __align__(1024) extern __shared__ u8 memory[];
  const Shape shape(shuffle(hopper::shared_address(memory),
                            0));  // by way of a shuffle it is not computed over and over
  // Set up the barriers.
  if (threadIdx.x == 0) {
    hopper::prefetch(p.q), hopper::prefetch(p.k), hopper::prefetch(p.v);
    shape.init_barriers();
  }
  __syncthreads();
  // The producer loads; the consumers compute.
  const int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::leave_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) forward_produce(p, shape);
  } else {
    hopper::take_registers<Shape::kConsumerRegisters>();
    forward_consume<T, Modifier>(p, shape, warpgroup - 1);
  }
}

}  // namespace flexops::attention
