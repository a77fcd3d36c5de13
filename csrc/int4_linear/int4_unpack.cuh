// The weight that 4-bit codes stand for.
#pragma once

#include "common/dtypes.cuh"
#include "common/element_type.h"
#include "common/fragments.cuh"
#include "common/once.cuh"

namespace flexops::int4 {

struct UnpackParams {
  const u8* packed;
  const void *scales, *zeros;
  void* out;
  int n, k, tiles_k, groups, group_shift;
  ElementType scale_type, zero_type;
  i64 tiles;
};

FLEXOPS_DEVICE float number_at(const void* from, i64 index, ElementType type) {
  if (type == ElementType::f32) return static_cast<const float*>(from)[index];
  const u16 bits = static_cast<const u16*>(from)[index];
  return type == ElementType::f16 ? to_float(f16{bits}) : to_float(bf16{bits});
}

/// Of MXFP4: a sign, and twice the number in a table of eight.
FLEXOPS_DEVICE float mxfp4_number(u32 code) {
  const auto twice = static_cast<float>(0xc8643210u >> 4 * (code & 7u) & 15u);
  return (code & 8u ? -0.5f : 0.5f) * twice;
}

/// A warp has a tile. kMxfp4: codes are MXFP4's numbers, without zero points.
template <class T, bool kMxfp4 = false>
__global__ void __launch_bounds__(256) unpack(const FLEXOPS_GRID_CONSTANT UnpackParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (index >= p.tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const i64 tile = index / p.tiles_k;
  const int tile_k = static_cast<int>(index - tile * p.tiles_k);
  const uint4 all = load_once(reinterpret_cast<const uint4*>(p.packed) + index * 32 + lane);
  const u32 each[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int column = 64 * tile_k + 32 * h, group = column >> p.group_shift;
    if (column >= p.k) continue;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = static_cast<int>(16 * tile) + g + 8 * high;
      const i64 at = (tile * p.groups + group) * 16 + 2 * g + high;
      const float scale = number_at(p.scales, at, p.scale_type),
                  zero = p.zeros ? number_at(p.zeros, at, p.zero_type) : 8.0f;
      T* const out = static_cast<T*>(p.out) + static_cast<i64>(row) * p.k + column;
      u32 words[4];  // of two columns of every eight
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 codes = each[2 * h + i / 2] >> (8 * (i % 2) + 4 * high);
        const auto number = [&](u32 code) {
          return scale * (kMxfp4 ? mxfp4_number(code) : static_cast<float>(code) - zero);
        };
        const float first = number(codes & 15u), second = number(codes >> 16 & 15u);
        if constexpr (sizeof(T) == 4) {
          if (row < p.n) *reinterpret_cast<float2*>(out + 8 * i + 2 * t) = {first, second};
        } else {
          words[i] = pack2<T>(first, second);
        }
      }
      if constexpr (sizeof(T) == 2) store_columns(out, words, 32, row < p.n);
    }
  }
}

}  // namespace flexops::int4
