// What kernels of grouped products share: which tiles there are, and how results are stored.
//
// Rows are sorted by expert; `offsets` has the end of each expert's rows and is read on the device
// only. Values that do not match (descending, negative, beyond the rows) are clamped, so that no
// access is out of bounds. Rows behind the last expert's belong to none: their results are zeros.
#pragma once

#include "activation/activation.cuh"
#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/elements.cuh"

namespace flexops::grouped {

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

/// word i of lane q becomes word q of lane i, among each four lanes.
FLEXOPS_DEVICE void transpose_quad(u32 (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = shuffle_xor(odd ? words[i] : words[i + 1], 1);
    if (odd) words[i] = other;
    if (!odd) words[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = shuffle_xor(high ? words[i] : words[i + 2], 2);
    if (high) words[i] = other;
    if (!high) words[i + 2] = other;
  }
}

/// Stores 32 columns of a row, of which each lane of a quad has two of every eight (the layout of
/// mma's and wgmma's accumulators), 16 bytes at a time. `to` is the row's first of these columns,
/// of which `columns` (a multiple of 8) exist; nothing is stored if not `valid`.
template <class T>
FLEXOPS_DEVICE void store_columns(T* to, u32 (&words)[4], int columns, bool valid) {
  transpose_quad(words);
  const int column = static_cast<int>(threadIdx.x % 4) * 8;
  if (valid && column < columns)
    store<Cache::normal>(reinterpret_cast<uint4*>(to + column),
                         uint4{words[0], words[1], words[2], words[3]});
}

/// act(gate) * up of two packed numbers each, computed from the rounded ones.
template <class T>
FLEXOPS_DEVICE u32 gated_pair(u32 gate, u32 up, const activation::Function& f) {
  float value[2] = {half_of<T>(gate, 0), half_of<T>(gate, 1)};
  activation::activate_all<false>(value, f);
  return pack2<T>(value[0] * half_of<T>(up, 0), value[1] * half_of<T>(up, 1));
}

}  // namespace flexops::grouped
