#pragma once

#include "common/dtypes.cuh"

namespace mylib {
using namespace flexops;

template <typename T>
__global__ void scale_kernel(const T* x, float factor, T* out, i64 count) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(to_float(x[i]) * factor);
}

}  // namespace mylib
