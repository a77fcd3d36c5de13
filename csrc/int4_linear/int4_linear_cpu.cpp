// Products with 4-bit weights on the CPU: compiled once per ISA level (common/cpu.h). Formulas and
// the layout of the weight: flexops/ops/int4_linear.py.
//
// 64 bytes of a tile hold 64 columns of two rows, as 16 words. x is put into the order in which
// codes are extracted from these words once, so that they become values without being moved. Values
// are multiplied by several rows of x from registers.

#include "int4_linear/int4_linear.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

// Products of bfloat16, of which older compilers do not know whether a CPU has them.
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 10)
#define FLEXOPS_BF16_PRODUCTS 1
#else
#define FLEXOPS_BF16_PRODUCTS 0
#endif

constexpr int64_t kWords = 16;
constexpr int kParts = static_cast<int>(kWords) / kLanes;  // registers for 16 words

/// The column of a tile that a byte of a word holds.
static int64_t column_of(int64_t byte, int64_t word) {
  const int64_t within[4] = {0, 8, 1, 9};
  return word % 4 * 16 + word / 4 * 2 + within[byte];
}

constexpr int64_t kMostRows = kLanes < 16 ? 4 : 8;  // of x that are multiplied at once

/// Rows of x that are multiplied at once; the last ones may be fewer.
static int64_t rows_at_once(const Int4Product& c) {
  return ceil_div(c.m, ceil_div(c.m, kMostRows));
}

/// Whether the weight is rounded to bfloat16, as in torch's product, for vdpbf16ps.
static bool rounds_weight([[maybe_unused]] const Int4Product& c) {
#if FLEXOPS_BF16_PRODUCTS
  return c.type == ElementType::bf16 && c.m > kMostRows && c.weight.group_size > 32 &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

void int4_order_cpu(const Int4Product& c, float* x, int64_t begin, int64_t end) {
  const int64_t tiles = c.weight.tiles_k, most = rows_at_once(c);
  const bool halves = rounds_weight(c);
  int64_t order[kInt4TileK];
  for (int64_t i = 0; i < kInt4TileK; ++i)
    order[i] =
        halves ? column_of(i / 32 + i % 2 * 2, i % 32 / 2) : column_of(i / kWords, i % kWords);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row / most * most, rows = least(most, c.m - first);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t from = row * c.weight.k + tile * kInt4TileK,
                    to = (first * tiles + tile * rows + row - first) * kInt4TileK;
      if (halves) {
        const uint16_t* const bits = static_cast<const uint16_t*>(c.x) + from;
        for (int64_t i = 0; i < kInt4TileK; ++i)
          reinterpret_cast<uint16_t*>(x)[to + i] = bits[order[i]];
        continue;
      }
      alignas(64) float buffer[kInt4TileK] = {};
      const int64_t count = least(kInt4TileK, c.weight.k - tile * kInt4TileK);
      const float* const values = widen(c.x, from, count, c.type, buffer);
      for (int64_t i = 0; i < kInt4TileK; ++i)
        x[to + i] = order[i] < count ? values[order[i]] : 0.0f;
    }
  }
}

/// Scale and zero point of a group of a row.
struct Number {
  float scale, zero;
};
static inline Number load_number(const Int4View& w, int64_t tile, int64_t group, int64_t at) {
  const int64_t index = (tile * w.groups + group) * kInt4TileN + at;
  return {load(w.scales, index, w.scale_type), w.zeros ? load(w.zeros, index, w.zero_type) : 8.0f};
}

/// A number in all lanes.
static inline Floats broadcast(float value) {
  return (Floats)(Words{} + bits_of(value));  // an addition of floats would be computed
}

constexpr int64_t kBlock = 8;  // tiles of columns whose x stays in the first cache

/// A tile of rows and a block of columns: its scales, and sums over this block and those before it.
struct Block {
  const uint8_t* bytes;
  const float* x;   // [tiles_k, rows of x, kInt4TileK]
  int64_t tiles_k;  // in this block
  int shift;        // a group has 32 << shift columns
  bool halves;      // x has 16 bits
  float scales[kBlock * 2 * kInt4TileN], zeros[kBlock * 2 * kInt4TileN];
  Floats sums[kInt4TileN][kMostRows];
};

/// What the codes of a row of a tile stand for: (code - zero) * scale, the two of a word's group.
#if defined(__AVX512F__)
template <bool kTwoGroups>
struct RowValues {
  Floats tables[2];

  RowValues(const float* scales, const float* zeros) {
    constexpr Floats kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < (kTwoGroups ? 2 : 1); ++i)
      tables[i] = (kCodes - broadcast(zeros[i * kInt4TileN])) * broadcast(scales[i * kInt4TileN]);
  }

  /// Of the codes of 4 bits above the lowest `shift` ones.
  Floats at(Words words, int shift) const {
    if constexpr (!kTwoGroups)
      return _mm512_maskz_permutexvar_ps(0xffff, (__m512i)(words >> shift), tables[0]);
    constexpr Words kGroup = {0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16};
    const Words index = (words >> shift & 15u) | kGroup;
    return _mm512_maskz_permutex2var_ps(0xffff, tables[0], (__m512i)index, tables[1]);
  }
};
#else
template <bool kTwoGroups>
struct RowValues {
  Floats scale, zero;

  static Floats of_words(const float* numbers) {
    if constexpr (!kTwoGroups) return broadcast(*numbers);
    Ints second;
    for (int lane = 0; lane < kLanes; ++lane) second[lane] = lane % 4 < 2 ? 0 : -1;
    return second ? broadcast(numbers[kInt4TileN]) : broadcast(*numbers);
  }

  RowValues(const float* scales, const float* zeros)
      : scale(of_words(scales)), zero(of_words(zeros)) {}

  Floats at(Words words, int shift) const {
    const Words codes = words >> shift & 15u;
#if defined(__AVX2__)
    return (_mm256_cvtepi32_ps((__m256i)codes) - zero) * scale;
#else
    return (__builtin_convertvector((Ints)codes, Floats) - zero) * scale;
#endif
  }
};
#endif

/// Rows g and g + 8 of the weight times rows of x.
template <int kRows, bool kTwoGroups>
static void multiply_pair(Block& b, int64_t g) {
  Floats sums[2][kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    sums[0][row] = b.sums[2 * g][row], sums[1][row] = b.sums[2 * g + 1][row];
  for (int64_t tile = 0; tile < b.tiles_k; ++tile) {
    const uint8_t* const bytes = b.bytes + tile * kInt4TileBytes + 64 * g;
    const float* const x = b.x + tile * kRows * kInt4TileK;
    const int64_t at = (2 * tile >> b.shift) * kInt4TileN + 2 * g;
    const RowValues<kTwoGroups> low(b.scales + at, b.zeros + at),
        high(b.scales + at + 1, b.zeros + at + 1);
    __builtin_prefetch(bytes + kBlock * kInt4TileBytes);  // a block's lines are not read in order
    Words words[kParts];
    for (int i = 0; i < kParts; ++i)
      words[i] = (Words)load_floats(reinterpret_cast<const float*>(bytes) + i * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < 4 * kParts; ++i) {
      const int shift = i / kParts * 8;
      const Floats first = low.at(words[i % kParts], shift),
                   second = high.at(words[i % kParts], shift + 4);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        Floats value = load_floats(x + row * kInt4TileK + i * kLanes);
#if defined(__x86_64__)
        __asm__("" : "+x"(value));  // or it is loaded for each product
#endif
        sums[0][row] += first * value, sums[1][row] += second * value;
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    b.sums[2 * g][row] = sums[0][row], b.sums[2 * g + 1][row] = sums[1][row];
}

#if FLEXOPS_BF16_PRODUCTS
typedef uint16_t Halves __attribute__((vector_size(64)));

/// sum + a * b for both bfloat16 of each word.
static inline Floats add_products(Floats sum, Halves a, Halves b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

/// The same in bfloat16.
struct RowHalves {
  Halves table;  // two of each, so that the index's lowest bit has no meaning

  RowHalves(const float* scales, const float* zeros) {
    const Words rounded = round_to_upper_half(RowValues<false>(scales, zeros).tables[0]);
    table = (Halves)(rounded >> 16 | (rounded & 0xffff0000u));
  }

  /// Of the codes at 4 bits of each half, by what moves them to bit 1; other bits are ignored.
  Halves at(Halves codes) const {
#if defined(__clang__)
    return (Halves)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table);
#else
    return __builtin_shuffle(table, codes);
#endif
  }
};

/// multiply_pair for a weight that is rounded.
template <int kRows>
static void multiply_halves(Block& b, int64_t g) {
  Floats sums[2][kRows];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    sums[0][row] = b.sums[2 * g][row], sums[1][row] = b.sums[2 * g + 1][row];
  for (int64_t tile = 0; tile < b.tiles_k; ++tile) {
    const uint8_t* const bytes = b.bytes + tile * kInt4TileBytes + 64 * g;
    const float* const x = b.x + tile * kRows * kInt4TileK / 2;
    const int64_t at = (2 * tile >> b.shift) * kInt4TileN + 2 * g;
    const RowHalves low(b.scales + at, b.zeros + at), high(b.scales + at + 1, b.zeros + at + 1);
    __builtin_prefetch(bytes + kBlock * kInt4TileBytes);
    const Halves words = (Halves)load_floats(reinterpret_cast<const float*>(bytes));
    const Halves values[2][2] = {{low.at(words << 1), low.at(words >> 7)},
                                 {high.at(words >> 3), high.at(words >> 11)}};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Halves first = (Halves)load_floats(x + row * kInt4TileK / 2),
                   second = (Halves)load_floats(x + row * kInt4TileK / 2 + kLanes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        sums[half][row] = add_products(add_products(sums[half][row], values[half][0], first),
                                       values[half][1], second);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    b.sums[2 * g][row] = sums[0][row], b.sums[2 * g + 1][row] = sums[1][row];
}
#endif

template <int kRows>
static void multiply_block(Block& b, int64_t rows) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_block<kRows - 1>(b, rows);
  for (int64_t g = 0; g < kInt4TileN / 2; ++g) {
#if FLEXOPS_BF16_PRODUCTS
    if (b.halves) {
      multiply_halves<kRows>(b, g);
      continue;
    }
#endif
    b.shift == 0 ? multiply_pair<kRows, true>(b, g) : multiply_pair<kRows, false>(b, g);
  }
}

static void load_block(const void* from, int64_t offset, int64_t count, ElementType type,
                       float* to) {
  alignas(64) float buffer[kBlock * 2 * kInt4TileN];
  narrow(widen(from, offset, count, type, buffer), to, 0, count, ElementType::f32);
}

/// Load the scales and zero points of a block.
static void start_block(Block& b, const Int4View& w, int64_t tile, int64_t tile_k) {
  const int64_t first = 2 * tile_k >> b.shift, count = (2 * b.tiles_k >> b.shift) * kInt4TileN;
  const int64_t from = (tile * w.groups + first) * kInt4TileN;
  load_block(w.scales, from, count, w.scale_type, b.scales);
  if (w.zeros) return load_block(w.zeros, from, count, w.zero_type, b.zeros);
  for (int64_t i = 0; i < count; ++i) b.zeros[i] = 8;
}

void int4_product_cpu(const Int4Product& c, const float* x, int64_t begin, int64_t end) {
  const Int4View& w = c.weight;
  Block b;
  b.halves = rounds_weight(c);
  const int64_t columns = b.halves ? kInt4TileK / 2 : kInt4TileK;  // of a tile of x, as floats
  b.shift = w.group_size == 32 ? 0 : w.group_size == 64 ? 1 : 2;
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t row = 0, rows = rows_at_once(c); row < c.m; row += rows) {
      rows = least(rows, c.m - row);
      memset(b.sums, 0, sizeof b.sums);
      for (int64_t tile_k = 0; tile_k < w.tiles_k; tile_k += kBlock) {
        b.bytes = w.packed + (tile * w.tiles_k + tile_k) * kInt4TileBytes;
        b.x = x + (row * w.tiles_k + rows * tile_k) * columns;
        b.tiles_k = least(kBlock, w.tiles_k - tile_k);
        start_block(b, w, tile, tile_k);
        multiply_block<kMostRows>(b, rows);
      }
      for (int64_t i = 0; i < rows * kInt4TileN; ++i) {
        const int64_t at = i % kInt4TileN, n = tile * kInt4TileN + at / 2 + 8 * (at % 2);
        if (n >= w.n) continue;
        float value = sum_of_lanes(b.sums[at][i / kInt4TileN]);
        if (c.bias) value += load(c.bias, n, c.type);
        store(c.out, (row + i / kInt4TileN) * w.n + n, value, c.type);
      }
    }
  }
}

// ---- unpack ----

typedef uint8_t Bytes __attribute__((vector_size(16)));

/// From the order of the words of four threads to that of their 16 columns.
static inline Bytes by_column(Bytes words) {
#if defined(__clang__)
  return __builtin_shufflevector(words, words, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13,
                                 15);
#else
  return __builtin_shuffle(words, Bytes{0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15});
#endif
}

static inline Floats load_codes(const uint8_t* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtepi32_ps(
      0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Floats out;
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = from[lane];
  return out;
#endif
}

/// 16 codes of a group as elements.
template <ElementType type>
static inline void write_codes(Bytes codes, Number number, void* to) {
  uint8_t bytes[16];
  memcpy(bytes, &codes, sizeof bytes);
  for (int i = 0; i < 16; i += kLanes)
    store_elements<type>(to, i, (load_codes(bytes + i) - number.zero) * number.scale);
}

/// The 16 values of a group. Those of 16 bits are looked up, byte by byte.
template <ElementType type>
struct Values {
#if defined(__AVX2__)
  static constexpr bool kTable = element_size(type) == 2;
  __m128i low, high;
#else
  static constexpr bool kTable = false;
#endif
  Number number;

  explicit Values(Number number) : number(number) {
#if defined(__AVX2__)
    if constexpr (kTable) {
      constexpr Bytes kAll = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      __m128i words[2];
      write_codes<type>(kAll, number, words);
      const __m128i bytes = _mm_set1_epi16(255);
      low = _mm_packus_epi16(_mm_and_si128(words[0], bytes), _mm_and_si128(words[1], bytes));
      high = _mm_packus_epi16(_mm_srli_epi16(words[0], 8), _mm_srli_epi16(words[1], 8));
    }
#endif
  }

  inline void write(Bytes codes, char* to) const {
#if defined(__AVX2__)
    if constexpr (kTable) {
      const __m128i a = _mm_shuffle_epi8(low, (__m128i)codes),
                    b = _mm_shuffle_epi8(high, (__m128i)codes);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(a, b));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm_unpackhi_epi8(a, b));
      return;
    }
#endif
    write_codes<type>(codes, number, to);
  }
};

/// Rows g and g + 8 of a tile of rows.
template <ElementType type>
static void unpack_pair(const Int4View& w, char* out, int64_t tile, int64_t g) {
  const int64_t row = tile * kInt4TileN + g, size = element_size(type);
  const int64_t parts = least(kInt4TileK, w.group_size) / 16;
  for (int64_t first = 0; first < w.k; first += 16 * parts) {
    const int64_t group = first / w.group_size;
    const uint8_t* const bytes = w.packed + tile * w.tiles_k * kInt4TileBytes +
                                 first / kInt4TileK * kInt4TileBytes + 64 * g +
                                 first % kInt4TileK / 4;
    Bytes codes[4];
    for (int64_t part = 0; part < parts; ++part) {
      Bytes words;
      for (int64_t t = 0; t < 4; ++t)
        memcpy(reinterpret_cast<char*>(&words) + 4 * t, bytes + 16 * t + 4 * part, 4);
      codes[part] = by_column(words);
    }
    char* const to = out + (row * w.k + first) * size;
    const Values<type> low(load_number(w, tile, group, 2 * g));
    for (int64_t part = 0; part < parts; ++part) low.write(codes[part] & 15, to + 16 * part * size);
    if (row + 8 >= w.n) continue;
    const Values<type> high(load_number(w, tile, group, 2 * g + 1));
    for (int64_t part = 0; part < parts; ++part)
      high.write(codes[part] >> 4, to + (8 * w.k + 16 * part) * size);
  }
}

void int4_unpack_cpu(const Int4View& w, void* out, ElementType type, int64_t begin, int64_t end) {
  const auto unpack = type == ElementType::f32    ? unpack_pair<ElementType::f32>
                      : type == ElementType::bf16 ? unpack_pair<ElementType::bf16>
                                                  : unpack_pair<ElementType::f16>;
  for (int64_t pair = begin * 8; pair < end * 8; ++pair)
    if (pair / 8 * kInt4TileN + pair % 8 < w.n)
      unpack(w, static_cast<char*>(out), pair / 8, pair % 8);
}

}  // namespace flexops::FLEXOPS_ISA
