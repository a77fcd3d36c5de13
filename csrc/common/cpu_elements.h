// Elements of float32, float16 or bfloat16 as floats, in CPU kernels; for *_cpu.cpp files, once per ISA level (cpu.h).
//
//   with_floats(x.dtype, [&](auto type) {      // the body is compiled for each of the three
//     using T = decltype(type);
//     const T* in = x.as<T>();
//     for (int64_t i = begin; i < end; ++i) store(out.as<T>(), i, 2 * load(in, i));
//   });
#pragma once

#include "common/cpu_math.h"
#include "common/tensor_view.h"

namespace flexops::FLEXOPS_ISA {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float load(const float* from, int64_t at) { return from[at]; }
inline float load(const Bf16* from, int64_t at) { return bf16_to_float(from[at].bits); }
inline float load(const F16* from, int64_t at) { return f16_to_float(from[at].bits); }
inline void store(float* to, int64_t at, float value) { to[at] = value; }
inline void store(Bf16* to, int64_t at, float value) { to[at].bits = float_to_bf16(value); }
inline void store(F16* to, int64_t at, float value) { to[at].bits = float_to_f16(value); }

template <typename F>
inline void with_floats(Dtype dtype, const F& body) {
  if (dtype == Dtype::bf16) return body(Bf16{});
  if (dtype == Dtype::f16) return body(F16{});
  return body(float{});
}

}  // namespace flexops::FLEXOPS_ISA
