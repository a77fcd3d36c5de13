// Attention backward on Hopper (sm_90a), between backward_before and backward_after
// (attention_backward_rows.cuh).
//
//   P = 2^(S - LSE)   dP = dO V^T   dS = P (dP - delta)
//   dV = P^T dO   dK = scale dS^T Q   dQ = scale dS K
//
// A block of threads has kN keys of one key head and goes over all queries that see them, of all
// heads that share it: dK and dV stay in registers and no other block adds to them. To dQ many
// blocks add, in float32; or it is left to a kernel of its own (kQueryGradient is false,
// attention_backward_queries_hopper.cuh).
//
// Two consumer warpgroups compute S and dP transposed (keys by queries), and dK and dV. Up to 128
// columns each has 64 keys of its own: P^T then is a left operand as it lies in registers. With
// more (kSplit) both have the same 64 keys: each computes the scores of half of the queries and has
// half of the columns of dK and dV, and P^T goes through shared memory. dS^T does in either case.
//
// A third one, the server, computes dQ from it, which sums over the keys of both, and adds it to
// memory: consumers wait neither for one another nor for that. One of its threads starts the loads.
//
//   Shared memory: K and V; rings of kStages tiles of kM queries (with their exponents) and of dO
//   (with delta); dS (and P, if split) twice. Registers of a consumer: dK and dV (64 keys by
//   kColumns, each kColumns / 2), S^T and dP^T (kQueries / 2 each), then P^T and dS^T in T. Of the
//   server: dQ (64 queries by kDqColumns).
//
//   Consumer, for tile i of queries:
//     what the tensor cores do   |  and the other units beside it
//     dP(i)                      |  P(i) = 2^(S(i) - LSE); the wait for dS's place keeps it before
//                                |  the wait for dP
//                                |  dS(i), to shared memory
//     dV(i), dK(i), S(i + 1)     |
//   What stands alone here runs beside the products of the other consumer and of the server. No
//   accumulator is under way where the loop begins again: with more than one, ptxas serializes all
//   (C7514).
//
// Registers are short at 128 columns. That stages and blocks come from a shuffle keeps descriptors
// in uniform registers; that shared memory's address is obscured in each turn keeps ptxas from
// holding all of them throughout the loop.
#pragma once

#include "attention/attention_backward_rows.cuh"
#include "attention/attention_softmax.cuh"
#include "common/wgmma.cuh"

namespace flexops::attention {

struct BackwardHopperParams {
  hopper::TensorMap q, k, v,
      d_o;  // as in ForwardHopperParams; boxes of kM rows of q and d_o, of kN rows of k and v
  BackwardParams call;
};

template <int kDim_, int kDimV_, bool kQueryGradient_>
struct BackwardHopper {
  static constexpr int kDim = kDim_, kDimV = kDimV_, kGroups = 2, kM = 64;
  static constexpr bool kSplit = kDim > 128, kQueryGradient = kQueryGradient_;
  static constexpr int kN = kSplit ? 64 : 64 * kGroups, kStages = kSplit ? 2 : 3;
  static_assert(kStages > 2 || !kQueryGradient,
                "the server loads a tile when the last but one is done");
  static constexpr int kThreads = (kGroups + 1) * hopper::kWarpgroup;
  /// Of 504, shared out to consumers and server: ptxas requires 24 more than what accumulates. At
  /// 128 columns the server then has room for 32 columns of dQ at once.
  static constexpr int kConsumerRegisters = !kQueryGradient ? 240 : kDim > 64 ? 224 : 208;
  static constexpr int kServerRegisters = !kQueryGradient ? 24 : kDim > 64 ? 56 : 88;
  static constexpr int kQueries = kSplit ? kM / kGroups : kM;  // of a consumer's scores
  static constexpr int kColumns = kSplit ? kDim / kGroups : kDim,
                       kColumnsV = kSplit ? kDimV / kGroups : kDimV;  // of its dK, dV
  static constexpr int kDqColumns = kDim > 64 ? 32 : 64;
  /// Registers are left: K and V are held in them, so that the tensor cores read half as much
  /// shared memory.
  static constexpr bool kHeld = kDim + kDimV <= 128;
  using Q = hopper::Tile<kM, kDim>;
  using Do = hopper::Tile<kM, kDimV>;
  using K = hopper::Tile<kN, kDim>;
  using V = hopper::Tile<kN, kDimV>;
  using Ds = hopper::Tile<kN, kM>;  // transposed: keys by queries
  static constexpr int kRowBytes = kM * 4;
  static constexpr int kK = 0, kV = kK + K::kBytes, kQ = kV + V::kBytes,
                       kDo = kQ + kStages * Q::kBytes, kDs = kDo + kStages * Do::kBytes;
  static constexpr int kP = kDs + 2 * Ds::kBytes, kExponent = kP + (kSplit ? 2 * Ds::kBytes : 0),
                       kDelta = kExponent + kStages * kRowBytes;
  static constexpr int kBarriers = kDelta + kStages * kRowBytes,
                       kBytes = kBarriers + 8 * (1 + 4 * kStages + 4);
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");

  u32 memory;
  FLEXOPS_DEVICE explicit BackwardHopper(u32 address) : memory(address) {}
  FLEXOPS_DEVICE u32 barrier(int i) const { return memory + kBarriers + 8 * i; }
  FLEXOPS_DEVICE u32 kv_full() const { return barrier(0); }
  FLEXOPS_DEVICE hopper::Ring<kStages> q_ring() const { return {memory + kBarriers, 1}; }
  FLEXOPS_DEVICE hopper::Ring<kStages> do_ring() const {
    return {memory + kBarriers, 1 + 2 * kStages};
  }
  FLEXOPS_DEVICE hopper::Ring<2> ds_ring() const { return {memory + kBarriers, 1 + 4 * kStages}; }
  FLEXOPS_DEVICE u32 k() const { return memory + kK; }
  FLEXOPS_DEVICE u32 v() const { return memory + kV; }
  FLEXOPS_DEVICE u32 q(int stage) const { return memory + kQ + stage * Q::kBytes; }
  FLEXOPS_DEVICE u32 d_o(int stage) const { return memory + kDo + stage * Do::kBytes; }
  FLEXOPS_DEVICE u32 ds(int which) const { return memory + kDs + which * Ds::kBytes; }
  FLEXOPS_DEVICE u32 p(int which) const { return memory + kP + which * Ds::kBytes; }
  FLEXOPS_DEVICE u32 exponent(int stage) const { return memory + kExponent + stage * kRowBytes; }
  FLEXOPS_DEVICE u32 delta(int stage) const { return memory + kDelta + stage * kRowBytes; }

  FLEXOPS_DEVICE void init_barriers() const {
    constexpr int kConsumers = 4 * kGroups;  // warps
    hopper::init(kv_full(), 1);
    q_ring().init(kConsumers), do_ring().init(kConsumers), ds_ring().init(4, kConsumers);
    hopper::fence_init(), hopper::fence_async();
  }
};

FLEXOPS_DEVICE void add_to_memory(float* to, const float* four) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four[0]),
               "f"(four[1]), "f"(four[2]), "f"(four[3])
               : "memory");
}
/// What a block of threads works on.
struct BackwardTile {
  Sequence s;  // with the first of the heads
  Blocks blocks;
  int n, group, first_head, tiles;  // group: its number; tiles: of queries, of all heads
  template <class Shape>
  FLEXOPS_DEVICE BackwardTile(const BackwardParams& p, const TileNumber& number, Shape)
      : s(p.problem, number.batch, number.head * p.group),
        n(p.first_tile + number.tile),
        group(number.head) {
    blocks = seeing_queries<Shape::kM, Shape::kN>(p.problem, s, n);
    first_head = group * p.group;
    blocks = {shuffle(blocks.begin, 0), shuffle(blocks.end, 0)};
    tiles = blocks.none() ? 0 : (blocks.end - blocks.begin) * p.group;
  }
  /// Of tile i of queries.
  FLEXOPS_DEVICE int head(int i) const { return first_head + i / (blocks.end - blocks.begin); }
  FLEXOPS_DEVICE int m(int i) const { return blocks.begin + i % (blocks.end - blocks.begin); }
};

template <class Shape>
FLEXOPS_DEVICE void load_keys(const BackwardHopperParams& p, const Shape& shape,
                              const BackwardTile& tile) {
  const Sequence& s = tile.s;
  hopper::expect(shape.kv_full(), Shape::K::kBytes + Shape::V::kBytes);
  Shape::K::load(shape.k(), p.k, shape.kv_full(), s.first_k + tile.n * Shape::kN, s.head_k,
                 s.coordinate);
  Shape::V::load(shape.v(), p.v, shape.kv_full(), s.first_k + tile.n * Shape::kN, s.head_k,
                 s.coordinate);
}
/// Starts the loads of tile i of queries, as soon as its stage is free.
template <class Shape>
FLEXOPS_DEVICE void load_queries(const BackwardHopperParams& p, const Shape& shape,
                                 const BackwardTile& tile, int i) {
  using namespace hopper;
  if (i >= tile.tiles) return;
  const Sequence& s = tile.s;
  const auto at = RingState<Shape::kStages>::after(i);
  const int head = tile.head(i), m = tile.m(i), row = s.first_q + m * Shape::kM;
  const i64 first = head * p.call.padded_rows + padded_row(p.call.problem, s) + m * Shape::kM;
  const u32 q_full = shape.q_ring().fill(at, Shape::Q::kBytes + Shape::kRowBytes);
  Shape::Q::load(shape.q(at.stage), p.q, q_full, row, head, s.coordinate);
  load_bytes(shape.exponent(at.stage), p.call.exponent + first, Shape::kRowBytes, q_full);
  const u32 do_full = shape.do_ring().fill(at, Shape::Do::kBytes + Shape::kRowBytes);
  Shape::Do::load(shape.d_o(at.stage), p.d_o, do_full, row, head, s.coordinate);
  load_bytes(shape.delta(at.stage), p.call.delta + first, Shape::kRowBytes, do_full);
}

template <class T, class Shape>
FLEXOPS_DEVICE void backward_serve(const BackwardHopperParams& p, Shape shape,
                                   const BackwardTile& tile, int thread) {
  using namespace hopper;
  using K = typename Shape::K;
  using Ds = typename Shape::Ds;
  if (tile.tiles == 0) return;
  const bool leader = thread == 0;
  if (leader) {
    load_keys(p, shape, tile);
#pragma unroll 1
    for (int i = 0; i < Shape::kStages; ++i) load_queries(p, shape, tile, i);
  }
  if constexpr (!Shape::kQueryGradient) {
    if (leader) {
#pragma unroll 1
      for (int i = Shape::kStages; i < tile.tiles; ++i) load_queries(p, shape, tile, i);
    }
  } else {
    __syncwarp();
    wait(shape.kv_full(), 0);
#pragma unroll 1
    for (int i = 0; i < tile.tiles; ++i) {
      const int stage = shuffle(i % 2, 0);
      shape.memory = shuffle(shape.memory, 0);
      wait(shape.ds_ring().full(stage), i / 2 % 2);
      // Consumers no longer use the tile before this one.
      if (leader && i > 0) load_queries(p, shape, tile, i - 1 + Shape::kStages);
      __syncwarp();
      const i64 row = tile.head(i) * p.call.padded_rows + padded_row(p.call.problem, tile.s) +
                      tile.m(i) * Shape::kM;
      float* to = p.call.dq_sums + row * K::kColumns + thread * 4;
#pragma unroll
      for (int part = 0; part < K::kColumns / Shape::kDqColumns; ++part) {
        float dq[Shape::kDqColumns / 2];
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Shape::kN / 16; ++step)
          wgmma<T, true, true>(dq, Ds::columns(shape.ds(stage), 0, step),
                               K::columns(shape.k(), part * Shape::kDqColumns, step), step > 0);
        wgmma_commit();
        wgmma_wait<0>(dq);
        if ((part + 1) * Shape::kDqColumns == K::kColumns && lane_id() == 0)
          arrive(shape.ds_ring().empty(stage));
#pragma unroll
        for (int j = 0; j < Shape::kDqColumns / 8; ++j)
          add_to_memory(to + (part * Shape::kDqColumns / 8 + j) * (4 * kWarpgroup), &dq[4 * j]);
      }
    }
  }
}

template <class T, class Modifier, class Shape>
FLEXOPS_DEVICE void backward_consume(const BackwardHopperParams& p, Shape shape,
                                     const BackwardTile& tile, int group, int thread) {
  using namespace hopper;
  using Q = typename Shape::Q;
  using Do = typename Shape::Do;
  using K = typename Shape::K;
  using V = typename Shape::V;
  using Ds = typename Shape::Ds;
  constexpr int kM = Shape::kM, kQueries = Shape::kQueries;
  constexpr bool kSplit = Shape::kSplit;
  const Problem& problem = p.call.problem;
  const Sequence& s = tile.s;
  const float scale = exponent_scale<Modifier>(problem);
  const auto release =
      [](u32 barrier) {  // by one lane, when the others have read exponents and deltas, too
        __syncwarp();
        if (lane_id() == 0) arrive(barrier);
      };
  // This warpgroup's part of the tile: keys and queries of the scores, columns of dK and dV.
  const int group_key = kSplit ? 0 : group * 64, group_query = kSplit ? group * kQueries : 0;
  const int warp_key = group_key + thread / 32 * 16, first_key = tile.n * Shape::kN + group_key,
            key = tile.n * Shape::kN + warp_key + lane_row();
  const int column = kSplit ? group * Shape::kColumns : 0,
            column_v = kSplit ? group * Shape::kColumnsV : 0;

  float scores[kQueries / 2], dp[kQueries / 2], dk[Shape::kColumns / 2] = {},
                                                                     dv[Shape::kColumnsV / 2] = {};
  RingState<Shape::kStages> turn;  // of Q and of dO
  RingState<2> turn_ds;
  u32 held_k[Shape::kHeld ? K::kColumns / 16 : 1][4],
      held_v[Shape::kHeld ? V::kColumns / 16 : 1][4];
  const auto start_scores = [&](int stage) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K::kColumns / 16; ++step) {
      const u64 right = Q::rows(shape.q(stage), group_query, step);
      if constexpr (Shape::kHeld) {
        wgmma<T, false>(scores, held_k[step], right, step > 0);
      } else {
        wgmma<T, false, false>(scores, K::rows(shape.k(), group_key, step), right, step > 0);
      }
    }
    wgmma_commit();
  };
  if (tile.tiles > 0) {
    int head = tile.first_head, m = tile.blocks.begin;
    wait(shape.kv_full(), 0);
    if constexpr (Shape::kHeld) {
#pragma unroll
      for (int step = 0; step < K::kColumns / 16; ++step)
        K::load_left(held_k[step], shape.k(), warp_key, 16 * step);
#pragma unroll
      for (int step = 0; step < V::kColumns / 16; ++step)
        V::load_left(held_v[step], shape.v(), warp_key, 16 * step);
    }
    pin(dk), pin(dv);
    shape.q_ring().wait(turn);
    start_scores(0);
    wgmma_wait<0>(scores);
#pragma unroll 1
    for (int i = 0; i < tile.tiles; ++i, turn_ds.next()) {
      obscure(shape.memory);  // descriptors are computed where they are used: there are more of
                              // them than registers
      const int first = m * kM + group_query, query = first + lane_column();
      const u32 row_bytes = (group_query + lane_column()) * 4,
                deltas = shape.delta(turn.stage) + row_bytes;
      shape.do_ring().wait(turn);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < V::kColumns / 16; ++step) {
        const u64 right = Do::rows(shape.d_o(turn.stage), group_query, step);
        if constexpr (Shape::kHeld) {
          wgmma<T, false>(dp, held_v[step], right, step > 0);
        } else {
          wgmma<T, false, false>(dp, V::rows(shape.v(), group_key, step), right, step > 0);
        }
      }
      wgmma_commit();

      if constexpr (!Modifier::kPlain) {
        wgmma_wait<0>(dp);
        subtract(dp, deltas);
        modify_transposed<Modifier>(scores, dp, problem, s.batch, head, key, query);
      }
      if (is_partial(problem, s, first, kQueries, first_key, 64))
        mask_transposed(scores, problem, s, key, query);
      weigh(scores, scale, shape.exponent(turn.stage) + row_bytes);
      // dS has a place. A branch, too, without which ptxas waits for dP before it has computed the
      // weights.
      if constexpr (Shape::kQueryGradient) {
        shape.ds_ring().acquire(turn_ds);
      } else {
        shape.do_ring().wait(turn);
      }
      if constexpr (Modifier::kPlain) {
        wgmma_wait<0>(dp);
        subtract(dp, deltas);
      }
      multiply(dp, scores);
      u32 weights[kQueries / 4], ds[kQueries / 4];
      pack<T>(ds, dp);
      pin(ds), pin(scores);
      pack<T>(weights, scores);

      const auto start_dv = [&] {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kM / 16; ++step) {
          const u64 right = Do::columns(shape.d_o(turn.stage), column_v, step);
          if constexpr (kSplit) {
            wgmma<T, false, true>(dv, Ds::rows(shape.p(turn_ds.stage), 0, step), right, true);
          } else {
            wgmma<T, true>(dv, weights + 4 * step, right, true);
          }
        }
        wgmma_commit();
      };
      if constexpr (!kSplit) start_dv();
      if constexpr (kSplit)
        Ds::store_matrices(shape.p(turn_ds.stage), warp_key, weights, group_query);
      Ds::store_matrices(shape.ds(turn_ds.stage), warp_key, ds, group_query);
      fence_async();
      if constexpr (kSplit) {
        barrier(1, Shape::kGroups * kWarpgroup);
      } else {
        barrier(1 + group, kWarpgroup);
      }
      if constexpr (Shape::kQueryGradient) {
        if (lane_id() == 0) arrive(shape.ds_ring().full(turn_ds.stage));
      }
      if constexpr (kSplit) start_dv();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kM / 16; ++step)
        wgmma<T, false, true>(dk, Ds::rows(shape.ds(turn_ds.stage), group_key, step),
                              Q::columns(shape.q(turn.stage), column, step), true);
      wgmma_commit();

      wgmma_wait<1>(dv);
      release(shape.do_ring().empty(turn.stage));
      RingState<Shape::kStages> next = turn;
      next.next();
      if (i + 1 < tile.tiles) {
        shape.q_ring().wait(next);
      } else {
        next = turn;  // the last time S is not used
      }
      start_scores(next.stage);
      wgmma_wait<1>(dk);
      release(shape.q_ring().empty(turn.stage));
      wgmma_wait<0>(scores);
      turn = next;
      if (++m == tile.blocks.end) m = tile.blocks.begin, ++head;
    }
  }
  store_key_gradient<T>(p.call.dk, s, tile.group, key, dk, problem.scale, problem.head_dim, column);
  store_key_gradient<T>(p.call.dv, s, tile.group, key, dv, 1.0f, problem.head_dim_v, column_v);
}

/// grid: tiles * batch * groups of query heads blocks, those with the most queries (a causal mask's
/// first keys) first.
template <class T, int kDim, int kDimV, bool kQueryGradient, class Modifier>
__global__ void __launch_bounds__(384, 1)
    backward_hopper(const FLEXOPS_GRID_CONSTANT BackwardHopperParams p) {
  using Shape = BackwardHopper<kDim, kDimV, kQueryGradient>;
  __align__(1024) extern __shared__ u8 memory[];
  const Shape shape(hopper::shared_address(memory));
  const Problem& problem = p.call.problem;
  // Find the tile of keys.
  const TileNumber number(blockIdx.x, problem.batch, problem.heads_q / p.call.group, p.call.tiles,
                          p.call.section);
  const BackwardTile tile(p.call, number, shape);
  // Set up the barriers.
  if (threadIdx.x == 0) {
    hopper::prefetch(p.q), hopper::prefetch(p.k), hopper::prefetch(p.v), hopper::prefetch(p.d_o);
    shape.init_barriers();
  }
  __syncthreads();
  // The server loads and computes dQ; the consumers compute the rest.
  const int warpgroup = shuffle(static_cast<int>(threadIdx.x) / hopper::kWarpgroup, 0),
            thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::leave_registers<Shape::kServerRegisters>();
    backward_serve<T>(p, shape, tile, thread);
  } else {
    hopper::take_registers<Shape::kConsumerRegisters>();
    backward_consume<T, Modifier>(p, shape, tile, warpgroup - 1, thread);
  }
}

}  // namespace flexops::attention
