// Cross entropy's way for sm_90: rows streamed through the shared memory of clusters of blocks.
#pragma once

#include "cross_entropy/cross_entropy_row.cuh"

namespace flexops::cross_entropy {

// Tuned on one H200.
inline constexpr int kRingLeast = 2048;   // vectors of a row that is streamed
inline constexpr int kRingThreads = 512;  // that compute
inline constexpr int kRingVectors = 4;    // of a chunk that a thread takes
inline constexpr int kRingChunks = 6;     // that a ring holds
inline constexpr int kRingShare =
    3;  // of a row, in chunks, that a block takes at most: two rows' must fit the ring
inline constexpr int kMostBlocks = 8;                           // of a cluster
inline constexpr int kRingChunk = kRingThreads * kRingVectors;  // vectors
inline constexpr int kRingWarps = kRingThreads / kNarrowWarp;

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLEXOPS_HAS_CLUSTERS 1
FLEXOPS_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
FLEXOPS_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barriers in shared memory, by their address there. Each use of one is a phase, even or odd.
FLEXOPS_DEVICE u32 shared_address(const void* pointer) {
  u32 out;
  asm("{\n.reg .u64 wide;\ncvta.to.shared.u64 wide, %1;\ncvt.u32.u64 %0, wide;\n}"
      : "=r"(out)
      : "l"(pointer));
  return out;
}
FLEXOPS_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
FLEXOPS_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
FLEXOPS_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
FLEXOPS_DEVICE void barrier_wait(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], "
        "%2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  } while (done == 0);
}
/// Orders this thread's reads of shared memory before bulk copies that others start when they are
/// told.
FLEXOPS_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// 16 bytes or a multiple from global to shared memory; `barrier` is told when they are there.
FLEXOPS_DEVICE void copy_async(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(reinterpret_cast<u64>(from)), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Writes to the place that `to` is in block `rank` of the cluster, and tells its `barrier`.
FLEXOPS_DEVICE void send(u32 to, u32 barrier, int rank, float4 value) {
  asm volatile(
      "{\n.reg .u32 there, bell;\nmapa.shared::cluster.u32 there, %0, "
      "%2;\nmapa.shared::cluster.u32 bell, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, "
      "[bell];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(bit_cast<u32>(value.x)), "r"(bit_cast<u32>(value.y)),
      "r"(bit_cast<u32>(value.z)), "r"(bit_cast<u32>(value.w))
      : "memory");
}

/// A place in the ring, and the phase of its barriers.
struct Slot {
  int index;
  u32 phase;

  FLEXOPS_DEVICE void advance() {
    if (++index == kRingChunks) index = 0, phase ^= 1;
  }
};

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

/// The ring and its barriers, by their addresses in shared memory.
struct Ring {
  const Packed* data;
  u32 full, empty, told;

  FLEXOPS_DEVICE u32 full_at(const Slot& slot) const { return full + 8 * slot.index; }
  FLEXOPS_DEVICE u32 empty_at(const Slot& slot) const { return empty + 8 * slot.index; }
  FLEXOPS_DEVICE const Packed* chunk(const Slot& slot) const {
    return data + slot.index * kRingChunk;
  }
};

/// Copies the block's parts of its rows into the ring. For one thread.
template <typename T>
FLEXOPS_DEVICE void fill_ring(const Params& p, const Ring& ring, int rank, i64 row, i64 step) {
  constexpr int N = kPerVector<T>;
  Slot slot = {0, 0};
  for (; row < p.rows; row += step) {
    const i64 wanted = p.target[row];
    if (wanted == p.ignore_index) continue;
    const T* x = static_cast<const T*>(p.logits) + row * p.stride;
    const Part part = Part::of<T>(p, row, wanted, rank);
    for (int at = part.begin; at < part.end; at += kRingChunk * N) {
      const int vectors = (part.end - at + N - 1) / N;
      const u32 bytes = static_cast<u32>(vectors < kRingChunk ? vectors : kRingChunk) * 16;
      barrier_wait(ring.empty_at(slot), slot.phase ^ 1);  // passes at once for the first chunks
      barrier_expect(ring.full_at(slot), bytes);
      copy_async(shared_address(ring.chunk(slot)), x + at, bytes, ring.full_at(slot));
      slot.advance();
    }
  }
}

/// What this thread's logits of the part contribute.
template <typename T>
FLEXOPS_DEVICE State add_part(const Params& p, const Ring& ring, const Part& part, Slot& slot) {
  constexpr int N = kPerVector<T>, V = kRingVectors;
  const int thread = static_cast<int>(threadIdx.x);
  State s = {-infinity(), 0.0f, 0.0f};
  for (int from = part.begin; from < part.end; from += kRingChunk * N) {
    const Packed* chunk = ring.chunk(slot) + thread;
    barrier_wait(ring.full_at(slot), slot.phase);
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (thread + k * kRingThreads) * N;
      raw[k] = {{kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>}};
      if (at < part.end) raw[k] = chunk[k * kRingThreads];
      limit<T>(raw[k], at, p.length, kNothing<T>);
    }
    add_vectors<T, V>(s, p, raw, from + thread * N, kRingThreads * N, part.end);
    slot.advance();
  }
  return s;
}

/// Writes the part's gradient, and gives its chunks back.
template <typename T>
FLEXOPS_DEVICE void write_part(const Params& p, const Ring& ring, const Part& part, Slot& slot,
                               const Gradient& g) {
  constexpr int N = kPerVector<T>, V = kRingVectors;
  const int thread = static_cast<int>(threadIdx.x);
  T* out = static_cast<T*>(p.out) + part.row * p.out_stride;
  for (int from = part.begin; from < part.end; from += kRingChunk * N) {
    const Packed* chunk = ring.chunk(slot) + thread;
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (from + (thread + k * kRingThreads) * N < part.end) raw[k] = chunk[k * kRingThreads];
    }
    // Loads and bulk copies know nothing of each other's order: without the fence a copy may be
    // there first (a variant of this loop had that in 5 of 8000 runs).
    fence_async();
    __syncwarp();
    if (thread % kNarrowWarp == 0) barrier_arrive(ring.empty_at(slot));
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (thread + k * kRingThreads) * N;
      if (at >= part.end) break;
      write_vector<T>(p, out, raw[k], at, g, part.target);
    }
    slot.advance();
  }
}

#else
#define FLEXOPS_HAS_CLUSTERS 0
#endif

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
  // A block tells of row i + 2 once it has all that was told of row i, which the others did after
  // they had finished row i - 2. So row i + 2 may take row i - 2's place, but no later one's.
  constexpr u32 kSides = 4;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) float4 states[kSides][kMostBlocks * kRingWarps];
  __shared__ __align__(8) u64 barriers[2 * kRingChunks + kSides];
  __shared__ float counts[kWarps];
  const int thread = static_cast<int>(threadIdx.x),
            rank = static_cast<int>(blockIdx.x % static_cast<u32>(p.blocks));
  const i64 step = gridDim.x / static_cast<u32>(p.blocks),
            first = blockIdx.x / static_cast<u32>(p.blocks);
  const u32 address = shared_address(barriers);
  const Ring ring = {reinterpret_cast<const Packed*>(memory), address, address + 8 * kRingChunks,
                     address + 16 * kRingChunks};
  if (thread == 0) {
    for (int i = 0; i < kRingChunks; ++i)
      barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, kRingWarps);
    for (u32 i = 0; i < kSides; ++i) barrier_init(ring.told + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  float divisor = p.divisor ? *p.divisor : 1.0f;
  if (p.count) divisor = count_targets(p, counts);
  cluster_arrive();
  cluster_wait();
  if (thread >= kRingThreads) {
    if (thread == kRingThreads) fill_ring<T>(p, ring, rank, first, step);
    return;
  }

  const int lane = thread % kNarrowWarp, warp = thread / kNarrowWarp, count = p.blocks * kRingWarps;
  Slot read = {0, 0}, written = {0, 0};
  u32 turn = 0;                       // rows that were told of
  Part before = {0, 0, 0, 0, false};  // the last of them, whose gradient is not written yet
  const auto finish = [&](u32 its_turn) {
    const float4* told = states[its_turn % kSides];
    barrier_wait(ring.told + 8 * (its_turn % kSides), its_turn / kSides & 1);
    const State s = merge(told, count, p.smoothing != 0.0f);
    const float maximum = settle(s.maximum);
    if (thread == 0 && rank == 0) {
      p.losses[before.row] =
          before.valid ? loss_of(p, maximum, s.sum, told[0].w, s.total) : not_a_number();
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
    const u32 side = turn % kSides, bell = ring.told + 8 * side;
    if (thread == 0) barrier_expect(bell, static_cast<u32>(count) * 16);
    if (lane < p.blocks)
      send(shared_address(&states[side][rank * kRingWarps + warp]), bell, lane,
           {s.maximum, s.sum, s.total, chosen});
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
