// What a plain C++ compiler does not see of ATen/core/TensorAccessor.h, which keeps it for nvcc:
// host code of a user's `.cu` names it.
#pragma once

#include <ATen/core/TensorAccessor.h>

#if __has_include(<torch/headeronly/core/TensorAccessor.h>)
namespace torch::headeronly {
template <typename T>
struct RestrictPtrTraits {
  typedef T* __restrict__ PtrType;
};
}  // namespace torch::headeronly
namespace at {
using torch::headeronly::RestrictPtrTraits;
}
#else
namespace at {
template <typename T>
struct RestrictPtrTraits {
  typedef T* __restrict__ PtrType;
};
}  // namespace at
#endif
