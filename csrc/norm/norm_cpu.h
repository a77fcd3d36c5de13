// What the norms' kernels for the CPU share: elements, a register of them at a time. Compiled once per ISA level (common/cpu.h).
#pragma once

#include "norm/norm.h"

#include "common/cpu_math.h"

namespace flexops::FLEXOPS_ISA {

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

constexpr int64_t kBlock = 512;  // elements that go through a buffer at once
constexpr int64_t kSums = 4;     // independent sums, to hide an addition's latency
static_assert(kBlock % (kSums * kLanes) == 0);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename To, typename From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  memcpy(&out, &from, sizeof out);
  return out;
}

static inline Floats zeros() { return Floats{}; }
static inline Floats spread(float value) { return Floats{} + value; }

// ---- elements, a register of them at a time ---------------------------------------------------------------------------

template <NormType type>
struct Element {
  using type_ = uint16_t;
};
template <>
struct Element<NormType::f32> {
  using type_ = float;
};
template <NormType type>
using Stored = typename Element<type>::type_;

template <NormType type>
static inline Floats load(const Stored<type>* from) {
  if constexpr (type == NormType::f32) {
    return load_floats(from);
  } else if constexpr (type == NormType::bf16) {
    Halves bits;
    memcpy(&bits, from, sizeof bits);
    return bits_as<Floats>(__builtin_convertvector(bits, Words) << 16);
  } else {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Floats out;
    for (int i = 0; i < kLanes; ++i) out[i] = f16_to_float(from[i]);
    return out;
#endif
  }
}

template <NormType type>
static inline void store(Stored<type>* to, Floats value) {
  if constexpr (type == NormType::f32) {
    store_floats(to, value);
  } else if constexpr (type == NormType::bf16) {
    const Words bits = bits_as<Words>(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words out = value == value ? rounded : Words{} + 0x7fc0u;
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, bits_as<__m512i>(out)));
#elif defined(__AVX2__)
    const __m256i words = bits_as<__m256i>(out);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    const Halves halves = __builtin_convertvector(out, Halves);
    memcpy(to, &halves, sizeof halves);
#endif
  } else {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = float_to_f16(value[i]);
#endif
  }
}

/// The first `count` of a register; the others are zeros. Out of line: rows have one such end, and every loop would have its own copy.
template <NormType type>
[[gnu::noinline]] static Floats load_some(const Stored<type>* from, int64_t count) {
  Stored<type> buffer[kLanes] = {};
  memcpy(buffer, from, static_cast<size_t>(count) * sizeof(Stored<type>));
  return load<type>(buffer);
}
template <NormType type>
[[gnu::noinline]] static void store_some(Stored<type>* to, Floats value, int64_t count) {
  Stored<type> buffer[kLanes];
  store<type>(buffer, value);
  memcpy(to, buffer, static_cast<size_t>(count) * sizeof(Stored<type>));
}
/// Zeros behind the first `count`.
static inline Floats keep(Floats value, int64_t count) {
  for (int64_t i = count; i < kLanes; ++i) value[i] = 0.0f;
  return value;
}

/// Calls f(index, count) for every register of a row, from `first` on; count is less than kLanes for the last one only.
template <typename F>
static inline void for_each(int64_t first, int64_t columns, const F& f) {
  int64_t i = first;
  for (; i + kLanes <= columns; i += kLanes) f(i, int64_t{kLanes});
  if (i < columns) f(i, columns - i);
}
template <typename F>
static inline void for_each(int64_t columns, const F& f) {
  for_each(0, columns, f);
}
/// The same with the number of a sum, which goes around.
template <typename F>
static inline void for_each_sum(int64_t first, int64_t columns, const F& f) {
  int64_t i = first;
  for (; i + kSums * kLanes <= columns; i += kSums * kLanes) {
    for (int k = 0; k < kSums; ++k) f(i + k * kLanes, int64_t{kLanes}, k);
  }
  for (; i < columns; i += kLanes) f(i, least(columns - i, kLanes), 0);
}
template <NormType type>
static inline Floats load_at(const Stored<type>* from, int64_t i, int64_t count) {
  return count == kLanes ? load<type>(from + i) : load_some<type>(from + i, count);
}
template <NormType type>
static inline void store_at(Stored<type>* to, int64_t i, Floats value, int64_t count) {
  count == kLanes ? store<type>(to + i, value) : store_some<type>(to + i, value, count);
}

struct Sums {
  Floats at[kSums] = {};
  float total() const {
    const Floats all = (at[0] + at[1]) + (at[2] + at[3]);
    float lanes[kLanes];
    store_floats(lanes, all);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }
};

/// `count` elements of a type that is told at run time, as floats: in place or in `buffer`.
static inline const float* widen(const void* from, int64_t offset, int64_t count, NormType type, float* buffer) {
  if (type == NormType::f32) return static_cast<const float*>(from) + offset;
  const uint16_t* bits = static_cast<const uint16_t*>(from) + offset;
  type == NormType::bf16 ? bf16_to_float(bits, buffer, count) : f16_to_float(bits, buffer, count);
  return buffer;
}
static inline void narrow(const float* from, void* to, int64_t offset, int64_t count, NormType type) {
  if (type == NormType::f32) {
    memcpy(static_cast<float*>(to) + offset, from, static_cast<size_t>(count) * 4);
  } else {
    uint16_t* bits = static_cast<uint16_t*>(to) + offset;
    type == NormType::bf16 ? float_to_bf16(from, bits, count) : float_to_f16(from, bits, count);
  }
}

/// A weight or a bias: float32, or of the rows' type.
template <NormType type, bool kWide>
static inline Floats load_parameter(const void* from, int64_t i, int64_t count) {
  constexpr NormType own = kWide ? NormType::f32 : type;
  return load_at<own>(static_cast<const Stored<own>*>(from), i, count);
}

}  // namespace flexops::FLEXOPS_ISA
