// The exponential in CPU kernels, a register of floats at a time; see cpu_math.h.
#pragma once

#include "common/cpu_math.h"

namespace flexops::FLEXOPS_ISA {

inline Floats floats_of(float value) { return Floats{} + value; }

inline Floats bits_as_floats(Ints bits) {
  Floats out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
inline Ints floats_as_bits(Floats value) {
  Ints out;
  memcpy(&out, &value, sizeof out);
  return out;
}

inline Floats absolute(Floats value) { return bits_as_floats(floats_as_bits(value) & 0x7fffffff); }

/// a < b ? a : b and a > b ? a : b, in each lane: b if either is NaN.
inline Floats lesser(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX__)
  return _mm256_min_ps(a, b);
#elif defined(__x86_64__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
inline Floats greater(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

constexpr float kMostExponent = 88.7f;

namespace detail {
/// exp(z) = part * power * 2^(127 - kBias), for z in range; power is 0 if it would be 2^-127.
template <int kBias>
struct Exponential {
  Floats part, power;

  explicit Exponential(Floats z) {
    constexpr float kRound =
        12582912.0f + kBias;  // adding 1.5 * 2^23 rounds to an integer, in the sum's low bits
    const Floats sum = z * 1.44269504f + kRound, n = sum - kRound;
    power = bits_as_floats(floats_as_bits(sum) << 23);
    const Floats r = (z - n * 0.693359375f) - n * -2.12194440e-4f;  // the first product is exact
    // Cephes' expf; its coefficients in pairs, so that the processor need not wait for one product
    // after the other.
    const Floats square = r * r, high = r * 1.9875691500e-4f + 1.3981999507e-3f,
                 middle = r * 8.3334519073e-3f + 4.1665795894e-2f;
    const Floats low = r * 1.6666665459e-1f + 5.0000001201e-1f;
    part = ((high * square + middle) * square + low) * square + r + 1.0f;
  }
};
}  // namespace detail

/// exp(x), to about 1 unit in the last place; 0 below -87 (where it is 2e-38), infinity from 88.7
/// on; NaN gives 0.
inline Floats exponential(Floats x) {
  const detail::Exponential<126> e(lesser(greater(x, floats_of(-87.3f)),
                                          floats_of(kMostExponent)));  // the least one's power is 0
  const Floats value = e.part * e.power * 2.0f;  // in two steps, because 2^128 is no float
  return x >= kMostExponent ? floats_of(__builtin_inff()) : value;
}

/// The same for x that is at most 0, or NaN; 0 below -87.6.
inline Floats exponential_of_negative(Floats x) {
  const detail::Exponential<127> e(greater(x, floats_of(-88.0f)));
  return e.part * e.power;
}

}  // namespace flexops::FLEXOPS_ISA
