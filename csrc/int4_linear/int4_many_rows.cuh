// Products of more rows of x: the warps beside each other along n, a team, share a tile of x in
// shared memory. All that is read goes there by cp.async, some tiles of columns ahead; a thread's
// words of the weight come back to the thread that has copied them.
#pragma once

#include "int4_linear/int4_linear.cuh"

namespace flexops::int4 {

inline constexpr int kManyRows = 2;                            // tiles of 16 rows of W for a warp
inline constexpr int kManyStages = 4;                          // tiles of columns in shared memory
inline constexpr int kWarpStage = kManyRows * (512 + 4 * 32);  // bytes: words, scales, zeros

/// `S`: of the scales; kBeside: warps of a team.
template <class T, class S, int kTokens, int kBeside, bool kSmall>
__global__ void __launch_bounds__(256, 1) many_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kRows = kManyRows, kTeam = 32 * kBeside, kGroups = kSmall ? 2 : 1;
  constexpr int kStage = kTokens * 8 * 128 + kBeside * kWarpStage;
  extern __shared__ uint4 storage[];
  const Place place(p);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4, t = lane % 4;
  const int depth = warps / kBeside, warp_k = warp / kBeside, warp_n = warp % kBeside;
  const int first_tile = (place.n_tile * kBeside + warp_n) * kRows;
  const int first_token = place.token_tile * kTokens * 8;
  let_next_start();
  const u32 step = depth * p.cluster, begin = place.rank * depth + warp_k, tiles_k = p.tiles_k;

  // A stage: x [8 * kTokens][64 columns], then the words and the numbers of each warp. The vectors
  // of odd rows of x are exchanged by halves, against bank conflicts.
  u8* const stages = reinterpret_cast<u8*>(storage) + warp_k * (kManyStages * kStage);
  u8* const own = stages + kTokens * 1024 + warp_n * kWarpStage;
  constexpr int kCopies = kTokens * 64 / kTeam, kCopyRows = kTeam / 8;
  static_assert(kCopies * kTeam == kTokens * 64, "a thread copies whole vectors of x");
  const int member = warp_n * 32 + lane, copy_row = member / 8, vector = member % 8;
  u8* const copy_to = stages + copy_row * 128 + (vector ^ (copy_row & 1) * 4) * 16;
  const T* const copy_from = static_cast<const T*>(p.x) +
                             static_cast<i64>(min(first_token + copy_row, p.m - 1)) * p.k +
                             8 * vector;
  const int copy_rows = p.m - first_token - copy_row;  // that are there from this one on
  const auto fetch_x = [&](u32 slot, u32 tile_k) {
    const T* const at = copy_from + static_cast<u64>(tile_k) * 64;
    const bool inside = !kSmall || static_cast<int>(64 * tile_k) + 8 * vector < p.k;
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
  const bool copies_zeros = lane / 4 % 2, shifted = p.group_shift == 7;
  const bool copies_numbers =
      lane < kRows * 8 && (kSmall || lane / 2 % 2 == 0) && (!copies_zeros || p.zeros);
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
    const u64 group = kSmall ? 2 * tile_k : shifted ? tile_k / 2 : tile_k;
    if (copies_numbers) async_copy16(to + kRows * 512 + lane * 16, numbers_from + group * 16, true);
  };

  float acc[kRows][kTokens][4] = {};
  const auto multiply = [&](u32 slot) {
    const u8* const mine = own + slot * kStage;
    u32 left[kRows][4][4];
    float scales[kRows][kGroups][2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Codes less their zero points: exact for its whole part, then rounded as a dequantized
      // weight is.
      const uint4 all = *reinterpret_cast<const uint4*>(mine + r * 512 + lane * 16);
      const u32 each[4] = {all.x, all.y, all.z, all.w};
      const u32* const numbers = reinterpret_cast<const u32*>(mine + kRows * 512 + r * 128);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const u32 scale = numbers[8 * group + g], zero = p.zeros ? numbers[16 + 8 * group + g] : 0;
        u32 whole[2], rest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scales[r][group][i] = half_of<S>(scale, i);
          const float z = zero_of(p, zero, i);
          const float near = fminf(fmaxf(rintf(z), -64.0f), 64.0f);
          whole[i] = pack2<T>(-Code<T>::kOffset - near, -Code<T>::kOffset - near);
          rest[i] = pack2<T>(near - z, near - z);
        }
#pragma unroll
        for (int j = group * 4 / kGroups; j < (group + 1) * 4 / kGroups; ++j) {
          widen_codes<T>(left[r][j], each[j]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            left[r][j][i] = fma2<T>(left[r][j][i], Code<T>::kOnes, whole[i % 2]);
            if (p.zeros) left[r][j][i] = fma2<T>(left[r][j][i], Code<T>::kOnes, rest[i % 2]);
          }
        }
      }
    }
    const u8* const low = stages + slot * kStage + g * 128 + (t ^ (g & 1) * 4) * 16;
    const u8* const high = stages + slot * kStage + g * 128 + ((t + 4) ^ (g & 1) * 4) * 16;
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      float part[kRows][4] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 x = *reinterpret_cast<const uint4*>((h == 0 ? low : high) + n * 1024);
#pragma unroll
        for (int r = 0; r < kRows; ++r) mma<T>(part[r], left[r][2 * h], x.x, x.y);
#pragma unroll
        for (int r = 0; r < kRows; ++r) mma<T>(part[r], left[r][2 * h + 1], x.z, x.w);
        if (h == 0 && !kSmall) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[r][n][i] += scales[r][h * (kGroups - 1)][i / 2] * part[r][i];
            part[r][i] = 0.0f;
          }
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
  finish<T, kRows, kTokens>(p, place, reinterpret_cast<float*>(storage), acc);
}

}  // namespace flexops::int4
