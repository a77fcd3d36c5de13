// Forward, boolean masks or none.
#pragma once

#include "softmax/softmax_mask.cuh"

namespace flexops::softmax {

// Vectors of a row that a thread can hold, and the threads of the largest block. Two blocks of 640
// leave a thread 48 registers, of 768 40.
template <typename T>
inline constexpr int kHeld = !kIsFloat<T> ? 4 : 8;
template <typename T, bool kMasked>
inline constexpr int kMostOfRows = kIsFloat<T> ? kMostThreads
                                   : kMasked   ? 640
                                               : 768;
template <typename T, bool kMasked>
inline constexpr int kBlocksOfRows = (kMostOfRows<T, kMasked>) < kMostThreads ? 2 : 1;

/// The sum of the powers of a thread's scores, `length` of which take part. In float32 these become
/// their powers.
template <typename T, int V>
FLEXOPS_DEVICE float add_powers(Packed (&scores)[V], bool is_f16, int first, int step, int length,
                                float scale, float top) {
  constexpr int N = kPerVector<T>;
  float sum = 0.0f, powers[N];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    if (first + k * step >= length) continue;
    make_powers<T>(powers, scores[k], is_f16, scale, top);
    sum += sum_tree<N>(powers);
    if constexpr (kIsFloat<T>) scores[k] = narrow<T>(powers);
  }
  return sum;
}

/// Writes the powers, divided by their sum, and zeros beyond `length`, to a row that ends at `end`.
template <typename T, int V>
FLEXOPS_DEVICE void write_powers(void* row, int end, const Packed (&scores)[V], bool is_f16,
                                 int first, int step, int length, float scale, float top,
                                 float sum) {
  constexpr int N = kPerVector<T>;
  T* out = static_cast<T*>(row);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  float powers[N];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (at >= end) break;
    Packed results = {{0, 0, 0, 0}};
    if (at < length) {
      if constexpr (kIsFloat<T>) {
        widen<T>(powers, scores[k]);
      } else {  // again, which is cheaper than the registers to keep them: rows under way are what
                // hides memory's latency
        make_powers<T>(powers, scores[k], is_f16, scale, top);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) powers[i] = divide<T>(powers[i], sum, inverse);
      results = narrow<T>(powers, is_f16);
      limit_end<T>(results, at, length, 0);
    }
    store_vector<T, kWrite>(out, at, end, results);
  }
}

/// Rows of up to lanes * kHeld vectors; for a positive scale.
template <typename T, bool kMasked>
__global__ void __launch_bounds__((kMostOfRows<T, kMasked>), (kBlocksOfRows<T, kMasked>))
    softmax_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kHeld<T>;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const bool boolean = kMasked && (!kIsFloat<T> || p.mask_kind == Dtype::boolean);
  i64 mask_at = 0;
  const Place place = boolean ? find_masked_place(p, mask_at) : find_place(p);
  const T* x = static_cast<const T*>(p.x) + place.row * p.stride;
  const int first = place.lane * N - head_of<T>(x), step = p.lanes * N;
  int length = visible(p, place.row);
  const u32 lowest = p.lowest ^ p.flip;
  const L2Policy policy(p.keep_in_l2);
  // Load the row into registers.
  Packed scores[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    scores[k] = {{lowest, lowest, lowest, lowest}};
    if (first + k * step < length)
      scores[k] = load_with(reinterpret_cast<const Packed*>(x + (first + k * step)), policy);
  }
  // Load a boolean mask.
  u32 words[V][N / 4];
  bool bytewise = false;
  if (boolean) {
    const char* mask = static_cast<const char*>(p.mask) + mask_at;
    if (p.mask_step == 0) {
      if (*mask == 0) length = 0;
    } else {
      read_boolean<N, V>(words, mask, first, step, length);
      bytewise = true;
    }
  }
  // Apply sign, mask and the row's ends to the scores.
  if (p.flip != 0) {
#pragma unroll
    for (int i = 0; i < V * 4; ++i) scores[i / 4].at[i % 4] ^= p.flip;
  }
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (kMasked && bytewise && at < length) apply_boolean<T>(scores[k], words[k], p.lowest);
    if (k == 0) {
      limit<T>(scores[k], at, length, p.lowest);
    } else {
      limit_end<T>(scores[k], at, length, p.lowest);
    }
  }
  // Reduce to the maximum, then to the sum of powers.
  float top = find_top(
      reduce_row(highest_of<T>(scores, p.is_f16), Max{}, -infinity(), p.lanes, maxima), p.scale);
  const float scale = p.scale * kUnit<T>;
  const bool is_f16 = !kIsFloat<T> && p.is_f16,
             apart =
                 kMasked && is_f16;  // one branch: with a mask, branches for every vector cost 4 %
  float sum = apart ? add_powers<f16>(scores, false, first, step, length, scale, top)
                    : add_powers<T>(scores, is_f16 && !kMasked, first, step, length, scale, top);
  sum = reduce_row(sum, Sum{}, 0.0f, p.lanes, sums);
  // Write the powers, divided by the sum.
  if (!place.exists) return;
  forget(top);
  T* out = static_cast<T*>(p.out) + place.row * p.length;
  if (apart) {
    write_powers<f16>(out, p.length, scores, false, first, step, length, scale, top, sum);
  } else {
    write_powers<T>(out, p.length, scores, is_f16 && !kMasked, first, step, length, scale, top,
                    sum);
  }
}

}  // namespace flexops::softmax
