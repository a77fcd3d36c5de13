// What a pipeline through shared memory is made of on Hopper and newer (sm_90): mbarriers, bulk
// copies by the copy engine, a ring of stages between a producer and its consumers, and values that
// the blocks of a cluster exchange. PTX ISA, "mbarrier", "cp.async.bulk", "st.async". On HIP and on
// older architectures it compiles and does nothing: launchers choose other kernels there.
//
//   __shared__ u64 barriers[Ring<3>::kBarriers];
//   const Ring<3> ring = {shared_address(barriers)};
//   if (threadIdx.x == 0) ring.init(consumer_warps), fence_init();
//   __syncthreads();                                  // ClusterExchange::open() between clusters
//   RingState<3> at;                                  // of the producer, of each consumer
//   // The producer, one thread:                      // The consumers, whole warps:
//   const u32 full = ring.fill(at, bytes);            ring.wait(at);
//   load_bytes(stage_of(at.stage), from, bytes, full);  ... read the stage ...
//   at.next();                                        ring.release(at), at.next();
#pragma once

#include "common/device.cuh"
#include "common/vec.cuh"

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLEXOPS_HAS_CLUSTERS 1
#define FLEXOPS_SM90(...) asm volatile(__VA_ARGS__)
#else
#define FLEXOPS_HAS_CLUSTERS 0
#define FLEXOPS_SM90(...)
#endif

namespace flexops::hopper {

FLEXOPS_DEVICE u32 shared_address(const void* pointer) {
#if FLEXOPS_HIP
  (void)pointer;
  return 0;
#else
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#endif
}

// ---- mbarriers, by their address in shared memory. Each use is a phase: 0, 1, 0, ... ----

FLEXOPS_DEVICE void init(u32 barrier, u32 arrivals) {
  FLEXOPS_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// After the last init, before other threads or the copy engine see the barriers.
FLEXOPS_DEVICE void fence_init() {
  FLEXOPS_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
}
FLEXOPS_DEVICE void arrive(u32 barrier) {
  FLEXOPS_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives; the phase then also waits for so many bytes.
FLEXOPS_DEVICE void expect(u32 barrier, u32 bytes) {
  FLEXOPS_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes) : "memory");
}
/// Until the phase is complete, for what this block's threads and copies bring.
FLEXOPS_DEVICE void wait(u32 barrier, u32 phase) {
  FLEXOPS_SM90(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
      "r"(phase) : "memory");
}
/// The same for what other blocks of the cluster have stored; it empties the first-level cache,
/// too.
FLEXOPS_DEVICE void wait_for_cluster(u32 barrier, u32 phase) {
  FLEXOPS_SM90(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
      "done, [%0], %1;\n@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
      "r"(phase) : "memory");
}
/// Orders this thread's accesses of shared memory before those of the copy engine and of the tensor
/// cores, which have no order with them otherwise.
FLEXOPS_DEVICE void fence_async() { FLEXOPS_SM90("fence.proxy.async.shared::cta;" :: : "memory"); }

// ---- Bulk copies to shared memory: `bytes` and both addresses are multiples of 16. `barrier`
// counts the bytes that arrive. ----

FLEXOPS_DEVICE void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  FLEXOPS_SM90(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(reinterpret_cast<u64>(from)), "r"(bytes), "r"(barrier) : "memory");
}
FLEXOPS_DEVICE void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier,
                               const L2Policy& policy) {
  FLEXOPS_SM90(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(reinterpret_cast<u64>(from)), "r"(bytes), "r"(barrier), "l"(policy.bits) : "memory");
}

// ---- The ring ----

/// Where a producer or consumer is in a ring: the stage, and the phase bit of its barriers.
template <int kStages>
struct RingState {
  int stage = 0;
  u32 phase = 0;

  /// After `count` uses of stages.
  static FLEXOPS_DEVICE RingState after(u32 count) {
    return {static_cast<int>(count % kStages), count / kStages % 2};
  }
  FLEXOPS_DEVICE void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

/// Stages that a producer fills and consumers release: two barriers for each, "full" and "empty",
/// from `first` on of those at the address `barriers`.
template <int kStages>
struct Ring {
  static constexpr int kBarriers = 2 * kStages;
  using State = RingState<kStages>;
  u32 barriers;
  int first = 0;

  FLEXOPS_DEVICE u32 full(int stage = 0) const { return barriers + 8 * (first + stage); }
  FLEXOPS_DEVICE u32 empty(int stage = 0) const { return full(kStages + stage); }
  /// By one thread, with the arrivals that make a stage empty, and full.
  FLEXOPS_DEVICE void init(u32 consumers, u32 producers = 1) const {
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      hopper::init(full(i), producers), hopper::init(empty(i), consumers);
  }
  /// The producer's: until the stage is empty, which it is at first.
  FLEXOPS_DEVICE void acquire(const State& at) const {
    hopper::wait(empty(at.stage), at.phase ^ 1);
  }
  /// The producer's: the barrier for copies of `bytes` to the stage, once it is empty.
  FLEXOPS_DEVICE u32 fill(const State& at, u32 bytes) const {
    acquire(at);
    expect(full(at.stage), bytes);
    return full(at.stage);
  }
  /// A consumer's: until the stage is full.
  FLEXOPS_DEVICE void wait(const State& at) const { hopper::wait(full(at.stage), at.phase); }
  /// By all threads of a consumer's warp that have read the stage. Without the fence the next copy
  /// may overtake their reads.
  FLEXOPS_DEVICE void release(const State& at) const {
    fence_async();
    FLEXOPS_SM90("bar.warp.sync 0xffffffff;" :: : "memory");
    if (threadIdx.x % 32 == 0) arrive(empty(at.stage));
  }
};

/// How kernels that stream long rows through clusters divide them: vectors of a row that a thread
/// has at most, rows that a block has in shared memory, and blocks that share a multiprocessor.
template <int kHeld_, int kStages_, int kBlocks_>
struct RowShape {
  static constexpr int kThreads = 512;  // that compute
  static constexpr int kHeld = kHeld_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kPart = kHeld * kThreads;  // vectors of a row that a block has at most
  static constexpr int kBytes = kStages * kPart * 16;
};

// ---- Clusters ----

inline constexpr int kMostClusterBlocks = 8;  // what every GPU with clusters has

/// Until all threads of all blocks of the cluster have come here. By whole warps.
FLEXOPS_DEVICE void cluster_sync() {
  FLEXOPS_SM90(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :: : "memory");
}
/// Until no block of the cluster reads this one's shared memory any more.
FLEXOPS_DEVICE void cluster_leave() {
  FLEXOPS_SM90(
      "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" :: : "memory");
}
/// Floats at the same place of another block's shared memory.
FLEXOPS_DEVICE float cluster_load(const float* own, int rank) {
  float value = *own;
  FLEXOPS_SM90(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there];\n}" : "=f"(value) : "r"(shared_address(own)),
      "r"(rank) : "memory");
  (void)rank;
  return value;
}
FLEXOPS_DEVICE float4 cluster_load(const float4* own, int rank) {
  float4 v = *own;
  FLEXOPS_SM90(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}" : "=f"(v.x),
      "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_address(own)), "r"(rank) : "memory");
  (void)rank;
  return v;
}
/// Arrives at the barrier that lies at this address in block `rank` of the cluster. Without a
/// fence, which would cost more than a stage's products: it is for stages that wgmma has read.
FLEXOPS_DEVICE void arrive_at(u32 barrier, u32 rank) {
  FLEXOPS_SM90(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank) : "memory");
}
/// This block's number within its cluster.
FLEXOPS_DEVICE int cluster_rank() {
  u32 rank = 0;
  FLEXOPS_SM90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
/// The cluster's number; of a grid without clusters, the block's.
FLEXOPS_DEVICE int cluster_index() {
  u32 index = blockIdx.x;
  FLEXOPS_SM90("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return static_cast<int>(index);
}

/// A value (float2 or float4) of each consumer warp of a cluster, sent to all of its blocks for
/// each row. With two places a row's values are sent after those of the row before it were
/// received, with four after those of the row before that one: a block that has received a row's
/// values knows that all warps have read those of the row (two rows) before, whose place the next
/// ones take. A block that has received all that it is sent may end.
template <typename Value, int kPlaces>
struct ClusterExchange {
  static constexpr int kMostWarps = 16;
  static_assert(sizeof(Value) == 8 || sizeof(Value) == 16, "float2 or float4");
  Value values[kPlaces][kMostClusterBlocks * kMostWarps];
  u64 barriers[kPlaces];

  /// By one thread, before open().
  FLEXOPS_DEVICE void init() const {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) hopper::init(shared_address(&barriers[i]), 1);
  }
  /// By all threads of the block, after the init of all its barriers: until all of the cluster's
  /// blocks have come here.
  FLEXOPS_DEVICE void open() const {
    fence_init();
    __syncthreads();
    cluster_sync();
  }
  /// By all consumers, row by row: their warp's value, which its first lanes have, to all blocks.
  FLEXOPS_DEVICE void send(u32 row, const Value& value, int blocks, int warps) const {
    const int thread = static_cast<int>(threadIdx.x);
    const u32 barrier = shared_address(&barriers[row % kPlaces]);
    const u32 to = shared_address(&values[row % kPlaces][cluster_rank() * warps + thread / 32]);
    if (thread == 0) expect(barrier, blocks * warps * static_cast<int>(sizeof(Value)));
    if (thread % 32 >= blocks) return;
    if constexpr (sizeof(Value) == 8) {
      FLEXOPS_SM90(
          "{\n.reg .u32 there, bell;\nmapa.shared::cluster.u32 there, %0, %2;\n"
          "mapa.shared::cluster.u32 bell, %1, %2;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [there], {%3, %4}, "
          "[bell];\n}" ::"r"(to),
          "r"(barrier), "r"(thread % 32), "r"(bit_cast<u32>(value.x)),
          "r"(bit_cast<u32>(value.y)) : "memory");
    } else {
      FLEXOPS_SM90(
          "{\n.reg .u32 there, bell;\nmapa.shared::cluster.u32 there, %0, %2;\n"
          "mapa.shared::cluster.u32 bell, %1, %2;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, "
          "%6}, [bell];\n}" ::"r"(to),
          "r"(barrier), "r"(thread % 32), "r"(bit_cast<u32>(value.x)), "r"(bit_cast<u32>(value.y)),
          "r"(bit_cast<u32>(value.z)), "r"(bit_cast<u32>(value.w)) : "memory");
    }
    (void)to;
  }
  /// What all warps have sent, block by block.
  FLEXOPS_DEVICE const Value* receive(u32 row) const {
    wait_for_cluster(shared_address(&barriers[row % kPlaces]), row / kPlaces % 2);
    return values[row % kPlaces];
  }
};

}  // namespace flexops::hopper
