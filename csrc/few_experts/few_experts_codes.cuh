// Experts of few tokens with weights of 4 bits. Formulas: flexops/ops/few_experts.py; the layout of
// the weights: flexops/ops/int4_linear.py, with all experts' rows one behind the other.
//
// A block has 16 results: of gate and up two tiles of 16 rows, of down one. Its warps share the
// rounds into which columns are cut, over all of a token's experts. A round is 8 units (64 columns;
// 32 where groups have as many), whose words are all on their way at once. Column n of an mma has
// the x of unit n, and zeros in the other units' products: an accumulator then holds the sums of 8
// units, and scales are applied once.
#pragma once

#include "common/async.cuh"
#include "common/hopper.cuh"
#include "common/panels.cuh"
#include "common/reduce.cuh"
#include "few_experts/few_experts.cuh"
#include "few_rows/few_rows_kinds.h"
#include "int4_linear/int4_codes.cuh"

namespace flexops::few_experts {

using int4::Codes;

struct CodesParams : Params {
  const u16 *factors, *zeros;  // of groups: float16 or bfloat16; float16 or null
  int tiles, tiles_k, groups;  // tiles of an expert's rows; of columns
  int group_shift;             // log2 of the group size
  int rounds;                  // of the columns
  bool half_factors;           // float16
};

inline constexpr int kUnits = 8;
/// Of a round of a warp, with `kRowTiles` tiles of rows.
template <Codes kCodes, int kRowTiles>
struct Stage {
  using X = Panels<kUnits, kCodes == Codes::whole ? 64 : 32>;  // a unit's columns in each row
  uint4 x[X::kBytes / 16];
  uint4 numbers[kRowTiles][32];  // of 8 groups: factors, then zero points
};

/// Tile `number` behind `from`; zeros, and nothing is read, if not `there`.
FLEXOPS_DEVICE uint4 load_tile(bool there, const u16* from, int number) {
  uint4 out;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(out.x), "=&r"(out.y), "=&r"(out.z), "=&r"(out.w)
      : "l"(from + number * 256), "r"(static_cast<u32>(there)));
  return out;
}

template <class T, bool kAdds, int kWarps, Codes kCodes>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    of_codes(const FLEXOPS_GRID_CONSTANT CodesParams p) {
  constexpr int kRowTiles = kAdds ? 1 : 2, kResults = 16;
  using OneStage = Stage<kCodes, kRowTiles>;
  using X = typename OneStage::X;
  constexpr bool kSmall = kCodes != Codes::whole, kWhole = kCodes != Codes::mxfp4;
  constexpr int kTiles = kSmall ? kUnits / 2 : kUnits, kColumns = X::kColumns,
                kVectors = X::kVectors;
  __shared__ OneStage storage[kWarps][2];
  __shared__ float sums[kWarps][kResults * kRowTiles];
  __shared__ int experts[kMostChoicesOfToken];
  __shared__ float scales[kMostChoicesOfToken];
  const Share<kAdds> share(p, kResults);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, t = lane % 4;
  const int group_shift = p.group_shift - 6;
  // The first tile of rows, of an expert, and how far the second one is behind it.
  const int row_tile = !kAdds && p.interleaved ? share.first / 8 : share.first / 16,
            apart = p.interleaved ? 1 : p.tiles / 2;
  wait_for_previous();
  let_next_start();
  int only = -1;
  if constexpr (kAdds) {
    for (int i = thread; i < share.segments; i += 32 * kWarps) {
      const float scale = scale_of<T>(p, share.choice(p, i));
      scales[i] = scale, experts[i] = scale == 0.0f ? -1 : share.expert(p, i);
    }
    __syncthreads();
  } else {
    only = share.expert(p, 0);
  }

  // Where a round is: of a segment, `round` rounds behind its first column. No round is of two.
  int segment = 0, round = warp;
  const auto settle = [&] {
    while (round >= p.rounds && segment < share.segments) round -= p.rounds, ++segment;
  };
  // What is loaded of a round: x and the numbers of its groups into a stage, words into registers.
  const u16* words_at;
  int left;  // tiles, of the round that is loaded
  const auto prepare = [&](OneStage& to) {
    const int expert = segment >= share.segments ? -1 : kAdds ? experts[segment] : only;
    const bool there = expert >= 0;
    const i64 row = static_cast<i64>(max(expert, 0)) * p.tiles + row_tile;
    words_at =
        static_cast<const u16*>(p.weights) + (row * p.tiles_k + round * kTiles) * 256 + lane * 8;
    left = there ? p.tiles_k - round * kTiles : 0;
    const int column = (round * kUnits + g) * kColumns + 8 * t;
    const u16* const x = share.x(p, there ? segment : 0) + column;
#pragma unroll
    for (int i = 0; i < kVectors / 4; ++i)
      async_copy16(reinterpret_cast<u8*>(to.x) + X::place(0, g, t + 4 * i), x + 32 * i,
                   there && column + 32 * i < p.k);
    const int group = kSmall ? round * kUnits : round * kUnits >> group_shift;
    const u16* const numbers = lane < 16 ? p.factors : p.zeros;
    const bool inside = there && group + lane % 16 / 2 < p.groups && numbers;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      async_copy16(&to.numbers[i][lane],
                   numbers + ((row + i * apart) * p.groups + group) * 16 + lane % 16 * 8, inside);
    async_commit();
  };

  float acc[kRowTiles][2] = {};
  uint4 words[kTiles];
  settle();
  prepare(storage[warp][0]);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) words[j] = load_tile(j < left, words_at, j);
  for (int turn = 0; segment < share.segments; ++turn) {
    const float scale = kAdds ? scales[segment] : 1.0f;
    async_wait<0>();
    __syncwarp();
    const OneStage& stage = storage[warp][turn % 2];
    u32 x[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors / 4; ++i) {
      u32 four[4];
      load_words<false>(four,
                        X::place(hopper::shared_address(stage.x), lane % 8, lane / 8 + 4 * i));
#pragma unroll
      for (int n = 0; n < 4; ++n) x[4 * i + n] = four[n];
    }
    float sums_of_x[4] = {};
    if constexpr (kWhole) {
      constexpr u32 kOne = int4::Code<T>::kOnes, ones[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
      for (int n = 0; n < kVectors; n += 2) int4::mma<T>(sums_of_x, ones, x[n], x[n + 1]);
    }
#pragma unroll
    for (int of = 0; of < kRowTiles; ++of) {
      const u16* at = words_at + static_cast<i64>(apart) * p.tiles_k * 256;
      if (of + 1 == kRowTiles) {
        round += kWarps, settle();
        prepare(storage[warp][(turn + 1) % 2]);
        at = words_at;
      }
      float made[2][4] = {};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const u32 four[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
        words[j] = load_tile(j < left, at, j);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          u32 codes[4];
          if constexpr (kWhole) {
            int4::widen_codes<T>(codes, four[w]);
          } else {
            int4::widen_mxfp4<T>(codes, four[w]);
          }
          const int n = kSmall ? w % 2 : w;
          const bool own = g == (kSmall ? 2 * j + w / 2 : j);
          int4::mma<T>(made[w % 2], codes, own ? x[2 * n] : 0u, own ? x[2 * n + 1] : 0u);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32* const number = reinterpret_cast<const u32*>(stage.numbers[of]) +
                                  (kSmall ? 2 * t + i : 2 * t + i >> group_shift) * 8 + g;
        const u32 factor = number[0], zeros = number[64];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float total = made[0][2 * half + i] + made[1][2 * half + i];
          const float zero = p.zeros ? half_of<f16>(zeros, half) : 8.0f;
          if (kWhole) total -= (int4::Code<T>::kOffset + zero) * sums_of_x[i];
          acc[of][half] += scale * int4::number_of(factor, half, p.half_factors) * total;
        }
      }
    }
    __syncwarp();  // the stage may be written
  }
#pragma unroll
  for (int of = 0; of < kRowTiles; ++of) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_reduce<4>(acc[of][half], Sum());
      const int row = of * 16 + g + 8 * half;
      const bool turns = !kAdds && p.interleaved;
      if (t == 0) sums[warp][turns ? row / 2 + row % 2 * kResults : row] = sum;
    }
  }
  __syncthreads();
  write<T>(p, share, sums, thread);
}

}  // namespace flexops::few_experts
