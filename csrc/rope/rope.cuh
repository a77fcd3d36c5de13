// Rotary embedding's kernels. Formulas: flexops/ops/rope.py.
//
// Memory decides: each element is read and written once. A thread has one place of a position, two
// vectors that belong together (or two elements), in a few heads: what it reads of cos and sin is
// for all of them, and all of its loads are in flight at once. Few heads, so that there are many
// threads, and as few instructions as can be before the loads: both matter more than how often cos
// and sin are read. Query and key are one launch: the key's heads follow the query's. Blocks are
// numbered in the order of memory.
#pragma once

#include "common/device.cuh"
#include "common/divisor.cuh"
#include "common/elements.cuh"
#include "common/vec.cuh"

namespace flexops::rope {

// Tuned on one H200.
inline constexpr int kThreads = 64;
inline constexpr int kHeads = 2;    // of a thread, at most: loads in flight
inline constexpr int kBlocks = 20;  // at least so many on a multiprocessor
inline constexpr Cache kLoad = Cache::normal,
                       kStore = Cache::normal;  // why not streaming: activation.cuh

/// Strides count vectors, or elements where `rotate` goes element by element; except `element`.
struct Side {
  const void* in;
  void* out;
  i64 in_batch, in_head, in_length, in_element;
  i64 out_batch, out_head, out_length, out_element;
  u32 heads;
};

struct Params {
  Side side[2];
  const void *cos, *sin, *positions;
  i64 cos_stride, sin_stride, max_positions;  // strides count elements
  i64 cos_batch, sin_batch;                   // 0 if all batches share the rows
  i64 position_batch, position_length;
  u32 first_position;  // if positions are not given
  u32 total;           // batch * length * items, or length * items if the grid counts batches
  Divisor items;       // of a position: `rotated`, then those that are copied
  Divisor length;
  u32 rotated;       // items that are rotated
  u32 copied;        // distance between the two vectors of an item that is copied
  u32 vectors;       // of a head
  u32 query_groups;  // the first groups of heads are the query's, the others the key's
  u32 per_group;     // heads of a group
  bool heads_first;  // blocks of one place and several groups follow each other; else blocks of one
                     // group
  ElementType table_type;
  bool interleaved, inverse, wide_positions;
};

/// What is to be done where: the same for all threads of a block, but for the first four.
struct Task {
  u32 item, at, batch;  // at: position in `length`
  bool inside;
  u32 side, head, heads;  // the first one, and how many
};

FLEXOPS_DEVICE Task find_task(const Params& p) {
  Task t;
  const u32 block = p.heads_first ? blockIdx.y : blockIdx.x,
            group = p.heads_first ? blockIdx.x : blockIdx.y;
  const u32 index = block * kThreads + threadIdx.x;
  t.inside = index < p.total;
  t.batch = divide(divide(index, p.items, t.item), p.length, t.at) + blockIdx.z;
  t.side = group >= p.query_groups;
  t.head = (t.side ? group - p.query_groups : group) * p.per_group;
  const u32 left = p.side[t.side].heads - t.head;
  t.heads = left < p.per_group ? left : p.per_group;
  return t;
}

/// cos and sin of a thread's pairs, as they are fetched: N neighbouring ones, or half of them for
/// each of its vectors.
template <int N, bool kHalves>
struct Table {
  static constexpr int kPart = kHalves ? N / 2 : N;
  static constexpr int kFew = kPart == 2 ? 1 : kPart;  // two pairs are read one by one
  Broadcast<kFew> raw[N / kFew];

  FLEXOPS_DEVICE void load(const void* table, i64 index, i64 apart, ElementType type) {
#pragma unroll
    for (int i = 0; i < N; i += kFew)
      raw[i / kFew].load(table, index + i / kPart * apart + i % kPart, type);
  }
  FLEXOPS_DEVICE void widen_to(float (&out)[N], ElementType type) const {
#pragma unroll
    for (int i = 0; i < N; i += kFew) raw[i / kFew].widen_to(out + i, type);
  }
};

/// What rotates a thread's elements, in the order of `rotate`'s.
template <int N>
struct Angles {
  float cos[N], sin[N];

  /// Of N pairs from `pair` on; with kHalves of N / 2, and of as many which are `apart` from them.
  template <bool kHalves>
  FLEXOPS_DEVICE void load(const Params& p, const Task& t, u32 pair, u32 apart) {
    i64 row = p.first_position + t.at;
    bool known = true;
    if (p.positions) {
      const i64 index = t.batch * p.position_batch + t.at * p.position_length;
      const i64 position = p.wide_positions ? static_cast<const i64*>(p.positions)[index]
                                            : static_cast<const i32*>(p.positions)[index];
      known = position >= 0 && position < p.max_positions;
      row = known ? position : 0;
    }
    Table<N, kHalves> c, s;
    c.load(p.cos, t.batch * p.cos_batch + row * p.cos_stride + pair, apart, p.table_type);
    s.load(p.sin, t.batch * p.sin_batch + row * p.sin_stride + pair, apart, p.table_type);
    c.widen_to(cos, p.table_type);
    s.widen_to(sin, p.table_type);
    const u32 sign = p.inverse ? 0x80000000u : 0u;
#pragma unroll
    for (int i = 0; i < N; ++i) sin[i] = bit_cast<float>(bit_cast<u32>(sin[i]) ^ sign);
    if (known) return;
#pragma unroll
    for (int i = 0; i < N; ++i) cos[i] = sin[i] = bit_cast<float>(0x7fc00000u);
  }
};

/// a b - c d. In fp32 with the rounding error of the second product (after Kahan), which leaves
/// half a unit in the last place and a little.
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
  if (!interleaved) {
#pragma unroll
    for (int i = 0; i < N; ++i) rotate_pair<kAccurate>(x[i], y[i], a.cos[i], a.sin[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      rotate_pair<kAccurate>(x[2 * i], x[2 * i + 1], a.cos[i], a.sin[i]);
      rotate_pair<kAccurate>(y[2 * i], y[2 * i + 1], a.cos[N / 2 + i], a.sin[N / 2 + i]);
    }
  }
}

/// By vectors. The strides of `side` fit 32 bits, as do its tensors' sizes in vectors.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) rotate(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>;
  using Vector = Vec<T, N>;
  const Task t = find_task(p);
  if (!t.inside) return;
  const bool rotated = t.item < p.rotated;
  // Find the two vectors that rotate together, or are copied.
  u32 first = t.item, second = t.item + p.rotated;
  if (!rotated) first = second, second += p.copied;
  const bool has_second = second < p.vectors;
  const Side& s = p.side[t.side];
  const u32 from = t.batch * static_cast<u32>(s.in_batch) + t.at * static_cast<u32>(s.in_length) +
                   t.head * static_cast<u32>(s.in_head);
  const auto *in = static_cast<const Vector*>(s.in) + (from + first),
             *in_second = static_cast<const Vector*>(s.in) + (from + second);
  // Load them for several heads, which share the angles.
  Vector a[kHeads], b[kHeads];
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (u < t.heads) {
      a[u] = load<kLoad>(in + u * s.in_head);
      if (has_second) b[u] = load<kLoad>(in_second + u * s.in_head);
    }
  }
  Angles<N> angles;
  if (rotated) {
    if (p.interleaved) {
      angles.template load<true>(p, t, t.item * (N / 2), p.rotated * (N / 2));
    } else {
      angles.template load<false>(p, t, t.item * N, 0);
    }
  }
  // Rotate and write.
  const u32 to = t.batch * static_cast<u32>(s.out_batch) + t.at * static_cast<u32>(s.out_length) +
                 t.head * static_cast<u32>(s.out_head);
  T *out = static_cast<T*>(s.out) + static_cast<i64>(to + first) * N,
    *out_second = static_cast<T*>(s.out) + static_cast<i64>(to + second) * N;
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (u < t.heads) {  // not a return, with which clang does not unroll
      float x[N], y[N] = {};
      widen(x, a[u]);
      if (has_second) widen(y, b[u]);
      if (rotated) rotate_all<sizeof(T) != 2>(x, y, angles, p.interleaved);
      store<T, kStore>(out, u * s.out_head * N, x);
      if (has_second) store<T, kStore>(out_second, u * s.out_head * N, y);
    }
  }
}

/// By elements, of any strides: an item is a pair, or two elements to copy.
template <typename T>
__global__ void __launch_bounds__(kThreads) rotate_elements(const FLEXOPS_GRID_CONSTANT Params p) {
  const Task t = find_task(p);
  if (!t.inside) return;
  const bool rotated = t.item < p.rotated;
  // Find the two elements that rotate together, or are copied.
  u32 first = t.item, second = t.item + p.rotated;
  if (!rotated) {
    first = second, second += p.copied;
  } else if (p.interleaved) {
    first = 2 * t.item, second = first + 1;
  }
  const bool has_second = second < p.vectors;
  Angles<1> angles;
  if (rotated) angles.load<false>(p, t, t.item, 0);
  const Side& s = p.side[t.side];
  // Load, rotate and write, head by head.
  for (u32 head = t.head; head < t.head + t.heads; ++head) {
    const i64 in = t.batch * s.in_batch + t.at * s.in_length + head * s.in_head;
    const i64 out = t.batch * s.out_batch + t.at * s.out_length + head * s.out_head;
    const T* from = static_cast<const T*>(s.in) + in;
    T* to = static_cast<T*>(s.out) + out;
    float x = to_float(from[first * s.in_element]),
          y = has_second ? to_float(from[second * s.in_element]) : 0.0f;
    if (rotated) rotate_pair<true>(x, y, angles.cos[0], angles.sin[0]);
    to[first * s.out_element] = from_float<T>(x);
    if (has_second) to[second * s.out_element] = from_float<T>(y);
  }
}

}  // namespace flexops::rope
