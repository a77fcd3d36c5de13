// Forward without a mask, for a scale that is neither 0 nor NaN: rows of any length, a block each.
//
// A row of more than its threads hold is read twice, forwards for maximum and sum together, then
// backwards for the results: what was read last is still in registers, and what was read before it
// in the second-level cache.
#pragma once

#include "softmax/softmax.cuh"

namespace flexops::softmax {

inline constexpr int kLongHeld = 8;  // vectors of a row that a thread holds

/// A chunk of V vectors: those of elements [from, from + kPerVector) and so on, `step` apart. What
/// is not in the row of `length` becomes -inf.
template <typename T, int V, typename Load>
FLEXOPS_DEVICE void load_scores(Packed (&scores)[V], const T* x, int from, int step, int length,
                                const Params& p, const Load& load_one) {
  const u32 lowest = p.lowest ^ p.flip;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    scores[k] = {{lowest, lowest, lowest, lowest}};
    if (from + k * step < length) scores[k] = load_one(x + (from + k * step));
  }
  if (p.flip != 0) {
#pragma unroll
    for (int i = 0; i < V * 4; ++i) scores[i / 4].at[i % 4] ^= p.flip;
  }
  limit_all<T>(scores, from, step, length, p.lowest);
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads) softmax_long(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kLongHeld;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const i64 row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.stride;
  T* out = static_cast<T*>(p.out) + row * p.length;
  const int length = visible(p, row), first = static_cast<int>(threadIdx.x) * N - head_of<T>(x),
            step = p.lanes * N;
  const float scale = p.scale * kUnit<T>;
  const L2Policy policy(p.keep_in_l2);
  const auto keep = [&](const T* at) {
    return load_with(reinterpret_cast<const Packed*>(at), policy);
  };
  const auto leave = [](const T* at) { return load_vector<T, Cache::streaming>(at, 0); };
  // First pass, forwards: running maximum and sum.
  float maximum = -infinity(), sum = 0.0f, s[N];
  Packed scores[V];
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const int from = first + chunk * V * step;
    load_scores<T>(scores, x, from, step, length, p, keep);
    const float highest = Max{}(highest_of<T>(scores, p.is_f16), maximum), base = settle(highest);
    sum *= power<T>((maximum - base) * scale);
    maximum = highest;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (from + k * step >= length) continue;
      make_powers<T>(s, scores[k], p.is_f16, scale, base);
      sum += sum_tree<N>(s);
    }
  }
  // Reduce both over the block.
  float top = find_top(reduce_row(maximum, Max{}, -infinity(), p.lanes, maxima), p.scale);
  sum = reduce_row(sum * power<T>((maximum - top) * scale), Sum{}, 0.0f, p.lanes, sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  forget(top);
  // Second pass, backwards, since the last chunk is in registers still: write.
#pragma unroll 1
  for (int chunk = p.chunks - 1; chunk >= 0; --chunk) {
    const int from = first + chunk * V * step;
    if (chunk != p.chunks - 1) load_scores<T>(scores, x, from, step, length, p, leave);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + k * step;
      if (at >= p.length) continue;
      make_powers<T>(s, scores[k], p.is_f16, scale, top);
      store_results<T>(out, s, p.is_f16, sum, inverse, at, length, p.length);
    }
  }
}

}  // namespace flexops::softmax
