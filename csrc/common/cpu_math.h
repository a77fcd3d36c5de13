// bf16 and fp16 in CPU kernels, and streaming stores; for *_cpu.cpp files, once per ISA level (see cpu.h for why the namespace).
//
// The conversions take whole blocks, so that the compiler (or F16C) makes vector code of them.
#pragma once

#include "common/cpu.h"

// GCC 12 spends half a second and more with <immintrin.h>, mostly on AVX-512's extensions and whatever the level. So it gets the parts that
// are used, which want to be told that it is that header that includes them.
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
#define _IMMINTRIN_H_INCLUDED
// clang-format off: each needs those before it
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>
// clang-format on
#if defined(__AVX512F__)
#include <avx512fintrin.h>
#endif
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

#define FLEXOPS_RESTRICT __restrict__

namespace flexops::FLEXOPS_ISA {

inline float float_from_bits(uint32_t bits) {
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
inline uint32_t bits_of(float value) {
  uint32_t out;
  memcpy(&out, &value, sizeof out);
  return out;
}

inline float bf16_to_float(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

/// Rounds to nearest even; NaN becomes 0x7fc0 as in torch, overflow infinity.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

#if defined(__F16C__)
inline float f16_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_f16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0));
  // Scaling by 2^112 rebases the exponent, and makes subnormals normal exactly.
  const float scaled = float_from_bits(magnitude << 13) * 0x1p112f;
  return float_from_bits(bits_of(scaled) | sign);
}
inline uint16_t float_to_f16(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and more
  if (magnitude < 0x38800000u) {                                               // subnormal: the float adder rounds at 2^-24
    return static_cast<uint16_t>(sign | (bits_of(float_from_bits(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);  // may carry into infinity: right
}
#endif

/// As many floats as one register holds; arithmetic and comparisons work lane by lane (the compiler's vector extension).
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));

inline Floats load_floats(const float* from) {
  Floats out;
  memcpy(&out, from, sizeof out);
  return out;
}
inline void store_floats(float* to, Floats value) { memcpy(to, &value, sizeof value); }

/// Two registers' worth of neighbouring bf16 numbers, the even and the odd ones as floats: half the work of taking them apart in their
/// order, where it does not matter.
struct Bf16Pairs {
  Floats even, odd;
};
typedef uint32_t PairBits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
inline Bf16Pairs load_bf16_pairs(const uint16_t* from) {
  PairBits bits;
  memcpy(&bits, from, sizeof bits);
  return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)};
}
inline PairBits round_to_upper_half(Floats value) {
  const PairBits bits = (PairBits)value;
  return value == value ? bits + ((bits >> 16 & 1u) + 0x7fffu) : PairBits{} + 0x7fc00000u;
}
inline void store_bf16_pairs(uint16_t* to, Bf16Pairs values) {
  const PairBits bits = round_to_upper_half(values.even) >> 16 | (round_to_upper_half(values.odd) & 0xffff0000u);
  memcpy(to, &bits, sizeof bits);
}

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline Floats square_root(Floats value) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(0xffff, value);  // the unmasked one makes GCC 12 warn of an uninitialised value
#elif defined(__AVX__)
  return _mm256_sqrt_ps(value);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(value);
#else
  for (int i = 0; i < kLanes; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
#endif
}

inline void bf16_to_float(const uint16_t* FLEXOPS_RESTRICT in, float* FLEXOPS_RESTRICT out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(in[i]);
}
#if defined(__AVX512F__)
/// Sixteen at once, each in the upper half of a word, above bits that mean nothing.
inline __m512i round_to_bf16(__m512 value) {
  typedef uint32_t Words __attribute__((vector_size(64)));
  const Words bits = (Words)value;
  const __m512i rounded = (__m512i)(bits + ((bits >> 16 & 1u) + 0x7fffu));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), (__m512i)(Words{} + 0x7fc00000u));
}
#elif defined(__AVX2__)
/// Eight at once, each in the lower half of a word. (Left to itself, the compiler packs them four times as slowly.)
inline __m256i round_to_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}
#endif
inline void float_to_bf16(const float* FLEXOPS_RESTRICT in, uint16_t* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  typedef uint16_t Halves __attribute__((vector_size(64)));
  constexpr Halves kUpper = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                             33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  for (; i + 32 <= count; i += 32) {
    const __m512i low = round_to_bf16(load_floats(in + i)), high = round_to_bf16(load_floats(in + i + 16));
#if defined(__clang__)
    const __m512i halves = _mm512_permutex2var_epi16(low, (__m512i)kUpper, high);
#else
    const Halves halves = __builtin_shuffle((Halves)low, (Halves)high, kUpper);
#endif
    memcpy(out + i, &halves, sizeof halves);
  }
#elif defined(__AVX2__)
  for (; i + 16 <= count; i += 16) {
    const __m256i packed = _mm256_packus_epi32(round_to_bf16(load_floats(in + i)), round_to_bf16(load_floats(in + i + 8)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permute4x64_epi64(packed, 0xd8));
  }
#endif
  for (; i < count; ++i) out[i] = float_to_bf16(in[i]);
}
inline void f16_to_float(const uint16_t* FLEXOPS_RESTRICT in, float* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
  for (; i < count; ++i) out[i] = f16_to_float(in[i]);
}
inline void float_to_f16(const float* FLEXOPS_RESTRICT in, uint16_t* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < count; ++i) out[i] = float_to_f16(in[i]);
}

#if defined(__x86_64__)
/// One cache line of 64 bytes, past the caches; `to` is aligned to it.
inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
#else
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#endif
}
#endif

/// Copies bytes past the caches where it can: for output that is not read again soon. Best a few lines at a time, between other work: a
/// long burst waits for memory. Call streaming_fence() once afterwards.
inline void streaming_copy(void* FLEXOPS_RESTRICT out, const void* FLEXOPS_RESTRICT in, int64_t bytes) {
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
#if defined(__x86_64__)
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63u);
  if (head > bytes) head = bytes;
  memcpy(to, from, static_cast<size_t>(head));
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; to += 64, from += 64, bytes -= 64) stream_line(to, from);
#endif
  memcpy(to, from, static_cast<size_t>(bytes));
}
inline void streaming_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace flexops::FLEXOPS_ISA
