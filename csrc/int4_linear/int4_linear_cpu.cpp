// Products with 4-bit weights on the CPU: compiled once per ISA level (common/cpu.h). Formulas and
// the layout of the weight: flexops/ops/int4_linear.py.
//
// 64 bytes of a tile hold 64 columns of two rows. x is put into the order of these bytes once, so
// that codes become floats as they lie, without shuffles. Groups of 32 alternate every 8 bytes:
// scales and zero points are applied to 16 lanes, whatever the group size, after 64 columns.

#include "int4_linear/int4_linear.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

/// The column of a tile that byte `position` of 64 holds.
static int64_t column_of(int64_t position) {
  const int64_t within[4] = {0, 8, 1, 9};
  return position / 4 % 4 * 16 + position / 16 * 2 + within[position % 4];
}

constexpr int64_t kLaneSums = 16;
constexpr int kParts = static_cast<int>(kLaneSums) / kLanes;  // registers for 16 lanes

void int4_order_cpu(const Int4Product& c, float* x, float* sums, int64_t begin, int64_t end) {
  const Int4View& w = c.weight;
  const int64_t columns = w.tiles_k * kInt4TileK;
  int64_t order[kInt4TileK];
  for (int64_t i = 0; i < kInt4TileK; ++i) order[i] = column_of(i);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t tile = 0; tile < w.tiles_k; ++tile) {
      float* const to = x + row * columns + tile * kInt4TileK;
      float* const sum = sums + (row * w.tiles_k + tile) * kLaneSums;
      alignas(64) float buffer[kInt4TileK] = {};
      const int64_t count = least(kInt4TileK, w.k - tile * kInt4TileK);
      const float* from = widen(c.x, row * w.k + tile * kInt4TileK, count, c.type, buffer);
      for (int64_t i = 0; i < kInt4TileK; ++i) to[i] = order[i] < count ? from[order[i]] : 0.0f;
      for (int64_t i = 0; i < kLaneSums; ++i)
        sum[i] = (to[i] + to[i + 16]) + (to[i + 32] + to[i + 48]);
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

/// Registers of the codes of 16 bytes: of their low halves, or of their high ones.
struct Codes {
  Floats low[kParts], high[kParts];
};
static inline Codes load_codes(const uint8_t* from) {
  Codes out;
  for (int i = 0; i < kParts; ++i) {
    const uint8_t* const bytes = from + i * kLanes;
#if defined(__AVX512F__)
    const __m512i words = _mm512_maskz_cvtepu8_epi32(
        0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    out.low[i] = _mm512_maskz_cvtepi32_ps(0xffff, (__m512i)((Words)words & 15u));
    out.high[i] = _mm512_maskz_cvtepi32_ps(0xffff, (__m512i)((Words)words >> 4));
#elif defined(__AVX2__)
    const __m256i words =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    out.low[i] = _mm256_cvtepi32_ps((__m256i)((Words)words & 15u));
    out.high[i] = _mm256_cvtepi32_ps((__m256i)((Words)words >> 4));
#else
    for (int lane = 0; lane < kLanes; ++lane) {
      out.low[i][lane] = static_cast<float>(bytes[lane] & 15);
      out.high[i][lane] = static_cast<float>(bytes[lane] >> 4);
    }
#endif
  }
  return out;
}

/// Scale and zero point of 16 lanes of one row in one tile: those of two groups of 32 alternate
/// every 8 lanes.
struct Numbers {
  Floats scale[kParts], zero[kParts];
};
static inline Numbers load_numbers(const Int4View& w, int64_t tile, int64_t tile_k, int64_t at) {
  const int64_t first = tile_k * kInt4TileK / w.group_size;
  Numbers out;
  const Number of[2] = {load_number(w, tile, first, at),
                        load_number(w, tile, first + (w.group_size == 32 ? 1 : 0), at)};
  for (int i = 0; i < kParts; ++i) {
    float scale[kLanes], zero[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Number& number = of[(i * kLanes + lane) / 8];
      scale[lane] = number.scale, zero[lane] = number.zero;
    }
    out.scale[i] = load_floats(scale), out.zero[i] = load_floats(zero);
  }
  return out;
}

/// Rows g and g + 8 of a tile of rows, times up to kRows rows of x.
template <int kRows>
static void multiply_rows(const Int4Product& c, const float* x, const float* sums, int64_t tile,
                          int64_t g, int64_t first) {
  const Int4View& w = c.weight;
  const int64_t columns = w.tiles_k * kInt4TileK;
  Floats low[kRows] = {}, high[kRows] = {};
  for (int64_t tile_k = 0; tile_k < w.tiles_k; ++tile_k) {
    const uint8_t* const bytes = w.packed + (tile * w.tiles_k + tile_k) * kInt4TileBytes + 64 * g;
    const Numbers of_low = load_numbers(w, tile, tile_k, 2 * g),
                  of_high = load_numbers(w, tile, tile_k, 2 * g + 1);
    Floats low_sum[kRows][kParts] = {}, high_sum[kRows][kParts] = {};
    for (int64_t at = 0; at < kInt4TileK; at += 16) {
      const Codes codes = load_codes(bytes + at);
      for (int row = 0; row < kRows; ++row) {
        const float* const from = x + (first + row) * columns + tile_k * kInt4TileK + at;
        for (int i = 0; i < kParts; ++i) {
          const Floats value = load_floats(from + i * kLanes);
          low_sum[row][i] += codes.low[i] * value;
          high_sum[row][i] += codes.high[i] * value;
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const float* const sum = sums + ((first + row) * w.tiles_k + tile_k) * kLaneSums;
      for (int i = 0; i < kParts; ++i) {
        const Floats of_x = load_floats(sum + i * kLanes);
        low[row] += of_low.scale[i] * (low_sum[row][i] - of_low.zero[i] * of_x);
        high[row] += of_high.scale[i] * (high_sum[row][i] - of_high.zero[i] * of_x);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t n = tile * kInt4TileN + g + 8 * half;
      if (n >= w.n) continue;
      float value = sum_of_lanes(half ? high[row] : low[row]);
      if (c.bias) value += load(c.bias, n, c.type);
      store(c.out, (first + row) * w.n + n, value, c.type);
    }
  }
}

void int4_product_cpu(const Int4Product& c, const float* x, const float* sums, int64_t begin,
                      int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t g = 0; g < 8; ++g) {
      int64_t row = 0;
      for (; row + 4 <= c.m; row += 4) multiply_rows<4>(c, x, sums, tile, g, row);
      for (; row + 2 <= c.m; row += 2) multiply_rows<2>(c, x, sums, tile, g, row);
      for (; row < c.m; ++row) multiply_rows<1>(c, x, sums, tile, g, row);
    }
  }
}

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

void int4_unpack_cpu(const Int4View& w, void* out, ElementType type, int64_t begin, int64_t end) {
  for (int64_t pair = begin * 8; pair < end * 8; ++pair) {
    const int64_t tile = pair / 8, g = pair % 8, row = tile * kInt4TileN + g;
    for (int64_t tile_k = 0; tile_k < w.tiles_k; ++tile_k) {
      const uint8_t* const bytes = w.packed + (tile * w.tiles_k + tile_k) * kInt4TileBytes + 64 * g;
      alignas(64) float values[2][kInt4TileK];
      for (int64_t column = 0; column < kInt4TileK; column += 16) {
        const int64_t group = (tile_k * kInt4TileK + column) / w.group_size;
        const Number low = load_number(w, tile, group, 2 * g),
                     high = load_number(w, tile, group, 2 * g + 1);
        Bytes words;
        for (int64_t t = 0; t < 4; ++t)
          memcpy(reinterpret_cast<char*>(&words) + 4 * t, bytes + 16 * t + column / 4, 4);
        words = by_column(words);
        uint8_t ordered[16];
        memcpy(ordered, &words, sizeof ordered);
        const Codes codes = load_codes(ordered);
        for (int i = 0; i < kParts; ++i) {
          const int64_t to = column + i * kLanes;
          store_floats(values[0] + to, (codes.low[i] - low.zero) * low.scale);
          store_floats(values[1] + to, (codes.high[i] - high.zero) * high.scale);
        }
      }
      const int64_t first = tile_k * kInt4TileK, count = least(kInt4TileK, w.k - first);
      if (row < w.n) narrow(values[0], out, row * w.k + first, count, type);
      if (row + 8 < w.n) narrow(values[1], out, (row + 8) * w.k + first, count, type);
    }
  }
}

}  // namespace flexops::FLEXOPS_ISA
