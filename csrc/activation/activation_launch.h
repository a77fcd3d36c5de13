// What the launchers of activations share.
#pragma once

#include "activation/activation.h"

#include "activation/activation.cuh"

namespace flexops::activation {

inline bool aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

inline int element_size(ActivationType type) { return type == ActivationType::f32 ? 4 : 2; }

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

template <typename T>
void advance(T*& pointer, int64_t bytes) {
  if (pointer) pointer = static_cast<T*>(static_cast<char*>(const_cast<void*>(static_cast<const void*>(pointer))) + bytes);
}

inline Function function_of(Activation which) {
  if (which == Activation::silu) return {1.0f, 0.0f, false};
  return {1.595769122f, 0.07135481627f, which == Activation::gelu_erf};  // 2 sqrt(2 / pi), and 0.044715 of it
}

inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename P>
void launch(const void* kernel, P& p, int64_t blocks, int threads, void* stream) {
  void* arguments[] = {&p};
  cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), arguments, 0, static_cast<cudaStream_t>(stream));
}

/// Launches a kernel of `activation::Walk` for all rows, in pieces that 32 bits can count. move(part, rows) moves its pointers that far
/// down.
template <typename P, typename Move>
void launch_rows(const void* kernel, P p, int64_t rows, int64_t vectors, int most, const Move& move, void* stream) {
  constexpr int64_t kMost = int64_t{1} << 30, kFew = 1 << 17;  // threads
  const int64_t across = p.flat ? 1 : vectors, piece = kMost / across;
  p.vectors = make_divisor(across);
  p.take = static_cast<u32>(rows * across / most < kFew ? 1 : most);  // fewer would leave much of the GPU idle
  for (; rows > 0; rows -= piece, move(p, piece)) {
    p.rows = static_cast<u32>(rows < piece ? rows : piece);
    launch(kernel, p, divide_up(divide_up(p.rows, p.take) * across, kThreads), kThreads, stream);
  }
}

constexpr int64_t kLongestRow = int64_t{1} << 30;
constexpr const char* kTooLong = "rows of more than 2^30 elements must follow each other without gaps";

/// A kernel for each type, then AnyElement's. As pointers, because each <<<>>> costs build time.
using Kernels = const void* [4];
constexpr int kAny = 3;
/// After the kernel's name comes a template argument that it has beyond the type.
#define FLEXOPS_KERNEL(...) reinterpret_cast<const void*>(&__VA_ARGS__)
#define FLEXOPS_KERNELS(kernel, which)                                                                                   \
  {FLEXOPS_KERNEL(kernel<float, which>), FLEXOPS_KERNEL(kernel<AnyHalf, which>), FLEXOPS_KERNEL(kernel<AnyHalf, which>), \
   FLEXOPS_KERNEL(kernel<AnyElement, which>)}

}  // namespace flexops::activation
