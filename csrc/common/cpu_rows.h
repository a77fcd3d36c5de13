// Rows of fp32, fp16 or bf16 in CPU kernels, a block of floats at a time; see cpu_math.h. For
// kernels that reduce rows.
#pragma once

#include "common/cpu_elements.h"
#include "common/cpu_exp.h"

namespace flexops::FLEXOPS_ISA {

constexpr int64_t kRowBlock = 1024;

/// Elements of a row before the first that is at a multiple of 64 bytes, if that is something to
/// whole registers of floats: unaligned, each of them is in two lines of the cache, which long rows
/// feel.
inline int64_t unaligned_of(const void* row, int64_t offset, int64_t length, ElementType type) {
  if (type != ElementType::f32 || length < kRowBlock) return 0;
  return static_cast<int64_t>(
      -(reinterpret_cast<uintptr_t>(row) / 4 + static_cast<uintptr_t>(offset)) & 15u);
}

/// Calls f(at, count) for the blocks of [0, length): one of `first` elements, unless that is 0, and
/// then of kRowBlock.
template <typename F>
inline void for_row_blocks(int64_t length, int64_t first, const F& f) {
  int64_t at = 0;
  for (int64_t count = first; at < length; at += count, count = kRowBlock) {
    if (count == 0) count = kRowBlock;
    if (count > length - at) count = length - at;
    f(at, count);
  }
}

/// The first `count` lanes, which are not all; the others are `filling`.
inline Floats load_some(const float* from, int64_t count, float filling) {
#if defined(__AVX512F__)
  return _mm512_mask_loadu_ps(floats_of(filling), static_cast<__mmask16>((1u << count) - 1), from);
#else
  Floats out = floats_of(filling);
  for (int64_t i = 0; i < count; ++i) out[i] = from[i];
  return out;
#endif
}
inline void store_some(float* to, Floats value, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), value);
#else
  for (int64_t i = 0; i < count; ++i) to[i] = value[i];
#endif
}
/// The same of lanes that may be all.
inline Floats load_up_to(const float* from, int64_t count) {
  return count == kLanes ? load_floats(from) : load_some(from, count, 0.0f);
}
inline void store_up_to(float* to, Floats value, int64_t count) {
  count == kLanes ? store_floats(to, value) : store_some(to, value, count);
}

inline Floats greater_of(Floats a, Floats b) { return a < b ? b : a; }  // a if b is NaN

inline float greatest_lane(Floats value) {
  float lanes[kLanes];
  store_floats(lanes, value);
  return fold_lanes<kLanes>(lanes, [](auto a, auto b) { return a < b ? b : a; });
}
/// exp(x) for what is at most 0, but for rounding: as `exponential`, without the care for what is
/// large. 0 below -87, NaN for NaN.
inline Floats power(Floats x) {
  constexpr float kLeast = -87.0f;
  const Floats z = x < kLeast ? floats_of(kLeast) : x;
  const Floats n = (z * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Floats r = (z - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Floats value = p * bits_as_floats((__builtin_convertvector(n, Ints) + 127) << 23);
  return x < kLeast ? floats_of(0.0f) : value;
}

inline float greatest(const float* values, int64_t count, float out) {
  Floats a = floats_of(out), b = a;
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    a = greater_of(a, load_floats(values + i));
    b = greater_of(b, load_floats(values + i + kLanes));
  }
  for (; i + kLanes <= count; i += kLanes) a = greater_of(a, load_floats(values + i));
  if (i < count) a = greater_of(a, load_some(values + i, count - i, out));
  return greatest_lane(greater_of(a, b));
}

/// Sum of exp(values - base); the powers are stored too, unless `powers` is null.
template <bool kStore>
inline float sum_powers(const float* values, float* powers, int64_t count, float base) {
  Floats a = {}, b = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Floats first = power(load_floats(values + i) - base),
                 second = power(load_floats(values + i + kLanes) - base);
    if (kStore) store_floats(powers + i, first), store_floats(powers + i + kLanes, second);
    a += first, b += second;
  }
  for (; i + kLanes <= count; i += kLanes) {
    const Floats value = power(load_floats(values + i) - base);
    if (kStore) store_floats(powers + i, value);
    a += value;
  }
  if (i < count) {
    const Floats value = power(load_some(values + i, count - i, -__builtin_inff()) - base);
    if (kStore) store_some(powers + i, value, count - i);
    b += value;
  }
  return sum_of_lanes(a + b);
}

}  // namespace flexops::FLEXOPS_ISA
