// Group-wise quantization in 256-bit registers, for the AVX2 and AVX-512 levels: whole vectors of
// the work. The functions say how much of it they did; quant_cpu.cpp's plain loops do the rest. (At
// the baseline level they do nothing.)
#pragma once

#include "quant/quant_cpu.h"

namespace flexops::FLEXOPS_ISA {

#if defined(__AVX2__)

typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));

constexpr int64_t kVectorRun = 32;         // codes that are packed at once
constexpr int64_t kKeptBytes = 64 * 1024;  // of a tile's elements, copied before its two passes

static inline __m256 all(float value) { return _mm256_set1_ps(value); }

template <ElementType type>
static inline __m256 load8(const void* from, int64_t offset) {
  if constexpr (type == ElementType::f32)
    return _mm256_loadu_ps(static_cast<const float*>(from) + offset);
  const __m128i bits = _mm_loadu_si128(
      reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + offset));
  if constexpr (type == ElementType::f16) return _mm256_cvtph_ps(bits);
  return (__m256)((Words8)_mm256_cvtepu16_epi32(bits) << 16);
}

/// Eight neighbouring bytes.
static inline Ints8 load_bytes8(const uint8_t* from) {
  return (Ints8)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

/// float_to_bf16 of eight, each in the low half of its lane.
static inline Words8 bf16_bits(__m256 value) {
  const Words8 bits = (Words8)value;
  return value == value ? (bits + ((bits >> 16 & 1u) + 0x7fffu)) >> 16 : Words8{} + 0x7fc0u;
}

template <ElementType type>
static inline __m128i bits8(__m256 value) {
  if constexpr (type == ElementType::f16) return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  const __m256i words = (__m256i)bf16_bits(value);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

template <ElementType type>
static inline void store8(void* to, int64_t offset, __m256 value) {
  if constexpr (type == ElementType::f32) {
    _mm256_storeu_ps(static_cast<float*>(to) + offset, value);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(to) + offset),
                     bits8<type>(value));
  }
}

template <ElementType type>
static inline __m256 round8(__m256 value) {
  if constexpr (type == ElementType::f16)
    return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  if constexpr (type == ElementType::bf16) return (__m256)(bf16_bits(value) << 16);
  return value;
}

/// Extremes of eight sets of elements. A NaN lifts `highest` to infinity once settled.
struct Extremes8 {
  __m256 lowest = all(kInfinity), highest = all(-kInfinity);
  Ints8 poison = {};

  void add(__m256 value) {
    lowest = _mm256_min_ps(value, lowest);
    highest = _mm256_max_ps(value, highest);
    poison |= value != value;
  }
  void settle() { highest = poison ? all(kInfinity) : highest; }
  Extremes merged() {
    settle();
    const __m256 negative = all(0.0f) - highest;  // so that one minimum finds both
    __m256 both = _mm256_min_ps(_mm256_permute2f128_ps(lowest, negative, 0x20),
                                _mm256_permute2f128_ps(lowest, negative, 0x31));
    both = _mm256_min_ps(both, _mm256_permute_ps(both, 0x4e));
    both = _mm256_min_ps(both, _mm256_permute_ps(both, 0xb1));
    Extremes e;
    e.lowest = _mm256_cvtss_f32(both);
    e.highest = -_mm_cvtss_f32(_mm256_extractf128_ps(both, 1));
    return e;
  }
};

static inline Ints8 code8(__m256 value, __m256 minimum, __m256 scale, __m256 top) {
  return (Ints8)_mm256_cvtps_epi32(  // rounds half to even
      _mm256_min_ps((value - minimum) * scale, top));
}

/// The low bytes of 32 lanes, in order; each lane is at most 255.
static inline __m256i join_bytes(Ints8 a, Ints8 b, Ints8 c, Ints8 d) {
  const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32((__m256i)a, (__m256i)b),
                                            _mm256_packus_epi32((__m256i)c, (__m256i)d));
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <ElementType type>
FLEXOPS_INLINED int64_t scan_vectors(const void* x, int64_t offset, int64_t count, Extremes& out) {
  if (count < 8) return 0;
  Extremes8 first, second;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    first.add(load8<type>(x, offset + i)), second.add(load8<type>(x, offset + i + 8));
  for (; i + 8 <= count; i += 8) first.add(load8<type>(x, offset + i));
  first.lowest = _mm256_min_ps(first.lowest, second.lowest);
  first.highest = _mm256_max_ps(first.highest, second.highest);
  first.poison |= second.poison;
  out = first.merged();
  return i;
}

template <ElementType type>
FLEXOPS_INLINED int64_t encode_vectors(const void* x, int64_t offset, int64_t count, const Group& g,
                                       const Coding& c, int bits, uint8_t* out) {
  const __m256 minimum = all(g.minimum), scale = all(g.scale), top = all(c.top);
  const Ints8 mask = Ints8{} + static_cast<int>(c.mask);
  const __m256i halves = _mm256_set1_epi16(0x0110);  // even byte * 16 + odd byte
  int64_t i = 0;
  for (; i + kVectorRun <= count; i += kVectorRun) {
    Ints8 code[4];
    for (int k = 0; k < 4; ++k)
      code[k] = code8(load8<type>(x, offset + i + 8 * k), minimum, scale, top) & mask;
    const __m256i bytes = join_bytes(code[0], code[1], code[2], code[3]);
    if (bits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bytes);
    } else {
      const __m256i words = _mm256_maddubs_epi16(bytes, halves);
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(out + i / 2),
          _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
  }
  for (; i + 8 <= count; i += 8) {  // small groups
    const Ints8 code = code8(load8<type>(x, offset + i), minimum, scale, top) & mask, zero = {};
    const __m128i bytes = _mm256_castsi256_si128(join_bytes(code, zero, zero, zero));
    if (bits == 8) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), bytes);
    } else {
      const __m128i words = _mm_maddubs_epi16(bytes, _mm256_castsi256_si128(halves));
      const int four = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
      memcpy(out + i / 2, &four, sizeof four);
    }
  }
  return i;
}

static inline __m256 decoded(Ints8 codes, int flip, __m256 step, __m256 minimum) {
  return _mm256_cvtepi32_ps((__m256i)((codes ^ flip) - flip)) * step + minimum;
}

/// All sixteen codes' values, by the formula, and their look-up.
template <ElementType type>
struct Table {
  __m256 values[2];
  __m128i low, high;  // the bytes of 16-bit values

  Table(float step, float minimum, int flip) {
    for (int half = 0; half < 2; ++half) {
      const Ints8 codes = Ints8{0, 1, 2, 3, 4, 5, 6, 7} + 8 * half;
      values[half] = decoded(codes, flip, all(step), all(minimum));
    }
    if constexpr (type != ElementType::f32) {
      const __m128i first = bits8<type>(values[0]), second = bits8<type>(values[1]),
                    mask = _mm_set1_epi16(255);
      low = _mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(second, mask));
      high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    }
  }

  /// Sixteen codes, a byte each, in order.
  void store16(void* out, int64_t offset, __m128i codes) const {
    if constexpr (type == ElementType::f32) {
      for (int half = 0; half < 2; ++half) {
        const __m256i index = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(codes, 8) : codes);
        const __m256 small = _mm256_permutevar8x32_ps(values[0], index),
                     large = _mm256_permutevar8x32_ps(values[1], index);
        const __m256 is_large =
            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // the sign is the code's bit 3
        _mm256_storeu_ps(static_cast<float*>(out) + offset + 8 * half,
                         _mm256_blendv_ps(small, large, is_large));
      }
    } else {
      const __m128i lows = _mm_shuffle_epi8(low, codes), highs = _mm_shuffle_epi8(high, codes);
      __m128i* at = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + offset);
      _mm_storeu_si128(at, _mm_unpacklo_epi8(lows, highs));
      _mm_storeu_si128(at + 1, _mm_unpackhi_epi8(lows, highs));
    }
  }
};

template <ElementType type>
FLEXOPS_INLINED int64_t decode_vectors(const uint8_t* packed, int64_t count, int bits, float step,
                                       float minimum, int flip, void* out, int64_t offset) {
  int64_t i = 0;
  if (bits == 4 && count >= 16) {
    const Table<type> table(step, minimum, flip);
    const __m128i mask = _mm_set1_epi8(15);
    for (; i + kVectorRun <= count; i += kVectorRun) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2));
      const __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask),
                    odd = _mm_and_si128(bytes, mask);
      table.store16(out, offset + i, _mm_unpacklo_epi8(even, odd));
      table.store16(out, offset + i + 16, _mm_unpackhi_epi8(even, odd));
    }
    if (i + 16 <= count) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i / 2));
      table.store16(out, offset + i,
                    _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask),
                                      _mm_and_si128(bytes, mask)));
      i += 16;
    }
  } else if (bits == 8) {
    for (; i + 8 <= count; i += 8)
      store8<type>(out, offset + i,
                   decoded(load_bytes8(packed + i), flip, all(step), all(minimum)));
  }
  return i;
}

/// Group, for eight columns.
template <ElementType type>
static inline void make_groups(Extremes8& e, const Coding& c, __m256& minimum, __m256& scale) {
  e.settle();
  const __m256 zero = all(0.0f), sign = all(-0.0f);
  minimum = c.symmetric ? zero : e.lowest + zero;
  const __m256 span = c.symmetric ? _mm256_max_ps(_mm256_andnot_ps(sign, e.lowest),
                                                  _mm256_andnot_ps(sign, e.highest))
                                  : e.highest - minimum;
  scale = round8<type>(_mm256_min_ps(all(1.0f) / span * all(c.top), all(c.most)));
  scale = span == zero ? all(1.0f) : scale;
  const Ints8 sound = span <= all(kFloatMax);
  scale = sound ? scale : all(__builtin_nanf(""));
  minimum = sound ? minimum : all(__builtin_nanf(""));
}

template <ElementType type>
static void make_batch(Extremes8& e, const Coding& c, float* minimum, float* scale) {
  __m256 minima, scales;
  make_groups<type>(e, c, minima, scales);
  _mm256_storeu_ps(minimum, minima);
  _mm256_storeu_ps(scale, scales);
}

/// Codes of eight columns; broken groups get 0.
template <ElementType type>
static inline Ints8 column_code8(const void* x, int64_t offset, __m256 minimum, __m256 scale,
                                 __m256 top, Ints8 mask) {
  return code8(load8<type>(x, offset), minimum, scale, top) & mask & (scale == scale);
}

/// The groups of 32 columns; rows are `stride` elements apart.
template <ElementType type>
static void quantize_columns(const void* x, int64_t stride, uint8_t* packed, void* scales,
                             int64_t entry, const QuantLayout& l, const Coding& c, int64_t rows) {
  Extremes8 e[4];
  for (int64_t row = 0; row < rows; ++row) {
    for (int k = 0; k < 4; ++k) e[k].add(load8<type>(x, row * stride + 8 * k));
  }
  __m256 minimum[4], scale[4];
  for (int k = 0; k < 4; ++k) {
    make_groups<type>(e[k], c, minimum[k], scale[k]);
    store8<type>(scales, entry + 8 * k, scale[k]);
    if (!l.symmetric) store8<type>(scales, entry + l.inner + 8 * k, minimum[k]);
  }
  const __m256 top = all(c.top);
  const Ints8 mask = Ints8{} + static_cast<int>(c.mask);
  for (int64_t byte = 0; byte < l.group_bytes; ++byte) {
    const int64_t row = l.bits == 4 ? 2 * byte : byte;
    Ints8 code[4];
    for (int k = 0; k < 4; ++k) {
      const int64_t at = row * stride + 8 * k;
      code[k] = Ints8{};
      if (row < rows) code[k] = column_code8<type>(x, at, minimum[k], scale[k], top, mask);
      if (l.bits == 8) continue;
      code[k] <<= 4;
      if (row + 1 < rows)
        code[k] |= column_code8<type>(x, at + stride, minimum[k], scale[k], top, mask);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + byte * l.inner),
                        join_bytes(code[0], code[1], code[2], code[3]));
  }
}

/// A tile's columns, 32 at a time. The tile is copied first, because rows that lie a power of two
/// apart would throw one another out of the caches.
template <ElementType type>
static int64_t quantize_tile_vectors(const void* x, uint8_t* packed, void* scales,
                                     const QuantLayout& l, const Coding& c, const Place& p) {
  constexpr int64_t kSize = type == ElementType::f32 ? 4 : 2;
  alignas(64) char kept[kKeptBytes];
  const int64_t columns = p.columns & ~(kVectorRun - 1);
  const char* from = static_cast<const char*>(x) + p.element * kSize;
  int64_t stride = l.length_stride;
  if (p.rows * columns * kSize <= kKeptBytes) {
    for (int64_t row = 0; row < p.rows; ++row)
      memcpy(kept + row * columns * kSize, from + row * stride * kSize,
             static_cast<size_t>(columns * kSize));
    from = kept, stride = columns;
  }
  for (int64_t i = 0; i < columns; i += kVectorRun) {
    quantize_columns<type>(from + i * kSize, stride, packed + p.packed + i, scales, p.scales + i, l,
                           c, p.rows);
  }
  return columns;
}

/// One row of a tile; `shift` finds its halves of the bytes.
template <ElementType type>
FLEXOPS_INLINED int64_t decode_columns(const uint8_t* packed, int64_t count, int shift, int mask,
                                       int flip, const float* step, const float* minimum, void* out,
                                       int64_t offset) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const Ints8 codes = load_bytes8(packed + i) >> shift & mask;
    store8<type>(out, offset + i,
                 decoded(codes, flip, _mm256_loadu_ps(step + i), _mm256_loadu_ps(minimum + i)));
  }
  return i;
}

#define FLEXOPS_QUANT_BY_TYPE(type, function, ...)                        \
  ((type) == ElementType::f32   ? function<ElementType::f32>(__VA_ARGS__) \
   : (type) == ElementType::f16 ? function<ElementType::f16>(__VA_ARGS__) \
                                : function<ElementType::bf16>(__VA_ARGS__))

static int64_t scan_fast(const void* x, int64_t offset, int64_t count, ElementType type,
                         Extremes& e) {
  return FLEXOPS_QUANT_BY_TYPE(type, scan_vectors, x, offset, count, e);
}
static void make_batch(const Extremes (&e)[kBatch], const Coding& c, float* minimum, float* scale) {
  float lowest[kBatch], highest[kBatch], poison[kBatch];
  for (int64_t i = 0; i < kBatch; ++i)
    lowest[i] = e[i].lowest, highest[i] = e[i].highest, poison[i] = e[i].poison;
  Extremes8 eight;
  eight.lowest = _mm256_loadu_ps(lowest), eight.highest = _mm256_loadu_ps(highest);
  eight.poison = _mm256_loadu_ps(poison) != _mm256_loadu_ps(poison);
  FLEXOPS_QUANT_BY_TYPE(c.type, make_batch, eight, c, minimum, scale);
}
static int64_t encode_fast(const void* x, int64_t offset, int64_t count, const Group& g,
                           const Coding& c, int bits, uint8_t* out) {
  return g.is_broken()
             ? 0
             : FLEXOPS_QUANT_BY_TYPE(c.type, encode_vectors, x, offset, count, g, c, bits, out);
}
static int64_t decode_fast(const uint8_t* packed, int64_t count, int bits, float step,
                           float minimum, int flip, void* out, int64_t offset, ElementType type) {
  return FLEXOPS_QUANT_BY_TYPE(type, decode_vectors, packed, count, bits, step, minimum, flip, out,
                               offset);
}
static int64_t quantize_columns_fast(const void* x, uint8_t* packed, void* scales,
                                     const QuantLayout& l, const Coding& c, const Place& p) {
  return FLEXOPS_QUANT_BY_TYPE(l.type, quantize_tile_vectors, x, packed, scales, l, c, p);
}
static int64_t decode_columns_fast(const uint8_t* packed, int64_t count, int shift, int mask,
                                   int flip, const float* step, const float* minimum, void* out,
                                   int64_t offset, ElementType type) {
  return FLEXOPS_QUANT_BY_TYPE(type, decode_columns, packed, count, shift, mask, flip, step,
                               minimum, out, offset);
}

#else  // the baseline has plain loops only

static int64_t scan_fast(const void*, int64_t, int64_t, ElementType, Extremes&) { return 0; }
static void make_batch(const Extremes (&e)[kBatch], const Coding& c, float* minimum, float* scale) {
  for (int64_t i = 0; i < kBatch; ++i) {
    const Group g(e[i], c);
    minimum[i] = g.minimum, scale[i] = g.scale;
  }
}
static int64_t encode_fast(const void*, int64_t, int64_t, const Group&, const Coding&, int,
                           uint8_t*) {
  return 0;
}
static int64_t decode_fast(const uint8_t*, int64_t, int, float, float, int, void*, int64_t,
                           ElementType) {
  return 0;
}
static int64_t quantize_columns_fast(const void*, uint8_t*, void*, const QuantLayout&,
                                     const Coding&, const Place&) {
  return 0;
}
static int64_t decode_columns_fast(const uint8_t*, int64_t, int, int, int, const float*,
                                   const float*, void*, int64_t, ElementType) {
  return 0;
}

#endif

}  // namespace flexops::FLEXOPS_ISA
