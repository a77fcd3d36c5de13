// The weight that 4-bit codes stand for.
#pragma once

#include "common/dtypes.cuh"
#include "common/element_type.h"
#include "common/elements.cuh"
#include "common/once.cuh"
#include "common/vec.cuh"

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

/// A warp has a tile; a thread 16 columns of two rows.
template <class T>
__global__ void __launch_bounds__(256) unpack(const FLEXOPS_GRID_CONSTANT UnpackParams p) {
  constexpr int N = 16 / static_cast<int>(sizeof(T));
  const i64 index = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (index >= p.tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const i64 tile = index / p.tiles_k;
  const int tile_k = static_cast<int>(index - tile * p.tiles_k);
  const uint4 all = load_once(reinterpret_cast<const uint4*>(p.packed) + index * 32 + lane);
  const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int column = 64 * tile_k + 32 * h + 8 * t, group = column >> p.group_shift;
    if (column >= p.k) continue;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = static_cast<int>(16 * tile) + g + 8 * high;
      if (row >= p.n) continue;
      const i64 at = (tile * p.groups + group) * 16 + 2 * g + high;
      const float scale = number_at(p.scales, at, p.scale_type),
                  zero = p.zeros ? number_at(p.zeros, at, p.zero_type) : 8.0f;
      T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        constexpr int kByte[4] = {0, 2, 1, 3};
        const u32 code = words[2 * h + i / 4] >> (8 * kByte[i % 4] + 4 * high) & 15u;
        values[i] = from_float<T>((static_cast<float>(code) - zero) * scale);
      }
      T* const out = static_cast<T*>(p.out) + static_cast<i64>(row) * p.k + column;
#pragma unroll
      for (int i = 0; i < 8; i += N) {
        Vec<T, N> vector;
#pragma unroll
        for (int j = 0; j < N; ++j) vector.at[j] = values[i + j];
        store<Cache::normal>(reinterpret_cast<Vec<T, N>*>(out + i), vector);
      }
    }
  }
}

}  // namespace flexops::int4
