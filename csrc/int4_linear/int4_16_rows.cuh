// Products of up to 16 rows of x on tensor cores: all that a warp reads goes to its registers,
// several tiles ahead. Family int4_few_rows is faster for one or two.
#pragma once

#include "int4_linear/int4_linear.cuh"

namespace flexops::int4 {

/// What a warp reads of one tile of columns, for kRows tiles of rows and 8 * kTokens rows of x.
template <int kRows, int kTokens>
struct Fetched {
  uint4 words[kRows], x[kTokens][2];
  u32 scales[kRows][2], zeros[kRows][2];  // the second ones with groups of 32
};

/// Lets the compiler keep an address in registers, instead of computing it again for each load.
template <class V>
FLEXOPS_DEVICE void keep_address(const V*& address) {
  asm volatile("" : "+l"(address));
}

/// Warps and blocks of a cluster share the tiles of columns in turns. `S`: of the scales;
/// kAhead: tiles of columns that are fetched before they are multiplied.
template <class T, class S, int kRows, int kTokens, int kAhead, int kThreads, int kBlocks,
          bool kSmall>
__global__ void __launch_bounds__(kThreads, kBlocks) rows_16(const FLEXOPS_GRID_CONSTANT Params p) {
  extern __shared__ uint4 storage[];
  const Place place(p);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4, t = lane % 4, first_tile = place.n_tile * kRows;
  let_next_start();
  const u32 step = warps * p.cluster, begin = place.rank * warps + warp, tiles_k = p.tiles_k;
  const bool shifted = p.group_shift == 7;  // two tiles of columns have one group

  // Where the thread's data of the first tile of columns begin.
  const uint4* words[kRows];
  const u32* scales[kRows];
  const i64 to_zeros = reinterpret_cast<i64>(p.zeros) - reinterpret_cast<i64>(p.scales);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const i64 tile = min(first_tile + r, p.tiles_n - 1), group = tile * p.groups * 8 + g;
    words[r] = reinterpret_cast<const uint4*>(p.packed) + tile * tiles_k * 32 + lane;
    scales[r] = reinterpret_cast<const u32*>(p.scales) + group;
    keep_address(words[r]), keep_address(scales[r]);
  }
  const uint4* x[kTokens];
  bool valid[kTokens];
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    valid[n] = 8 * n + g < p.m;
    x[n] = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) +
                                          (valid[n] ? 8 * n + g : 0) * static_cast<i64>(p.k)) +
           t;
  }

  const auto fetch_weight = [&](Fetched<kRows, kTokens>& to, u32 tile_k) {
    // Products of 32 bits with constants, added to an address in one instruction.
    const u64 group = kSmall ? 2 * tile_k : shifted ? tile_k / 2 : tile_k, tile = tile_k;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      to.words[r] = load_once(words[r] + tile * 32);
#pragma unroll
      for (int h = 0; h < (kSmall ? 2 : 1); ++h) {
        const u32* const at = scales[r] + group * 8 + 8 * h;
        to.scales[r][h] = load<Cache::constant>(at);
        if (p.zeros)
          to.zeros[r][h] = load<Cache::constant>(
              reinterpret_cast<const u32*>(reinterpret_cast<i64>(at) + to_zeros));
      }
    }
  };
  const auto fetch_x = [&](Fetched<kRows, kTokens>& to, u32 tile_k) {
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to.x[n][h] = uint4{0, 0, 0, 0};
        if (valid[n] && (!kSmall || h == 0 || static_cast<int>(64 * tile_k) + 32 < p.k))
          to.x[n][h] = x[n][static_cast<u64>(tile_k) * 8 + 4 * h];
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
      constexpr int kGroup = kSmall ? 1 : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float scale = half_of<S>(of.scales[r][h * kGroup], half),
                      zero = Code<T>::kOffset + zero_of(p, of.zeros[r][h * kGroup], half),
                      less = -scale * zero;
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              acc[r][n][i] += scale * part[r][n][i];
              acc[r][n][i] += less * sums[n][i];
              part[r][n][i] = 0.0f;
            }
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
    if (begin + i * step < tiles_k) fetch_weight(fetched[i], begin + i * step);
  }
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i * step < tiles_k) fetch_x(fetched[i], begin + i * step);
  }
  for (u32 tile = begin; tile < tiles_k;) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, tile += step) {
      const u32 next = tile + kAhead * step;
      if (tile < tiles_k) multiply(fetched[i]);
      if (next < tiles_k) fetch_weight(fetched[i], next), fetch_x(fetched[i], next);
    }
  }
  finish<T, kRows, kTokens>(p, place, reinterpret_cast<float*>(storage), acc);
}

}  // namespace flexops::int4
