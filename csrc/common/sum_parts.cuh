// The sum over the parts of a gradient that blocks have added up: of a weight's, say, whose every
// row has a share in it.
#pragma once

#include "common/elements.cuh"
#include "common/rows.cuh"

namespace flexops {

inline constexpr int kSumThreads = 512, kSumColumns = 8;  // of a block: 32 bytes of each part

struct SumParts {
  const float* parts[2];  // [count, columns] each
  void* out[2];
  ElementType type[2];
  i64 count;
  int columns;
};

/// Always in the same order.
__global__ void __launch_bounds__(kSumThreads) sum_parts(const FLEXOPS_GRID_CONSTANT SumParts p) {
  constexpr int kSlices = kSumThreads / kSumColumns, kLines = 8;
  __shared__ float shared[kSlices][kSumColumns + 1];
  const int lane = static_cast<int>(threadIdx.x) % kSumColumns,
            slice = static_cast<int>(threadIdx.x) / kSumColumns;
  const int column = static_cast<int>(blockIdx.x) * kSumColumns + lane;
  // Each slice adds up its lines, in several sums.
  // By halves, so that errors add up as the logarithm does.
  float sums[kLines] = {};
  if (column < p.columns) {
    const float* from = p.parts[blockIdx.y] + column;
#pragma unroll 1
    for (i64 i = slice; i < p.count; i += kLines * kSlices) {
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        const i64 line = i + k * kSlices;
        if (line < p.count) sums[k] += from[line * p.columns];
      }
    }
  }
  // Reduce the slices in shared memory.
  shared[slice][lane] = rows::sum_tree<kLines>(sums);
#pragma unroll
  for (int half = kSlices / 2; half > 0; half /= 2) {
    __syncthreads();
    if (slice < half) shared[slice][lane] += shared[slice + half][lane];
  }
  // Write.
  if (slice == 0 && column < p.columns)
    store_any(p.out[blockIdx.y], column, shared[0][lane], p.type[blockIdx.y]);
}

}  // namespace flexops
