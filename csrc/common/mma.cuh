// Products by mma.sync of tiles that cp.async loads, on sm_80 and newer.
#pragma once

#include "common/async.cuh"
#include "common/dtypes.cuh"
#include "common/panels.cuh"

namespace flexops {

/// acc[16 x 8] += left[16 x 16] right[16 x 8].
template <class T>
FLEXOPS_DEVICE void mma(float* acc, const u32 (&left)[4], u32 right0, u32 right1);
#define FLEXOPS_DEFINE_MMA(T, type)                                                     \
  template <>                                                                           \
  FLEXOPS_DEVICE void mma<T>(float* acc, const u32(&left)[4], u32 right0, u32 right1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])               \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), \
                   "r"(right1));                                                        \
  }
FLEXOPS_DEFINE_MMA(bf16, "bf16")
FLEXOPS_DEFINE_MMA(f16, "f16")
#undef FLEXOPS_DEFINE_MMA

/// 16 columns of the accumulator, acc[8], with two right operands as Panels loads them.
template <class T>
FLEXOPS_DEVICE void mma_pair(float* acc, const u32 (&left)[4], const u32 (&right)[4]) {
  mma<T>(acc, left, right[0], right[1]), mma<T>(acc + 4, left, right[2], right[3]);
}
/// Starts copies of a tile's rows, of which `rows` are there, and `columns` of each row (a multiple
/// of 8); the others become zeros.
template <class Tile, int kThreads, class T>
FLEXOPS_DEVICE void load_rows(u32 tile, const T* from, i64 stride, int rows, int columns) {
  constexpr int kVectors = Tile::kColumns / 8, kTotal = Tile::kRows * kVectors,
                kStep = kThreads / kVectors;  // rows of one pass
  const int vector = static_cast<int>(threadIdx.x) % kVectors;
  int row = static_cast<int>(threadIdx.x) / kVectors;
  if (kThreads % kVectors != 0 && row >= kStep)
    return;  // 96 columns: some threads have nothing to do
  const T* at = from + row * stride + 8 * vector;
  if (8 * vector >= columns) rows = 0;
#pragma unroll
  for (int i = 0; i < (Tile::kRows + kStep - 1) / kStep; ++i, row += kStep, at += kStep * stride) {
    if ((kTotal % (kStep * kVectors) != 0) && row >= Tile::kRows) break;
    async_copy16(Tile::place(tile, row, vector), row < rows ? at : from, row < rows);
  }
}

}  // namespace flexops
