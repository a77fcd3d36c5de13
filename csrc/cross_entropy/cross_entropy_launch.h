// The launcher of cross entropy's way for sm_90: rows streamed through clusters' shared memory.
// Included by cross_entropy_cuda.cpp.
#pragma once

#include "common/launch.h"
#include "cross_entropy/cross_entropy_ring.cuh"

namespace flexops {
namespace {

using cross_entropy::Params;

#if !FLEXOPS_HIP

constexpr auto kRing = kernel<cross_entropy::cross_entropy_ring<float>>;

LaunchConfig ring_launch(int64_t clusters, int64_t size, void* stream) {
  constexpr int64_t kBytes = cross_entropy::kRingChunks * cross_entropy::kRingChunk * 16;
  return {blocks(clusters * size),
          {cross_entropy::kRingThreads + cross_entropy::kNarrowWarp},
          stream,
          kBytes,
          static_cast<unsigned>(size)};
}

/// Launches the kernel that streams float32 rows of at most `vectors` vectors through shared
/// memory, if the GPU and its code can, and rows fit.
bool launch_ring(Params& p, int64_t vectors, void* stream) {
  int64_t size = 1, part = vectors;
  while (size < cross_entropy::kMostBlocks &&
         part > cross_entropy::kRingShare * cross_entropy::kRingChunk) {
    size *= 2;
    part = ceil_div(ceil_div(vectors, size), 8) * 8;  // whole lines
  }
  if (2 * ceil_div(part, cross_entropy::kRingChunk) > cross_entropy::kRingChunks) return false;
  const int64_t clusters = least(resident_clusters(kRing, ring_launch(1, size, stream)), p.rows);
  if (clusters <= 0) return false;
  p.blocks = static_cast<int>(size), p.part = static_cast<int>(part);
  launch(kRing, ring_launch(clusters, size, stream), p);
  return true;
}

#else

bool launch_ring(Params&, int64_t, void*) { return false; }

#endif

}  // namespace
}  // namespace flexops
