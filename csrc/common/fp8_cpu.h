// 8-bit floating-point numbers in CPU kernels (see common/fp8.cuh for the formats), once per ISA
// level.
//
//   float_to_e4m3(values, codes, count);   // to nearest even; beyond the largest, infinities
//   included: the largest. NaN: 0x7f e4m3_to_float(codes, values, count);   // the same for e5m2
//   and i8 (clamped to [-127, 127]; NaN becomes any of these)
#pragma once

#include "common/cpu_math.h"

namespace flexops::FLEXOPS_ISA {

// By registers: compilers do not make vector code of these conversions by themselves, because of
// the branches that they see in them.

inline Words words_of(Floats value) { return (Words)value; }
inline Floats floats_of_words(Words bits) { return (Floats)bits; }
inline Words choose(Ints mask, Words a, Words b) { return ((Words)mask & a) | (~(Words)mask & b); }
/// a < b, for words below 2^31: comparing unsigned ones costs more.
inline Ints is_less(Words a, Words b) { return (Ints)a < (Ints)b; }

/// The low bytes of a register's words, each below 256, and back. (__builtin_convertvector goes
/// lane by lane.)
inline void store_bytes(uint8_t* to, Words words) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)words));
#elif defined(__AVX2__)
  const __m256i all = (__m256i)words;
  const __m128i halves =
      _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
#elif defined(__x86_64__)
  const __m128i halves = _mm_packs_epi32((__m128i)words, (__m128i)words);
  const int four = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
  memcpy(to, &four, sizeof four);
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(words[i]);
#endif
}
inline Words load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu8_epi32(0xffff,
                                           _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(__x86_64__)
  int four;
  memcpy(&four, from, sizeof four);
  const __m128i zero = _mm_setzero_si128();
  return (Words)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero);
#else
  Words out;
  for (int i = 0; i < kLanes; ++i) out[i] = from[i];
  return out;
#endif
}

struct E4m3 {
  static constexpr uint32_t kShift = 20;    // fraction bits that float32 has more
  static constexpr uint32_t kRebias = 120;  // what float32 adds to the exponent
  static constexpr uint32_t kLargest = 0x43e00000u, kLeastNormal = 0x3c800000u;
  static constexpr uint32_t kAdder =
      0x46800000u;  // 2^14: its last place is worth the least subnormal
  static constexpr uint32_t kFirstSpecial = 0x7fu;
};
struct E5m2 {
  static constexpr uint32_t kShift = 21, kRebias = 112;
  static constexpr uint32_t kLargest = 0x47600000u, kLeastNormal = 0x38800000u;
  static constexpr uint32_t kAdder = 0x43000000u;  // 2^7
  static constexpr uint32_t kFirstSpecial = 0x7cu;
};

/// The codes of so many floats, a word each.
template <typename F>
inline Words fp8_codes(Floats value) {
  const Words none = {}, bits = words_of(value), all = bits & 0x7fffffffu,
              largest = none + F::kLargest;
  const Words magnitude = choose(is_less(all, largest), all, largest);
  const Words normal = (magnitude - (F::kRebias << 23) + ((1u << (F::kShift - 1)) - 1) +
                        (magnitude >> F::kShift & 1u)) >>
                       F::kShift;
  const Words small =
      words_of(floats_of_words(magnitude) + floats_of_words(none + F::kAdder)) - F::kAdder;
  const Words code =
      choose(is_less(magnitude, none + F::kLeastNormal), small, normal) | (bits >> 24 & 0x80u);
  return choose(is_less(none + 0x7f800000u, all), none + 0x7fu, code);
}

template <typename F>
inline Floats fp8_values(Words code) {
  const Words none = {}, magnitude = code & 0x7fu;
  // Subnormals are made normal, and what that adds is taken off again: processors are slow with
  // subnormals of float32.
  const Words small = (Words)is_less(magnitude, none + (0x800000u >> F::kShift));
  const Words raised = (magnitude << F::kShift) + ((F::kRebias << 23) - (small << 23));
  const Words added = small & ((F::kRebias + 1) << 23);
  const Words finite = words_of(floats_of_words(raised) - floats_of_words(added));
  const Words special =
      (magnitude << F::kShift) | 0x7f800000u | (F::kFirstSpecial == 0x7fu ? 0x400000u : 0u);
  return floats_of_words(choose(is_less(magnitude, none + F::kFirstSpecial), finite, special) |
                         (code & 0x80u) << 24);
}

inline Words i8_codes(Floats value) {
  const Floats none = {}, top = none + 127.0f, bottom = none - 127.0f;
  const Words low = choose(value < bottom, words_of(bottom), words_of(value));
  const Words clamped = choose(floats_of_words(low) > top, words_of(top), low);
  return words_of(floats_of_words(clamped) + 12582912.0f) & 255u;  // adding 1.5 * 2^23 rounds
}

/// Calls one(from, to) for each register's length of a block; for a rest, on copies of that length.
template <typename In, typename Out, typename F>
inline void for_each_register(const In* FLEXOPS_RESTRICT in, Out* FLEXOPS_RESTRICT out,
                              int64_t count, const F& one) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) one(in + i, out + i);
  if (i == count) return;
  In some[kLanes] = {};
  Out made[kLanes];
  memcpy(some, in + i, static_cast<size_t>(count - i) * sizeof(In));
  one(some, made);
  memcpy(out + i, made, static_cast<size_t>(count - i) * sizeof(Out));
}

template <typename F>
inline void float_to_fp8(const float* FLEXOPS_RESTRICT in, uint8_t* FLEXOPS_RESTRICT out,
                         int64_t count) {
  for_each_register(in, out, count, [](const float* from, uint8_t* to) {
    store_bytes(to, fp8_codes<F>(load_floats(from)));
  });
}
template <typename F>
inline void fp8_to_float(const uint8_t* FLEXOPS_RESTRICT in, float* FLEXOPS_RESTRICT out,
                         int64_t count) {
  for_each_register(in, out, count, [](const uint8_t* from, float* to) {
    store_floats(to, fp8_values<F>(load_bytes(from)));
  });
}

inline void float_to_e4m3(const float* in, uint8_t* out, int64_t count) {
  float_to_fp8<E4m3>(in, out, count);
}
inline void float_to_e5m2(const float* in, uint8_t* out, int64_t count) {
  float_to_fp8<E5m2>(in, out, count);
}
inline void float_to_i8(const float* in, int8_t* out, int64_t count) {
  for_each_register(in, reinterpret_cast<uint8_t*>(out), count, [](const float* from, uint8_t* to) {
    store_bytes(to, i8_codes(load_floats(from)));
  });
}
inline void e4m3_to_float(const uint8_t* in, float* out, int64_t count) {
  fp8_to_float<E4m3>(in, out, count);
}
inline void e5m2_to_float(const uint8_t* in, float* out, int64_t count) {
  fp8_to_float<E5m2>(in, out, count);
}
inline void i8_to_float(const int8_t* FLEXOPS_RESTRICT in, float* FLEXOPS_RESTRICT out,
                        int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
}

}  // namespace flexops::FLEXOPS_ISA
