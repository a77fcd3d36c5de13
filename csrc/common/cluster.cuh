// Rows that stream through the shared memory of thread block clusters (sm_90 and newer). Each block
// has a part of a row; a warp of it does nothing but to start bulk copies of the rows to come.
// Where there are no clusters (HIP, older architectures) this compiles and does nothing: kernels
// are launched only where resident_clusters() finds room for them.
//
//   if (threadIdx.x == 0) ring.init(warps), exchange.init();
//   exchange.open();
//   // One thread, for each row:
//   ByteBarrier& full = ring.fill(turn, bytes);  full.load(stage turn % kStages, row, bytes,
//   lasting);
//   // The others: a row's partial sums; while they go round, the row before it is finished.
//   ring.wait(turn);  ... read the stage ...  exchange.send(turn, pair, blocks, warps);
//   pairs = exchange.receive(turn - 1);  ... read its stage again ...  ring.release(turn - 1);
#pragma once

#include "common/device.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLEXOPS_SM90(...) asm volatile(__VA_ARGS__)
#else
#define FLEXOPS_SM90(...)
#endif

namespace flexops {

inline constexpr int kMostClusterBlocks = 8;  // what every GPU with clusters has

FLEXOPS_DEVICE u32 shared_address(const void* pointer) {
#if FLEXOPS_HIP
  (void)pointer;
  return 0;
#else
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#endif
}

/// This block's number within its cluster.
FLEXOPS_DEVICE int cluster_rank() {
  u32 rank = 0;
  FLEXOPS_SM90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// A barrier in shared memory (an mbarrier), whose phases complete with its arrivals and the bytes
/// that these expect. `parity` is 0 for the first phase, 1 for the second, and so on in turn.
struct ByteBarrier {
  u64 state;

  FLEXOPS_DEVICE void init(int arrivals) {
    FLEXOPS_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()),
                 "r"(arrivals) : "memory");
  }
  FLEXOPS_DEVICE void arrive() {
    FLEXOPS_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  FLEXOPS_DEVICE void expect(int bytes) {
    FLEXOPS_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes) : "memory");
  }
  /// For what this block or its copies bring.
  FLEXOPS_DEVICE void wait(u32 parity) const {
    FLEXOPS_SM90(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
        "%1;\n@done bra finished;\nbra "
        "again;\nfinished:\n}" ::"r"(address()),
        "r"(parity) : "memory");
  }
  /// For what other blocks of the cluster have stored. Empties the first-level cache, too.
  FLEXOPS_DEVICE void wait_for_cluster(u32 parity) const {
    FLEXOPS_SM90(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
        "done, [%0], %1;\n@done bra finished;\nbra "
        "again;\nfinished:\n}" ::"r"(address()),
        "r"(parity) : "memory");
  }
  /// Starts a copy of `bytes` (a multiple of 16, as both addresses are) to shared memory, of which
  /// this barrier is told.
  FLEXOPS_DEVICE void load(void* shared, const void* global, int bytes, const Lasting& lasting) {
    FLEXOPS_SM90(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(address()), "l"(lasting.policy) : "memory");
  }
  FLEXOPS_DEVICE u32 address() const { return shared_address(&state); }
};

/// Stages that a producer fills and consumers' warps release. `turn` counts the rows of a block.
struct RowRing {
  static constexpr int kStages = 3;  // two rows are read, the next one is on its way
  ByteBarrier full[kStages], empty[kStages];

  /// By one thread, before ClusterExchange::open().
  FLEXOPS_DEVICE void init(int consumer_warps) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) full[i].init(1), empty[i].init(consumer_warps);
  }
  /// The producer's: the barrier of a stage that is free, and told what it will get.
  FLEXOPS_DEVICE ByteBarrier& fill(u32 turn, int bytes) {
    empty[turn % kStages].wait(turn / kStages % 2 ^ 1);  // passes at once for the first rows
    full[turn % kStages].expect(bytes);
    return full[turn % kStages];
  }
  FLEXOPS_DEVICE void wait(u32 turn) const { full[turn % kStages].wait(turn / kStages % 2); }
  /// By all threads of a warp that has done with the stage. Loads and bulk copies know nothing of
  /// each other's order, hence the fence.
  FLEXOPS_DEVICE void release(u32 turn) {
    FLEXOPS_SM90("fence.proxy.async.shared::cta;" :: : "memory");
    FLEXOPS_SM90("bar.warp.sync 0xffffffff;" :: : "memory");
    if (threadIdx.x % 32 == 0) empty[turn % kStages].arrive();
  }
};

/// What the consumers' warps of a cluster tell each other of each row: a pair of floats. With two
/// places a row's pairs are sent after those of the row before it were received, with four after
/// those of the row before that one: who has received a row's pairs knows that all warps have read
/// those of the row (two rows) before, whose place the next ones take. A block that has received
/// all that it is sent may end.
template <int kPlaces>
struct ClusterExchange {
  static constexpr int kMostWarps = 16;
  float2 pairs[kPlaces][kMostClusterBlocks * kMostWarps];
  ByteBarrier told[kPlaces];

  /// By one thread, before open().
  FLEXOPS_DEVICE void init() {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) told[i].init(1);
  }
  /// By all threads of the block, after its barriers are made: waits until all of the cluster's
  /// blocks are open.
  FLEXOPS_DEVICE void open() const {
    FLEXOPS_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
    __syncthreads();
    FLEXOPS_SM90("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :: : "memory");
  }
  /// By all consumers: their warp's pair, which its first lanes have, to all blocks.
  FLEXOPS_DEVICE void send(u32 turn, float2 pair, int blocks, int warps) {
    const int thread = static_cast<int>(threadIdx.x);
    ByteBarrier& bell = told[turn % kPlaces];
    float2* const place = &pairs[turn % kPlaces][cluster_rank() * warps + thread / 32];
    if (thread == 0) bell.expect(blocks * warps * static_cast<int>(sizeof(float2)));
    if (thread % 32 < blocks) {
      FLEXOPS_SM90(
          "{\n.reg .u32 there, bell;\nmapa.shared::cluster.u32 there, %0, "
          "%2;\nmapa.shared::cluster.u32 bell, %1, %2;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [there], {%3, %4}, "
          "[bell];\n}" ::"r"(shared_address(place)),
          "r"(bell.address()), "r"(thread % 32), "r"(bit_cast<u32>(pair.x)),
          "r"(bit_cast<u32>(pair.y)) : "memory");
      (void)place, (void)pair;
    }
  }
  /// What all warps have sent, block by block.
  FLEXOPS_DEVICE const float2* receive(u32 turn) const {
    told[turn % kPlaces].wait_for_cluster(turn / kPlaces % 2);
    return pairs[turn % kPlaces];
  }
};

}  // namespace flexops
