// The launcher of cross entropy's way for sm_90: rows streamed through clusters' shared memory. Included by cross_entropy.cu.
#pragma once

#include <stdint.h>

#include "cross_entropy/cross_entropy_ring.cuh"

namespace flexops {
namespace {

using cross_entropy::Params;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if !FLEXOPS_HIP && CUDART_VERSION >= 11080

const void* const kRing = reinterpret_cast<const void*>(&cross_entropy::cross_entropy_ring<cross_entropy::kF32>);
constexpr int kRingBytes = cross_entropy::kRingChunks * cross_entropy::kRingChunk * 16;

/// A launch of clusters.
struct ClusterLaunch {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};

  ClusterLaunch(int64_t clusters, int64_t blocks, int64_t threads, int64_t shared, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(blocks), attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(clusters * blocks)), config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

/// How many clusters of `blocks` blocks the current device runs at once; 0 if its code has none. Asked once for each device and size.
int ring_clusters(int blocks) {
  constexpr int kDevices = 64, kSizes = 9;
  static int known[kDevices][kSizes];  // one more than the answer; races write the same
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices || blocks >= kSizes) return 0;
  int& answer = known[device][blocks];
  if (answer == 0) {
    cudaFuncAttributes attributes;
    int clusters = 0;
    if (cudaFuncGetAttributes(&attributes, kRing) == cudaSuccess && attributes.ptxVersion >= 90 &&
        cudaFuncSetAttribute(kRing, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes) == cudaSuccess) {
      ClusterLaunch launch(1, blocks, cross_entropy::kRingThreads + cross_entropy::kNarrowWarp, kRingBytes, nullptr);
      if (cudaOccupancyMaxActiveClusters(&clusters, kRing, &launch.config) != cudaSuccess) clusters = 0;
    }
    cudaGetLastError();  // what was refused here is no error of the launch
    answer = clusters + 1;
  }
  return answer - 1;
}

/// Launches the kernel that streams float32 rows of at most `vectors` vectors through shared memory, if the GPU and its code can, and rows
/// fit.
bool launch_ring(Params& p, int64_t vectors, cudaStream_t stream) {
  int64_t blocks = 1, part = vectors;
  while (blocks < cross_entropy::kMostBlocks && part > cross_entropy::kRingShare * cross_entropy::kRingChunk) {
    blocks *= 2;
    part = divide_up(divide_up(vectors, blocks), 8) * 8;  // whole lines
  }
  if (2 * divide_up(part, cross_entropy::kRingChunk) > cross_entropy::kRingChunks) return false;
  const int64_t clusters = least(ring_clusters(static_cast<int>(blocks)), p.rows);
  if (clusters <= 0) return false;
  p.blocks = static_cast<int>(blocks), p.part = static_cast<int>(part);
  ClusterLaunch launch(clusters, blocks, cross_entropy::kRingThreads + cross_entropy::kNarrowWarp, kRingBytes, stream);
  void* arguments[] = {&p};
  cudaLaunchKernelExC(&launch.config, kRing, arguments);
  return true;
}

#else

bool launch_ring(Params&, int64_t, cudaStream_t) { return false; }

#endif

}  // namespace
}  // namespace flexops
