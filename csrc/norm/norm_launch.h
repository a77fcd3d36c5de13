// What the norms' launchers share.
#pragma once

#include "norm/norm.cuh"
#include "norm/norm.h"

namespace flexops::norm {

inline int size_of(NormType type) { return type == NormType::f32 ? 4 : 2; }

/// Whether a tensor is too large for caches to hold it and its results until somebody reads these.
inline bool is_large(int64_t elements, NormType type) { return elements * size_of(type) >= int64_t{1} << 24; }

inline bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uint64_t>(bytes) == 0;
}

/// What launchers ask of the current GPU.
struct Gpu {
  int device = -1;
  int processors, shared_of_block, shared_of_processor;  // bytes
};
/// Asked once by each thread, and again when it has gone on to another GPU.
inline const Gpu& current_gpu() {
  thread_local Gpu known;
  int device = 0;
  cudaGetDevice(&device);
  if (device != known.device) {
    cudaDeviceGetAttribute(&known.processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&known.shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&known.shared_of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    known.device = device;
  }
  return known;
}

/// The threads of a row: a power of two up to 32, or a multiple of 32.
inline int lanes_for(int64_t wanted, int most) {
  int lanes = 1;
  while (lanes < wanted && lanes < kNarrowWarp) lanes *= 2;
  if (wanted <= kNarrowWarp) return lanes;
  lanes = static_cast<int>((wanted + kNarrowWarp - 1) / kNarrowWarp * kNarrowWarp);
  return lanes < most ? lanes : most;
}

/// A grid whose blocks have `together` groups of threads.
struct Grid {
  int threads;
  int64_t together, blocks;

  /// A block for each long row, or for some short ones.
  Grid(int lanes, int64_t rows) : threads(lanes > kNarrowWarp ? lanes : kShortThreads), together(threads / lanes) {
    blocks = (rows + together - 1) / together;
  }
};

#define FLEXOPS_NORM_KERNEL(...) reinterpret_cast<const void*>(&::flexops::norm::__VA_ARGS__)

/// Kernels of norm_forward_codes.cu: forward_codes whose threads hold so many vectors, and forward_ragged.
const void* codes_kernel(NormType type, int items);
const void* ragged_kernel();

template <typename P>
void launch(const void* kernel, P& p, dim3 blocks, int64_t threads, int64_t shared_bytes, void* stream) {
  constexpr int64_t kWithoutAsking = 40000;
  if (shared_bytes > kWithoutAsking)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  void* arguments[] = {&p};
  cudaLaunchKernel(kernel, blocks, dim3(static_cast<unsigned>(threads)), arguments, static_cast<size_t>(shared_bytes),
                   static_cast<cudaStream_t>(stream));
}

inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flexops::norm
