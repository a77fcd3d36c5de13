// Products of up to 16 rows of x: memory decides, so all that a warp reads goes to its registers,
// several tiles ahead.
#pragma once

#include "int4_linear/int4_linear.cuh"

namespace flexops::int4 {

/// What a warp reads of one tile of columns, for kRows tiles of rows and 8 * kTokens rows of x.
template <int kRows, int kTokens>
struct Fetched {
  uint4 words[kRows], x[kTokens][2];
  u32 scales[kRows][2], zeros[kRows][2];  // the second ones with groups of 32
};

/// Warps and blocks of a cluster share the tiles of columns in turns.
template <class T, int kRows, int kTokens, int kAhead, bool kSmall>
__global__ void __launch_bounds__(kRows* kTokens > 4 ? 256 : 512)
    few_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  extern __shared__ uint4 storage[];
  const Place place(p);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4, t = lane % 4, first_tile = place.n_tile * kRows;
  let_next_start();
  const int step = warps * p.cluster, begin = place.rank * warps + warp;
  const T* const x = static_cast<const T*>(p.x) + static_cast<i64>(g) * p.k + 8 * t;

  const auto fetch_weight = [&](Fetched<kRows, kTokens>& to, int tile_k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int tile = min(first_tile + r, p.tiles_n - 1);
      to.words[r] = load_once(reinterpret_cast<const uint4*>(p.packed) +
                              (static_cast<i64>(tile) * p.tiles_k + tile_k) * 32 + lane);
      const int group = kSmall ? 2 * tile_k : tile_k >> (p.group_shift - 6);
      const i64 at = (static_cast<i64>(tile) * p.groups + group) * 8 + g;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (h == 0 || kSmall) {
          to.scales[r][h] =
              load<Cache::constant>(reinterpret_cast<const u32*>(p.scales) + at + 8 * h);
          if (p.zeros)
            to.zeros[r][h] =
                load<Cache::constant>(reinterpret_cast<const u32*>(p.zeros) + at + 8 * h);
        }
      }
    }
  };
  const auto fetch_x = [&](Fetched<kRows, kTokens>& to, int tile_k) {
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = 64 * tile_k + 32 * h;
        to.x[n][h] = uint4{0, 0, 0, 0};
        if (8 * n + g < p.m && column < p.k)
          to.x[n][h] = *reinterpret_cast<const uint4*>(x + static_cast<i64>(8 * n) * p.k + column);
      }
    }
  };

  float acc[kRows][kTokens][4] = {};
  const auto multiply = [&](const Fetched<kRows, kTokens>& of) {
    const u32 ones[4] = {Code<T>::kOnes, Code<T>::kOnes, Code<T>::kOnes, Code<T>::kOnes};
    float part[kRows][kTokens][4] = {}, sums[kTokens][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Codes times x, and the sums of x, which the offset and the zero points are multiplied by.
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        mma<T>(sums[n], ones, of.x[n][h].x, of.x[n][h].y);
        mma<T>(sums[n], ones, of.x[n][h].z, of.x[n][h].w);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        u32 left[4];
        widen_codes<T>(left, h == 0 ? of.words[r].x : of.words[r].z);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) mma<T>(part[r][n], left, of.x[n][h].x, of.x[n][h].y);
        widen_codes<T>(left, h == 0 ? of.words[r].y : of.words[r].w);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) mma<T>(part[r][n], left, of.x[n][h].z, of.x[n][h].w);
      }
      if (h == 0 && !kSmall) continue;
      // The group is complete.
      const int which = h == 1 && kSmall ? 1 : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 scales = which ? of.scales[r][1] : of.scales[r][0],
                    zeros = which ? of.zeros[r][1] : of.zeros[r][0];
          const float scale = scale_of(p, scales, i / 2),
                      zero = Code<T>::kOffset + zero_of(p, zeros, i / 2);
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {
            acc[r][n][i] += scale * (part[r][n][i] - zero * sums[n][i]);
            part[r][n][i] = 0.0f;
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kTokens; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    }
  };

  Fetched<kRows, kTokens> fetched[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i * step < p.tiles_k) fetch_weight(fetched[i], begin + i * step);
  }
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i * step < p.tiles_k) fetch_x(fetched[i], begin + i * step);
  }
  for (int tile = begin; tile < p.tiles_k; tile += kAhead * step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int now = tile + i * step, next = now + kAhead * step;
      if (now < p.tiles_k) multiply(fetched[i]);
      if (next < p.tiles_k) fetch_weight(fetched[i], next), fetch_x(fetched[i], next);
    }
  }
  finish<T, kRows, kTokens>(p, place, reinterpret_cast<float*>(storage), acc);
}

}  // namespace flexops::int4
