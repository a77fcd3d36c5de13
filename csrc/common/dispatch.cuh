// From a tensor's dtype to a type, in launchers:
//
//   with_floats(x.dtype, [&](auto type) {      // the body is compiled for float, f16 and bf16
//     using T = decltype(type);
//     launch(kernel<scale<T>>, config, x.as<T>(), out.as<T>(), x.numel);
//   });
#pragma once

#include "common/dtypes.cuh"
#include "common/tensor_view.h"

namespace flexops {

template <typename F>
void with_floats(Dtype dtype, const F& body) {
  if (dtype == Dtype::bf16) return body(bf16{});
  if (dtype == Dtype::f16) return body(f16{});
  return body(float{});
}
template <typename F>
void with_floats(ElementType type, const F& body) {
  with_floats(static_cast<Dtype>(type), body);
}

}  // namespace flexops
