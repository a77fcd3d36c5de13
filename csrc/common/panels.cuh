// Tiles of 16-bit elements in shared memory, so that neither their rows nor their columns meet in
// one bank.
//
// A tile is panels of 64 (or 32) columns, one after the other. A panel's row is 128 (or 64) bytes,
// its 16-byte vectors permuted within groups of 8 rows. That is the layout of the copy engine's 128
// (64) byte swizzle and of wgmma's operands, and what ldmatrix reads without conflicts.
#pragma once

#include "common/device.cuh"

namespace flexops {

/// Four 8 x 8 matrices of 16-bit elements: lane 8 i + j has the address of row j of the i-th one.
template <bool kTransposed>
FLEXOPS_DEVICE void load_words(u32 (&out)[4], u32 address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  }
}

/// An 8 x 8 matrix of 16-bit elements, of which a lane has two of row lane / 4, transposed.
FLEXOPS_DEVICE u32 transposed(u32 word) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}

template <int kRows_, int kColumns_>
struct Panels {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kPanel = kColumns % 64 == 0 ? 64 : 32;  // columns
  static constexpr int kPanels = kColumns / kPanel, kVectors = kPanel / 8;
  static constexpr int kRowBytes = kPanel * 2, kPanelBytes = kRows * kRowBytes,
                       kBytes = kPanels * kPanelBytes;
  static_assert(kColumns % kPanel == 0, "panels are 32 or 64 columns");

  /// Where the 8 elements from column 8 `vector` on of a row lie. Panels begin at multiples of 1024
  /// bytes.
  static FLEXOPS_DEVICE u32 place(u32 tile, u32 row, u32 vector) {
    const u32 swizzled = vector % kVectors ^ (kPanel == 64 ? row % 8 : row / 2 % 4);
    return tile + vector / kVectors * kPanelBytes + row * kRowBytes + swizzled * 16;
  }
  /// 16 x 16 elements from (row, column) on, both multiples of 16, for mma.sync. As a left operand:
  static FLEXOPS_DEVICE void load_left(u32 (&out)[4], u32 tile, int row, int column) {
    load_words<false>(out, matrices(tile, row, lane() % 16, column, lane() / 16));
  }
  /// A left operand that is stored transposed: rows of the tile are summed over.
  static FLEXOPS_DEVICE void load_left_transposed(u32 (&out)[4], u32 tile, int row, int column) {
    load_words<true>(out,
                     matrices(tile, row, lane() / 16 * 8 + lane() % 8, column, lane() / 8 % 2));
  }
  /// Two right operands, of 8 rows each, whose columns are summed over.
  static FLEXOPS_DEVICE void load_right(u32 (&out)[4], u32 tile, int row, int column) {
    load_words<false>(out,
                      matrices(tile, row, lane() / 16 * 8 + lane() % 8, column, lane() / 8 % 2));
  }
  /// Two right operands, of 8 columns each, whose rows are summed over.
  static FLEXOPS_DEVICE void load_right_transposed(u32 (&out)[4], u32 tile, int row, int column) {
    load_words<true>(out, matrices(tile, row, lane() % 16, column, lane() / 16));
  }
  /// A warp's 16 rows of packed fragments (as a left operand has them) to the rows from `row` and
  /// the columns from `column` on. sm_90.
  template <int N>
  static FLEXOPS_DEVICE void store_matrices(u32 tile, int row, const u32 (&words)[N],
                                            int column = 0) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       matrices(tile, row, lane() % 16, column + 16 * i, lane() / 16)),
                   "r"(words[4 * i]), "r"(words[4 * i + 1]), "r"(words[4 * i + 2]),
                   "r"(words[4 * i + 3])
                   : "memory");
  }
  /// The same transposed: to the 16 columns from `column` on.
  template <int N>
  static FLEXOPS_DEVICE void store_transposed(u32 tile, const u32 (&words)[N], int column) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
              matrices(tile, 16 * i, lane() / 16 * 8 + lane() % 8, column, lane() / 8 % 2)),
          "r"(words[4 * i]), "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
          : "memory");
  }
  /// As store_matrices() by plain stores, to the columns from `column` on.
  template <int N>
  static FLEXOPS_DEVICE void store_words(u32 tile, int row, int column, const u32 (&words)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      asm volatile(
          "st.shared.u32 [%0], %1;" ::"r"(
              place(tile, row + lane() / 4 + i % 2 * 8, column / 8 + i / 2) + lane() % 4 * 4),
          "r"(words[i])
          : "memory");
  }

  template <bool kTransposed>
  static FLEXOPS_DEVICE void load_matrices(u32 (&out)[4], u32 address) {
    load_words<kTransposed>(out, address);
  }

 private:
  static FLEXOPS_DEVICE u32 lane() { return threadIdx.x % 32; }
  /// A lane's row of four 8 x 8 matrices. What differs from place(): the column's part is one
  /// instruction, on what all columns share.
  static FLEXOPS_DEVICE u32 matrices(u32 tile, int row, u32 lane_row, int column, u32 lane_vector) {
    const u32 swizzle = kPanel == 64 ? lane_row % 8 : lane_row / 2 % 4;
    const u32 shared = tile + (row + lane_row) * kRowBytes + (lane_vector ^ swizzle) * 16;
    return (shared ^ static_cast<u32>(column / 8 % kVectors * 16)) +
           column / 8 / kVectors * kPanelBytes;
  }
};

}  // namespace flexops
