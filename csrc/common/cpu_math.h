// bf16 and fp16 in CPU kernels, and streaming stores; for *_cpu.cpp files, once per ISA level (see
// cpu.h for why the namespace).
//
// The conversions take whole blocks, so that the compiler (or F16C) makes vector code of them.
#pragma once

#include "common/cpu.h"
#include "common/cpu_intrinsics.h"

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

inline float bf16_to_float(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

/// Rounds to nearest even; NaN becomes 0x7fc0 as in torch, overflow infinity.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

/// As many floats as one register holds; arithmetic and comparisons work lane by lane (the
/// compiler's vector extension).
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

/// In a loop over what no whole register is left for, with its index: the compiler would make
/// vector code of it, or write all of it out.
inline void few(int64_t& index) { __asm__ volatile("" : "+r"(index)); }

typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

/// A register of neighbouring 16-bit numbers as words, and words below 2^16 as such numbers.
/// (__builtin_convertvector goes lane by lane.)
inline Words load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(
      0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__x86_64__)
  return (Words)_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)),
                                   _mm_setzero_si128());
#else
  Words out;
  for (int i = 0; i < kLanes; ++i) out[i] = from[i];
  return out;
#endif
}
inline void store_halves(uint16_t* to, Words words) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)words));
#elif defined(__AVX2__)
  const __m256i all = (__m256i)words;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#elif defined(__x86_64__)
  const __m128i all = (__m128i)((Ints)(words << 16) >> 16);  // SSE2 packs signed numbers only
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(all, all));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint16_t>(words[i]);
#endif
}

/// float_to_bf16 of a register, each in its word's upper half, above bits that mean nothing.
inline Words round_to_upper_half(Floats value) {
  const Words bits = (Words)value;
  return value == value ? bits + ((bits >> 16 & 1u) + 0x7fffu) : Words{} + 0x7fc00000u;
}
inline Floats load_bf16(const uint16_t* from) { return (Floats)(load_halves(from) << 16); }
inline void store_bf16(uint16_t* to, Floats value) {
  store_halves(to, round_to_upper_half(value) >> 16);
}

/// Two registers' worth of neighbouring bf16 numbers, the even and the odd ones as floats: half the
/// work of taking them apart in their order, where it does not matter.
struct Bf16Pairs {
  Floats even, odd;
};
inline Bf16Pairs load_bf16_pairs(const uint16_t* from) {
  Words bits;
  memcpy(&bits, from, sizeof bits);
  return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)};
}
inline void store_bf16_pairs(uint16_t* to, Bf16Pairs values) {
  const Words bits =
      round_to_upper_half(values.even) >> 16 | (round_to_upper_half(values.odd) & 0xffff0000u);
  memcpy(to, &bits, sizeof bits);
}

#if defined(__F16C__)
inline float f16_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_f16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#if defined(__AVX512F__)
inline Floats load_f16(const uint16_t* from) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_f16(uint16_t* to, Floats value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline Floats load_f16(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_f16(uint16_t* to, Floats value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
#endif
#else  // without instructions for it; comparisons are of signed words, which cost less, and none
       // here is 2^31 or more
inline Floats f16_to_float(Words bits) {
  const Words magnitude = bits & 0x7fffu;
  // Scaling by 2^112 rebases the exponent, and makes subnormals normal exactly.
  const Words finite = (Words)((Floats)(magnitude << 13) * 0x1p112f);
  const Words quiet = (Words)((Ints)magnitude > 0x7c00) & 0x400000u,
              special = magnitude << 13 | 0x7f800000u | quiet;
  return (Floats)(((Ints)magnitude >= 0x7c00 ? special : finite) | (bits & 0x8000u) << 16);
}
inline Words float_to_f16(Floats value) {
  const Words bits = (Words)value, magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >>
                       13;  // may carry into infinity: right
  const Words small = (Words)((Floats)magnitude + 0.5f) -
                      0x3f000000u;  // subnormal: the float adder rounds at 2^-24
  const Words finite = (Ints)magnitude < 0x38800000 ? small : normal;
  const Words special = Words{} + 0x7c00u + ((Words)((Ints)magnitude > 0x7f800000) & 0x200u);
  return ((Ints)magnitude >= 0x47800000 ? special : finite) |
         (bits >> 16 & 0x8000u);  // 2^16 and more, or NaN
}
inline float f16_to_float(uint16_t bits) { return f16_to_float(Words{bits})[0]; }
inline uint16_t float_to_f16(float value) {
  return static_cast<uint16_t>(float_to_f16(Floats{value})[0]);
}
inline Floats load_f16(const uint16_t* from) { return f16_to_float(load_halves(from)); }
inline void store_f16(uint16_t* to, Floats value) { store_halves(to, float_to_f16(value)); }
#endif

/// The lanes folded in half again and again; op takes vectors, and numbers at last.
template <int width, typename Op>
inline float fold_lanes(const float* lanes, Op op) {
  if constexpr (width == 1) {
    return lanes[0];
  } else {
    typedef float Half __attribute__((vector_size(width / 2 * sizeof(float))));
    Half low, high;
    memcpy(&low, lanes, sizeof low);
    memcpy(&high, lanes + width / 2, sizeof high);
    const Half folded = op(low, high);
    float rest[width / 2];
    memcpy(rest, &folded, sizeof folded);
    return fold_lanes<width / 2>(rest, op);
  }
}
inline float sum_of_lanes(Floats value) {
  float lanes[kLanes];
  store_floats(lanes, value);
  return fold_lanes<kLanes>(lanes, [](auto a, auto b) { return a + b; });
}

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline Floats square_root(Floats value) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(
      0xffff, value);  // the unmasked one makes GCC 12 warn of an uninitialised value
#elif defined(__AVX__)
  return _mm256_sqrt_ps(value);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(value);
#else
  for (int i = 0; i < kLanes; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
#endif
}

// ---- blocks ----
// Out of line: a block takes longer than a call, and most kernels convert in several places.

[[gnu::noinline]] inline void bf16_to_float(const uint16_t* FLEXOPS_RESTRICT in,
                                            float* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= count; i += kLanes) store_floats(out + i, load_bf16(in + i));
  for (; i < count; ++i) few(i), out[i] = bf16_to_float(in[i]);
}
[[gnu::noinline]] inline void float_to_bf16(const float* FLEXOPS_RESTRICT in,
                                            uint16_t* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  typedef uint16_t Halves __attribute__((vector_size(64)));
  constexpr Halves kUpper = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                             33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  for (; i + 32 <= count; i += 32) {
    const Words low = round_to_upper_half(load_floats(in + i)),
                high = round_to_upper_half(load_floats(in + i + 16));
#if defined(__clang__)
    const __m512i halves = _mm512_permutex2var_epi16((__m512i)low, (__m512i)kUpper, (__m512i)high);
#else
    const Halves halves = __builtin_shuffle((Halves)low, (Halves)high, kUpper);
#endif
    memcpy(out + i, &halves, sizeof halves);
  }
#elif defined(__AVX2__)
  for (; i + 16 <= count; i += 16) {
    const Words low = round_to_upper_half(load_floats(in + i)) >> 16,
                high = round_to_upper_half(load_floats(in + i + 8)) >> 16;
    const __m256i packed = _mm256_packus_epi32((__m256i)low, (__m256i)high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_permute4x64_epi64(packed, 0xd8));
  }
#endif
  for (; i + kLanes <= count; i += kLanes) store_bf16(out + i, load_floats(in + i));
  for (; i < count; ++i) few(i), out[i] = float_to_bf16(in[i]);
}
[[gnu::noinline]] inline void f16_to_float(const uint16_t* FLEXOPS_RESTRICT in,
                                           float* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= count; i += kLanes) store_floats(out + i, load_f16(in + i));
  for (; i < count; ++i) few(i), out[i] = f16_to_float(in[i]);
}
[[gnu::noinline]] inline void float_to_f16(const float* FLEXOPS_RESTRICT in,
                                           uint16_t* FLEXOPS_RESTRICT out, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= count; i += kLanes) store_f16(out + i, load_floats(in + i));
  for (; i < count; ++i) few(i), out[i] = float_to_f16(in[i]);
}

#if defined(__x86_64__)
/// One cache line of 64 bytes, past the caches; `to` is aligned to it.
inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
#else
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#endif
}
#endif

/// Copies bytes past the caches where it can: for output that is not read again soon. Best a few
/// lines at a time, between other work: a long burst waits for memory. Call streaming_fence() once
/// afterwards.
inline void streaming_copy(void* FLEXOPS_RESTRICT out, const void* FLEXOPS_RESTRICT in,
                           int64_t bytes) {
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
