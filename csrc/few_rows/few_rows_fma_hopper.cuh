// Products of one or two rows without tensor cores: on an H200 the clock is lower while a kernel
// uses those, and two rows are so few that a lane can widen every weight while memory delivers the
// next ones. Formulas: flexops/ops/few_rows.py.
//
// Blocks and shapes are those of few_rows.cuh. Each four warps of a block share its 16 lines of
// weights, four lines each, and these fours share k. A warp's load is 512 bytes of one line: a lane
// has 8 neighbouring weights of it, and the numbers of x there serve the warp's four lines. A
// lane's sums are its own until the end.
#pragma once

#include "few_rows/few_rows.cuh"

namespace flexops::few_rows {

/// The sums over all lanes of kCount numbers (a power of two, at most 32): lane i gets that of
/// number i % kCount.
template <int kCount>
FLEXOPS_DEVICE float sums_over_lanes(float (&values)[kCount], int lane) {
  int mask = 1;
#pragma unroll
  for (int left = kCount / 2; left > 0; left /= 2, mask *= 2) {
    const bool odd = lane & mask;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = odd ? values[2 * i + 1] : values[2 * i];
      values[i] = kept + shuffle_xor(odd ? values[2 * i] : values[2 * i + 1], mask);
    }
  }
#pragma unroll
  for (; mask < 32; mask *= 2) values[0] += shuffle_xor(values[0], mask);
  return values[0];
}

/// As load8, of weights, and in its place: ptxas would put loads of constants (.nc) behind
/// wait_for_previous().
FLEXOPS_DEVICE uint4 load_in_place(const u16* line, int at, int k) {
  uint4 out = {0, 0, 0, 0};
  if (at >= k) return out;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(line + at));
  return out;
}

/// One of the 8 numbers of 16 bytes.
template <class T>
FLEXOPS_DEVICE float number_of(const uint4& of, int i) {
  return half_of<T>(i < 2 ? of.x : i < 4 ? of.y : i < 6 ? of.z : of.w, i % 2);
}

/// For x and weights at multiples of 16 bytes; of the inputs kDirect, and kStaged with a norm.
template <class T, int kShape, bool kGated, Input kInput, int kRows>
__global__ void __launch_bounds__(32 * kShapes[kShape].warps,
                                  kShapes[kShape].resident / kShapes[kShape].warps)
    product_by_fma_hopper(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kWarps = kShapes[kShape].warps, kLines = 4, kTeam = kColumns / kLines;
  constexpr int kParts = kWarps / kTeam, kSteps = kShapes[kShape].steps / 2;
  static_assert(kShapes[kShape].tiles == 1 && kSteps <= 2 && kInput != kDirectNorm, "not made");
  constexpr int kOut = kGated ? kColumns / 2 : kColumns;
  constexpr int kStep = 8 * 32, kStride = kParts * kSteps * kStep;
  extern __shared__ uint4 staged[];
  __shared__ float sums[kParts][kColumns][kRows];
  __shared__ float squares[kWarps][kRows];
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int part = warp / kTeam, line = warp % kTeam * kLines;  // the warp's first line

  // Which weights: four rows of them. Those behind the last one are its like.
  const int block = static_cast<int>(blockIdx.x);
  int which = 0;
  while (!kGated && which + 1 < p.count && block >= p.ends[which]) ++which;
  const int first = (block - (which ? p.ends[which - 1] : 0)) * kOut;
  const int columns = p.columns[which];
  const int column = first + line % kOut, last = columns - 1;
  const int nearest = column < last ? column : last;
  const u16* const weights = static_cast<const u16*>(p.weights[kGated ? line / kOut : which]) +
                             static_cast<i64>(nearest) * p.k;
  int lines[kLines];  // from the first one
#pragma unroll
  for (int i = 0; i < kLines; ++i)
    lines[i] = ((column + i < last ? column + i : last) - nearest) * p.k;

  // The first weights, before what the kernel ahead writes is read.
  uint4 held[2][kSteps][kLines];
  const auto fetch = [&](uint4(&to)[kSteps][kLines], int at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kLines; ++i)
        to[s][i] = load_in_place(weights + lines[i], at + kStep * s, p.k);
    }
  };
  const int begin = part * kSteps * kStep + 8 * lane;
  fetch(held[0], begin);
  fetch(held[1], begin + kStride);
  if (p.early) wait_for_previous();

  // The rows: to shared memory, or the first numbers to registers.
  u16* const rows = reinterpret_cast<u16*>(staged);
  if constexpr (kInput == kStaged) {
    stage_rows<T>(p, rows, squares);
    __syncthreads();
  }
  uint4 x[2][kSteps][kRows];
  const auto fetch_x = [&](uint4(&to)[kSteps][kRows], int at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const u16* const from = kInput == kStaged ? rows + row * staged_stride(p.k)
                                                  : static_cast<const u16*>(p.x) + row * p.k;
        to[s][row] = load8<true, Cache::normal>(from, at + kStep * s, p.k);
      }
    }
  };
  if constexpr (kInput == kDirect) {
    fetch_x(x[0], begin);
    fetch_x(x[1], begin + kStride);
  }

  float acc[kLines * kRows] = {};
  const auto multiply = [&](const uint4(&of_weights)[kLines], const uint4(&of_x)[kRows]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float wide[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) wide[row] = number_of<T>(of_x[row], i);
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const float weight = number_of<T>(of_weights[j], i);
#pragma unroll
        for (int row = 0; row < kRows; ++row) acc[j * kRows + row] += weight * wide[row];
      }
    }
  };
  const auto step = [&](uint4(&of_weights)[kSteps][kLines], uint4(&of_x)[kSteps][kRows], int at) {
    if constexpr (kInput == kStaged) fetch_x(of_x, at);
    multiply(of_weights[0], of_x[0]);  // as a loop, NVRTC 12.1 puts all arrays in local memory
    if constexpr (kSteps == 2) multiply(of_weights[1], of_x[1]);
    fetch(of_weights, at + 2 * kStride);
    if constexpr (kInput == kDirect) fetch_x(of_x, at + 2 * kStride);
  };
  for (int at = begin; at - 8 * lane < p.k; at += 2 * kStride) {
    step(held[0], x[0], at);
    if (at + kStride - 8 * lane >= p.k) break;  // without it, ptxas puts all loads at the end
    step(held[1], x[1], at + kStride);
  }

  // The sums of lanes are added, then those of the parts of k.
  const float sum = sums_over_lanes(acc, lane);
  if (lane < kLines * kRows) sums[part][line + lane / kRows][lane % kRows] = sum;
  __syncthreads();
  const int row = thread / kOut;
  if (row < kRows && first + thread % kOut < columns)
    write_one<T, kGated, kInput == kStaged>(p, which, first, thread % kOut, row, sums, squares);
}

}  // namespace flexops::few_rows
