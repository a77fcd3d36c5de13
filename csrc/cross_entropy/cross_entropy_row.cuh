// A row of cross entropy: what of it a thread adds up, and the gradient that it writes. What is
// computed: flexops/ops/cross_entropy.py.
#pragma once

#include "common/held.cuh"
#include "common/rows.cuh"

namespace flexops::cross_entropy {

using namespace flexops::rows;

inline constexpr Cache kRead = Cache::streaming, kWrite = Cache::streaming;
inline constexpr int kMostThreads = 1024;  // of a block
inline constexpr int kWarps = kMostThreads / kNarrowWarp;

inline constexpr float kLog2e = 1.44269504088896341f;

struct Params {
  void* logits;
  void* out;  // of the gradient, or null; may be the logits
  const i64* target;
  float* losses;  // null: maxima and sums are read, not written, and only the gradient is made
  float *maxima,
      *sums;  // of each row: its greatest logit, and the sum of the powers of the distances to it
  float* divisor;         // of the sum of losses; null: 1
  const float* upstream;  // factors of the gradient, or null
  i64 rows, stride, out_stride, ignore_index;
  int length;
  int each_row;          // 1: upstream has one factor for each row
  int lanes, log_lanes;  // threads that share a row: a power of two up to 32, or the block
  int blocks;            // that share a row, if blocks do
  int part;              // vectors of a block
  int count;  // 1: the divisor is the number of rows that are not ignored, which blocks find by
              // themselves
  float smoothing, z_loss;
};

// ---- numbers ----

// 16-bit logits take powers of 2, with a factor folded into their exponents; float32 ones have e's
// own, to the last bits.
template <typename T>
inline constexpr float kUnit = kIsFloat<T> ? 1.0f : kLog2e;

/// e to the power of (value - base / kUnit).
template <typename T>
FLEXOPS_DEVICE float power(float value, float base) {
  if constexpr (kIsFloat<T>) return expf(value - base);
  return quick_exp2(__fmaf_rn(value, kLog2e, -base));
}

/// e to the power of a distance between maxima.
FLEXOPS_DEVICE float rescale(float distance) { return quick_exp2(distance * kLog2e); }

/// What a set of logits contributes: their maximum, the sum of the powers of their distances to it,
/// and their sum.
struct State {
  float maximum, sum, total;
};

FLEXOPS_DEVICE float settle(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

/// Over neighbouring lanes.
FLEXOPS_DEVICE State reduce_lanes(State s, int lanes, bool with_total) {
  float maximum = s.maximum;
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    maximum = fmaxf(maximum, shuffle_xor(maximum, mask, kNarrowWarp));
  s.sum *= rescale(s.maximum - settle(maximum));
  s.maximum = maximum;
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    s.sum += shuffle_xor(s.sum, mask, kNarrowWarp);
    if (with_total) s.total += shuffle_xor(s.total, mask, kNarrowWarp);
  }
  return s;
}

/// Of several warps' states; for every lane of every warp, in the same order.
FLEXOPS_DEVICE State merge(const float4* states, int count, bool with_total) {
  State s = {-infinity(), 0.0f, 0.0f};
  for (int i = threadIdx.x % kNarrowWarp; i < count; i += kNarrowWarp) {
    const float4 other = states[i];
    const float maximum = fmaxf(s.maximum, other.x), base = settle(maximum);
    s.sum = s.sum * rescale(s.maximum - base) + other.y * rescale(other.x - base);
    s.total += other.z;
    s.maximum = maximum;
  }
  return reduce_lanes(s, kNarrowWarp, with_total);
}

/// Over all the threads that share a row.
FLEXOPS_DEVICE State reduce_row(const Params& p, State s, float4* shared) {
  s = reduce_lanes(s, p.lanes < kNarrowWarp ? p.lanes : kNarrowWarp, p.smoothing != 0.0f);
  if (p.lanes <= kNarrowWarp) return s;
  if (threadIdx.x % kNarrowWarp == 0)
    shared[threadIdx.x / kNarrowWarp] = {s.maximum, s.sum, s.total, 0.0f};
  __syncthreads();
  return merge(shared, static_cast<int>(blockDim.x) / kNarrowWarp, p.smoothing != 0.0f);
}

/// A row's gradient is slope * power(logit, base) - shift, and less `drop` at the target.
struct Gradient {
  float base, slope, shift, drop;
};

/// From the row's (settled) maximum and sum, not from their logarithm, which a float32 row would
/// feel the rounding of.
template <typename T>
FLEXOPS_DEVICE Gradient make_gradient(const Params& p, float maximum, float sum, float weight) {
  const float slope =
      p.z_loss == 0.0f ? weight : weight * (1.0f + 2.0f * p.z_loss * (maximum + logf(sum)));
  return {maximum * kUnit<T>, slope / sum, weight * p.smoothing / static_cast<float>(p.length),
          weight * (1.0f - p.smoothing)};
}

// ---- a row ----

/// -inf, twice in 16 bits.
template <typename T>
inline constexpr u32 kNothing = 0xff800000u;
template <>
inline constexpr u32 kNothing<f16> = 0xfc00fc00u;
template <>
inline constexpr u32 kNothing<bf16> = 0xff80ff80u;

#if FLEXOPS_HAS_MIN2
/// The greatest of each half of N words: a tree, as in rows.cuh.
template <typename T, int N>
FLEXOPS_DEVICE u32 max2_tree(const u32* words) {
  if constexpr (N == 1) return words[0];
  if constexpr (N > 1)
    return max2<T>(max2_tree<T, N / 2>(words), max2_tree<T, N - N / 2>(words + N / 2));
}
#endif

/// The greatest element.
template <typename T>
FLEXOPS_DEVICE float largest(const Packed& raw) {
#if FLEXOPS_HAS_MIN2
  if constexpr (!kIsFloat<T>) {  // NaN wins here, where it must not, but makes the row's sum NaN
                                 // all the same
    const u32 out = max2_tree<T, 4>(raw.at);
    const T low = {static_cast<u16>(out)}, high = {static_cast<u16>(out >> 16)};
    return fmaxf(to_float(low), to_float(high));
  }
#endif
  float x[kPerVector<T>];
  widen<T>(x, raw);
  return max_tree<kPerVector<T>>(x);
}

/// Adds up the elements that are in [0, end). Vectors that are not whole come last and in turn: few
/// threads have one.
template <typename T, int V>
FLEXOPS_DEVICE void add_total(State& s, Packed (&raw)[V], int at, int step, int end) {
  constexpr int N = kPerVector<T>;
  float x[N];
  bool ragged = false;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int from = at + k * step;
    widen<T>(x, raw[k]);
    if (from >= 0 && from + N <= end) {
      s.total += sum_tree<N>(x);
    } else {
      ragged |= from < end;
    }
  }
  if (!ragged) return;
#pragma unroll 1
  for (int k = 0; k < V; ++k) {
    const int from = at + k * step;
    widen<T>(x, next(raw));
    if (from >= 0 && from + N <= end) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) s.total += from + i >= 0 && from + i < end ? x[i] : 0.0f;
  }
}

/// Adds vectors of which elements outside of the row are -inf; the first of vector k is at + k *
/// step. By kParts parts, for each of which the vectors change places.
template <typename T, int V, int kParts = 1>
FLEXOPS_DEVICE void add_vectors(State& s, const Params& p, Packed (&raw)[V], int at, int step,
                                int end) {
  constexpr int N = kPerVector<T>;
  float highest = s.maximum, x[N];
#pragma unroll
  for (int k = 0; k < V; ++k) highest = fmaxf(highest, largest<T>(raw[k]));
  const float base = settle(highest), scaled = base * kUnit<T>;
  s.sum *= rescale(s.maximum - base);
  s.maximum = highest;
  if (p.smoothing != 0.0f) add_total<T>(s, raw, at, step, end);
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int k = 0; k < V / kParts; ++k) {
      widen<T>(x, raw[k]);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = power<T>(x[i], scaled);
      s.sum += sum_tree<N>(x);
    }
    if constexpr (kParts == 2) swap_halves(raw);
  }
}

template <typename T>
FLEXOPS_DEVICE void write_vector(const Params& p, T* out, const Packed& raw, int at,
                                 const Gradient& g, int target) {
  constexpr int N = kPerVector<T>;
  float x[N];
  widen<T>(x, raw);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fmaf_rn(power<T>(x[i], g.base), g.slope, -g.shift);
  if (static_cast<u32>(target - at) < static_cast<u32>(N)) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] -= at + i == target ? g.drop : 0.0f;
  }
  store_vector<T, kWrite>(out, at, p.length, packed<T>(x));
}

/// Rows that are not ignored. Every thread of the block takes part.
FLEXOPS_DEVICE float count_targets(const Params& p, float* shared) {
  float count = 0.0f;  // exact: this is asked for a few rows only
  for (i64 i = threadIdx.x; i < p.rows; i += blockDim.x)
    count += p.target[i] != p.ignore_index ? 1.0f : 0.0f;
  return group_reduce(count, Sum{}, 0.0f, static_cast<int>(blockDim.x), shared);
}

FLEXOPS_DEVICE float loss_of(const Params& p, float maximum, float sum, float at_target,
                             float total) {
  const float log = logf(sum), lse = maximum + log;
  const float loss = log + (1.0f - p.smoothing) * (maximum - at_target) + p.z_loss * lse * lse;
  return p.smoothing == 0.0f
             ? loss
             : loss + p.smoothing * (maximum - total / static_cast<float>(p.length));
}

/// Zeros over this block's part of a row that is ignored.
template <typename T>
FLEXOPS_DEVICE void clear_part(const Params& p, T* out, int first, int step, int end) {
  for (int at = first; at < end; at += step)
    store_vector<T, kWrite>(out, at, p.length, Packed{{0, 0, 0, 0}});
}

}  // namespace flexops::cross_entropy
