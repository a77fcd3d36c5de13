// Reductions over lanes and blocks. Every lane of the group takes part and gets the result.
#pragma once

#include "common/device.cuh"

namespace flexops {

struct Sum {
  template <typename T>
  FLEXOPS_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <typename T>
  FLEXOPS_DEVICE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

/// Over groups of `width` neighbouring lanes (a power of two, at most a warp).
template <int width = kWarpSize, typename T, typename Op>
FLEXOPS_DEVICE T warp_reduce(T value, Op op) {
#pragma unroll
  for (int mask = width / 2; mask > 0; mask /= 2)
    value = op(value, shuffle_xor(value, mask, width));
  return value;
}

/// Over a block of `threads` threads (a multiple of the warp size). `shared` holds threads /
/// kWarpSize values, and may be used again only after a __syncthreads().
template <int threads, typename T, typename Op>
FLEXOPS_DEVICE T block_reduce(T value, Op op, T* shared) {
  constexpr int kWarps = threads / kWarpSize;
  value = warp_reduce(value, op);
  if constexpr (kWarps == 1) return value;
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T out = shared[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) out = op(out, shared[i]);
  return out;
}

}  // namespace flexops
