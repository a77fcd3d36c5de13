// Products of a few rows with weights as they are, [columns, k]: a decode step's, which take as
// long as it takes to read the weights. Formulas: flexops/ops/few_rows.py.
//
// A block computes 16 columns (or 8 of a gate and the same 8 of what it gates) for all rows; its
// warps share k. The weights are the left operand of mma.sync and go from memory to registers, 16
// bytes a lane: which 16 of k one product adds up is free, if both operands agree, so a lane's
// bytes lie together. Tensor cores, because a lane would otherwise widen every weight.
//
// The RMS norm of the rows costs nothing: each warp adds up the squares of what it reads, and a
// row's factor is applied to the sums.
//
// In a captured step (`early`) a block starts, and asks for its first weights, while the kernel
// before it still runs: weights do not depend on it.
#pragma once

#include "common/dtypes.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "few_rows/few_rows_kinds.h"

namespace flexops::few_rows {

inline constexpr int kMaxWeights = kMostFewWeights, kColumns = 16, kSteps = 4;
inline constexpr int kChunk = 32 * kSteps;  // of k, that a warp has in flight

struct Params {
  const void* x;                                  // [rows, k]
  const void* weights[kMaxWeights];               // [columns, k] each
  const void* biases[kMaxWeights];                // [columns], or null
  const void* norm;                               // [k], or null
  const void* residual;                           // [rows, width], or null
  void* out;                                      // [rows, width]
  int ends[kMaxWeights];                          // of the weights' blocks
  int columns[kMaxWeights], starts[kMaxWeights];  // first column in `out`
  int rows, k, width, count;
  float eps, offset;
  int activation;
};

/// A lane's 8 neighbouring numbers of a row; zeros from k on.
template <bool kAligned, Cache cache>
FLEXOPS_DEVICE uint4 load8(const u16* row, int at, int k) {
  uint4 out = {0, 0, 0, 0};
  if constexpr (kAligned) {
    if (at < k) out = bit_cast<uint4>(load<cache>(reinterpret_cast<const Vec<u16, 8>*>(row + at)));
  } else {
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (at + i < k) words[i / 2] |= static_cast<u32>(row[at + i]) << (i % 2 * 16);
    }
    out = {words[0], words[1], words[2], words[3]};
  }
  return out;
}

template <class T>
FLEXOPS_DEVICE void mma(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
#define FLEXOPS_DEFINE_FEW_ROWS_MMA(T, type)                                                    \
  template <>                                                                                   \
  FLEXOPS_DEVICE void mma<T>(float (&acc)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                         \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"         \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                       \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                       \
  }
FLEXOPS_DEFINE_FEW_ROWS_MMA(bf16, "bf16")
FLEXOPS_DEFINE_FEW_ROWS_MMA(f16, "f16")
#undef FLEXOPS_DEFINE_FEW_ROWS_MMA

/// Multiplies two numbers of a row by the norm's weights, and adds their squares to `squares`.
template <class T>
FLEXOPS_DEVICE u32 weigh(u32 x, u32 weight, float offset, float& squares) {
  const float low = half_of<T>(x, 0), high = half_of<T>(x, 1);
  squares += low * low + high * high;
  return pack2<T>(low * (half_of<T>(weight, 0) + offset), high * (half_of<T>(weight, 1) + offset));
}

FLEXOPS_DEVICE float activate(float x, int which) {
  if (which == kFewSilu) return x / (1 + expf(-x));
  if (which == kFewGelu) return 0.5f * x * (1 + erff(0.70710678f * x));
  const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1 + tanhf(inner));
}

FLEXOPS_DEVICE void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
FLEXOPS_DEVICE void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class T>
FLEXOPS_DEVICE float round_to(float x) {
  return to_float(from_float<T>(x));
}

/// kRowTiles: rows are at most 8 of them. kNorm: the rows are normalized first.
template <class T, int kWarps, int kRowTiles, bool kGated, bool kNorm, bool kAligned>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    product(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kOut = kGated ? kColumns / 2 : kColumns, kRows = 8 * kRowTiles;
  __shared__ float sums[kWarps][kColumns][kRows + 1];
  __shared__ float squares[kWarps][kRows];
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quarter = lane % 4;

  // Which weights: two rows of them for each lane. Those behind the last one are its like.
  const int block = static_cast<int>(blockIdx.x);
  int which = 0;
  while (!kGated && which + 1 < p.count && block >= p.ends[which]) ++which;
  const int first = (block - (which ? p.ends[which - 1] : 0)) * kOut;
  const int columns = p.columns[which];
  const auto row_of = [&](int number, int column) {
    const int last = columns - 1;
    return static_cast<const u16*>(p.weights[number]) +
           static_cast<i64>(column < last ? column : last) * p.k;
  };
  const u16* const low = row_of(which, first + group);
  const u16* const high = kGated ? row_of(1, first + group) : row_of(which, first + group + 8);

  // The first weights, before what the kernel ahead writes is read.
  uint4 next[kSteps][2];
  const auto fetch = [&](int at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      next[s][0] = load8<kAligned, Cache::streaming>(low, at + 32 * s, p.k);
      next[s][1] = load8<kAligned, Cache::streaming>(high, at + 32 * s, p.k);
    }
  };
  int at = warp * kChunk + 8 * quarter;
  fetch(at);
  wait_for_previous();

  float acc[kRowTiles][4] = {}, squared[kRowTiles] = {};
  for (; at - 8 * quarter < p.k; at += kWarps * kChunk) {
    uint4 weights[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) weights[s][0] = next[s][0], weights[s][1] = next[s][1];
    fetch(at + kWarps * kChunk);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int place = at + 32 * s;
      uint4 gain = {};
      if constexpr (kNorm)
        gain = load8<kAligned, Cache::normal>(static_cast<const u16*>(p.norm), place, p.k);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int row = 8 * tile + group;
        uint4 x = {};
        if (row < p.rows)
          x = load8<kAligned, Cache::normal>(
              static_cast<const u16*>(p.x) + static_cast<i64>(row) * p.k, place, p.k);
        if constexpr (kNorm) {
          x.x = weigh<T>(x.x, gain.x, p.offset, squared[tile]);
          x.y = weigh<T>(x.y, gain.y, p.offset, squared[tile]);
          x.z = weigh<T>(x.z, gain.z, p.offset, squared[tile]);
          x.w = weigh<T>(x.w, gain.w, p.offset, squared[tile]);
        }
        const uint4 &a = weights[s][0], &b = weights[s][1];
        mma<T>(acc[tile], a.x, b.x, a.y, b.y, x.x, x.y);
        mma<T>(acc[tile], a.z, b.z, a.w, b.w, x.z, x.w);
      }
    }
  }

  // The warps' sums are added.
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[warp][group + 8 * (i / 2)][8 * tile + 2 * quarter + i % 2] = acc[tile][i];
    if constexpr (kNorm) {
      const float total = warp_reduce<4>(squared[tile], Sum());
      if (quarter == 0) squares[warp][8 * tile + group] = total;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kOut * p.rows; i += 32 * kWarps) {
    const int column = i % kOut, row = i / kOut;
    if (first + column >= columns) continue;
    float factor = 1;
    if constexpr (kNorm) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += squares[w][row];
      factor = rsqrtf(total / static_cast<float>(p.k) + p.eps);
    }
    const auto result = [&](int number, int line) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums[w][line][row];
      total *= factor;
      if (p.biases[number])
        total += to_float(static_cast<const T*>(p.biases[number])[first + column]);
      return round_to<T>(total);
    };
    float value = result(which, column);
    if constexpr (kGated) value = activate(value, p.activation) * result(1, column + 8);
    const i64 place = static_cast<i64>(row) * p.width + p.starts[which] + first + column;
    if (p.residual) value = round_to<T>(value) + to_float(static_cast<const T*>(p.residual)[place]);
    static_cast<T*>(p.out)[place] = from_float<T>(value);
  }
}

}  // namespace flexops::few_rows
