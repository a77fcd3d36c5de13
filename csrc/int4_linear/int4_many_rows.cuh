// Products of more rows of x: the warps beside each other along n share a tile of x in shared
// memory. All that is read goes there by cp.async, some tiles of columns ahead; a thread's words of
// the weight come back to the thread that has copied them.
#pragma once

#include "int4_linear/int4_linear.cuh"

namespace flexops::int4 {

inline constexpr int kManyRows = 2;                            // tiles of 16 rows of W for a warp
inline constexpr int kWarpStage = kManyRows * (512 + 4 * 32);  // bytes: words, scales, zeros

template <class T, int kTokens, bool kSmall>
__global__ void __launch_bounds__(256, kTokens <= 4 ? 2 : 1)
    many_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kRows = kManyRows;
  extern __shared__ uint4 storage[];
  const Place place(p);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4, t = lane % 4;
  const int depth = warps / p.warps_n, warp_k = warp / p.warps_n,
            warp_n = warp - warp_k * p.warps_n;
  const int first_tile = (place.n_tile * p.warps_n + warp_n) * kRows;
  const int first_token = place.token_tile * kTokens * 8;
  let_next_start();
  const int step = depth * p.cluster, begin = place.rank * depth + warp_k;
  const int team = p.warps_n * 32, member = warp_n * 32 + lane;

  // A stage: x [8 * kTokens][64 columns], then the words and the numbers of each warp.
  const int stage_size = p.stage_bytes;
  u8* const stages = reinterpret_cast<u8*>(storage) + warp_k * p.stages * stage_size;
  const auto fetch_x = [&](int slot, int tile_k) {
    u8* const stage = stages + slot * stage_size;
    // Row by row; the vectors of odd rows are exchanged by halves, against bank conflicts.
    for (int i = member; i < kTokens * 64; i += team) {
      const int row = i / 8, vector = i % 8, column = 64 * tile_k + 8 * vector;
      const bool valid = first_token + row < p.m && column < p.k;
      const T* from = static_cast<const T*>(p.x);
      if (valid) from += static_cast<i64>(first_token + row) * p.k + column;
      async_copy16(stage + row * 128 + (vector ^ (row & 1) * 4) * 16, from, valid);
    }
  };
  const auto fetch_weight = [&](int slot, int tile_k) {
    u8* const stage = stages + slot * stage_size;
    u8* const own = stage + kTokens * 1024 + warp_n * kWarpStage;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int tile = min(first_tile + r, p.tiles_n - 1);
      async_copy16(own + r * 512 + lane * 16,
                   p.packed + ((static_cast<i64>(tile) * p.tiles_k + tile_k) * 32 + lane) * 16,
                   true);
    }
    // Lanes copy the numbers: [tile][scales, zeros][group][16].
    if (lane < kRows * 8) {
      const int r = lane / 8, zeros = lane / 4 % 2, h = lane / 2 % 2;
      const int tile = min(first_tile + r, p.tiles_n - 1);
      const int group = kSmall ? 2 * tile_k + h : tile_k >> (p.group_shift - 6);
      const u16* const from = (zeros ? p.zeros : p.scales);
      if ((h == 0 || kSmall) && from)
        async_copy16(own + kRows * 512 + lane * 16,
                     from + (static_cast<i64>(tile) * p.groups + group) * 16 + lane % 2 * 8, true);
    }
  };

  float acc[kRows][kTokens][4] = {};
  const auto multiply = [&](int slot) {
    const u8* const stage = stages + slot * stage_size;
    const u8* const own = stage + kTokens * 1024 + warp_n * kWarpStage;
    u32 left[kRows][4][4];
    float scales[kRows][2][2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Codes less their zero points: exact for its whole part, then rounded as a dequantized
      // weight is.
      const uint4 words = *reinterpret_cast<const uint4*>(own + r * 512 + lane * 16);
      const u32 each[4] = {words.x, words.y, words.z, words.w};
      const u32* const numbers = reinterpret_cast<const u32*>(own + kRows * 512 + r * 128);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int group = kSmall ? h : 0;
        const u32 scale = numbers[8 * group + g], zero = p.zeros ? numbers[16 + 8 * group + g] : 0;
        u32 whole[2], rest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scales[r][h][i] = scale_of(p, scale, i);
          const float z = zero_of(p, zero, i);
          const float near = fminf(fmaxf(rintf(z), -64.0f), 64.0f);
          whole[i] = pack2<T>(-Code<T>::kOffset - near, -Code<T>::kOffset - near);
          rest[i] = pack2<T>(near - z, near - z);
        }
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; ++j) {
          widen_codes<T>(left[r][j], each[j]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            left[r][j][i] = fma2<T>(left[r][j][i], Code<T>::kOnes, whole[i % 2]);
            if (p.zeros) left[r][j][i] = fma2<T>(left[r][j][i], Code<T>::kOnes, rest[i % 2]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const u8* const row = stage + (8 * n + g) * 128;
      float part[kRows][4] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 x = *reinterpret_cast<const uint4*>(row + ((t + 4 * h) ^ (g & 1) * 4) * 16);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          mma<T>(part[r], left[r][2 * h], x.x, x.y);
          mma<T>(part[r], left[r][2 * h + 1], x.z, x.w);
        }
        if (h == 0 && !kSmall) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[r][n][i] += scales[r][h][i / 2] * part[r][i];
            part[r][i] = 0.0f;
          }
        }
      }
    }
  };

  const int count = begin < p.tiles_k ? (p.tiles_k - begin + step - 1) / step : 0;
  for (int i = 0; i < p.stages - 1; ++i) {
    if (i < count) fetch_weight(i, begin + i * step);
  }
  wait_for_previous();
  for (int i = 0; i < p.stages - 1; ++i) {
    if (i < count) fetch_x(i, begin + i * step);
    async_commit();
  }
  int slot = 0, free = p.stages - 1;
  for (int i = 0; i < count; ++i) {
    async_wait(p.stages - 2);
    barrier(1 + warp_k, team);  // the team's copies are there, and the slot before this one is free
    const int ahead = i + p.stages - 1;
    if (ahead < count)
      fetch_weight(free, begin + ahead * step), fetch_x(free, begin + ahead * step);
    async_commit();
    multiply(slot);
    free = slot;
    if (++slot == p.stages) slot = 0;
  }
  async_wait(0);
  __syncthreads();
  finish<T, kRows, kTokens>(p, place, reinterpret_cast<float*>(storage), acc);
}

}  // namespace flexops::int4
