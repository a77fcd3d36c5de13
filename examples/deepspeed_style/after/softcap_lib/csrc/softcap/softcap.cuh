#pragma once

#include "common/dtypes.cuh"

namespace softcap_lib {
using namespace flexops;

template <typename T>
__global__ void softcap_kernel(const T* x, float cap, T* out, i64 count) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(cap * tanhf(to_float(x[i]) / cap));
}

template <typename T>
__global__ void softcap_backward_kernel(const T* grad, const T* y, float cap, T* out, i64 count) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const float ratio = i < count ? to_float(y[i]) / cap : 0.0f;
  if (i < count) out[i] = from_float<T>(to_float(grad[i]) * (1.0f - ratio * ratio));
}

}  // namespace softcap_lib
