// Rows of fp32, fp16 or bf16 in CPU kernels, a block of floats at a time; see cpu_math.h. For kernels that reduce rows.
#pragma once

#include "common/cpu_exp.h"

namespace flexops::FLEXOPS_ISA {

enum class RowType : uint8_t { f32, f16, bf16 };

constexpr int64_t kRowBlock = 1024;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t bytes_of(RowType type) { return type == RowType::f32 ? 4 : 2; }

/// `count` neighbouring elements as floats: in place, or in `buffer`.
inline const float* widen_row(const void* from, int64_t offset, int64_t count, RowType type, float* buffer) {
  if (type == RowType::f32) return static_cast<const float*>(from) + offset;
  const uint16_t* bits = static_cast<const uint16_t*>(from) + offset;
  if (type == RowType::bf16) {
    bf16_to_float(bits, buffer, count);
  } else {
    f16_to_float(bits, buffer, count);
  }
  return buffer;
}

/// Elements of a row before the first that is at a multiple of 64 bytes, if that is something to whole registers of floats: unaligned, each
/// of them is in two lines of the cache, which long rows feel.
inline int64_t unaligned_of(const void* row, int64_t offset, int64_t length, RowType type) {
  if (type != RowType::f32 || length < kRowBlock) return 0;
  return static_cast<int64_t>(-(reinterpret_cast<uintptr_t>(row) / 4 + static_cast<uintptr_t>(offset)) & 15u);
}

/// Calls f(at, count) for the blocks of [0, length): one of `first` elements, unless that is 0, and then of kRowBlock.
template <typename F>
inline void for_row_blocks(int64_t length, int64_t first, const F& f) {
  int64_t at = 0;
  for (int64_t count = first; at < length; at += count, count = kRowBlock) {
    if (count == 0) count = kRowBlock;
    if (count > length - at) count = length - at;
    f(at, count);
  }
}

/// A register of neighbouring elements as floats, and one of them.
template <RowType type>
inline Floats load_elements(const void* from, int64_t index) {
  if constexpr (type == RowType::f32) return load_floats(static_cast<const float*>(from) + index);
  const uint16_t* bits = static_cast<const uint16_t*>(from) + index;
  return type == RowType::f16 ? load_f16(bits) : load_bf16(bits);
}
template <RowType type>
inline float load_element(const void* from, int64_t index) {
  if constexpr (type == RowType::f32) return static_cast<const float*>(from)[index];
  const uint16_t bits = static_cast<const uint16_t*>(from)[index];
  return type == RowType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
}

/// The reverse.
template <RowType type>
inline void store_elements(void* to, int64_t index, Floats value) {
  if constexpr (type == RowType::f32) {
    store_floats(static_cast<float*>(to) + index, value);
  } else {
    uint16_t* bits = static_cast<uint16_t*>(to) + index;
    type == RowType::f16 ? store_f16(bits, value) : store_bf16(bits, value);
  }
}

template <RowType type>
inline void store_element(void* to, int64_t index, float value) {
  if constexpr (type == RowType::f32) {
    static_cast<float*>(to)[index] = value;
  } else {
    static_cast<uint16_t*>(to)[index] = type == RowType::f16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

/// Where floats that become elements are put together: in place, or in `buffer`. narrow_row then finishes it.
inline float* place_in_row(void* to, int64_t offset, RowType type, float* buffer) {
  return type == RowType::f32 ? static_cast<float*>(to) + offset : buffer;
}

inline void narrow_row(const float* from, void* to, int64_t offset, int64_t count, RowType type) {
  if (type == RowType::bf16) float_to_bf16(from, static_cast<uint16_t*>(to) + offset, count);
  if (type == RowType::f16) float_to_f16(from, static_cast<uint16_t*>(to) + offset, count);
}

inline void clear_row(void* to, int64_t offset, int64_t count, RowType type) {
  memset(static_cast<char*>(to) + offset * bytes_of(type), 0, static_cast<size_t>(count * bytes_of(type)));
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

inline Floats greater_of(Floats a, Floats b) { return a < b ? b : a; }  // a if b is NaN

inline float greatest_lane(Floats value) {
  float lanes[kLanes];
  store_floats(lanes, value);
  return fold_lanes<kLanes>(lanes, [](auto a, auto b) { return a < b ? b : a; });
}
/// exp(x) for what is at most 0, but for rounding: as `exponential`, without the care for what is large. 0 below -87, NaN for NaN.
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
    const Floats first = power(load_floats(values + i) - base), second = power(load_floats(values + i + kLanes) - base);
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
