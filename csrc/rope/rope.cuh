// Rotary embedding's kernel. Formulas: flexops/ops/rope.py.
//
// Memory decides: each element is read and written once. A thread has one place of a position, two vectors that belong together (or two
// elements), in several heads: what it reads of cos and sin is for all of them, and all of its loads are in flight at once. Query and key
// are one launch: the key's heads follow the query's. Blocks are numbered in the order of memory.
#pragma once

#include "common/device.cuh"
#include "common/divisor.cuh"
#include "common/elements.cuh"
#include "common/vec.cuh"

namespace flexops::rope {

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_ROPE_THREADS)
#define FLEXOPS_ROPE_THREADS 64
#endif
#if !defined(FLEXOPS_ROPE_HEADS)
#define FLEXOPS_ROPE_HEADS 3
#endif
#if !defined(FLEXOPS_ROPE_LOAD)
#define FLEXOPS_ROPE_LOAD normal
#endif
#if !defined(FLEXOPS_ROPE_STORE)
#define FLEXOPS_ROPE_STORE normal
#endif

constexpr int kThreads = FLEXOPS_ROPE_THREADS;
constexpr int kHeads = FLEXOPS_ROPE_HEADS;                                             // of a thread, at most: loads in flight
constexpr Cache kLoad = Cache::FLEXOPS_ROPE_LOAD, kStore = Cache::FLEXOPS_ROPE_STORE;  // why not streaming: activation.cuh

struct Side {
  const void* in;
  void* out;
  i64 in_batch, in_head, in_length, in_element;
  i64 out_batch, out_head, out_length, out_element;
  int heads;
};

struct Params {
  Side side[2];
  const void *cos, *sin, *positions;
  i64 cos_stride, sin_stride, max_positions;
  i64 position_batch, position_length;
  i64 first_position;  // if positions are not given
  u32 total;           // batch * length * items
  Divisor items;       // of a position: `rotated`, then those that are copied
  Divisor length;
  int rotated;  // items that are rotated
  int copied;   // distance between the two vectors of an item that is copied
  int half;     // elements between the two of a pair, unless interleaved
  int rotary;   // elements that are rotated: 2 * half
  int head_dim;
  Divisor groups, blocks;  // the grid: groups of heads, and blocks of each
  u32 query_groups;        // the first groups are the query's heads, the others the key's
  u32 per_block;           // heads of a group
  bool heads_first;        // blocks of one place and several groups follow each other; else blocks of one group
  ElementType type, table_type;
  bool interleaved, inverse, wide_positions;
};

/// A thread's two vectors: where they begin in a head, and whether there is a second.
struct Places {
  int first, second;
  bool has_second;
};

template <typename T>
FLEXOPS_DEVICE Places places_of(const Params& p, int item) {
  constexpr int N = kPerVector<T>;
  if (item >= p.rotated) {
    const int k = item - p.rotated;
    return {p.rotary + k * N, p.rotary + (k + p.copied) * N, p.rotary + (k + p.copied) * N < p.head_dim};
  }
  if (!p.interleaved) return {item * N, p.half + item * N, true};
  if (N == 1) return {2 * item, 2 * item + 1, true};
  return {item * N, (item + p.rotated) * N, (item + p.rotated) * N < p.rotary};
}

/// What rotates a thread's elements, in the order of `rotate`'s.
template <int N>
struct Angles {
  float cos[N], sin[N];
};

FLEXOPS_DEVICE i64 position_of(const Params& p, u32 batch, u32 at) {
  if (!p.positions) return p.first_position + at;
  const i64 index = batch * p.position_batch + at * p.position_length;
  return p.wide_positions ? static_cast<const i64*>(p.positions)[index] : static_cast<const i32*>(p.positions)[index];
}

/// cos and sin of a thread's pairs, as they are fetched: N neighbouring ones, or half of them for each of its vectors.
template <int N, bool kHalves>
struct Table {
  static constexpr int kPart = kHalves ? N / 2 : N;
  static constexpr int kParts = N / kPart;
  static constexpr int kFew = kPart == 2 ? 1 : kPart;  // two pairs are read one by one
  Shared<kFew> raw[N / kFew];

  FLEXOPS_DEVICE void load(const void* table, i64 row, const int (&pair)[2], ElementType type) {
#pragma unroll
    for (int i = 0; i < N; i += kFew) raw[i / kFew].load(table, row + pair[i / kPart] + i % kPart, type);
  }
  FLEXOPS_DEVICE void widen_to(float* out, ElementType type) const {
#pragma unroll
    for (int i = 0; i < N; i += kFew) raw[i / kFew].widen_to(out + i, type);
  }
};

template <int N, bool kHalves>
FLEXOPS_DEVICE void load_angles(Angles<N>& out, const Params& p, i64 position, const int (&pair)[2]) {
  const bool known = position >= 0 && position < p.max_positions;
  const i64 row = known ? position : 0;
  Table<N, kHalves> cos, sin;
  cos.load(p.cos, row * p.cos_stride, pair, p.table_type);
  sin.load(p.sin, row * p.sin_stride, pair, p.table_type);
  cos.widen_to(out.cos, p.table_type);
  sin.widen_to(out.sin, p.table_type);
  const float sign = known ? (p.inverse ? -1.0f : 1.0f) : bit_cast<float>(0x7fc00000u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out.sin[i] *= sign;
    if (!known) out.cos[i] = sign;
  }
}

/// a b - c d. In fp32 with the rounding error of the second product (after Kahan), which leaves half a unit in the last place and a little.
template <bool kAccurate>
FLEXOPS_DEVICE float difference(float a, float b, float c, float d) {
  const float product = c * d, first = fmaf(a, b, -product);
  return kAccurate ? first + fmaf(-c, d, product) : first;
}

template <bool kAccurate>
FLEXOPS_DEVICE void rotate_pair(float& x, float& y, float cos, float sin) {
  const float before = x;
  x = difference<kAccurate>(before, cos, y, sin);
  y = difference<kAccurate>(y, cos, -before, sin);
}

template <bool kAccurate, int N>
FLEXOPS_DEVICE void rotate_all(float (&x)[N], float (&y)[N], const Angles<N>& a, bool interleaved) {
  if (N == 1 || !interleaved) {
#pragma unroll
    for (int i = 0; i < N; ++i) rotate_pair<kAccurate>(x[i], y[i], a.cos[i], a.sin[i]);
  } else if constexpr (N > 1) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      rotate_pair<kAccurate>(x[2 * i], x[2 * i + 1], a.cos[i], a.sin[i]);
      rotate_pair<kAccurate>(y[2 * i], y[2 * i + 1], a.cos[N / 2 + i], a.sin[N / 2 + i]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rotate(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>;
  u32 block, group;
  if (p.heads_first) {
    block = divide(blockIdx.x, p.groups, group);
  } else {
    group = divide(blockIdx.x, p.blocks, block);
  }
  const u32 index = block * kThreads + threadIdx.x;
  if (index >= p.total) return;
  u32 item, length;
  const u32 batch = divide(divide(index, p.items, item), p.length, length);
  const Places at = places_of<T>(p, static_cast<int>(item));
  const bool key = group >= p.query_groups;
  const Side& s = p.side[key];
  const u32 first_head = (key ? group - p.query_groups : group) * p.per_block, left = s.heads - first_head;
  const u32 heads = left < p.per_block ? left : p.per_block;
  const i64 in = batch * s.in_batch + length * s.in_length + first_head * s.in_head;
  const i64 in_first = in + at.first * (N == 1 ? s.in_element : 1), in_second = in + at.second * (N == 1 ? s.in_element : 1);
  Elements<T, N> first[kHeads], second[kHeads];
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (u < heads) {
      first[u] = fetch<T, N, kLoad>(s.in, in_first + u * s.in_head, p.type);
      if (at.has_second) second[u] = fetch<T, N, kLoad>(s.in, in_second + u * s.in_head, p.type);
    }
  }
  const bool rotated = item < p.rotated;
  Angles<N> angles;
  if (rotated) {
    const i64 position = position_of(p, batch, length);
    const int pair[2] = {N == 1 || !p.interleaved ? static_cast<int>(item) * N : at.first / 2, at.second / 2};
    if constexpr (N > 1) {
      if (p.interleaved) {
        load_angles<N, true>(angles, p, position, pair);
      } else {
        load_angles<N, false>(angles, p, position, pair);
      }
    } else {
      load_angles<N, false>(angles, p, position, pair);
    }
  }
  const i64 out = batch * s.out_batch + length * s.out_length + first_head * s.out_head;
  const i64 out_first = out + at.first * (N == 1 ? s.out_element : 1), out_second = out + at.second * (N == 1 ? s.out_element : 1);
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (u >= heads) return;
    float x[N], y[N] = {};
    widen(x, first[u]);
    if (at.has_second) widen(y, second[u]);
    if (rotated) rotate_all<sizeof(T) != 2>(x, y, angles, p.interleaved);
    put<T, N, kStore>(s.out, out_first + u * s.out_head, x, p.type);
    if (at.has_second) put<T, N, kStore>(s.out, out_second + u * s.out_head, y, p.type);
  }
}

}  // namespace flexops::rope
