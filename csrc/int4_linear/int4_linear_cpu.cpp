// Products with 4-bit weights on the CPU: compiled once per ISA level (common/cpu.h). Formulas and
// the layout of the weight: flexops/ops/int4_linear.py.
//
// 64 bytes of a tile hold 64 columns of two rows, as 16 words. x is put into the order in which
// codes are extracted from these words once, so that they become floats without being moved.

#include "int4_linear/int4_linear.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

constexpr int64_t kWords = 16;
constexpr int kParts = static_cast<int>(kWords) / kLanes;  // registers for 16 words

/// The column of a tile that a byte of a word holds.
static int64_t column_of(int64_t byte, int64_t word) {
  const int64_t within[4] = {0, 8, 1, 9};
  return word % 4 * 16 + word / 4 * 2 + within[byte];
}

void int4_order_cpu(const Int4Product& c, float* x, float* sums, int64_t begin, int64_t end) {
  const Int4View& w = c.weight;
  int64_t order[kInt4TileK];
  for (int64_t i = 0; i < kInt4TileK; ++i) order[i] = column_of(i / kWords, i % kWords);
  for (int64_t tile = begin * w.tiles_k; tile < end * w.tiles_k; ++tile) {
    const int64_t row = tile / w.tiles_k, first = tile % w.tiles_k * kInt4TileK;
    float* const to = x + tile * kInt4TileK;
    alignas(64) float buffer[kInt4TileK] = {};
    const int64_t count = least(kInt4TileK, w.k - first);
    const float* from = widen(c.x, row * w.k + first, count, c.type, buffer);
    for (int64_t i = 0; i < kInt4TileK; ++i) to[i] = order[i] < count ? from[order[i]] : 0.0f;
    for (int64_t half = 0; half < 2; ++half) {
      float sum = 0;
      for (int64_t i = 32 * half; i < least(count, 32 * half + 32); ++i) sum += from[i];
      sums[2 * tile + half] = sum;
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

/// The codes of 4 bits above the lowest `shift` ones.
static inline Floats codes_at(Words words, int shift) {
#if defined(__AVX512F__)
  constexpr Floats kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return _mm512_maskz_permutexvar_ps(0xffff, (__m512i)(words >> shift), kCodes);
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps((__m256i)(words >> shift & 15u));
#else
  return __builtin_convertvector((Ints)(words >> shift & 15u), Floats);
#endif
}

/// A number in all lanes.
static inline Floats broadcast(float value) {
  return (Floats)(Words{} + bits_of(value));  // an addition of floats would be computed
}

constexpr int64_t kBlock = 8;     // tiles of columns whose x stays in the first cache
constexpr int64_t kMostRows = 4;  // of x that are multiplied at once

/// A tile of rows and a block of columns: its scales, and sums over this block and those before it.
struct Block {
  const uint8_t* bytes;
  const float* x;
  int64_t row;      // elements between rows of x
  int64_t tiles_k;  // in this block
  int shift;        // a group has 32 << shift columns
  float scales[kBlock * 2 * kInt4TileN];
  float offsets[kMostRows][kInt4TileN];  // what zero points subtract
  Floats sums[kInt4TileN][kMostRows];
};

/// Pairs of rows (g and g + 8) from `first` on times rows of x.
template <int kPairs, int kRows, bool kTwoGroups>
static void multiply_pairs(Block& b, int64_t first) {
  Floats sums[2 * kPairs][kRows];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kPairs; ++i)
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) sums[i][row] = b.sums[2 * first + i][row];
  for (int64_t tile = 0; tile < b.tiles_k; ++tile) {
    const uint8_t* const bytes = b.bytes + tile * kInt4TileBytes + 64 * first;
    const float* const x = b.x + tile * kInt4TileK;
    const float* const scales = b.scales + (2 * tile >> b.shift) * kInt4TileN + 2 * first;
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
      Words words[kParts];
      for (int i = 0; i < kParts; ++i)
        words[i] =
            (Words)load_floats(reinterpret_cast<const float*>(bytes + 64 * pair) + i * kLanes);
      Floats products[2][kRows] = {};
#pragma GCC unroll 16
      for (int i = 0; i < 4 * kParts; ++i) {
        const int shift = i / kParts * 8;
        const Floats low = codes_at(words[i % kParts], shift),
                     high = codes_at(words[i % kParts], shift + 4);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          Floats value = load_floats(x + row * b.row + i * kLanes);
#if defined(__x86_64__)
          __asm__("" : "+x"(value));  // or it is loaded for each product
#endif
          products[0][row] += low * value, products[1][row] += high * value;
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Floats scale = broadcast(scales[2 * pair + half]);
        if (kTwoGroups) {  // of a word, by the column of its bytes
          Ints second;
          for (int lane = 0; lane < kLanes; ++lane) second[lane] = lane % 4 < 2 ? 0 : -1;
          scale = second ? broadcast(scales[kInt4TileN + 2 * pair + half]) : scale;
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
          sums[2 * pair + half][row] += products[half][row] * scale;
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kPairs; ++i)
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) b.sums[2 * first + i][row] = sums[i][row];
}

template <int kRows>
static void multiply_block(Block& b) {
  constexpr int kPairs = kLanes < 16 ? 1 : 8 / kRows;  // as there are registers
  for (int64_t pair = 0; pair < 8; pair += kPairs)
    b.shift == 0 ? multiply_pairs<kPairs, kRows, true>(b, pair)
                 : multiply_pairs<kPairs, kRows, false>(b, pair);
}

/// Load the scales of a block, and add its products with zero points to the offsets.
static void start_block(Block& b, const Int4View& w, int64_t tile, int64_t tile_k,
                        const float* sums, int64_t rows) {
  const int64_t first = 2 * tile_k >> b.shift, groups = 2 * b.tiles_k >> b.shift;
  const int64_t offset = (tile * w.groups + first) * kInt4TileN, count = groups * kInt4TileN;
  alignas(64) float buffer[kBlock * 2 * kInt4TileN];
  narrow(widen(w.scales, offset, count, w.scale_type, buffer), b.scales, 0, count,
         ElementType::f32);
  for (int64_t i = 0; !w.zeros && i < count; ++i) buffer[i] = 8;
  const float* const zeros = w.zeros ? widen(w.zeros, offset, count, w.zero_type, buffer) : buffer;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      float sum = 0;
      for (int64_t i = 0; i < 1 << b.shift; ++i)
        sum += sums[row * w.tiles_k * 2 + ((first + group) << b.shift) + i];
      for (int64_t i = 0; i < kInt4TileN; ++i) {
        const int64_t at = group * kInt4TileN + i;
        b.offsets[row][i] += zeros[at] * b.scales[at] * sum;
      }
    }
  }
}

void int4_product_cpu(const Int4Product& c, const float* x, const float* sums, int64_t begin,
                      int64_t end) {
  const Int4View& w = c.weight;
  Block b;
  b.row = w.tiles_k * kInt4TileK, b.shift = w.group_size == 32 ? 0 : w.group_size == 64 ? 1 : 2;
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t row = 0, rows; row < c.m; row += rows) {
      rows = c.m - row >= 4 ? 4 : c.m - row >= 2 ? 2 : 1;
      memset(b.sums, 0, sizeof b.sums), memset(b.offsets, 0, sizeof b.offsets);
      for (int64_t tile_k = 0; tile_k < w.tiles_k; tile_k += kBlock) {
        b.bytes = w.packed + (tile * w.tiles_k + tile_k) * kInt4TileBytes;
        b.x = x + row * b.row + tile_k * kInt4TileK;
        b.tiles_k = least(kBlock, w.tiles_k - tile_k);
        start_block(b, w, tile, tile_k, sums + row * w.tiles_k * 2, rows);
        rows == 4 ? multiply_block<4>(b) : rows == 2 ? multiply_block<2>(b) : multiply_block<1>(b);
      }
      for (int64_t i = 0; i < rows * kInt4TileN; ++i) {
        const int64_t at = i % kInt4TileN, n = tile * kInt4TileN + at / 2 + 8 * (at % 2);
        if (n >= w.n) continue;
        float value = sum_of_lanes(b.sums[at][i / kInt4TileN]) - b.offsets[i / kInt4TileN][at];
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
