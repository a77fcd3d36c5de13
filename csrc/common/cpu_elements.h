// Elements of float32, float16 or bfloat16 as floats, in CPU kernels; for *_cpu.cpp files, once per
// ISA level (cpu.h).
//
//   with_floats(x.dtype, [&](auto type) {      // the body is compiled for each of the three
//     using T = decltype(type);
//     const T* in = x.as<T>();
//     for (int64_t i = begin; i < end; ++i) store(out.as<T>(), i, 2 * load(in, i));
//   });
#pragma once

#include "common/cpu_math.h"
#include "common/element_type.h"
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

// ---- the same by ElementType: a register of floats, or a block of them, at a time ----

/// `count` neighbouring elements as floats: in place, or in `buffer`.
inline const float* widen(const void* from, int64_t offset, int64_t count, ElementType type,
                          float* buffer) {
  if (type == ElementType::f32) return static_cast<const float*>(from) + offset;
  const uint16_t* bits = static_cast<const uint16_t*>(from) + offset;
  if (type == ElementType::bf16) {
    bf16_to_float(bits, buffer, count);
  } else {
    f16_to_float(bits, buffer, count);
  }
  return buffer;
}

/// A register of neighbouring elements as floats, and one of them.
template <ElementType type>
inline Floats load_elements(const void* from, int64_t index) {
  if constexpr (type == ElementType::f32)
    return load_floats(static_cast<const float*>(from) + index);
  const uint16_t* bits = static_cast<const uint16_t*>(from) + index;
  return type == ElementType::f16 ? load_f16(bits) : load_bf16(bits);
}
template <ElementType type>
inline float load_element(const void* from, int64_t index) {
  if constexpr (type == ElementType::f32) return static_cast<const float*>(from)[index];
  const uint16_t bits = static_cast<const uint16_t*>(from)[index];
  return type == ElementType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
}

/// The reverse.
template <ElementType type>
inline void store_elements(void* to, int64_t index, Floats value) {
  if constexpr (type == ElementType::f32) {
    store_floats(static_cast<float*>(to) + index, value);
  } else {
    uint16_t* bits = static_cast<uint16_t*>(to) + index;
    type == ElementType::f16 ? store_f16(bits, value) : store_bf16(bits, value);
  }
}

template <ElementType type>
inline void store_element(void* to, int64_t index, float value) {
  if constexpr (type == ElementType::f32) {
    static_cast<float*>(to)[index] = value;
  } else {
    static_cast<uint16_t*>(to)[index] =
        type == ElementType::f16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

/// One element of a type known at run time.
inline float load(const void* from, int64_t at, ElementType type) {
  if (type == ElementType::f32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == ElementType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
}
inline void store(void* to, int64_t at, float value, ElementType type) {
  if (type == ElementType::f32) {
    static_cast<float*>(to)[at] = value;
  } else {
    static_cast<uint16_t*>(to)[at] =
        type == ElementType::f16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

/// Where floats that become elements may be put together: in place, or in `buffer`. narrow then
/// finishes it.
inline float* place_in_row(void* to, int64_t offset, ElementType type, float* buffer) {
  return type == ElementType::f32 ? static_cast<float*>(to) + offset : buffer;
}

inline void narrow(const float* from, void* to, int64_t offset, int64_t count, ElementType type) {
  float* const place = static_cast<float*>(to) + offset;
  if (type == ElementType::f32 && from != place) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      store_floats(place + i,
                   load_floats(from + i));  // a memcpy starts too slowly for a few numbers
    for (; i < count; ++i) few(i), place[i] = from[i];
  }
  if (type == ElementType::bf16) float_to_bf16(from, static_cast<uint16_t*>(to) + offset, count);
  if (type == ElementType::f16) float_to_f16(from, static_cast<uint16_t*>(to) + offset, count);
}

/// Columns [begin, end) of the sum over `count` parts, [count, columns].
inline void sum_parts(const float* parts, int64_t count, int64_t columns, void* out,
                      ElementType type, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 512;
  float sum[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t width = end - at < kBlock ? end - at : kBlock;
    memset(sum, 0, sizeof sum);
    for (int64_t part = 0; part < count; ++part) {
      const float* from = parts + part * columns + at;
      for (int64_t i = 0; i < width; ++i) sum[i] += from[i];
    }
    narrow(sum, out, at, width, type);
  }
}

inline void clear_row(void* to, int64_t offset, int64_t count, ElementType type) {
  memset(static_cast<char*>(to) + offset * element_size(type), 0,
         static_cast<size_t>(count * element_size(type)));
}

}  // namespace flexops::FLEXOPS_ISA
