// Forward with masks that add and lie as the scores do, within 16 bytes: rows that a block's
// threads hold as float32.
#pragma once

#include "softmax/softmax_mask.cuh"

namespace flexops::softmax {

inline constexpr int kAddedHeld = 4;  // vectors of a row that a thread holds
inline constexpr int kMostOfAdded = 512,
                     kBlocksOfAdded =
                         2;  // threads of a block; two such leave a thread 64 registers

/// Numbers of a mask's row of `length`, for V vectors of N of a thread, `step` elements apart. What
/// is outside of the row comes as anything.
template <int N, int V>
FLEXOPS_DEVICE void read_added(float (&s)[V * N], const char* mask, Dtype kind, int from, int step,
                               int length) {
  if (kind == Dtype::f32) {
    const float* row = reinterpret_cast<const float*>(mask);
#pragma unroll
    for (int i = 0; i < V * N; i += 4) {
      const int at = from + i / N * step + i % N;
      if (at <= -4 || at >= length) continue;
      const auto numbers = load<Cache::normal>(reinterpret_cast<const Vec<float, 4>*>(row + at));
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i + j] = numbers.at[j];
    }
  } else {
    const u16* row = reinterpret_cast<const u16*>(mask);
    Vec<u32, N / 2> halves[V];
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (from + k * step < length)
        halves[k] =
            load<Cache::normal>(reinterpret_cast<const Vec<u32, N / 2>*>(row + from + k * step));
    if (kind == Dtype::bf16) {
#pragma unroll
      for (int i = 0; i < V * N; ++i)
        s[i] = bit_cast<float>(i % 2 ? halves[i / N].at[i % N / 2] & 0xffff0000u
                                     : halves[i / N].at[i % N / 2] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < V * N; ++i)
        s[i] = to_float(f16{static_cast<u16>(halves[i / N].at[i % N / 2] >> (i % 2 * 16))});
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kMostOfAdded, kBlocksOfAdded)
    softmax_added(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kAddedHeld;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  i64 mask_at;
  const Place place = find_masked_place(p, mask_at);
  const T* x = static_cast<const T*>(p.x) + place.row * p.stride;
  const int first = place.lane * N - head_of<T>(x), step = p.lanes * N;
  const int length = p.length;
  // Load the row and its mask, and add them.
  Packed raw[V];
  load_row(raw, x, first, step, length);
  float s[V * N], scores[N];
  const char* mask =
      static_cast<const char*>(p.mask) + mask_at * (p.mask_kind == Dtype::f32 ? 4 : 2);
  read_added<N, V>(s, mask, p.mask_kind, first, step, length);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    widen<T>(scores, raw[k], p.is_f16);
#pragma unroll
    for (int i = 0; i < N; ++i) s[k * N + i] = __fmaf_rn(scores[i], p.scale, s[k * N + i]);
    limit_exponents<T>(s + k * N, first + k * step, length);
  }
  // Reduce to the maximum, then to the sum of powers.
  const float maximum =
      settle(reduce_row<true>(max_tree<V * N>(s), Max{}, -infinity(), p.lanes, maxima));
#pragma unroll
  for (int i = 0; i < V * N; ++i) s[i] = power<T>((s[i] - maximum) * kUnit<T>);
  const float sum = reduce_row<true>(sum_tree<V * N>(s), Sum{}, 0.0f, p.lanes, sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  // Divide and write.
  if (!place.exists) return;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (at >= length) break;
#pragma unroll
    for (int i = k * N; i < (k + 1) * N; ++i) s[i] = divide<T>(s[i], sum, inverse);
    store_vector<T, kWrite>(out, at, length, narrow<T>(s + k * N, p.is_f16));
  }
}

}  // namespace flexops::softmax
