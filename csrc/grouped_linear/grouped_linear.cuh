// What kernels of grouped products share: which tiles there are, and how results are stored. There
// are three forms:
//
//   kByRows      out[t, n] = sum_k x[t, k] w[e, n, k]       e: the expert of row t
//   kByColumns   out[t, n] = sum_k x[t, k] w[e, k, n]
//   kOuter       out[e, m, n] = sum_t g[t, m] x[t, n]       over the rows t of expert e
//
// With a gate, which is kByRows, a tile has as many columns of the gate as of up: a thread has both
// of a pair, and act(gate) * up is stored beside them.
//
// Rows are sorted by expert; `offsets` has the end of each expert's rows and is read on the device
// only. Values that do not match (descending, negative, beyond the rows) are clamped, so that no
// access is out of bounds. Rows behind the last expert's belong to none: their results are zeros.
#pragma once

#include "activation/activation.cuh"
#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/elements.cuh"
#include "common/fragments.cuh"

namespace flexops::grouped {

enum Form : int { kByRows, kByColumns, kOuter };
/// Silu and gelu by tanh are one shape, gelu by erf is another (activation.cuh).
enum Gate : int { kNoGate, kSigmoidGate, kErfGate };

struct Product {
  const int* offsets;
  void* out;    // null: gate and up are not kept
  void* gated;  // with a gate: act(gate) * up
  int experts, rows;
  int m, n, k;  // of kOuter: m rows and n columns of each result; else n columns, k summands
  int tiles_m, tiles_n;
  const int* order;               // of a gathered operand: row t is row order[t] / k of it
  int choices;                    // that k
  i64 stride;                     // of out's rows
  activation::Function function;  // of the gate
};

FLEXOPS_DEVICE int clamped(int value, int least, int most) {
  return value < least ? least : value > most ? most : value;
}

/// Tiles of kM rows by `tiles_n` tiles of columns, expert by expert. Tiles are asked for in
/// ascending order. The rows behind the last expert's are those of expert number `experts`.
template <int kM>
struct RowTiles {
  const int* offsets;
  int experts, rows, tiles_n;
  int expert = 0, begin = 0, end, first = 0, tiles;

  FLEXOPS_DEVICE RowTiles(const int* offsets_, int experts_, int rows_, int tiles_n_)
      : offsets(offsets_), experts(experts_), rows(rows_), tiles_n(tiles_n_) {
    measure();
  }
  FLEXOPS_DEVICE void measure() {
    end = expert < experts ? clamped(__ldg(offsets + expert), begin, rows) : rows;
    tiles = (end - begin + kM - 1) / kM * tiles_n;
  }
  /// Whether there is a tile of that number; then `expert`, `begin` and `end` are its expert's.
  FLEXOPS_DEVICE bool seek(int tile) {
    while (tile >= first + tiles) {
      if (expert == experts) return false;
      first += tiles, begin = end, ++expert;
      measure();
    }
    return true;
  }
  FLEXOPS_DEVICE int row(int tile) const { return begin + (tile - first) / tiles_n * kM; }
  FLEXOPS_DEVICE int column_tile(int tile) const { return (tile - first) % tiles_n; }
};

/// The rows of an expert.
struct RowRange {
  int begin, end;
  FLEXOPS_DEVICE RowRange(const int* offsets, int expert, int rows) {
    begin = expert > 0 ? clamped(__ldg(offsets + expert - 1), 0, rows) : 0;
    end = clamped(__ldg(offsets + expert), begin, rows);
  }
};

/// Calls body(expert, first row, end of the expert's rows, first row and column of the result,
/// stages) for each tile of this block.
template <int kForm, class Shape, class Body>
FLEXOPS_DEVICE void each_tile(const Product& p, const Body& body) {
  const int step = static_cast<int>(gridDim.x);
  if constexpr (kForm == kOuter) {
    const int of_expert = p.tiles_m * p.tiles_n;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < of_expert * p.experts; tile += step) {
      const int expert = tile / of_expert, place = tile % of_expert;
      const RowRange range(p.offsets, expert, p.rows);
      body(expert, range.begin, range.end, place / p.tiles_n * Shape::kM,
           place % p.tiles_n * Shape::kColumns,
           (range.end - range.begin + Shape::kK - 1) / Shape::kK);
    }
  } else {
    RowTiles<Shape::kM> tiles(p.offsets, p.experts, p.rows, p.tiles_n);
    const int stages = (p.k + Shape::kK - 1) / Shape::kK;
#pragma unroll 1
    for (int tile = blockIdx.x; tiles.seek(tile); tile += step) {
      const int row = tiles.row(tile);
      body(tiles.expert, row, tiles.end, row, tiles.column_tile(tile) * Shape::kColumns,
           tiles.expert < p.experts ? stages : 0);
    }
  }
}

/// act(gate) * up of packed numbers, computed from the rounded ones.
template <class T, bool kErf>
FLEXOPS_DEVICE void multiply_gate(u32 (&out)[4], const u32 (&gates)[4], const u32 (&ups)[4],
                                  const activation::Function& f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      value[n] =
          activation::activate<kErf, false>(half_of<T>(gates[i], n), f) * half_of<T>(ups[i], n);
    out[i] = pack2<T>(value[0], value[1]);
  }
}

/// Stores the sums of a warp's 16 rows and 8 kSpan columns (with a gate as many more, of up), of
/// which a thread has rows lane / 4 (+ 8), as mma and wgmma leave them. `row` and `column` are the
/// first of the result; rows from `end` on are another expert's.
template <class T, int kForm, int kGate, int N>
FLEXOPS_DEVICE void store_results(const Product& p, const float (&acc)[N], int expert, int row,
                                  int end, int column) {
  constexpr bool kGated = kGate != kNoGate;
  constexpr int kSpan = kGated ? N / 8 : N / 4;
  const int width = kGated ? p.n / 2 : p.n, columns = width - column;
  if constexpr (kForm == kOuter) end = p.m;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * half;
    const bool valid = at < end;
    const i64 place = at + (kForm == kOuter ? static_cast<i64>(expert) * p.m : 0);
    T* const to = static_cast<T*>(p.out) + place * p.stride + column;
#pragma unroll
    for (int j = 0; j < kSpan; j += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack2<T>(acc[4 * (j + i) + 2 * half], acc[4 * (j + i) + 2 * half + 1]);
      if constexpr (kGated) {
        u32 ups[4], products[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int up = 4 * (j + i + kSpan) + 2 * half;
          ups[i] = pack2<T>(acc[up], acc[up + 1]);
        }
        multiply_gate<T, kGate == kErfGate>(products, words, ups, p.function);
        T* const gated = static_cast<T*>(p.gated) + place * width + column;
        store_columns(gated + 8 * j, products, columns - 8 * j, valid);
        if (p.out) store_columns(to + width + 8 * j, ups, columns - 8 * j, valid);
      }
      if (!kGated || p.out) store_columns(to + 8 * j, words, columns - 8 * j, valid);
    }
  }
}

}  // namespace flexops::grouped
