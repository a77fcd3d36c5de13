// torch's own accessors (PackedTensorAccessor32 and their like), for device code that NVRTC
// compiles: ATen/core/TensorAccessor.h as it is. What it includes of the host's is declared here as
// far as it is named there, for functions that device code cannot call.
#pragma once

#if __has_include(<torch/headeronly/macros/Macros.h>)
#include <torch/headeronly/macros/Macros.h>
#else
#include <c10/macros/Macros.h>
#endif
#undef C10_HOST  // of functions that are left as they are: NVRTC takes none that is for the host
                 // alone
#define C10_HOST
#define TORCH_CHECK_INDEX(...)
#define STD_TORCH_CHECK(...)
#define C10_DEFINE_DEPRECATED_USING(name, ...) using name = __VA_ARGS__;

namespace c10 {
template <typename T>
class ArrayRef;
using IntArrayRef = ArrayRef<int64_t>;
}  // namespace c10
namespace torch::headeronly {
template <typename T>
class HeaderOnlyArrayRef;
using IntHeaderOnlyArrayRef = HeaderOnlyArrayRef<int64_t>;
}  // namespace torch::headeronly
namespace std {
template <class T>
void begin(T&&);
template <class T>
void end(T&&);
template <class... A>
void copy(A...);
}  // namespace std

#include <ATen/core/TensorAccessor.h>
