// Group-wise quantization on the CPU: compiled once per ISA level (common/cpu.h). Formulas and format: flexops/ops/quant.py, which this
// reproduces bit for bit, so multiplications and additions must stay apart.

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "quant/quant.h"

#include "common/cpu_math.h"

namespace flexops::FLEXOPS_ISA {

// Elements are widened to float buffers of this many, which stay in the first-level cache. Even, so that no byte is cut.
constexpr int64_t kBlock = 1024;
static_assert(kBlock % 2 == 0);

// Groups along contiguous memory are handled so many at a time, to hide the latency of finding their parameters.
constexpr int64_t kBatch = 8;

constexpr float kFloatMax = 3.40282347e38f;
constexpr float kRound = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, half to even, in the sum's low bits
static const float kInfinity = __builtin_inff();

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float largest_of(QuantType type) { return type == QuantType::f16 ? 65504.0f : type == QuantType::bf16 ? 3.38953139e38f : kFloatMax; }

static float round_to(float value, QuantType type) {
  if (type == QuantType::f16) return f16_to_float(float_to_f16(value));
  if (type == QuantType::bf16) return bf16_to_float(float_to_bf16(value));
  return value;
}

/// `count` neighbouring elements as floats: in place, or in `buffer`.
static const float* widen(const void* from, int64_t offset, int64_t count, QuantType type, float* buffer) {
  if (type == QuantType::f32) return static_cast<const float*>(from) + offset;
  const uint16_t* bits = static_cast<const uint16_t*>(from) + offset;
  if (type == QuantType::bf16) {
    bf16_to_float(bits, buffer, count);
  } else {
    f16_to_float(bits, buffer, count);
  }
  return buffer;
}

static void narrow(const float* from, void* to, int64_t offset, int64_t count, QuantType type) {
  if (type == QuantType::f32) {
    float* out = static_cast<float*>(to) + offset;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store_floats(out + i, load_floats(from + i));  // a memcpy starts too slowly for a few numbers
    for (; i < count; ++i) out[i] = from[i];
  } else if (type == QuantType::bf16) {
    float_to_bf16(from, static_cast<uint16_t*>(to) + offset, count);
  } else {
    float_to_f16(from, static_cast<uint16_t*>(to) + offset, count);
  }
}

/// What all groups of a tensor share.
struct Coding {
  float top;   // the largest code
  float most;  // the largest scale
  uint32_t mask;
  bool symmetric;
  QuantType type;

  explicit Coding(const QuantLayout& l) : most(largest_of(l.type)), mask(l.bits == 4 ? 15 : 255), symmetric(l.symmetric), type(l.type) {
    top = l.bits == 4 ? (l.symmetric ? 7.0f : 15.0f) : (l.symmetric ? 127.0f : 255.0f);
  }
};

/// Extremes of a set of elements. NaN is kept apart, since the comparisons skip it.
struct Extremes {
  float lowest = kInfinity, highest = -kInfinity, poison = 0.0f;

  void add(float value) {
    lowest = value < lowest ? value : lowest;
    highest = value > highest ? value : highest;
    poison += value * 0.0f;  // NaN if the value is NaN or infinite
  }
};

/// A group's parameters, exactly as its dtype holds them. NaN if the group is broken: its codes must then be 0.
struct Group {
  float minimum, scale;

  Group() = default;
  Group(const Extremes& e, const Coding& c) {
    minimum = c.symmetric ? 0.0f : e.lowest + 0.0f;
    const float low = __builtin_fabsf(e.lowest), high = __builtin_fabsf(e.highest);
    const float span = c.symmetric ? (low > high ? low : high) : e.highest - minimum;
    const float unrounded = 1.0f / span * c.top;
    scale = span == 0.0f ? 1.0f : round_to(unrounded < c.most ? unrounded : c.most, c.type);
    if (!(span <= kFloatMax) || e.poison != e.poison) minimum = scale = __builtin_nanf("");
  }
  bool is_broken() const { return scale != scale; }
};

/// What makes symmetric codes positive: code ^ flip - flip undoes two's complement.
static int flip_of(const QuantLayout& l) { return !l.symmetric ? 0 : l.bits == 4 ? 8 : 128; }

/// Where a group's elements, codes and scales begin.
struct Place {
  int64_t element, packed, scales;
  int64_t rows;     // of the group, not counting what pads a short one
  int64_t columns;  // of the tile

  /// Columns that are done.
  void skip(int64_t count) { element += count, packed += count, scales += count, columns -= count; }
};

/// Walks the tiles in order, adding up: dividing and multiplying for each would take as long as a small group's work.
class Tiles {
 public:
  Tiles(const QuantLayout& layout, int64_t columns, int64_t tile) : l_(layout), columns_(columns), pair_(layout.symmetric ? 1 : 2) {
    const int64_t tiles = quant_tiles(layout, columns), line = tile / tiles;
    column_ = tile % tiles * columns;
    outer_ = line / layout.groups;
    group_ = line % layout.groups;
    find();
  }

  const Place& place() const { return place_; }

  void next() {
    if (l_.inner == 1 && group_ + 1 < l_.groups) {
      ++group_;
      place_.element += l_.group_size * l_.length_stride;
      place_.packed += l_.group_bytes;
      place_.scales += pair_;
      place_.rows = least(l_.length - group_ * l_.group_size, l_.group_size);
      return;
    }
    column_ += columns_;
    if (column_ >= l_.inner) {
      column_ = 0;
      if (++group_ == l_.groups) group_ = 0, ++outer_;
    }
    find();
  }

 private:
  void find() {
    const int64_t line = outer_ * l_.groups + group_, first = group_ * l_.group_size;
    place_.element = outer_ * l_.outer_stride + first * l_.length_stride + column_ * l_.inner_stride;
    place_.packed = line * l_.group_bytes * l_.inner + column_;
    place_.scales = line * pair_ * l_.inner + column_;
    place_.rows = least(l_.length - first, l_.group_size);
    place_.columns = least(l_.inner - column_, columns_);
  }

  const QuantLayout& l_;
  int64_t columns_, pair_, outer_, group_, column_;
  Place place_;
};

// ---- 256-bit kernels ---------------------------------------------------------------------------------------------------
// Whole vectors of the work, for the AVX2 and AVX-512 levels. They say how much they did; plain loops do the rest.

#if defined(__AVX2__)

// A group of 64 takes some 40 cycles, of which calls with so many arguments would be a good part.
#define FLEXOPS_INLINE static inline __attribute__((always_inline))

constexpr int64_t kVectorRun = 32;         // codes that are packed at once
constexpr int64_t kKeptBytes = 64 * 1024;  // of a tile's elements, copied before its two passes

template <QuantType type>
static inline __m256 load8(const void* from, int64_t offset) {
  if constexpr (type == QuantType::f32) return _mm256_loadu_ps(static_cast<const float*>(from) + offset);
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + offset));
  if constexpr (type == QuantType::f16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/// float_to_bf16 of eight, each in the low half of its lane.
static inline __m256i bf16_bits(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}

template <QuantType type>
static inline __m128i bits8(__m256 value) {
  if constexpr (type == QuantType::f16) return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  const __m256i words = bf16_bits(value);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

template <QuantType type>
static inline void store8(void* to, int64_t offset, __m256 value) {
  if constexpr (type == QuantType::f32) {
    _mm256_storeu_ps(static_cast<float*>(to) + offset, value);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(to) + offset), bits8<type>(value));
  }
}

template <QuantType type>
static inline __m256 round8(__m256 value) {
  if constexpr (type == QuantType::f16) return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  if constexpr (type == QuantType::bf16) return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(value), 16));
  return value;
}

/// Extremes of eight sets of elements. A NaN lifts `highest` to infinity once settled.
struct Extremes8 {
  __m256 lowest = _mm256_set1_ps(kInfinity), highest = _mm256_set1_ps(-kInfinity), poison = _mm256_setzero_ps();

  void add(__m256 value) {
    lowest = _mm256_min_ps(value, lowest);
    highest = _mm256_max_ps(value, highest);
    poison = _mm256_or_ps(poison, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  }
  void settle() { highest = _mm256_blendv_ps(highest, _mm256_set1_ps(kInfinity), poison); }
  Extremes merged() {
    settle();
    const __m256 negative = _mm256_sub_ps(_mm256_setzero_ps(), highest);  // so that one minimum finds both
    __m256 both = _mm256_min_ps(_mm256_permute2f128_ps(lowest, negative, 0x20), _mm256_permute2f128_ps(lowest, negative, 0x31));
    both = _mm256_min_ps(both, _mm256_permute_ps(both, 0x4e));
    both = _mm256_min_ps(both, _mm256_permute_ps(both, 0xb1));
    Extremes e;
    e.lowest = _mm256_cvtss_f32(both);
    e.highest = -_mm_cvtss_f32(_mm256_extractf128_ps(both, 1));
    return e;
  }
};

static inline __m256i code8(__m256 value, __m256 minimum, __m256 scale, __m256 top) {
  const __m256 scaled = _mm256_mul_ps(_mm256_sub_ps(value, minimum), scale);
  return _mm256_cvtps_epi32(_mm256_min_ps(scaled, top));  // rounds half to even
}

/// The low bytes of 32 lanes, in order; each lane is at most 255.
static inline __m256i join_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <QuantType type>
FLEXOPS_INLINE int64_t scan_vectors(const void* x, int64_t offset, int64_t count, Extremes& out) {
  if (count < 8) return 0;
  Extremes8 first, second;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) first.add(load8<type>(x, offset + i)), second.add(load8<type>(x, offset + i + 8));
  for (; i + 8 <= count; i += 8) first.add(load8<type>(x, offset + i));
  first.lowest = _mm256_min_ps(first.lowest, second.lowest);
  first.highest = _mm256_max_ps(first.highest, second.highest);
  first.poison = _mm256_or_ps(first.poison, second.poison);
  out = first.merged();
  return i;
}

template <QuantType type>
FLEXOPS_INLINE int64_t encode_vectors(const void* x, int64_t offset, int64_t count, const Group& g, const Coding& c, int bits,
                                      uint8_t* out) {
  const __m256 minimum = _mm256_set1_ps(g.minimum), scale = _mm256_set1_ps(g.scale), top = _mm256_set1_ps(c.top);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(c.mask));
  const __m256i halves = _mm256_set1_epi16(0x0110);  // even byte * 16 + odd byte
  int64_t i = 0;
  for (; i + kVectorRun <= count; i += kVectorRun) {
    __m256i code[4];
    for (int k = 0; k < 4; ++k) code[k] = _mm256_and_si256(code8(load8<type>(x, offset + i + 8 * k), minimum, scale, top), mask);
    const __m256i bytes = join_bytes(code[0], code[1], code[2], code[3]);
    if (bits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bytes);
    } else {
      const __m256i words = _mm256_maddubs_epi16(bytes, halves);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i / 2),
                       _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
  }
  return i;
}

/// All sixteen codes' values, by the formula, and their look-up.
template <QuantType type>
struct Table {
  __m256 values[2];
  __m128i low, high;  // the bytes of 16-bit values

  Table(float step, float minimum, int flip) {
    const __m256i flips = _mm256_set1_epi32(flip);
    const __m256 steps = _mm256_set1_ps(step), minima = _mm256_set1_ps(minimum);
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * half));
      const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_xor_si256(codes, flips), flips));
      values[half] = _mm256_add_ps(_mm256_mul_ps(exact, steps), minima);
    }
    if constexpr (type != QuantType::f32) {
      const __m128i first = bits8<type>(values[0]), second = bits8<type>(values[1]), mask = _mm_set1_epi16(255);
      low = _mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(second, mask));
      high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    }
  }

  /// Sixteen codes, a byte each, in order.
  void store16(void* out, int64_t offset, __m128i codes) const {
    if constexpr (type == QuantType::f32) {
      for (int half = 0; half < 2; ++half) {
        const __m256i index = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(codes, 8) : codes);
        const __m256 small = _mm256_permutevar8x32_ps(values[0], index), large = _mm256_permutevar8x32_ps(values[1], index);
        const __m256 is_large = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // the sign is the code's bit 3
        _mm256_storeu_ps(static_cast<float*>(out) + offset + 8 * half, _mm256_blendv_ps(small, large, is_large));
      }
    } else {
      const __m128i lows = _mm_shuffle_epi8(low, codes), highs = _mm_shuffle_epi8(high, codes);
      __m128i* at = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + offset);
      _mm_storeu_si128(at, _mm_unpacklo_epi8(lows, highs));
      _mm_storeu_si128(at + 1, _mm_unpackhi_epi8(lows, highs));
    }
  }
};

template <QuantType type>
FLEXOPS_INLINE int64_t decode_vectors(const uint8_t* packed, int64_t count, int bits, float step, float minimum, int flip, void* out,
                                      int64_t offset) {
  int64_t i = 0;
  if (bits == 4 && count >= kVectorRun) {
    const Table<type> table(step, minimum, flip);
    const __m128i mask = _mm_set1_epi8(15);
    for (; i + kVectorRun <= count; i += kVectorRun) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2));
      const __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask), odd = _mm_and_si128(bytes, mask);
      table.store16(out, offset + i, _mm_unpacklo_epi8(even, odd));
      table.store16(out, offset + i + 16, _mm_unpackhi_epi8(even, odd));
    }
  } else if (bits == 8) {
    const __m256 steps = _mm256_set1_ps(step), minima = _mm256_set1_ps(minimum);
    const __m256i flips = _mm256_set1_epi32(flip);
    for (; i + 8 <= count; i += 8) {
      const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i)));
      const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_xor_si256(codes, flips), flips));
      store8<type>(out, offset + i, _mm256_add_ps(_mm256_mul_ps(exact, steps), minima));
    }
  }
  return i;
}

/// Group, for eight columns.
template <QuantType type>
static inline void make_groups(Extremes8& e, const Coding& c, __m256& minimum, __m256& scale) {
  e.settle();
  const __m256 zero = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f), nan = _mm256_set1_ps(__builtin_nanf(""));
  minimum = c.symmetric ? zero : _mm256_add_ps(e.lowest, zero);
  const __m256 span =
      c.symmetric ? _mm256_max_ps(_mm256_andnot_ps(sign, e.lowest), _mm256_andnot_ps(sign, e.highest)) : _mm256_sub_ps(e.highest, minimum);
  const __m256 unrounded = _mm256_mul_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), span), _mm256_set1_ps(c.top));
  scale = round8<type>(_mm256_min_ps(unrounded, _mm256_set1_ps(c.most)));
  scale = _mm256_blendv_ps(scale, _mm256_set1_ps(1.0f), _mm256_cmp_ps(span, zero, _CMP_EQ_OQ));
  const __m256 broken = _mm256_cmp_ps(span, _mm256_set1_ps(kFloatMax), _CMP_NLE_UQ);
  scale = _mm256_blendv_ps(scale, nan, broken);
  minimum = _mm256_blendv_ps(minimum, nan, broken);
}

template <QuantType type>
static void make_batch(Extremes8& e, const Coding& c, float* minimum, float* scale) {
  __m256 minima, scales;
  make_groups<type>(e, c, minima, scales);
  _mm256_storeu_ps(minimum, minima);
  _mm256_storeu_ps(scale, scales);
}

/// Codes of eight columns; broken groups get 0.
template <QuantType type>
static inline __m256i column_code8(const void* x, int64_t offset, __m256 minimum, __m256 scale, __m256 top, __m256i mask) {
  const __m256i whole = _mm256_castps_si256(_mm256_cmp_ps(scale, scale, _CMP_ORD_Q));
  return _mm256_and_si256(code8(load8<type>(x, offset), minimum, scale, top), _mm256_and_si256(mask, whole));
}

/// The groups of 32 columns; rows are `stride` elements apart.
template <QuantType type>
static void quantize_columns(const void* x, int64_t stride, uint8_t* packed, void* scales, int64_t entry, const QuantLayout& l,
                             const Coding& c, int64_t rows) {
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
  const __m256 top = _mm256_set1_ps(c.top);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(c.mask));
  for (int64_t byte = 0; byte < l.group_bytes; ++byte) {
    const int64_t row = l.bits == 4 ? 2 * byte : byte;
    __m256i code[4];
    for (int k = 0; k < 4; ++k) {
      const int64_t at = row * stride + 8 * k;
      code[k] = row < rows ? column_code8<type>(x, at, minimum[k], scale[k], top, mask) : _mm256_setzero_si256();
      if (l.bits == 4) {
        code[k] = _mm256_slli_epi32(code[k], 4);
        if (row + 1 < rows) code[k] = _mm256_or_si256(code[k], column_code8<type>(x, at + stride, minimum[k], scale[k], top, mask));
      }
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + byte * l.inner), join_bytes(code[0], code[1], code[2], code[3]));
  }
}

/// A tile's columns, 32 at a time. The tile is copied first, because rows that lie a power of two apart would throw one another out of the
/// caches.
template <QuantType type>
static int64_t quantize_tile_vectors(const void* x, uint8_t* packed, void* scales, const QuantLayout& l, const Coding& c, const Place& p) {
  constexpr int64_t kSize = type == QuantType::f32 ? 4 : 2;
  alignas(64) char kept[kKeptBytes];
  const int64_t columns = p.columns & ~(kVectorRun - 1);
  const char* from = static_cast<const char*>(x) + p.element * kSize;
  int64_t stride = l.length_stride;
  if (p.rows * columns * kSize <= kKeptBytes) {
    for (int64_t row = 0; row < p.rows; ++row)
      memcpy(kept + row * columns * kSize, from + row * stride * kSize, static_cast<size_t>(columns * kSize));
    from = kept, stride = columns;
  }
  for (int64_t i = 0; i < columns; i += kVectorRun) {
    quantize_columns<type>(from + i * kSize, stride, packed + p.packed + i, scales, p.scales + i, l, c, p.rows);
  }
  return columns;
}

/// One row of a tile; `shift` finds its halves of the bytes.
template <QuantType type>
FLEXOPS_INLINE int64_t decode_columns(const uint8_t* packed, int64_t count, int shift, int mask, int flip, const float* step,
                                      const float* minimum, void* out, int64_t offset) {
  const __m256i masks = _mm256_set1_epi32(mask), flips = _mm256_set1_epi32(flip);
  const __m128i shifts = _mm_cvtsi32_si128(shift);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + i)));
    const __m256i codes = _mm256_xor_si256(_mm256_and_si256(_mm256_srl_epi32(bytes, shifts), masks), flips);
    const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, flips));
    store8<type>(out, offset + i, _mm256_add_ps(_mm256_mul_ps(exact, _mm256_loadu_ps(step + i)), _mm256_loadu_ps(minimum + i)));
  }
  return i;
}

#define FLEXOPS_QUANT_BY_TYPE(type, function, ...)                    \
  ((type) == QuantType::f32   ? function<QuantType::f32>(__VA_ARGS__) \
   : (type) == QuantType::f16 ? function<QuantType::f16>(__VA_ARGS__) \
                              : function<QuantType::bf16>(__VA_ARGS__))

static int64_t scan_fast(const void* x, int64_t offset, int64_t count, QuantType type, Extremes& e) {
  return FLEXOPS_QUANT_BY_TYPE(type, scan_vectors, x, offset, count, e);
}
static void make_batch(const Extremes (&e)[kBatch], const Coding& c, float* minimum, float* scale) {
  float lowest[kBatch], highest[kBatch], poison[kBatch];
  for (int64_t i = 0; i < kBatch; ++i) lowest[i] = e[i].lowest, highest[i] = e[i].highest, poison[i] = e[i].poison;
  Extremes8 all;
  all.lowest = _mm256_loadu_ps(lowest), all.highest = _mm256_loadu_ps(highest), all.poison = _mm256_loadu_ps(poison);
  all.poison = _mm256_cmp_ps(all.poison, all.poison, _CMP_UNORD_Q);
  FLEXOPS_QUANT_BY_TYPE(c.type, make_batch, all, c, minimum, scale);
}
static int64_t encode_fast(const void* x, int64_t offset, int64_t count, const Group& g, const Coding& c, int bits, uint8_t* out) {
  return g.is_broken() ? 0 : FLEXOPS_QUANT_BY_TYPE(c.type, encode_vectors, x, offset, count, g, c, bits, out);
}
static int64_t decode_fast(const uint8_t* packed, int64_t count, int bits, float step, float minimum, int flip, void* out, int64_t offset,
                           QuantType type) {
  return FLEXOPS_QUANT_BY_TYPE(type, decode_vectors, packed, count, bits, step, minimum, flip, out, offset);
}
static int64_t quantize_columns_fast(const void* x, uint8_t* packed, void* scales, const QuantLayout& l, const Coding& c, const Place& p) {
  return FLEXOPS_QUANT_BY_TYPE(l.type, quantize_tile_vectors, x, packed, scales, l, c, p);
}
static int64_t decode_columns_fast(const uint8_t* packed, int64_t count, int shift, int mask, int flip, const float* step,
                                   const float* minimum, void* out, int64_t offset, QuantType type) {
  return FLEXOPS_QUANT_BY_TYPE(type, decode_columns, packed, count, shift, mask, flip, step, minimum, out, offset);
}

#else  // the baseline has plain loops only

static int64_t scan_fast(const void*, int64_t, int64_t, QuantType, Extremes&) { return 0; }
static void make_batch(const Extremes (&e)[kBatch], const Coding& c, float* minimum, float* scale) {
  for (int64_t i = 0; i < kBatch; ++i) {
    const Group g(e[i], c);
    minimum[i] = g.minimum, scale[i] = g.scale;
  }
}
static int64_t encode_fast(const void*, int64_t, int64_t, const Group&, const Coding&, int, uint8_t*) { return 0; }
static int64_t decode_fast(const uint8_t*, int64_t, int, float, float, int, void*, int64_t, QuantType) { return 0; }
static int64_t quantize_columns_fast(const void*, uint8_t*, void*, const QuantLayout&, const Coding&, const Place&) { return 0; }
static int64_t decode_columns_fast(const uint8_t*, int64_t, int, int, int, const float*, const float*, void*, int64_t, QuantType) {
  return 0;
}

#endif

// ---- plain loops ------------------------------------------------------------------------------------------------------

/// Codes of neighbouring elements of one group, a byte each.
static void encode_run(const float* FLEXOPS_RESTRICT values, uint8_t* FLEXOPS_RESTRICT codes, int64_t count, const Group& g,
                       const Coding& c) {
  if (g.is_broken()) {
    memset(codes, 0, static_cast<size_t>(count));
    return;
  }
  const float minimum = g.minimum, scale = g.scale, top = c.top;
  const uint32_t mask = c.mask;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = (values[i] - minimum) * scale;
    codes[i] = static_cast<uint8_t>(bits_of((scaled < top ? scaled : top) + kRound) & mask);
  }
}

/// The same for one row of groups that lie side by side.
static void encode_row(const float* FLEXOPS_RESTRICT values, uint8_t* FLEXOPS_RESTRICT codes, int64_t count,
                       const float* FLEXOPS_RESTRICT minimum, const float* FLEXOPS_RESTRICT scale, const Coding& c) {
  const float top = c.top;
  const uint32_t mask = c.mask;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = (values[i] - minimum[i]) * scale[i];
    const uint32_t code = bits_of((scaled < top ? scaled : top) + kRound) & mask;
    codes[i] = static_cast<uint8_t>(scale[i] == scale[i] ? code : 0u);
  }
}

/// Neighbouring codes to halves of bytes; `codes` has a zero behind an odd count.
static void pack_run(const uint8_t* FLEXOPS_RESTRICT codes, uint8_t* FLEXOPS_RESTRICT packed, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    uint16_t two;
    memcpy(&two, codes + 2 * i, 2);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    packed[i] = static_cast<uint8_t>(two << 4 | two >> 8);
#else
    packed[i] = static_cast<uint8_t>(two >> 4 | two);
#endif
  }
}

static void unpack_run(const uint8_t* FLEXOPS_RESTRICT packed, uint8_t* FLEXOPS_RESTRICT codes, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    const uint16_t byte = packed[i];
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const uint16_t two = static_cast<uint16_t>(byte >> 4 | (byte & 15) << 8);
#else
    const uint16_t two = static_cast<uint16_t>((byte >> 4) << 8 | (byte & 15));
#endif
    memcpy(codes + 2 * i, &two, 2);
  }
}

// ---- a group along contiguous memory --------------------------------------------------------------------------------

static Extremes scan_run(const void* x, int64_t offset, int64_t count, QuantType type) {
  Extremes e;
  float buffer[kBlock];
  for (int64_t at = scan_fast(x, offset, count, type, e); at < count; at += kBlock) {
    const int64_t part = least(count - at, kBlock);
    const float* values = widen(x, offset + at, part, type, buffer);
    for (int64_t i = 0; i < part; ++i) e.add(values[i]);
  }
  return e;
}

static void encode_group(const void* x, uint8_t* packed, const QuantLayout& l, const Coding& c, const Place& p, const Group& g) {
  uint8_t* out = packed + p.packed;
  float buffer[kBlock];
  uint8_t codes[kBlock];
  for (int64_t at = encode_fast(x, p.element, p.rows, g, c, l.bits, out); at < p.rows; at += kBlock) {
    const int64_t count = least(p.rows - at, kBlock);
    const float* values = widen(x, p.element + at, count, l.type, buffer);
    if (l.bits == 8) {
      encode_run(values, out + at, count, g, c);
    } else {
      if (count % 2) codes[count] = 0;
      encode_run(values, codes, count, g, c);
      pack_run(codes, out + at / 2, (count + 1) / 2);
    }
  }
  const int64_t used = l.bits == 8 ? p.rows : (p.rows + 1) / 2;
  if (used < l.group_bytes) memset(out + used, 0, static_cast<size_t>(l.group_bytes - used));
}

/// `count` groups, one behind the other.
static void quantize_runs(const void* x, uint8_t* packed, void* scales, const QuantLayout& l, const Coding& c, const Place (&p)[kBatch],
                          int64_t count) {
  Extremes e[kBatch];
  Group g[kBatch];
  float minimum[kBatch], scale[kBatch], pairs[2 * kBatch];
  for (int64_t i = 0; i < count; ++i) e[i] = scan_run(x, p[i].element, p[i].rows, l.type);
  make_batch(e, c, minimum, scale);
  const int64_t pair = l.symmetric ? 1 : 2;
  for (int64_t i = 0; i < kBatch; ++i) {
    g[i].minimum = minimum[i], g[i].scale = scale[i];
    pairs[i * pair + pair - 1] = minimum[i];
    pairs[i * pair] = scale[i];
  }
  narrow(pairs, scales, p[0].scales, count * pair, l.type);
  for (int64_t i = 0; i < count; ++i) encode_group(x, packed, l, c, p[i], g[i]);
}

static void decode_group(const uint8_t* packed, void* out, const QuantLayout& l, const Place& p, float step, float minimum) {
  float values[kBlock];
  uint8_t unpacked[kBlock];
  const int flip = flip_of(l);
  const uint8_t* from = packed + p.packed;
  for (int64_t at = decode_fast(from, p.rows, l.bits, step, minimum, flip, out, p.element, l.type); at < p.rows; at += kBlock) {
    const int64_t count = least(p.rows - at, kBlock);
    if (l.bits == 4) unpack_run(from + at / 2, unpacked, (count + 1) / 2);
    const uint8_t* codes = l.bits == 4 ? unpacked : from + at;
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>((codes[i] ^ flip) - flip) * step + minimum;
    narrow(values, out, p.element + at, count, l.type);
  }
}

static void dequantize_runs(const uint8_t* packed, const void* scales, void* out, const QuantLayout& l, const Place (&p)[kBatch],
                            int64_t count) {
  const int64_t pair = l.symmetric ? 1 : 2;
  float buffer[2 * kBatch];
  const float* pairs = widen(scales, p[0].scales, count * pair, l.scale_type, buffer);
  for (int64_t i = 0; i < count; ++i) decode_group(packed, out, l, p[i], 1.0f / pairs[i * pair], l.symmetric ? 0.0f : pairs[i * pair + 1]);
}

// ---- groups across contiguous rows ----------------------------------------------------------------------------------

/// One number for each column of a tile.
template <int64_t columns>
struct Row {
  float at[columns];
};
using QuantizeRow = Row<kQuantizeColumns>;

static void find_groups(const void* x, const QuantLayout& l, const Coding& c, const Place& p, QuantizeRow& minimum, QuantizeRow& scale) {
  QuantizeRow lowest, highest, poison, buffer;
  for (int64_t i = 0; i < p.columns; ++i) lowest.at[i] = kInfinity, highest.at[i] = -kInfinity, poison.at[i] = 0.0f;
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* values = widen(x, p.element + row * l.length_stride, p.columns, l.type, buffer.at);
    for (int64_t i = 0; i < p.columns; ++i) {
      const float value = values[i];
      lowest.at[i] = value < lowest.at[i] ? value : lowest.at[i];
      highest.at[i] = value > highest.at[i] ? value : highest.at[i];
      poison.at[i] += value * 0.0f;
    }
  }
  for (int64_t i = 0; i < p.columns; ++i) {
    Extremes e;
    e.lowest = lowest.at[i], e.highest = highest.at[i], e.poison = poison.at[i];
    const Group g(e, c);
    minimum.at[i] = g.minimum, scale.at[i] = g.scale;
  }
}

static void quantize_tile(const void* x, uint8_t* packed, void* scales, const QuantLayout& l, const Coding& c, Place p) {
  p.skip(quantize_columns_fast(x, packed, scales, l, c, p));
  if (p.columns == 0) return;
  QuantizeRow minimum, scale, buffer;
  uint8_t even[kQuantizeColumns], odd[kQuantizeColumns];
  find_groups(x, l, c, p, minimum, scale);
  narrow(scale.at, scales, p.scales, p.columns, l.type);
  if (!l.symmetric) narrow(minimum.at, scales, p.scales + l.inner, p.columns, l.type);
  const auto encode = [&](int64_t row, uint8_t* codes) {
    if (row >= p.rows) {
      for (int64_t i = 0; i < p.columns; ++i) codes[i] = 0;
    } else {
      encode_row(widen(x, p.element + row * l.length_stride, p.columns, l.type, buffer.at), codes, p.columns, minimum.at, scale.at, c);
    }
  };
  for (int64_t byte = 0; byte < l.group_bytes; ++byte) {
    uint8_t* FLEXOPS_RESTRICT out = packed + p.packed + byte * l.inner;
    if (l.bits == 8) {
      encode(byte, out);
    } else {
      encode(2 * byte, even);
      encode(2 * byte + 1, odd);
      for (int64_t i = 0; i < p.columns; ++i) out[i] = static_cast<uint8_t>(even[i] << 4 | odd[i]);
    }
  }
}

static void dequantize_tile(const uint8_t* packed, const void* scales, void* out, const QuantLayout& l, const Place& p) {
  Row<kDequantizeColumns> step, minimum, buffer, values;
  const float* scale = widen(scales, p.scales, p.columns, l.scale_type, buffer.at);
  for (int64_t i = 0; i < p.columns; ++i) step.at[i] = 1.0f / scale[i], minimum.at[i] = 0.0f;
  if (!l.symmetric)
    memcpy(minimum.at, widen(scales, p.scales + l.inner, p.columns, l.scale_type, buffer.at), static_cast<size_t>(p.columns) * 4);
  const int flip = flip_of(l), mask = l.bits == 4 ? 15 : 255;
  for (int64_t row = 0; row < p.rows; ++row) {
    const uint8_t* codes = packed + p.packed + (l.bits == 4 ? row / 2 : row) * l.inner;
    const int shift = l.bits == 4 && row % 2 == 0 ? 4 : 0;
    const int64_t to = p.element + row * l.length_stride;
    const int64_t done = decode_columns_fast(codes, p.columns, shift, mask, flip, step.at, minimum.at, out, to, l.type);
    for (int64_t i = done; i < p.columns; ++i) {
      values.at[i] = static_cast<float>(((codes[i] >> shift & mask) ^ flip) - flip) * step.at[i] + minimum.at[i];
    }
    narrow(values.at + done, out, to + done, p.columns - done, l.type);
  }
}

/// Calls one(place) for each tile of [begin, end), or batch(places, count) if the groups lie along contiguous memory.
template <typename One, typename Batch>
static void for_each_tile(const QuantLayout& l, int64_t columns, int64_t begin, int64_t end, const One& one, const Batch& batch) {
  Tiles tiles(l, columns, begin);
  Place places[kBatch];
  for (int64_t tile = begin; tile < end;) {
    const int64_t count = l.inner == 1 ? least(end - tile, kBatch) : 1;
    for (int64_t i = 0; i < count; ++i, tiles.next()) places[i] = tiles.place();
    l.inner == 1 ? batch(places, count) : one(places[0]);
    tile += count;
  }
}

void quantize_cpu(const void* x, uint8_t* packed, void* scales, const QuantLayout& layout, int64_t begin, int64_t end) {
  const Coding c(layout);
  for_each_tile(
      layout, kQuantizeColumns, begin, end, [&](const Place& p) { quantize_tile(x, packed, scales, layout, c, p); },
      [&](const Place(&p)[kBatch], int64_t count) { quantize_runs(x, packed, scales, layout, c, p, count); });
}

void dequantize_cpu(const uint8_t* packed, const void* scales, void* out, const QuantLayout& layout, int64_t begin, int64_t end) {
  for_each_tile(
      layout, kDequantizeColumns, begin, end, [&](const Place& p) { dequantize_tile(packed, scales, out, layout, p); },
      [&](const Place(&p)[kBatch], int64_t count) { dequantize_runs(packed, scales, out, layout, p, count); });
}

}  // namespace flexops::FLEXOPS_ISA
