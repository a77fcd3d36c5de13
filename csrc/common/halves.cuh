// Both types of 16 bits by one instantiation of a kernel: kHalf stands for either, and a flag that is the same for the whole grid tells
// which where it matters. A branch for 16 bytes costs next to nothing where memory decides; an instantiation costs build time.
#pragma once

#include "common/rows.cuh"

namespace flexops::rows {

inline constexpr Type kHalf = kBf16;

/// A vector's elements as floats. For kF32, `is_f16` is false.
template <Type type>
FLEXOPS_DEVICE void widen(float* out, const Packed& in, bool is_f16) {
  if (type == kHalf && is_f16) {
    widen<kF16>(out, in);
  } else {
    widen<type>(out, in);
  }
}

template <Type type>
FLEXOPS_DEVICE Packed narrow(const float* in, bool is_f16) {
  return type == kHalf && is_f16 ? narrow<kF16>(in) : narrow<type>(in);
}

}  // namespace flexops::rows
