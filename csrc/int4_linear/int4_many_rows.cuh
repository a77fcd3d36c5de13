// Products of more rows of x by mma.sync. The weight is the left operand, 16 rows of it, and x the
// right one, 8 rows (tokens): out^T = W x^T. A thread's lane is 4 g + t: it has rows g and g + 8 of
// a tile, and tokens 2 t and 2 t + 1 of the accumulator.
//
// The warps beside each other along n, a team, share a tile of x in shared memory. All that is read
// goes there by cp.async, some tiles of columns ahead; a thread's words of the weight come back to
// the thread that has copied them.
#pragma once

#include "common/panels.cuh"
#include "int4_linear/int4_codes.cuh"

namespace flexops::int4 {

inline constexpr int kManyRows = 2;                            // tiles of 16 rows of W for a warp
inline constexpr int kManyStages = 4;                          // tiles of columns in shared memory
inline constexpr int kWarpStage = kManyRows * (512 + 4 * 32);  // bytes: words, scales, zeros

/// A block's part of a product. kBeside: warps of a team; the block's teams share the columns.
template <class T, int kTokens, int kBeside, bool kMxfp4 = false>
FLEXOPS_DEVICE void multiply_many_rows(const Params& p, const Place& place) {
  using X = Panels<8 * kTokens, 64>;
  constexpr int kRows = kManyRows, kTeam = 32 * kBeside, kLines = 16 * kRows * kBeside;
  constexpr int kStage = X::kBytes + kBeside * kWarpStage;
  __align__(1024) extern __shared__ u8 staged[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4, t = lane % 4;
  const int depth = warps / kBeside, warp_k = warp / kBeside, warp_n = warp % kBeside;
  const int first_tile = (place.n_tile * kBeside + warp_n) * kRows;
  const int first_token = place.token_tile * kTokens * 8;
  const bool small = p.group_shift == 5, shifted = p.group_shift == 7;
  let_next_start();
  const u32 step = depth * p.cluster, begin = place.rank * depth + warp_k, tiles_k = p.tiles_k;

  // A stage: x, then the words and the numbers of each warp.
  u8* const stages = staged + warp_k * (kManyStages * kStage);
  u8* const own = stages + X::kBytes + warp_n * kWarpStage;
  const u32 x_stages = static_cast<u32>(__cvta_generic_to_shared(stages));
  constexpr int kCopies = kTokens * 64 / kTeam, kCopyRows = kTeam / 8;
  static_assert(kCopies * kTeam == kTokens * 64, "a thread copies whole vectors of x");
  const int member = warp_n * 32 + lane, copy_row = member / 8, vector = member % 8;
  const u32 copy_to = X::place(x_stages, copy_row, vector);
  const T* const copy_from = static_cast<const T*>(p.x) +
                             static_cast<i64>(min(first_token + copy_row, p.m - 1)) * p.k +
                             8 * vector;
  const int copy_rows = p.m - first_token - copy_row;  // that are there from this one on
  const auto fetch_x = [&](u32 slot, u32 tile_k) {
    const T* const at = copy_from + static_cast<u64>(tile_k) * 64;
    const bool inside = !small || static_cast<int>(64 * tile_k) + 8 * vector < p.k;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool valid = inside && i * kCopyRows < copy_rows;
      const T* const from = valid ? at + static_cast<i64>(i * kCopyRows) * p.k : copy_from;
      async_copy16(copy_to + slot * kStage + i * (kCopyRows * 128), from, valid);
    }
  };
  // Words; and lanes copy the numbers: [tile][scales, zeros][group][16].
  const u8* words[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    words[r] = p.packed +
               (static_cast<i64>(min(first_tile + r, p.tiles_n - 1)) * tiles_k * 32 + lane) * 16;
  const bool copies_zeros = lane / 4 % 2;
  const bool copies_numbers =
      lane < kRows * 8 && (small || lane / 2 % 2 == 0) && (!copies_zeros || p.zeros);
  const u16* const numbers_from =
      (copies_zeros ? p.zeros : p.scales) +
      (static_cast<i64>(min(first_tile + lane / 8 % kRows, p.tiles_n - 1)) * p.groups +
       lane / 2 % 2) *
          16 +
      lane % 2 * 8;
  const auto fetch_weight = [&](u32 slot, u32 tile_k) {
    u8* const to = own + slot * kStage;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      async_copy16(to + r * 512 + lane * 16, words[r] + static_cast<u64>(tile_k) * 512, true);
    const u64 group = small ? 2 * tile_k : shifted ? tile_k / 2 : tile_k;
    if (copies_numbers) async_copy16(to + kRows * 512 + lane * 16, numbers_from + group * 16, true);
  };

  float acc[kRows][kTokens][4] = {};
  const auto multiply = [&](u32 slot) {
    const u8* const mine = own + slot * kStage;
    u32 left[kRows][4][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint4 all = *reinterpret_cast<const uint4*>(mine + r * 512 + lane * 16);
      const u32* const numbers = reinterpret_cast<const u32*>(mine + kRows * 512 + r * 128) + g;
      const auto of_group = [&](int group) {
        return Dequantizer<T, kMxfp4>(numbers[8 * group],
                                      p.zeros ? numbers[16 + 8 * group] : kEight, p.half_scales);
      };
      Dequantizer<T, kMxfp4> dequantizer = of_group(0);
      dequantizer.widen(left[r][0], all.x), dequantizer.widen(left[r][1], all.y);
      if (small) dequantizer = of_group(1);
      dequantizer.widen(left[r][2], all.z), dequantizer.widen(left[r][3], all.w);
    }
    const u32 x = x_stages + slot * kStage;
#pragma unroll
    for (int n = 0; n < kTokens; n += 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 right[4];
        X::load_right(right, x, 8 * n, 16 * i);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          mma<T>(acc[r][n], left[r][i], right[0], right[1]);
          mma<T>(acc[r][n + 1], left[r][i], right[2], right[3]);
        }
      }
    }
  };

#pragma unroll
  for (u32 i = 0; i < kManyStages - 1; ++i) {
    if (begin + i * step < tiles_k) fetch_weight(i, begin + i * step);
  }
  wait_for_previous();
#pragma unroll
  for (u32 i = 0; i < kManyStages - 1; ++i) {
    if (begin + i * step < tiles_k) fetch_x(i, begin + i * step);
    async_commit();
  }
  u32 slot = 0;
  for (u32 tile = begin; tile < tiles_k; tile += step) {
    async_wait(kManyStages - 2);
    // The team's copies are there, and the slot before this one is free.
    barrier(1 + warp_k, kTeam);
    const u32 ahead = tile + (kManyStages - 1) * step,
              free = (slot + kManyStages - 1) % kManyStages;
    if (ahead < tiles_k) fetch_weight(free, ahead), fetch_x(free, ahead);
    async_commit();
    multiply(slot);
    slot = (slot + 1) % kManyStages;
  }
  async_wait(0);
  __syncthreads();
  // The sums, by rows of x, take the place of the stages.
  float* const sums = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(8 * (warp_k * kTokens + n) + 2 * t + i % 2) * (kLines + 4) +
             16 * (warp_n * kRows + r) + g + i / 2 * 8] = acc[r][n][i];
    }
  }
  __syncthreads();
  write_sums<T>(p, place.rank, sums, depth, kLines + 4, 8 * kTokens, kLines, first_token,
                place.n_tile * kLines, static_cast<int>(blockDim.x));
}

template <class T, int kTokens, int kBeside>
__global__ void __launch_bounds__(256, 1) many_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  multiply_many_rows<T, kTokens, kBeside>(p, Place(p));
}

}  // namespace flexops::int4
