// Codes of 8 bits with a scale for each row. Formulas: flexops/ops/norm_quantized.py.
#pragma once

#include "common/fp8.cuh"
#include "norm/norm.cuh"

namespace flexops::norm {

FLEXOPS_DEVICE float top_of(Dtype codes) {
  return codes == Dtype::i8 ? kLargest<i8> : kLargest<e4m3>;
}

/// Codes of value * factor, of numbers that lie within what C can tell.
template <typename C, int N>
FLEXOPS_DEVICE void store_codes(const float (&value)[N], float factor, u8* to) {
  constexpr bool kWhole = kLargest<C> == kLargest<i8>;
  // Adding 1.5 * 2^23 rounds to whole numbers, which are then in the low bytes.
  constexpr float kRound = 12582912.0f;
  float v[N];
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = kWhole ? fmaf(value[i], factor, kRound) : value[i] * factor;
  if constexpr (N == 1) {
    *to = kWhole ? static_cast<u8>(bit_cast<u32>(v[0])) : bit_cast<u8>(from_float<C>(v[0]));
  } else {
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      words.at[i / 4] = kWhole ? pack_bytes(bit_cast<u32>(v[i]), bit_cast<u32>(v[i + 1]),
                                            bit_cast<u32>(v[i + 2]), bit_cast<u32>(v[i + 3]))
                               : pack4<C>(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
    store<Cache::streaming>(reinterpret_cast<Vec<u32, N / 4>*>(to), words);
  }
}

struct MaxBits {
  FLEXOPS_DEVICE u32 operator()(u32 a, u32 b) const { return a < b ? b : a; }
};

// The operator / minds numbers that are subnormal, which takes a hundred instructions. Of others
// these give the same.

/// value / top_of(codes), if that is not subnormal.
FLEXOPS_DEVICE float divide_by_top(float value, Dtype codes) {
  const float top = top_of(codes),
              inverse = codes == Dtype::i8 ? 1.0f / kLargest<i8> : 1.0f / kLargest<e4m3>,
              near = value * inverse;
  return fmaf(fmaf(-near, top, value), inverse, near);
}
/// 1 / value, if neither is subnormal.
FLEXOPS_DEVICE float reciprocal(float value) {
  const float near = __fdividef(1.0f, value);
  return fmaf(fmaf(-value, near, 1.0f), near, near);
}

/// A row's scale, found from the largest of its absolute values' bits, among which NaN is above
/// infinity.
struct Coding {
  float scale, inverse;  // inverse: 0 if the row has no scale, which is NaN then

  FLEXOPS_DEVICE Coding(u32 largest, Dtype codes) {
    const float most = bit_cast<float>(largest);
    scale = most == 0.0f ? 1.0f : fmaxf(divide_by_top(most, codes), 1.17549435e-38f);
    inverse = reciprocal(scale);
    if (largest >= 0x7f800000u) scale = bit_cast<float>(0x7fc00000u), inverse = 0.0f;
  }
  template <int N>
  FLEXOPS_DEVICE void write(float (&value)[N], u8* to, Dtype codes) const {
    if (inverse == 0.0f) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = 0.0f;  // NaN is 0 neither times 0 nor as a code
    }
    codes == Dtype::i8 ? store_codes<i8>(value, inverse, to)
                       : store_codes<e4m3>(value, inverse, to);
  }
};

template <int N>
FLEXOPS_DEVICE void find_largest(u32& largest, const float (&value)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) largest = MaxBits{}(largest, bit_cast<u32>(value[i]) & 0x7fffffffu);
}

}  // namespace flexops::norm
