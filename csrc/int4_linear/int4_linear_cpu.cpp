// Products with 4-bit weights on the CPU: compiled once per ISA level (common/cpu.h). Formulas and
// the layout of the weight: flexops/ops/int4_linear.py.
//
// 64 bytes of a tile hold 64 columns of two rows, as 16 words. x is put into the order in which
// codes are extracted from these words once, so that they become values without being moved. Values
// are multiplied by several rows of x from registers. Where codes themselves are multiplied, the
// sum of a group is multiplied by its scale, and zero points by the sums of x in groups.

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

/// floats: codes become float32. halves: they become bfloat16, which is exact, for vdpbf16ps.
/// rounded: so do the values of the weight, as in torch's product.
enum class Method { floats, halves, rounded };

static Method method_of([[maybe_unused]] const Int4Product& c) {
#if FLEXOPS_BF16_PRODUCTS
  if (c.type == ElementType::bf16 && __builtin_cpu_supports("avx512bf16"))
    return c.m > kMostRows && c.weight.group_size > 32 ? Method::rounded : Method::halves;
#endif
  return Method::floats;
}

/// AVX-512 looks the values of codes up. Other levels multiply x by twice MXFP4's numbers, or by
/// the codes of odd bytes, and by those in the upper halves of bytes, where they are: 2^8 and 2^4
/// times as large.
constexpr bool kTables = kLanes == 16;
constexpr float kOddByte = 0x1p-8f, kUpperHalf = 0x1p-4f;

/// Whether codes are multiplied where they are.
static bool in_place(const Int4View& w, Method method) {
  return method == Method::floats && !kTables && !w.mxfp4;
}

/// Whether zero points are subtracted from sums.
static bool sums_codes(const Int4Product& c, Method method) {
  return in_place(c.weight, method) || (method == Method::halves && c.weight.zeros);
}

/// The sums of x in groups, after x itself.
template <class T>
static T* group_sums(const Int4Product& c, T* x) {
  return x + c.m * c.weight.tiles_k * kInt4TileK;
}

void int4_order_cpu(const Int4Product& c, float* x, int64_t begin, int64_t end) {
  const int64_t tiles = c.weight.tiles_k, most = rows_at_once(c), group = c.weight.group_size;
  const bool halves = method_of(c) != Method::floats;
  const float odd_byte = in_place(c.weight, method_of(c)) ? kOddByte : 1.0f;
  int64_t order[kInt4TileK];
  for (int64_t i = 0; i < kInt4TileK; ++i)
    order[i] =
        halves ? column_of(i / 32 + i % 2 * 2, i % 32 / 2) : column_of(i / kWords, i % kWords);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row / most * most, rows = least(most, c.m - first);
    float* const sums = group_sums(c, x) + row * c.weight.groups;
    memset(sums, 0, static_cast<size_t>(c.weight.groups) * sizeof *sums);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t from = row * c.weight.k + tile * kInt4TileK,
                    to = (first * tiles + tile * rows + row - first) * kInt4TileK;
      alignas(64) float buffer[kInt4TileK] = {};
      const int64_t count = least(kInt4TileK, c.weight.k - tile * kInt4TileK);
      narrow(widen(c.x, from, count, c.type, buffer), buffer, 0, count, ElementType::f32);
      for (int64_t i = 0; i < kInt4TileK; i += least(group, kInt4TileK)) {
        Floats sum = {};
        for (int64_t j = 0; j < least(group, kInt4TileK); j += kLanes)
          sum += load_floats(buffer + i + j);
        sums[(tile * kInt4TileK + i) / group] += sum_of_lanes(sum);
      }
      if (halves) {
        for (int64_t i = 0; i < kInt4TileK; ++i)
          reinterpret_cast<uint16_t*>(x)[to + i] =
              static_cast<uint16_t>(bits_of(buffer[order[i]]) >> 16);
      } else {
        for (int64_t i = 0; i < kInt4TileK; ++i)
          x[to + i] = buffer[order[i]] * (i / kWords % 2 ? odd_byte : 1.0f);
      }
    }
  }
}

/// Scale and zero point of a group of a row.
struct Number {
  float scale, zero;
};
static inline Number load_number(const Int4View& w, int64_t tile, int64_t group, int64_t at) {
  const int64_t index = (tile * w.groups + group) * kInt4TileN + at;
  const float zero = w.mxfp4 ? 0.0f : 8.0f;
  return {load(w.scales, index, w.scale_type), w.zeros ? load(w.zeros, index, w.zero_type) : zero};
}

/// A number in all lanes.
static inline Floats broadcast(float value) {
  return (Floats)(Words{} + bits_of(value));  // an addition of floats would be computed
}

/// Pairs of rows of the weight that are multiplied at once: with these rows of x, their sums take
/// at most half of the registers.
constexpr int pairs_of(int rows) {
  if (kLanes < 16) return rows == 1 ? 2 : 1;
  return rows == 1 ? 8 : rows == 2 ? 4 : 1;
}

constexpr int64_t kMostGroups = 64;  // whose scales are loaded at once
constexpr int64_t kBatches = 4;      // of rows of x, which share tables

/// Tiles of columns of a block, whose x stays in the first cache.
static int64_t tiles_of_block(Method method, int64_t rows) {
  return rows == 1 ? 32 : method == Method::floats ? 8 : 16;
}

/// A tile of rows, a block of columns and a batch of rows of x.
struct Block {
  const uint8_t* bytes;
  const float* x;               // [tiles_k, rows of x, kInt4TileK]
  int64_t tiles_k;              // in this block
  int shift;                    // a group has 32 << shift columns
  const float *scales, *zeros;  // [groups, kInt4TileN]
  const uint16_t* tables;
  Floats* sums;  // [kInt4TileN, rows of x], over this block and those before it
};

/// The codes of a weight: whole numbers in groups of more than 32 columns, or of 32, or MXFP4's
/// numbers in groups of 32.
enum class Codes { whole, whole32, mxfp4 };

constexpr float kMxfp4Numbers[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/// What the codes of a row of a tile stand for: (code - zero) * scale, the two of a word's group.
/// Or, without tables, twice MXFP4's numbers, or the codes where they are in bytes.
#if defined(__AVX512F__)
template <Codes codes>
struct RowValues {
  static constexpr bool kTwoGroups = codes != Codes::whole;
  Floats tables[2];

  RowValues(const float* scales, const float* zeros) {
    constexpr Floats kWhole = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats numbers = codes == Codes::mxfp4 ? load_floats(kMxfp4Numbers) : kWhole;
    for (int i = 0; i < (kTwoGroups ? 2 : 1); ++i)
      tables[i] = (numbers - broadcast(zeros[i * kInt4TileN])) * broadcast(scales[i * kInt4TileN]);
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
/// Twice MXFP4's numbers, with a sign, of a code in each byte.
static inline Words twice_numbers(Words codes) {
  typedef int8_t Signed __attribute__((vector_size(sizeof(Words))));
#if defined(__AVX2__)
  constexpr Signed kTwice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,
                             0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return (Words)_mm256_shuffle_epi8((__m256i)kTwice, (__m256i)codes);
#else
  const Signed size = (Signed)codes & 7, negative = (Signed)codes > 7;
  const Signed twice = size + ((size > 4) & (size - 4)) + ((size > 6) & 2);
  return (Words)((twice ^ negative) - negative);
#endif
}

template <Codes codes>
struct RowValues {
  RowValues(const float*, const float*) {}

  Floats at(Words words, int shift) const {
    Ints numbers;
    if constexpr (codes == Codes::mxfp4) {
      const Words all = twice_numbers(words >> (shift & 4) & 0x0f0f0f0fu);  // for four shifts
      numbers = (Ints)(all << (24 - (shift & 24))) >> 24;
    } else {
      numbers = (Ints)(words >> (shift & 16) & (15u << (shift & 15)));
    }
#if defined(__AVX2__)
    return _mm256_cvtepi32_ps((__m256i)numbers);
#else
    return __builtin_convertvector(numbers, Floats);
#endif
  }
};
#endif

/// The scales of a row of a tile for the lanes of a sum.
template <bool kTwoGroups>
static inline Floats scales_of(const float* scales) {
  if constexpr (!kTwoGroups) return broadcast(*scales);
  Ints second;
  for (int lane = 0; lane < kLanes; ++lane) second[lane] = lane % 4 < 2 ? 0 : -1;
  return second ? broadcast(scales[kInt4TileN]) : broadcast(*scales);
}

/// 64 bytes, two rows of the weight, times rows of x.
template <int kRows, Codes codes>
static inline void add_floats(Floats (&sums)[2][kRows], const uint8_t* bytes, const float* x,
                              const RowValues<codes>& low, const RowValues<codes>& high) {
#pragma GCC unroll 8
  for (int i = 0; i < kParts; ++i) {
    const Words words = (Words)load_floats(reinterpret_cast<const float*>(bytes) + i * kLanes);
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte) {
      const Floats first = low.at(words, 8 * byte), second = high.at(words, 8 * byte + 4);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        Floats value = load_floats(x + row * kInt4TileK + byte * kWords + i * kLanes);
#if defined(__x86_64__)
        __asm__("" : "+v"(value));  // or it is loaded for each product
#endif
        sums[0][row] += first * value, sums[1][row] += second * value;
      }
    }
  }
}

#if FLEXOPS_BF16_PRODUCTS
typedef uint16_t Halves __attribute__((vector_size(64)));

/// sum + a * b for both bfloat16 of each word.
static inline Floats add_products(Floats sum, Halves a, Halves b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

/// From the lowest 4 bits of each half; the 32 entries repeat 16.
static inline Halves look_up(Halves table, Halves codes) {
  Halves out;
  __asm__("vpermw %1, %2, %0" : "=v"(out) : "v"(table), "v"(codes));
  return out;
}

/// Codes from 0 to 15 less 8, and MXFP4's numbers, as bfloat16.
constexpr Halves kCodes = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                           0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                           0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                           0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
constexpr Halves kNumbers = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                             0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                             0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                             0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

/// The values of codes from 0 to 15 of each row and group of a tile of rows.
static void make_tables(const float* scales, const float* zeros, int64_t count, uint16_t* tables) {
  constexpr Floats kAll = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < count; ++i)
    store_bf16(tables + 16 * i, (kAll - broadcast(zeros[i])) * broadcast(scales[i]));
}
static inline Halves load_table(const uint16_t* from) {
  Halves out;
  __asm__("vbroadcasti64x4 %1, %0" : "=v"(out) : "m"(*reinterpret_cast<const __m256i*>(from)));
  return out;
}

/// 64 bytes, two rows of the weight, times rows of x.
template <int kRows>
static inline void add_halves(Floats (&sums)[2][kRows], const uint8_t* bytes, const float* x,
                              Halves low, Halves high) {
  const Halves words = (Halves)load_floats(reinterpret_cast<const float*>(bytes));
  const Halves values[2][2] = {{look_up(low, words), look_up(low, words >> 8)},
                               {look_up(high, words >> 4), look_up(high, words >> 12)}};
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    Halves first = (Halves)load_floats(x + row * kInt4TileK / 2),
           second = (Halves)load_floats(x + row * kInt4TileK / 2 + kLanes);
    __asm__("" : "+v"(first), "+v"(second));  // or they are loaded for each product
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      sums[half][row] = add_products(add_products(sums[half][row], values[half][0], first),
                                     values[half][1], second);
  }
}
#endif

/// Rows g and g + 8 of the weight, and those of the pairs behind them, times rows of x.
template <Method method, int kRows, Codes codes>
static void multiply_pairs(const Block& b, int64_t g) {
  constexpr bool kTwoGroups = codes != Codes::whole;
  constexpr int kPairs = pairs_of(kRows);
  Floats sums[kPairs][2][kRows];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kPairs; ++i)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      sums[i / 2][i % 2][row] = b.sums[(2 * g + i) * kRows + row];
  for (int64_t tile = 0; tile < b.tiles_k; ++tile) {
    const uint8_t* const bytes = b.bytes + tile * kInt4TileBytes + 64 * g;
    const float* const x =
        b.x + tile * kRows * (method == Method::floats ? kInt4TileK : kInt4TileK / 2);
    const int64_t group = (2 * tile >> b.shift) * kInt4TileN + 2 * g;
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint8_t* const from = bytes + 64 * pair;
      __builtin_prefetch(from + 4 * kInt4TileBytes);
      __builtin_prefetch(from + 128 * kInt4TileBytes, 0, 2);  // for the second cache
#if FLEXOPS_BF16_PRODUCTS
      if constexpr (method == Method::rounded) {
        const uint16_t* const tables = b.tables + 16 * (group + 2 * pair);
        add_halves<kRows>(sums[pair], from, x, load_table(tables), load_table(tables + 16));
        continue;
      }
#endif
      const float* const scale = b.scales + group + 2 * pair;
      Floats parts[2][kRows] = {};  // of a group
#if FLEXOPS_BF16_PRODUCTS
      if constexpr (method == Method::halves) {
        constexpr Halves kTable = codes == Codes::mxfp4 ? kNumbers : kCodes;
        add_halves<kRows>(parts, from, x, kTable, kTable);
      }
#endif
      if constexpr (method == Method::floats) {
        const float* const zero = b.zeros + group + 2 * pair;
        const RowValues<codes> low(scale, zero), high(scale + 1, zero + 1);
        add_floats<kRows>(kTables ? sums[pair] : parts, from, x, low, high);
        if constexpr (kTables) continue;
      }
      const Floats scales[2] = {scales_of<kTwoGroups>(scale), scales_of<kTwoGroups>(scale + 1)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
          sums[pair][half][row] += parts[half][row] * scales[half];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * kPairs; ++i)
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
      b.sums[(2 * g + i) * kRows + row] = sums[i / 2][i % 2][row];
}

template <int kRows>
static void multiply_block(const Block& b, Method method, Codes codes, int64_t rows) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_block<kRows - 1>(b, method, codes, rows);
  auto multiply = codes == Codes::whole     ? multiply_pairs<Method::floats, kRows, Codes::whole>
                  : codes == Codes::whole32 ? multiply_pairs<Method::floats, kRows, Codes::whole32>
                                            : multiply_pairs<Method::floats, kRows, Codes::mxfp4>;
#if FLEXOPS_BF16_PRODUCTS
  if (method == Method::halves)
    multiply = codes == Codes::whole     ? multiply_pairs<Method::halves, kRows, Codes::whole>
               : codes == Codes::whole32 ? multiply_pairs<Method::halves, kRows, Codes::whole32>
                                         : multiply_pairs<Method::halves, kRows, Codes::mxfp4>;
  if (method == Method::rounded) multiply = multiply_pairs<Method::rounded, kRows, Codes::whole>;
#endif
  for (int64_t g = 0; g < kInt4TileN / 2; g += pairs_of(kRows)) multiply(b, g);
}

/// What products with a tile of rows keep.
struct Tile {
  float scales[kMostGroups * kInt4TileN], zeros[kMostGroups * kInt4TileN];  // zeros: times scales
  Floats sums[kBatches * kMostRows * kInt4TileN];
  float zero_sums[kBatches * kMostRows][kInt4TileN];
#if FLEXOPS_BF16_PRODUCTS
  uint16_t tables[kMostGroups * kInt4TileN * 16];
#endif
};

static void load_numbers(const void* from, int64_t offset, int64_t count, ElementType type,
                         float* to) {
  const int64_t bytes = count * element_size(type);
  const char* const next = static_cast<const char*>(from) + offset * element_size(type) + bytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
  narrow(widen(from, offset, count, type, to), to, 0, count, ElementType::f32);
}

/// Load the scales and zero points of some groups.
static void load_groups(Tile& t, const Int4View& w, Method method, int64_t tile, int64_t first,
                        int64_t groups) {
  const int64_t count = groups * kInt4TileN, from = (tile * w.groups + first) * kInt4TileN;
  load_numbers(w.scales, from, count, w.scale_type, t.scales);
  if (w.zeros) load_numbers(w.zeros, from, count, w.zero_type, t.zeros);
  for (int64_t i = 0; !w.zeros && i < count; ++i) t.zeros[i] = w.mxfp4 ? 0 : 8;
#if FLEXOPS_BF16_PRODUCTS
  if (method == Method::rounded) return make_tables(t.scales, t.zeros, count, t.tables);
#endif
  if (method == Method::floats && kTables) return;
  const float offset = method == Method::halves ? 8 : 0;  // kCodes are less by as much
  for (int64_t i = 0; i < count; i += kLanes)
    store_floats(t.zeros + i, (load_floats(t.zeros + i) - offset) * load_floats(t.scales + i));
  if (in_place(w, method))
    for (int64_t i = 1; i < count; i += 2) t.scales[i] *= kUpperHalf;
  else if (method == Method::floats)
    for (int64_t i = 0; i < count; ++i) t.scales[i] *= 0.5f;  // of twice the numbers
}

/// Add zero points times sums of x in groups, for two rows of x.
static void add_zeros(const Tile& t, const float* first, const float* second, int64_t groups,
                      float* first_sums, float* second_sums) {
  for (int64_t i = 0; i < kInt4TileN; i += kLanes) {
    Floats a[2] = {load_floats(first_sums + i)}, b[2] = {load_floats(second_sums + i)};
#pragma GCC unroll 2
    for (int64_t group = 0; group < groups; ++group) {
      const Floats zeros = load_floats(t.zeros + group * kInt4TileN + i);
      a[group % 2] += zeros * broadcast(first[group]);
      b[group % 2] += zeros * broadcast(second[group]);
    }
    store_floats(first_sums + i, a[0] + a[1]), store_floats(second_sums + i, b[0] + b[1]);
  }
}

/// Write a row of the result.
static void finish_row(const Int4Product& c, int64_t tile, int64_t row, const Floats* sums,
                       int64_t stride, const float* zero_sums) {
  const int64_t n = tile * kInt4TileN, count = least(kInt4TileN, c.weight.n - n);
  alignas(64) float values[kInt4TileN], buffer[kInt4TileN];
#pragma GCC unroll 4
  for (int64_t at = 0; at < kInt4TileN; ++at)
    values[at / 2 + 8 * (at % 2)] = sum_of_lanes(sums[at * stride]) - zero_sums[at];
  if (c.bias) {
    const float* const bias = widen(c.bias, n, count, c.type, buffer);
    for (int64_t i = 0; i < count; ++i) values[i] += bias[i];
  }
  narrow(values, c.out, row * c.weight.n + n, count, c.type);
}

/// A tile of rows times some batches of rows of x.
static void multiply_tile(Tile& t, const Int4Product& c, const float* x, int64_t tile,
                          int64_t begin, int64_t end) {
  const Int4View& w = c.weight;
  const Method method = method_of(c);
  const int64_t most = rows_at_once(c), columns = w.tiles_k * kInt4TileK;
  const int64_t floats = method == Method::floats ? kInt4TileK : kInt4TileK / 2;  // of a tile of x
  Block b;
  b.shift = w.group_size == 32 ? 0 : w.group_size == 64 ? 1 : 2;
  const Codes codes = w.mxfp4 ? Codes::mxfp4 : b.shift ? Codes::whole : Codes::whole32;
  memset(t.sums, 0, static_cast<size_t>(kInt4TileN * (end - begin)) * sizeof *t.sums);
  memset(t.zero_sums, 0, static_cast<size_t>(end - begin) * sizeof *t.zero_sums);
  const int64_t most_tiles = kMostGroups << b.shift >> 1;
  for (int64_t first = 0; first < w.tiles_k; first += most_tiles) {
    const int64_t last = least(first + most_tiles, w.tiles_k), group = 2 * first >> b.shift;
    const int64_t groups = least(w.groups - group, kMostGroups);
    load_groups(t, w, method, tile, group, groups);
    if (sums_codes(c, method))
      for (int64_t row = begin; row < end; row += 2) {
        const int64_t next = least(row + 1, end - 1);
        const float* const sums = group_sums(c, x) + group;
        add_zeros(t, sums + row * w.groups, sums + next * w.groups, groups,
                  t.zero_sums[row - begin], t.zero_sums[next - begin]);
      }
    for (int64_t row = begin, rows = most; row < end; row += rows) {
      rows = least(rows, end - row);
      const int64_t tiles = tiles_of_block(method, rows);
      b.sums = t.sums + (row - begin) * kInt4TileN;
      for (int64_t at = first; at < last; at += tiles) {
        const int64_t offset = (2 * (at - first) >> b.shift) * kInt4TileN;
        b.bytes = w.packed + (tile * w.tiles_k + at) * kInt4TileBytes;
        b.x = x + row * columns * floats / kInt4TileK + rows * at * floats;
        b.tiles_k = least(tiles, last - at);
        b.scales = t.scales + offset, b.zeros = t.zeros + offset;
#if FLEXOPS_BF16_PRODUCTS
        b.tables = t.tables + 16 * offset;
#endif
        multiply_block<kMostRows>(b, method, codes, rows);
      }
    }
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t batch = (row - begin) / most * most, rows = least(most, end - begin - batch);
    finish_row(c, tile, row, t.sums + batch * kInt4TileN + row - begin - batch, rows,
               t.zero_sums[row - begin]);
  }
}

void int4_product_cpu(const Int4Product& c, const float* x, int64_t begin, int64_t end) {
  const int64_t rows = kBatches * rows_at_once(c);
  Tile t;
  for (int64_t tile = begin; tile < end; ++tile)
    for (int64_t row = 0; row < c.m; row += rows)
      multiply_tile(t, c, x, tile, row, least(row + rows, c.m));
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

template <bool kMxfp4>
static inline Floats load_codes(const uint8_t* from) {
  if constexpr (kMxfp4) {
    Floats out;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = kMxfp4Numbers[from[lane]];
    return out;
  }
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
template <ElementType type, bool kMxfp4>
static inline void write_codes(Bytes codes, Number number, void* to) {
  uint8_t bytes[16];
  memcpy(bytes, &codes, sizeof bytes);
  for (int i = 0; i < 16; i += kLanes)
    store_elements<type>(to, i, (load_codes<kMxfp4>(bytes + i) - number.zero) * number.scale);
}

/// The 16 values of a group. Those of 16 bits are looked up, byte by byte.
template <ElementType type, bool kMxfp4>
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
      write_codes<type, kMxfp4>(kAll, number, words);
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
    write_codes<type, kMxfp4>(codes, number, to);
  }
};

/// Rows g and g + 8 of a tile of rows.
template <ElementType type, bool kMxfp4>
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
    const Values<type, kMxfp4> low(load_number(w, tile, group, 2 * g));
    for (int64_t part = 0; part < parts; ++part) low.write(codes[part] & 15, to + 16 * part * size);
    if (row + 8 >= w.n) continue;
    const Values<type, kMxfp4> high(load_number(w, tile, group, 2 * g + 1));
    for (int64_t part = 0; part < parts; ++part)
      high.write(codes[part] >> 4, to + (8 * w.k + 16 * part) * size);
  }
}

template <bool kMxfp4>
static void unpack_pairs(const Int4View& w, void* out, ElementType type, int64_t begin,
                         int64_t end) {
  const auto unpack = type == ElementType::f32    ? unpack_pair<ElementType::f32, kMxfp4>
                      : type == ElementType::bf16 ? unpack_pair<ElementType::bf16, kMxfp4>
                                                  : unpack_pair<ElementType::f16, kMxfp4>;
  for (int64_t pair = begin * 8; pair < end * 8; ++pair)
    if (pair / 8 * kInt4TileN + pair % 8 < w.n)
      unpack(w, static_cast<char*>(out), pair / 8, pair % 8);
}

void int4_unpack_cpu(const Int4View& w, void* out, ElementType type, int64_t begin, int64_t end) {
  (w.mxfp4 ? unpack_pairs<true> : unpack_pairs<false>)(w, out, type, begin, end);
}

}  // namespace flexops::FLEXOPS_ISA
