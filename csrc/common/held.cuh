// The vectors of a row that a thread holds in registers: vector k is that of elements [first + k *
// step, + kVector). Code for each of them is much to compile; what few threads have to do is done
// to one after the other, and long work by halves.
#pragma once

#include "common/rows.cuh"

namespace flexops::rows {

FLEXOPS_DEVICE u32 choose(u32 keep, u32 value, u32 other) {
  return (value & keep) | (other & ~keep);
}

/// The first vector, which becomes the last one: V times that, in a loop that is not unrolled,
/// leave all as they were.
template <int V>
FLEXOPS_DEVICE Packed next(Packed (&vectors)[V]) {
  const Packed first = vectors[0];
#pragma unroll
  for (int k = 1; k < V; ++k) vectors[k - 1] = vectors[k];
  vectors[V - 1] = first;
  return first;
}

/// Whether all of the elements [at, at + kVector) are in a row of `length`, or none of them behind
/// its begin is.
template <typename T>
FLEXOPS_DEVICE bool is_whole(int at, int length) {
  return (at >= 0 && at + kPerVector<T> <= length) || at >= length;
}

FLEXOPS_DEVICE bool is_inside(int at, int length) {
  return static_cast<u32>(at) < static_cast<u32>(length);
}

/// Where a row begins or ends within the elements [at, at + kVector), those outside of it become
/// `other`'s.
template <typename T>
FLEXOPS_DEVICE void limit(Packed& values, int at, int length, u32 other) {
  constexpr int N = kPerVector<T>;
  if (is_whole<T>(at, length)) return;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    u32 keep = 0;
#pragma unroll
    for (int i = w * N / 4; i < (w + 1) * N / 4; ++i)
      if (is_inside(at + i, length)) keep |= kIsFloat<T> ? ~0u : 0xffffu << (i % 2 * 16);
    values.at[w] = choose(keep, values.at[w], other);
  }
}

/// The same where only the row's end can be among them: less to compile.
template <typename T>
FLEXOPS_DEVICE void limit_end(Packed& values, int at, int length, u32 other) {
  constexpr int N = kPerVector<T>;
  const int inside = length - at;
  if (inside >= N || inside <= 0) return;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int first = w * N / 4;
    const u32 keep = inside > first + N / 4 - 1 ? ~0u : inside > first ? 0xffffu : 0u;
    values.at[w] = choose(keep, values.at[w], other);
  }
}

/// The same for all of a thread's vectors, of which the first one alone may begin before the row.
template <typename T, int V>
FLEXOPS_DEVICE void limit_all(Packed (&values)[V], int first, int step, int length, u32 other) {
  bool ragged = first < 0;
#pragma unroll
  for (int k = 0; k < V; ++k) ragged |= is_inside(length - 1 - first - k * step, kPerVector<T> - 1);
  if (!ragged) return;
#pragma unroll 1
  for (int k = 0; k < V; ++k) {
    next(values);
    limit<T>(values[V - 1], first + k * step, length, other);
  }
}

/// The second half of the vectors becomes the first one.
template <int V>
FLEXOPS_DEVICE void swap_halves(Packed (&vectors)[V]) {
#pragma unroll
  for (int k = 0; k < V / 2; ++k) {
    const Packed vector = vectors[k];
    vectors[k] = vectors[k + V / 2], vectors[k + V / 2] = vector;
  }
}

}  // namespace flexops::rows
