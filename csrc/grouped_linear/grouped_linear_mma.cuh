// Grouped products by mma.sync, on sm_80 and newer.
//
// A block of threads takes every gridDim-th tile of kM x kN results (persistent). Its eight warps
// have 32 x 64 of them each. Operands come by cp.async into a ring of kStages stages of 64
// summands; rows and columns that are another expert's, or do not exist, are zeros there.
#pragma once

#include "common/mma.cuh"
#include "grouped_linear/grouped_linear.cuh"

namespace flexops::grouped {

struct MmaParams {
  const void *a, *b;  // contiguous
  Product product;
};

template <int kForm, int kGate>
struct MmaShape {
  static constexpr bool kGated = kGate != kNoGate;
  static constexpr int kM = 128, kN = 128, kK = 64, kStages = 3, kThreads = 256;
  static constexpr int kColumns = kGated ? kN / 2 : kN;  // of a tile of results
  using A = Panels<kForm == kOuter ? kK : kM, kForm == kOuter ? kM : kK>;
  using B = Panels<kForm == kByRows ? kN : kK, kForm == kByRows ? kK : kN>;
  using HalfB = Panels<kN / 2, kK>;  // with a gate: of the gate, or of up
  static constexpr int kStageBytes = A::kBytes + B::kBytes, kBytes = kStages * kStageBytes;
};

template <class T, int kForm, int kGate>
__global__ void __launch_bounds__(256, 1) product(const FLEXOPS_GRID_CONSTANT MmaParams params) {
  using Shape = MmaShape<kForm, kGate>;
  using A = typename Shape::A;
  using B = typename Shape::B;
  constexpr int kK = Shape::kK, kStages = Shape::kStages;
  __align__(1024) extern __shared__ u8 memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(memory));
  const Product& p = params.product;
  const T *const a = static_cast<const T*>(params.a), *const b = static_cast<const T*>(params.b);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * (Shape::kColumns / 2);

  each_tile<kForm, Shape>(p, [&](int expert, int begin, int end, int row, int column, int stages) {
    const auto load_stage = [&](int i) {
      const u32 to_a = shared + i % kStages * Shape::kStageBytes, to_b = to_a + A::kBytes;
      const i64 k = static_cast<i64>(i) * kK;
      if constexpr (kForm == kOuter) {
        const int rows = end - begin - i * kK;
        load_rows<A, Shape::kThreads>(to_a, a + (begin + k) * p.m + row, p.m, rows, p.m - row);
        load_rows<B, Shape::kThreads>(to_b, b + (begin + k) * p.n + column, p.n, rows,
                                      p.n - column);
      } else {
        const int left = p.k - i * kK;
        load_rows<A, Shape::kThreads>(to_a, a + static_cast<i64>(row) * p.k + k, p.k, end - row,
                                      left);
        const T* const matrix = b + static_cast<i64>(expert) * p.n * p.k;
        if constexpr (kForm == kByColumns) {
          load_rows<B, Shape::kThreads>(to_b, matrix + k * p.n + column, p.n, left, p.n - column);
        } else if constexpr (Shape::kGated) {
          using Half = typename Shape::HalfB;
          const T* const from = matrix + static_cast<i64>(column) * p.k + k;
          load_rows<Half, Shape::kThreads>(to_b, from, p.k, p.n / 2 - column, left);
          load_rows<Half, Shape::kThreads>(to_b + Half::kBytes,
                                           from + static_cast<i64>(p.n / 2) * p.k, p.k,
                                           p.n / 2 - column, left);
        } else {
          load_rows<B, Shape::kThreads>(to_b, matrix + static_cast<i64>(column) * p.k + k, p.k,
                                        p.n - column, left);
        }
      }
    };

    float acc[2][32] = {};  // 16 rows each, by 64 columns
    __syncthreads();        // the tile before is read
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < stages) load_stage(i);
      async_commit();
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      async_wait(kStages - 2);
      __syncthreads();
      if (i + kStages - 1 < stages) load_stage(i + kStages - 1);
      async_commit();
      const u32 at_a = shared + i % kStages * Shape::kStageBytes, at_b = at_a + A::kBytes;
#pragma unroll
      for (int step = 0; step < kK; step += 16) {
        u32 left[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if constexpr (kForm == kOuter) {
            A::load_left_transposed(left[t], at_a, step, warp_row + 16 * t);
          } else {
            A::load_left(left[t], at_a, warp_row + 16 * t, step);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // With a gate columns 32 to 63 are up's.
          const int at =
              warp_column + (Shape::kGated ? j / 2 * (Shape::kN / 2) + j % 2 * 16 : 16 * j);
          u32 right[4];
          if constexpr (kForm == kByRows) {
            B::load_right(right, at_b, at, step);
          } else {
            B::load_right_transposed(right, at_b, step, at);
          }
#pragma unroll
          for (int t = 0; t < 2; ++t) mma_pair<T>(&acc[t][8 * j], left[t], right);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t)
      store_results<T, kForm, kGate>(p, acc[t], expert, row + warp_row + 16 * t, end,
                                     column + warp_column);
  });
}

}  // namespace flexops::grouped
