// Cross entropy's kernel for sm_90 and newer: rows streamed through the shared memory of clusters
// of blocks.
#pragma once

#include "common/hopper.cuh"
#include "cross_entropy/cross_entropy_row.cuh"

namespace flexops::cross_entropy {

// Tuned on one H200.
inline constexpr int kRingLeast = 2048;   // vectors of a row that is streamed
inline constexpr int kRingThreads = 512;  // that compute
inline constexpr int kRingVectors = 4;    // of a chunk that a thread takes
inline constexpr int kRingChunks = 6;     // that a ring holds
inline constexpr int kRingShare =
    3;  // of a row, in chunks, that a block takes at most: two rows' must fit the ring
inline constexpr int kMostBlocks = hopper::kMostClusterBlocks;
inline constexpr int kRingChunk = kRingThreads * kRingVectors;  // vectors
inline constexpr int kRingWarps = kRingThreads / kNarrowWarp;

/// The part of a row that a block has: elements [begin, end), the first of which is at a multiple
/// of 16 bytes and may be before the row.
struct Part {
  i64 row;
  int begin, end, target;
  bool valid;

  template <typename T>
  FLEXOPS_DEVICE static Part of(const Params& p, i64 row, i64 wanted, int rank) {
    constexpr int N = kPerVector<T>;
    Part out;
    out.row = row;
    out.valid = wanted >= 0 && wanted < p.length;
    out.target = out.valid ? static_cast<int>(wanted) : -N;
    out.begin = rank * p.part * N - head_of<T>(static_cast<const T*>(p.logits) + row * p.stride);
    const int rest = p.length - out.begin, reach = p.part * N;
    out.end = out.begin + (rest < reach ? rest : reach);
    return out;
  }
};

using RingState = hopper::RingState<kRingChunks>;

/// A ring of chunks of rows.
struct Chunks : hopper::Ring<kRingChunks> {
  const Packed* data;

  FLEXOPS_DEVICE const Packed* operator[](const RingState& at) const {
    return data + at.stage * kRingChunk;
  }
};

/// Copies the block's parts of its rows into the ring. For one thread.
template <typename T>
FLEXOPS_DEVICE void fill_ring(const Params& p, const Chunks& ring, int rank, i64 row, i64 step) {
  constexpr int N = kPerVector<T>;
  RingState at;
  for (; row < p.rows; row += step) {
    const i64 wanted = p.target[row];
    if (wanted == p.ignore_index) continue;
    const T* x = static_cast<const T*>(p.logits) + row * p.stride;
    const Part part = Part::of<T>(p, row, wanted, rank);
    for (int from = part.begin; from < part.end; from += kRingChunk * N) {
      const int vectors = (part.end - from + N - 1) / N;
      const u32 bytes = static_cast<u32>(vectors < kRingChunk ? vectors : kRingChunk) * 16;
      hopper::load_bytes(hopper::shared_address(ring[at]), x + from, bytes, ring.fill(at, bytes));
      at.next();
    }
  }
}

/// What this thread's logits of the part contribute.
template <typename T>
FLEXOPS_DEVICE State add_part(const Params& p, const Chunks& ring, const Part& part,
                              RingState& stage) {
  constexpr int N = kPerVector<T>, V = kRingVectors;
  const int thread = static_cast<int>(threadIdx.x);
  State s = {-infinity(), 0.0f, 0.0f};
  for (int from = part.begin; from < part.end; from += kRingChunk * N) {
    const Packed* chunk = ring[stage] + thread;
    ring.wait(stage);
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (thread + k * kRingThreads) * N;
      raw[k] = {{kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>}};
      if (at < part.end) raw[k] = chunk[k * kRingThreads];
      limit<T>(raw[k], at, p.length, kNothing<T>);
    }
    add_vectors<T, V>(s, p, raw, from + thread * N, kRingThreads * N, part.end);
    stage.next();
  }
  return s;
}

/// Writes the part's gradient, and gives its chunks back.
template <typename T>
FLEXOPS_DEVICE void write_part(const Params& p, const Chunks& ring, const Part& part,
                               RingState& stage, const Gradient& g) {
  constexpr int N = kPerVector<T>, V = kRingVectors;
  const int thread = static_cast<int>(threadIdx.x);
  T* out = static_cast<T*>(p.out) + part.row * p.out_stride;
  for (int from = part.begin; from < part.end; from += kRingChunk * N) {
    const Packed* chunk = ring[stage] + thread;
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (from + (thread + k * kRingThreads) * N < part.end) raw[k] = chunk[k * kRingThreads];
    }
    ring.release(stage);  // its vectors are in registers
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (thread + k * kRingThreads) * N;
      if (at >= part.end) break;
      write_vector<T>(p, out, raw[k], at, g, part.target);
    }
    stage.next();
  }
}

/// Losses, maxima, sums and gradients, for sm_90: as many clusters as the GPU holds at once, each
/// of which goes over every so-manyth row. A warp of each block does nothing but to copy its part
/// of these rows, chunk by chunk, into a ring in shared memory. The other warps read a chunk twice:
/// for the row's maximum and sum, which they tell the other blocks, and for the gradient; in
/// between they find maximum and sum of the next row. So neither memory nor they wait while word
/// goes round. Two parts of rows fit the ring.
template <typename T>
__global__ void __launch_bounds__(kRingThreads + kNarrowWarp)
    cross_entropy_ring(const FLEXOPS_GRID_CONSTANT Params p) {
#if FLEXOPS_HAS_CLUSTERS
  __align__(128) extern __shared__ u8 memory[];
  __shared__ hopper::ClusterExchange<float4, 4> exchange;
  __shared__ u64 barriers[Chunks::kBarriers];
  __shared__ float counts[kWarps];
  const int thread = static_cast<int>(threadIdx.x),
            rank = static_cast<int>(blockIdx.x % static_cast<u32>(p.blocks));
  const i64 step = gridDim.x / static_cast<u32>(p.blocks),
            first = blockIdx.x / static_cast<u32>(p.blocks);
  const Chunks ring = {{hopper::shared_address(barriers)}, reinterpret_cast<const Packed*>(memory)};
  // Set up the barriers; count the targets that the mean divides by.
  if (thread == 0) ring.init(kRingWarps), exchange.init();
  float divisor = p.divisor ? *p.divisor : 1.0f;
  if (p.count) divisor = count_targets(p, counts);
  exchange.open();
  // The producer: bulk copies of the block's parts of its rows.
  if (thread >= kRingThreads) {
    if (thread == kRingThreads) fill_ring<T>(p, ring, rank, first, step);
    return;
  }

  // The consumers: each row's states are sent before the gradient of the row before it is written.
  const int lane = thread % kNarrowWarp, warp = thread / kNarrowWarp, count = p.blocks * kRingWarps;
  RingState read, written;
  u32 turn = 0;                       // rows whose states were sent
  Part before = {0, 0, 0, 0, false};  // the last of them, whose gradient is not written yet
  const auto finish = [&](u32 its_turn) {
    const float4* const sent = exchange.receive(its_turn);
    const State s = merge(sent, count, p.smoothing != 0.0f);
    const float maximum = settle(s.maximum);
    if (thread == 0 && rank == 0) {
      p.losses[before.row] =
          before.valid ? loss_of(p, maximum, s.sum, sent[0].w, s.total) : not_a_number();
      p.maxima[before.row] = maximum, p.sums[before.row] = s.sum;
    }
    const float weight = (p.upstream ? p.upstream[p.each_row ? before.row : 0] : 1.0f) / divisor;
    write_part<T>(p, ring, before, written,
                  make_gradient<T>(p, maximum, s.sum, before.valid ? weight : not_a_number()));
  };
  for (i64 row = first; row < p.rows; row += step) {
    const i64 wanted = p.target[row];
    const Part part = Part::of<T>(p, row, wanted, rank);
    if (wanted == p.ignore_index) {
      if (thread == 0 && rank == 0) p.losses[row] = p.maxima[row] = p.sums[row] = 0.0f;
      clear_part<T>(p, static_cast<T*>(p.out) + row * p.out_stride,
                    part.begin + thread * kPerVector<T>, kRingThreads * kPerVector<T>, part.end);
      continue;
    }
    float chosen = 0.0f;
    if (warp == 0 && rank == 0 && part.valid) {
      chosen = to_float(static_cast<const T*>(p.logits)[row * p.stride + part.target]);
    }
    const State s =
        reduce_lanes(add_part<T>(p, ring, part, read), kNarrowWarp, p.smoothing != 0.0f);
    exchange.send(turn, float4{s.maximum, s.sum, s.total, chosen}, p.blocks, kRingWarps);
    if (turn > 0) finish(turn - 1);
    before = part;
    ++turn;
  }
  if (turn > 0) finish(turn - 1);
#else
  (void)p;
#endif
}

}  // namespace flexops::cross_entropy
