// Groups of any size and place, element by element: 1 to 32 lanes or a whole block share a group. A lane holds pairs of neighbours, which
// with 4 bits share a byte; of a group that is longer than what its lanes hold, elements are read twice.
#pragma once

#include "quant/quant_coding.cuh"

namespace flexops::quant {

/// A lane's part of a group: pairs 2 * lane, 2 * (lane + lanes), 2 * (lane + 2 * lanes), ..., of which it holds kAnyHeld / 2 a round.
struct Share {
  i64 line, column;  // outer * groups + group; in `inner`
  i64 element;       // index of the group's first, if its rows are `outer_stride` and `length_stride` apart
  i64 rows;          // of the group, not counting what pads a short one
  i64 first;         // the first row of this lane's
  bool inside;       // if not, it is the very first group's
};

FLEXOPS_DEVICE Share find_share(const Params& p, i64 outer_stride, i64 length_stride) {
  Share s;
  i64 lane, outer, group;
  const i64 index = divide(static_cast<i64>(blockIdx.x) * kAnyThreads + threadIdx.x, p.lanes, lane);
  s.inside = index < p.total;
  s.line = divide(s.inside ? index : 0, p.inner, s.column);
  outer = divide(s.line, p.groups, group);
  const i64 begin = group * p.group_size, left = p.length - begin;
  s.rows = left < p.group_size ? left : p.group_size;
  s.element = outer * outer_stride + begin * length_stride + s.column;
  s.first = 2 * lane;
  return s;
}

/// The rows of a lane's i-th element, counted from its first of this round.
FLEXOPS_DEVICE int held_row(const Params& p, int i) { return i / 2 * 2 * p.lanes + i % 2; }

/// How many rows there are from `first` on, of `rows`, as far as a round goes.
FLEXOPS_DEVICE int rows_left(i64 rows, i64 first) {
  constexpr int kMost = kAnyHeld * kAnyThreads;
  const i64 left = rows - first;
  return left <= 0 ? 0 : left < kMost ? static_cast<int>(left) : kMost;
}

/// A lane's elements of a round. Instead of those that are not there, the group's first: it does not change the extremes.
FLEXOPS_DEVICE void read_held(float (&value)[kAnyHeld], const Params& p, const Share& s, i64 first) {
  const int left = rows_left(s.rows, first);
  const i64 start = first * p.length_stride;
  i64 at[kAnyHeld];
#pragma unroll
  for (int i = 0; i < kAnyHeld; ++i) {
    const int row = held_row(p, i);
    at[i] = s.element + (row < left ? start + row * p.length_stride : 0);
  }
  if (p.type == kF32) {
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) value[i] = static_cast<const float*>(p.x)[at[i]];
  } else {
    Vec<u16, kAnyHeld> bits;
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) bits.at[i] = static_cast<const u16*>(p.x)[at[i]];
    widen(value, bits, p.type);
  }
}

/// Over the `lanes` threads that share a group: a power of two up to 32, or the block.
FLEXOPS_DEVICE void merge_all(Extremes& e, int lanes, float (*shared)[2]) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask >>= 1) e.merge(e.from(mask));
  if (lanes <= kNarrowWarp) return;
  if (threadIdx.x % kNarrowWarp == 0) {
    shared[threadIdx.x / kNarrowWarp][0] = e.lowest;
    shared[threadIdx.x / kNarrowWarp][1] = e.highest;
  }
  __syncthreads();
  for (int i = 0; i < kAnyThreads / kNarrowWarp; ++i) e.merge(shared[i][0], shared[i][1]);
}

__global__ void __launch_bounds__(kAnyThreads) quantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  __shared__ float shared[kAnyThreads / kNarrowWarp][2];
  const Coding c = make_coding(p, p.type);
  const Share s = find_share(p, p.outer_stride, p.length_stride);
  const i64 step = static_cast<i64>(kAnyHeld) * p.lanes;
  float value[kAnyHeld];
  Extremes e;
  e.clear();
  i64 first = s.first;
  do {
    read_held(value, p, s, first);
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) e.add(value[i]);
    first += step;
  } while (first < s.rows);
  e.settle();
  merge_all(e, p.lanes, shared);
  if (!s.inside) return;
  Group g(e.lowest, e.highest, c);
  g.scale = round_to(g.scale, p.type);
  if (s.first == 0) {
    const i64 entry = s.line * p.pair * p.inner + s.column;
    store_any(p.scales, entry, g.scale, p.type);
    if (!c.symmetric) store_any(p.scales, entry + p.inner, g.minimum, p.type);
  }
  for (first = s.first; first < p.group_size; first += step) {
    if (s.rows > step) read_held(value, p, s, first);
    const int left = rows_left(s.rows, first), padded = rows_left(p.group_size, first);
    u8* out = static_cast<u8*>(p.out) + (s.line * p.group_bytes + (p.bits == 4 ? first / 2 : first)) * p.inner + s.column;
#pragma unroll
    for (int i = 0; i < kAnyHeld; i += 2) {
      const int row = held_row(p, i);
      u32 code[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        code[k] = g.code(value[i + k], c.top, c.round);
        if (row + k >= left || g.is_broken()) code[k] = bit_cast<u32>(c.round);
      }
      if (row >= padded) break;
      if (p.bits == 4) {
        out[row / 2 * p.inner] = static_cast<u8>((code[0] * 16u + code[1]) ^ c.flip);
      } else {
        out[row * p.inner] = static_cast<u8>(code[0]);
        if (row + 1 < padded) out[(row + 1) * p.inner] = static_cast<u8>(code[1]);
      }
    }
  }
}

__global__ void __launch_bounds__(kAnyThreads) dequantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  const Share s = find_share(p, p.length * p.inner, p.inner);
  if (!s.inside) return;
  const Decoding d = make_decoding(p);
  const i64 entry = s.line * p.pair * p.inner + s.column, step = static_cast<i64>(kAnyHeld) * p.lanes;
  const float minimum = d.symmetric ? 0.0f : load_any(p.scales, entry + p.inner, p.scale_type);
  const float each = __frcp_rn(load_any(p.scales, entry, p.scale_type));
  for (i64 first = s.first; first < s.rows; first += step) {
    const int left = rows_left(s.rows, first);
    const u8* packed = static_cast<const u8*>(p.x) + (s.line * p.group_bytes + (p.bits == 4 ? first / 2 : first)) * p.inner + s.column;
    const i64 to = s.element + first * p.inner;
    u32 codes[kAnyHeld];
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) {
      const int row = held_row(p, i);
      codes[i] = 0;
      if (row < left && (p.bits == 8 || i % 2 == 0)) codes[i] = packed[(p.bits == 8 ? row : row / 2) * p.inner];
    }
#pragma unroll
    for (int i = 0; i < kAnyHeld; ++i) {
      const int row = held_row(p, i);
      if (row >= left) break;
      const u32 byte = codes[p.bits == 8 ? i : i & ~1] ^ (d.flip & 255u);
      const u32 code = p.bits == 8 ? byte : i % 2 ? byte & 15u : byte >> 4;
      store_any(p.out, to + row * p.inner, apply(static_cast<float>(code) - d.bias, each, minimum), p.type);
    }
  }
}

}  // namespace flexops::quant
