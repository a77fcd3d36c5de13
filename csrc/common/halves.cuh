// Kernels by the number of a type instead of the type, and both types of 16 bits by one instantiation of a kernel: kHalf stands for either,
// and a flag that is the same for the whole grid tells which where it matters.
#pragma once

#include "common/held.cuh"
#include "common/rows.cuh"

namespace flexops::rows {

enum Type : u8 { kF32 = 0, kF16 = 1, kBf16 = 2 };

template <Type type>
struct ElementOf {
  using type_ = float;
};
template <>
struct ElementOf<kF16> {
  using type_ = f16;
};
template <>
struct ElementOf<kBf16> {
  using type_ = bf16;
};
template <Type type>
using Element = typename ElementOf<type>::type_;

template <Type type>
inline constexpr int kVector = type == kF32 ? 4 : 8;

inline constexpr Type kHalf = kBf16;

template <Type type>
FLEXOPS_DEVICE int head_of(const Element<type>* row) {
  return head_of<Element<type>>(row);
}
template <Type type, Cache cache>
FLEXOPS_DEVICE Packed load_vector(const Element<type>* row, int at) {
  return load_vector<Element<type>, cache>(row, at);
}
template <Type type, Cache cache>
FLEXOPS_DEVICE void store_vector(Element<type>* row, int at, int length, const Packed& value) {
  store_vector<Element<type>, cache>(row, at, length, value);
}
template <Type type>
FLEXOPS_DEVICE void limit(Packed& values, int at, int length, u32 other) {
  limit<Element<type>>(values, at, length, other);
}
template <Type type>
FLEXOPS_DEVICE void limit_end(Packed& values, int at, int length, u32 other) {
  limit_end<Element<type>>(values, at, length, other);
}
template <Type type, int V>
FLEXOPS_DEVICE void limit_all(Packed (&values)[V], int first, int step, int length, u32 other) {
  limit_all<Element<type>>(values, first, step, length, other);
}

/// A vector's elements as floats. For kF32, `is_f16` is false.
template <Type type>
FLEXOPS_DEVICE void widen(float* out, const Packed& in, bool is_f16 = false) {
  if (type == kHalf && is_f16) {
    widen<f16>(out, in);
  } else {
    widen<Element<type>>(out, in);
  }
}
template <Type type>
FLEXOPS_DEVICE Packed narrow(const float* in, bool is_f16 = false) {
  return type == kHalf && is_f16 ? packed<f16>(in) : packed<Element<type>>(in);
}

}  // namespace flexops::rows
