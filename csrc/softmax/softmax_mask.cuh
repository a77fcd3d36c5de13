// Where a row's mask is, and boolean ones.
#pragma once

#include "softmax/softmax.cuh"

namespace flexops::softmax {

/// Where the mask's row for row `row` begins.
FLEXOPS_DEVICE i64 mask_offset(const Params& p, i64 row) {
  i64 offset = 0;
#pragma unroll 1
  for (int d = 0; d + 1 < p.mask_dims; ++d) {
    i64 rest;
    row = split(row, p.mask_sizes[d], rest);
    offset += rest * p.mask_strides[d];
  }
  return offset + row * p.mask_strides[p.mask_dims - 1];
}

/// The thread's row, and where the mask's begins. A grid of the mask's dimensions spares most
/// blocks all divisions, which would be a third of what there is to do. Rows that share a row of a
/// large mask, as those of heads do, are neighbours in it: the second-level cache has the mask's
/// row then, and need not have all of them.
FLEXOPS_DEVICE Place find_masked_place(const Params& p, i64& mask_at) {
  if (!p.gridded) {
    const Place place = find_place(p);
    mask_at = mask_offset(p, place.row);
    return place;
  }
  const i64 x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;
  mask_at = x * p.mask_steps[0] + y * p.mask_steps[1] + z * p.mask_steps[2];
  return {x * p.row_steps[0] + y * p.row_steps[1] + z * p.row_steps[2],
          static_cast<int>(threadIdx.x), true};
}

/// Bytes of a boolean mask, four to a word, for V vectors of a thread, `step` elements apart. What
/// is outside of the row comes as anything.
template <int N, int V>
FLEXOPS_DEVICE void read_boolean(u32 (&words)[V][N / 4], const char* row, int from, int step,
                                 int length) {
  if (is_aligned(row + from, N)) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (from + k * step >= length) continue;
      const auto bytes =
          load<Cache::normal>(reinterpret_cast<const Vec<u32, N / 4>*>(row + from + k * step));
#pragma unroll
      for (int w = 0; w < N / 4; ++w) words[k][w] = bytes.at[w];
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + k * step + i;
      u32 byte = static_cast<u8>(row[at < 0 ? 0 : at < length ? at : length - 1]);
#pragma unroll
      for (int w = N / 4 - 1; w >= 0; --w) {  // it enters at the end, and the first leaves
        const u32 word = words[k][w];
        words[k][w] = word >> 8 | byte << 24;
        byte = word;
      }
    }
  }
}

/// Elements for which the mask has false become -inf.
template <typename T>
FLEXOPS_DEVICE void apply_boolean(Packed& values, const u32* words, u32 lowest) {
  constexpr int N = kPerVector<T>;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const u32 bytes = (words[w * N / 16] & 0x01010101u) * 0xffu;
    const u32 keep = __byte_perm(bytes, 0, kIsFloat<T> ? 0x1111u * w : 0x1100u + 0x2222u * (w % 2));
    values.at[w] = choose(keep, values.at[w], lowest);
  }
}

}  // namespace flexops::softmax
