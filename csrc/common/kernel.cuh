// What device code in a string finds without including anything (flexops.kernel): integers of fixed
// width, and bfloat16 and float16 that become a float, and are made of one, by themselves. No
// header of CUDA's is needed.
//
//   out[i] = x[i] * factor;   // bfloat16: widened to float, multiplied, rounded
#pragma once

#include "common/dtypes.cuh"
#include "common/integers.cuh"

namespace flexops {

/// A number of 16 bits, as memory has it: it is computed with in float, and rounded to nearest even
/// when it is stored.
template <typename Bits>
struct Number {
  u16 bits;

  Number() = default;
  FLEXOPS_DEVICE Number(float value) : bits(from_float<Bits>(value).bits) {}
  FLEXOPS_DEVICE operator float() const { return to_float(Bits{bits}); }
  FLEXOPS_DEVICE Number& operator+=(float other) { return *this = Number(*this + other); }
  FLEXOPS_DEVICE Number& operator-=(float other) { return *this = Number(*this - other); }
  FLEXOPS_DEVICE Number& operator*=(float other) { return *this = Number(*this * other); }
  FLEXOPS_DEVICE Number& operator/=(float other) { return *this = Number(*this / other); }
};

}  // namespace flexops

using bfloat16 = flexops::Number<flexops::bf16>;
using float16 = flexops::Number<flexops::f16>;
