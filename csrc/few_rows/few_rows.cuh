// Products of a few rows with weights as they are, [columns, k]: a decode step's, which take as
// long as it takes to read the weights. Formulas: flexops/ops/few_rows.py.
//
// A block computes tiles of 16 or 32 columns (or half of them, of a gate and of what it gates) for
// all rows, one after another; its warps share k. The weights are the left operand of mma.sync, 16
// bytes a lane: which 16 of k one product adds up is free, if both operands agree, so a lane's
// bytes lie together. Tensor cores, because a lane would otherwise widen every weight.
//
// Each warp has a ring of chunks of k in shared memory, which cp.async fills across the ends of
// tiles. A stage holds what its lanes read themselves:
//
//   weights  [steps][tiles][2][lanes], 16 bytes each
//   rows     [steps][rows][4], then the norm's weights, [steps][4]
//
// The rows are multiplied by the norm's weights as they are read, and their squares added up; a
// row's factor is applied to the sums of the product.
//
// One block of a multiprocessor fills memory's latency with half of the shared memory and a quarter
// of the registers. In a captured step (`early`) the next kernel therefore starts beside this one,
// and its rings are full when this one ends: weights do not depend on what this one writes.
#pragma once

#include "common/async.cuh"
#include "common/dtypes.cuh"
#include "common/reduce.cuh"
#include "few_rows/few_rows_kinds.h"

namespace flexops::few_rows {

inline constexpr int kMaxWeights = kMostFewWeights, kColumns = 16;

/// Of a kernel: `rows` are at most 8 of them; `tiles` of 16 weights' rows a block; `steps` of 32 of
/// k in a stage.
struct Shape {
  int rows, tiles, steps;
};
enum { kLow, kTall, kTallFew };  // at most 8 rows; more, with many and few tiles
inline constexpr Shape kShapes[] = {{1, 1, 2}, {2, 2, 1}, {2, 1, 2}};
inline constexpr int kWarps = 8;

struct Params {
  const void* x;                                  // [rows, k]
  const void* weights[kMaxWeights];               // [columns, k] each
  const void* biases[kMaxWeights];                // [columns], or null
  const void* norm;                               // [k], or null
  const void* residual;                           // [rows, width], or null
  void* out;                                      // [rows, width]
  int ends[kMaxWeights];                          // of the weights' blocks
  int columns[kMaxWeights], starts[kMaxWeights];  // first column in `out`
  int rows, k, width, count, tiles, stages;
  float eps, offset;
  int activation;
};
/// Bytes of a warp's stage.
FLEXOPS_DEVICE int stage_bytes(const Shape& shape, int rows, bool norm) {
  return shape.steps * (1024 * shape.tiles + 64 * rows + (norm ? 64 : 0));
}

/// Starts the copy of 8 neighbouring numbers of a row, zeros from k on; of weights, which one
/// kernel reads once, 256 bytes at a time into the second-level cache, because a warp reads 64 or
/// 128.
template <bool kAligned, bool kWeights>
FLEXOPS_DEVICE void copy8(uint4* to, const u16* row, int at, int k) {
  if constexpr (kAligned) {
    const bool valid = at < k;
    const u16* const from = valid ? row + at : row;
    if constexpr (kWeights) {
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(
                       static_cast<u32>(__cvta_generic_to_shared(to))),
                   "l"(from), "r"(valid ? 16 : 0)
                   : "memory");
    } else {
      async_copy16(to, from, valid);
    }
  } else {
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (at + i < k) words[i / 2] |= static_cast<u32>(row[at + i]) << (i % 2 * 16);
    }
    *to = {words[0], words[1], words[2], words[3]};
  }
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

/// A tile's columns: of which weight, and which.
struct Columns {
  int which = 0, first, count;
  FLEXOPS_DEVICE Columns(const Params& p, int tile, int width, bool gated) {
    while (!gated && which + 1 < p.count && tile >= p.ends[which]) ++which;
    first = (tile - (which ? p.ends[which - 1] : 0)) * width, count = p.columns[which];
  }
};

template <class T, int kShape, bool kGated, bool kNorm, bool kAligned>
__global__ void __launch_bounds__(32 * kWarps, 2) product(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr Shape kIs = kShapes[kShape];
  constexpr int kRowTiles = kIs.rows, kTiles = kIs.tiles, kSteps = kIs.steps;
  constexpr int kLines = kColumns * kTiles, kRows = 8 * kRowTiles;
  constexpr int kOfTile = kGated ? kColumns / 2 : kColumns, kOut = kOfTile * kTiles;
  constexpr int kChunk = 32 * kSteps, kStride = kWarps * kChunk;
  constexpr int kRowsAt = kSteps * kTiles * 64;  // in a stage, in vectors
  extern __shared__ uint4 memory[];
  __shared__ float sums[kWarps][kLines][kRows + 1];
  __shared__ float squares[kWarps][kRows];
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quarter = lane % 4;
  const int begin = warp * kChunk + 8 * quarter, stage = stage_bytes(kIs, p.rows, kNorm) / 16;
  uint4* const ring = memory + warp * p.stages * stage;

  // Of the chunk that is copied next: its tile and its first number of a lane's; and the two rows
  // of weights of each tile of 16. Those behind the last one are its like.
  int tile_ahead = static_cast<int>(blockIdx.x), ahead = begin;
  const u16* lines[kTiles][2];
  const auto find_lines = [&] {
    const Columns columns(p, tile_ahead, kOut, kGated);
    const auto row_of = [&](int number, int column) {
      return static_cast<const u16*>(p.weights[number]) +
             static_cast<i64>(min(column, columns.count - 1)) * p.k;
    };
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = columns.first + kOfTile * tile + group;
      lines[tile][0] = row_of(columns.which, column);
      lines[tile][1] = kGated ? row_of(1, column) : row_of(columns.which, column + 8);
    }
  };
  const auto copy_weights = [&](uint4* to) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i)
        copy8<kAligned, true>(to + (2 * kTiles * s + i) * 32 + lane, lines[i / 2][i % 2],
                              ahead + 32 * s, p.k);
      if (kNorm && group == 0)
        copy8<kAligned, false>(to + kRowsAt + 4 * kSteps * p.rows + 4 * s + quarter,
                               static_cast<const u16*>(p.norm), ahead + 32 * s, p.k);
    }
  };
  const auto copy_rows = [&](uint4* to, int at) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int row = 8 * tile + group;
        if (row < p.rows)
          copy8<kAligned, false>(to + kRowsAt + 4 * (p.rows * s + row) + quarter,
                                 static_cast<const u16*>(p.x) + static_cast<i64>(row) * p.k,
                                 at + 32 * s, p.k);
      }
    }
  };
  const auto advance = [&] {
    ahead += kStride;
    if (ahead - begin < p.k) return;
    ahead = begin, tile_ahead += static_cast<int>(gridDim.x);
    if (tile_ahead < p.tiles) find_lines();
  };

  // Fill the ring but for one stage: weights, before what the kernel ahead writes is there.
  find_lines();
#pragma unroll 1
  for (int i = 0; i < p.stages - 1 && tile_ahead < p.tiles; ++i)
    copy_weights(ring + i * stage), advance();
  wait_for_previous();
  for (int i = 0, at = begin; i < p.stages - 1; ++i) {
    copy_rows(ring + i * stage, at);
    at = at + kStride - begin < p.k ? at + kStride : begin;
  }
  async_commit();

  float acc[kTiles][kRowTiles][4], squared[kRowTiles];
  const auto multiply = [&](const uint4* from) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint4 x[kRowTiles], gain;
      if constexpr (kNorm) gain = from[kRowsAt + 4 * kSteps * p.rows + 4 * s + quarter];
#pragma unroll
      for (int row = 0; row < kRowTiles; ++row) {
        uint4& v = x[row];
        v = {0, 0, 0, 0};
        if (8 * row + group < p.rows)
          v = from[kRowsAt + 4 * (p.rows * s + 8 * row + group) + quarter];
        if constexpr (kNorm) {
          v.x = weigh<T>(v.x, gain.x, p.offset, squared[row]);
          v.y = weigh<T>(v.y, gain.y, p.offset, squared[row]);
          v.z = weigh<T>(v.z, gain.z, p.offset, squared[row]);
          v.w = weigh<T>(v.w, gain.w, p.offset, squared[row]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 a = from[(2 * kTiles * s + 2 * tile) * 32 + lane],
                    b = from[(2 * kTiles * s + 2 * tile + 1) * 32 + lane];
#pragma unroll
        for (int row = 0; row < kRowTiles; ++row) {
          mma<T>(acc[tile][row], a.x, b.x, a.y, b.y, x[row].x, x[row].y);
          mma<T>(acc[tile][row], a.z, b.z, a.w, b.w, x[row].z, x[row].w);
        }
      }
    }
  };
  // Adds the warps' sums, and writes the tile.
  const auto finish = [&](int number) {
#pragma unroll
    for (int row = 0; row < kRowTiles; ++row) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[warp][kColumns * tile + group + 8 * (i / 2)][8 * row + 2 * quarter + i % 2] =
              acc[tile][row][i];
      }
      if constexpr (kNorm) {
        const float total = warp_reduce<4>(squared[row], Sum());
        if (quarter == 0) squares[warp][8 * row + group] = total;
      }
    }
    __syncthreads();
    const Columns columns(p, number, kOut, kGated);
    for (int i = static_cast<int>(threadIdx.x); i < kOut * p.rows; i += 32 * kWarps) {
      const int column = i % kOut, row = i / kOut, at = columns.first + column;
      if (at >= columns.count) continue;
      float factor = 1;
      if constexpr (kNorm) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += squares[w][row];
        factor = rsqrtf(total / static_cast<float>(p.k) + p.eps);
      }
      const int line = column / kOfTile * kColumns + column % kOfTile;
      const auto result = [&](int weight, int at_line) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += sums[w][at_line][row];
        total *= factor;
        if (p.biases[weight]) total += to_float(static_cast<const T*>(p.biases[weight])[at]);
        return round_to<T>(total);
      };
      float value = result(columns.which, line);
      if constexpr (kGated) value = activate(value, p.activation) * result(1, line + 8);
      const i64 place = static_cast<i64>(row) * p.width + p.starts[columns.which] + at;
      if (p.residual)
        value = round_to<T>(value) + to_float(static_cast<const T*>(p.residual)[place]);
      static_cast<T*>(p.out)[place] = from_float<T>(value);
    }
    __syncthreads();  // the sums are free
  };

  int slot = 0;
  bool started = false;
  for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles;
       tile += static_cast<int>(gridDim.x)) {
#pragma unroll
    for (int row = 0; row < kRowTiles; ++row) {
      squared[row] = 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        acc[i][row][0] = acc[i][row][1] = acc[i][row][2] = acc[i][row][3] = 0;
    }
#pragma unroll 1
    for (int at = 0; at < p.k; at += kStride) {
      async_wait(started ? p.stages - 2 : 0);
      started = true;
      __syncwarp();  // this stage is there, and the one before no longer used
      if (tile_ahead < p.tiles) {
        uint4* const to = ring + (slot == 0 ? p.stages - 1 : slot - 1) * stage;
        copy_weights(to), copy_rows(to, ahead), advance();
      }
      async_commit();
      multiply(ring + slot * stage);
      slot = slot == p.stages - 1 ? 0 : slot + 1;
    }
    finish(tile);
  }
}

}  // namespace flexops::few_rows
