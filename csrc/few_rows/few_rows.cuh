// Products of a few rows with weights as they are, [columns, k]: a decode step's, which take as
// long as it takes to read the weights. Formulas: flexops/ops/few_rows.py.
//
// A block computes 16 or 32 columns (or half of them, of a gate and of what it gates) for all rows;
// its warps share k. The weights are the left operand of mma.sync and go from memory to registers,
// 16 bytes a lane: which 16 of k one product adds up is free, if both operands agree, so a lane's
// bytes lie together. Tensor cores, because a lane would otherwise widen every weight. A warp has
// two chunks of k in flight: while it multiplies one, the other arrives. On 9.0, one or two rows
// are multiplied without tensor cores: few_rows_fma_hopper.cuh; for more than eight the copy engine
// brings the weights: few_rows_copied_hopper.cuh.
//
// A block first copies one row or two to shared memory while its first weights are on their way.
// There they are multiplied by the norm's weights, and their squares added up; a row's factor is
// applied to the sums of the product.
//
// In a captured step (`early`) a block starts, and asks for its first weights, while the kernel
// before it still runs: weights do not depend on it.
#pragma once

#include "common/async.cuh"
#include "common/dtypes.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "few_rows/few_rows_kinds.h"

namespace flexops::few_rows {

inline constexpr int kMaxWeights = kMostFewWeights, kColumns = 16;

/// Of a kernel: `rows` are at most 8 of them; `tiles` of 16 weights' rows a block; `steps` of 32 of
/// k that a warp loads at once; `resident` warps of a multiprocessor, for which registers suffice.
struct Shape {
  int warps, rows, tiles, steps, resident;
};
/// For at most 8 rows, with many blocks, with two for each multiprocessor at most, and with one of
/// long rows at most; and for more rows, with many blocks and few. Tuned on one H200.
enum { kMany, kSome, kFew, kTall, kTallFew };
inline constexpr Shape kShapes[] = {
    {8, 1, 1, 2, 24}, {8, 1, 1, 4, 16}, {16, 1, 1, 4, 16}, {8, 2, 2, 2, 16}, {16, 2, 1, 2, 16},
};
/// Whether a block reads the rows as it needs them (and normalizes them), or from shared memory.
enum Input { kDirect, kDirectNorm, kStaged };

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
  bool early;  // the kernel starts before the one ahead has ended
};

/// 16 bytes of weights, which one kernel reads once: past the first-level cache, and 256 bytes at a
/// time into the second, because a warp reads 64 of a row at once.
FLEXOPS_DEVICE uint4 load_weights(const u16* at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint4 out;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
      : "l"(at));
  return out;
#else
  return bit_cast<uint4>(load<Cache::streaming>(reinterpret_cast<const Vec<u16, 8>*>(at)));
#endif
}

/// A lane's 8 neighbouring numbers of a row; zeros from k on.
template <bool kAligned, Cache cache>
FLEXOPS_DEVICE uint4 load8(const u16* row, int at, int k) {
  uint4 out = {0, 0, 0, 0};
  if constexpr (kAligned) {
    if (at >= k) return out;
    if constexpr (cache == Cache::streaming) return load_weights(row + at);
    out = bit_cast<uint4>(load<cache>(reinterpret_cast<const Vec<u16, 8>*>(row + at)));
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

template <class T>
FLEXOPS_DEVICE float round_to(float x) {
  return to_float(from_float<T>(x));
}

/// Elements from one row in shared memory to the next: 4 lanes of one row and 4 of the next read
/// different banks.
FLEXOPS_DEVICE int staged_stride(int k) { return (k + 63) / 64 * 64 + 32; }

/// Copies the rows to shared memory, multiplied by the norm's weights; the sums of their squares
/// are those of the warps.
template <class T, int kWarps, int kRows>
FLEXOPS_DEVICE void stage_rows(const Params& p, u16* rows, float (&squares)[kWarps][kRows]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = 0; row < p.rows; ++row) {
    float total = 0;
    for (int i = 8 * static_cast<int>(threadIdx.x); i < p.k; i += 8 * 32 * kWarps) {
      uint4 v = load8<true, Cache::normal>(
          static_cast<const u16*>(p.x) + static_cast<i64>(row) * p.k, i, p.k);
      if (p.norm) {
        const uint4 gain = load8<true, Cache::normal>(static_cast<const u16*>(p.norm), i, p.k);
        v.x = weigh<T>(v.x, gain.x, p.offset, total), v.y = weigh<T>(v.y, gain.y, p.offset, total);
        v.z = weigh<T>(v.z, gain.z, p.offset, total), v.w = weigh<T>(v.w, gain.w, p.offset, total);
      }
      *reinterpret_cast<uint4*>(rows + row * staged_stride(p.k) + i) = v;
    }
    total = warp_reduce(total, Sum());
    if (lane == 0) squares[warp][row] = total;
  }
}

/// Adds the sums of the parts of k of one row of a block's column, and writes what they are of. The
/// block's columns are those from `first` on of weight `which`.
template <class T, bool kGated, bool kNormed, int kParts, int kLines, int kWidth, int kWarps,
          int kRows>
FLEXOPS_DEVICE void write_one(const Params& p, int which, int first, int column, int row,
                              const float (&sums)[kParts][kLines][kWidth],
                              const float (&squares)[kWarps][kRows]) {
  constexpr int kOfTile = kGated ? kColumns / 2 : kColumns;
  float factor = 1;
  if (kNormed && p.norm) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += squares[w][row];
    factor = rsqrtf(total / static_cast<float>(p.k) + p.eps);
  }
  const int line = column / kOfTile * kColumns + column % kOfTile;
  const auto result = [&](int number, int at) {
    float total = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) total += sums[part][at][row];
    total *= factor;
    if (p.biases[number])
      total += to_float(static_cast<const T*>(p.biases[number])[first + column]);
    return round_to<T>(total);
  };
  float value = result(which, line);
  if constexpr (kGated) value = activate(value, p.activation) * result(1, line + 8);
  const i64 place = static_cast<i64>(row) * p.width + p.starts[which] + first + column;
  if (p.residual) value = round_to<T>(value) + to_float(static_cast<const T*>(p.residual)[place]);
  static_cast<T*>(p.out)[place] = from_float<T>(value);
}

template <class T, int kShape, bool kGated, Input kInput, bool kAligned>
__global__ void __launch_bounds__(32 * kShapes[kShape].warps,
                                  kShapes[kShape].resident / kShapes[kShape].warps)
    product(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr Shape kIs = kShapes[kShape];
  constexpr int kWarps = kIs.warps, kRowTiles = kIs.rows, kTiles = kIs.tiles, kSteps = kIs.steps;
  constexpr int kLines = kColumns * kTiles, kRows = 8 * kRowTiles;
  constexpr int kOfTile = kGated ? kColumns / 2 : kColumns, kOut = kOfTile * kTiles;
  constexpr int kChunk = 32 * kSteps, kStride = kWarps * kChunk;
  extern __shared__ uint4 staged[];
  __shared__ float sums[kWarps][kLines][kRows + 1];
  __shared__ float squares[kWarps][kRows];
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quarter = lane % 4;

  // Which weights: two rows of them for each lane and tile. Those behind the last one are its like.
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
  const u16* lines[kTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = first + kOfTile * tile + group;
    lines[tile][0] = row_of(which, column);
    lines[tile][1] = kGated ? row_of(1, column) : row_of(which, column + 8);
  }

  // The first weights, before what the kernel ahead writes is read.
  uint4 held[2][kSteps][kTiles][2];
  const auto fetch = [&](uint4(&to)[kSteps][kTiles][2], int at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          to[s][tile][i] = load8<kAligned, Cache::streaming>(lines[tile][i], at + 32 * s, p.k);
      }
    }
  };
  const int begin = warp * kChunk + 8 * quarter;
  fetch(held[0], begin);
  fetch(held[1], begin + kStride);
  if (p.early) wait_for_previous();  // without the branch, ptxas puts the loads behind it

  // The rows, to shared memory.
  u16* const rows = reinterpret_cast<u16*>(staged);
  if constexpr (kInput == kStaged) {
    stage_rows<T>(p, rows, squares);
    __syncthreads();
  }

  float acc[kTiles][kRowTiles][4] = {}, squared[kRowTiles] = {};
  const auto multiply = [&](const uint4(&weights)[kSteps][kTiles][2], int at) {
    uint4 x[kSteps][kRowTiles];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int row = 8 * tile + group;
        x[s][tile] = {0, 0, 0, 0};
        if (row >= p.rows) continue;
        if constexpr (kInput == kStaged) {
          if (at + 32 * s < p.k)
            x[s][tile] = *reinterpret_cast<uint4*>(rows + row * staged_stride(p.k) + at + 32 * s);
        } else {
          x[s][tile] = load8<kAligned, Cache::normal>(
              static_cast<const u16*>(p.x) + static_cast<i64>(row) * p.k, at + 32 * s, p.k);
        }
      }
    }
    if constexpr (kInput == kDirectNorm) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 gain =
            load8<kAligned, Cache::normal>(static_cast<const u16*>(p.norm), at + 32 * s, p.k);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          uint4& v = x[s][tile];
          v.x = weigh<T>(v.x, gain.x, p.offset, squared[tile]);
          v.y = weigh<T>(v.y, gain.y, p.offset, squared[tile]);
          v.z = weigh<T>(v.z, gain.z, p.offset, squared[tile]);
          v.w = weigh<T>(v.w, gain.w, p.offset, squared[tile]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 &a = weights[s][tile][0], &b = weights[s][tile][1];
#pragma unroll
        for (int row = 0; row < kRowTiles; ++row) {
          const uint4& v = x[s][row];
          mma<T>(acc[tile][row], a.x, b.x, a.y, b.y, v.x, v.y);
          mma<T>(acc[tile][row], a.z, b.z, a.w, b.w, v.z, v.w);
        }
      }
    }
  };
  for (int at = begin; at - 8 * quarter < p.k; at += 2 * kStride) {
    multiply(held[0], at);
    fetch(held[0], at + 2 * kStride);
    multiply(held[1], at + kStride);
    fetch(held[1], at + 3 * kStride);
  }

  // The warps' sums are added.
#pragma unroll
  for (int row = 0; row < kRowTiles; ++row) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[warp][kColumns * tile + group + 8 * (i / 2)][8 * row + 2 * quarter + i % 2] =
            acc[tile][row][i];
    }
    if constexpr (kInput == kDirectNorm) {
      const float total = warp_reduce<4>(squared[row], Sum());
      if (quarter == 0) squares[warp][8 * row + group] = total;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kOut * p.rows; i += 32 * kWarps) {
    const int column = i % kOut, row = i / kOut;
    if (first + column >= columns) continue;
    write_one<T, kGated, kInput != kDirect>(p, which, first, column, row, sums, squares);
  }
}

}  // namespace flexops::few_rows
