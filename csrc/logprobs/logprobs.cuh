// The kernels of log-probabilities. What they compute: flexops/ops/logprobs.py.
//
// Memory bandwidth bounds both. The forward kernel reads a row once, a block of threads to a row,
// by an online softmax that also sums the powers times their exponents, which give the entropy. The
// backward kernel reads and writes each logit once; many blocks share a row.
#pragma once

#include "cross_entropy/cross_entropy_row.cuh"

namespace flexops::logprobs {

using namespace flexops::rows;
using cross_entropy::kNothing;
using cross_entropy::kRead;
using cross_entropy::kUnit;
using cross_entropy::kWrite;
using cross_entropy::largest;
using cross_entropy::settle;

inline constexpr int kThreads = 256;  // of a block, at most
inline constexpr int kWarps = kThreads / kNarrowWarp;
inline constexpr int kVectors = 4;  // that a thread loads at once
template <typename T, bool capped>
inline constexpr int kHeld = capped && kIsFloat<T> ? 1 : kVectors;  // tanhf is much code

/// Exponents are limited to this, so that a power of 0 times its exponent is 0 and not NaN.
inline constexpr float kLeast = -200.0f;

struct Params {
  const void* logits;
  void* out;  // of the gradient; may be the logits
  const i64* target;
  float *logprobs, *entropy, *stats;
  const float *of_logprobs, *of_entropy;
  i64 rows, stride, out_stride, ignore_index;
  int length;
  int parts;  // blocks that share a row of the gradient
  float inverse_temperature, softcap, inverse_softcap;
};

/// tanh(x); for 16-bit logits as 1 - 2 / (e^2x + 1), whose error of 2^-23 is far below theirs.
template <typename T>
FLEXOPS_DEVICE float tanh_of(float x) {
  if constexpr (kIsFloat<T>) return tanhf(x);
  return 1.0f - __fdividef(2.0f, quick_exp2(x * (2.0f * cross_entropy::kLog2e)) + 1.0f);
}

/// The logit after the soft cap. A class that is masked by -inf stays masked.
template <typename T, bool capped>
FLEXOPS_DEVICE float cap(const Params& p, float logit) {
  if constexpr (!capped) return logit;
  return logit == -infinity() ? logit : p.softcap * tanh_of<T>(logit * p.inverse_softcap);
}

/// How far a (capped) logit, over the temperature, is from `base`: both in units of kUnit, which
/// make an exponent of 2 of it for 16-bit types.
template <typename T>
FLEXOPS_DEVICE float distance(const Params& p, float logit, float base) {
  return __fmaf_rn(logit, p.inverse_temperature * kUnit<T>, -base);
}

template <typename T>
FLEXOPS_DEVICE float power(float exponent) {
  if constexpr (kIsFloat<T>) return expf(exponent);
  return quick_exp2(exponent);
}

/// What a set of logits contributes: their maximum (in units), the sum of the powers of the
/// distances to it, and that of the powers times the distances.
struct State {
  float maximum, sum, weighted;
};

/// The same with a greater maximum.
template <typename T>
FLEXOPS_DEVICE State rebase(const State& s, float maximum) {
  const float shift = s.maximum - settle(maximum), factor = power<T>(shift);
  return {maximum, s.sum * factor, (s.weighted + s.sum * fmaxf(shift, kLeast)) * factor};
}

template <typename T>
FLEXOPS_DEVICE State merge(const State& a, const State& b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  const State first = rebase<T>(a, maximum), second = rebase<T>(b, maximum);
  return {maximum, first.sum + second.sum, first.weighted + second.weighted};
}

template <typename T>
FLEXOPS_DEVICE State reduce_lanes(State s) {
#pragma unroll 1
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) {
    const State other = {shuffle_xor(s.maximum, mask, kNarrowWarp),
                         shuffle_xor(s.sum, mask, kNarrowWarp),
                         shuffle_xor(s.weighted, mask, kNarrowWarp)};
    s = merge<T>(s, other);
  }
  return s;
}

/// Adds vectors of which elements outside of the row are -inf.
template <typename T, bool capped, int V>
FLEXOPS_DEVICE void add_vectors(State& s, const Params& p, const Packed (&raw)[V]) {
  constexpr int N = kPerVector<T>;
  float highest = -infinity(), x[N], weighted[N];
#pragma unroll
  for (int k = 0; k < V; ++k) highest = fmaxf(highest, largest<T>(raw[k]));
  s = rebase<T>(s, fmaxf(s.maximum, distance<T>(p, cap<T, capped>(p, highest), 0.0f)));
  const float base = settle(s.maximum);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    widen<T>(x, raw[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float exponent = distance<T>(p, cap<T, capped>(p, x[i]), base);
      x[i] = power<T>(exponent);
      weighted[i] = x[i] * fmaxf(exponent, kLeast);
    }
    s.sum += sum_tree<N>(x);
    s.weighted += sum_tree<N>(weighted);
  }
}

/// Log-probabilities, entropies and statistics: a block to each row.
template <typename T, bool capped>
__global__ void __launch_bounds__(kThreads) logprobs_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kHeld<T, capped>;
  __shared__ State states[kWarps];
  const i64 row = blockIdx.x, wanted = p.target[row];
  const int thread = static_cast<int>(threadIdx.x);
  if (wanted == p.ignore_index) {
    if (thread == 0) p.logprobs[row] = p.entropy[row] = p.stats[row] = p.stats[p.rows + row] = 0.0f;
    return;
  }

  // Each thread: the online softmax of its vectors.
  const T* x = static_cast<const T*>(p.logits) + row * p.stride;
  const int step = static_cast<int>(blockDim.x) * N;
  State s = {-infinity(), 0.0f, 0.0f};
  for (int from = thread * N - head_of<T>(x); from < p.length; from += step * V) {
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + k * step;
      raw[k] = {{kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>}};
      if (at < p.length) raw[k] = load_vector<T, kRead>(x, at);
    }
    limit_all<T>(raw, from, step, p.length, kNothing<T>);
    add_vectors<T, capped>(s, p, raw);
  }

  // Reduce over warps, then over the block.
  s = reduce_lanes<T>(s);
  const int warps = static_cast<int>(blockDim.x) / kNarrowWarp;
  if (warps > 1) {
    if (thread % kNarrowWarp == 0) states[thread / kNarrowWarp] = s;
    __syncthreads();
    if (thread >= kNarrowWarp) return;
    s = thread < warps ? states[thread] : State{-infinity(), 0.0f, 0.0f};
    s = reduce_lanes<T>(s);
  }
  if (thread != 0) return;
  const bool valid = wanted >= 0 && wanted < p.length;
  const float base = settle(s.maximum), log = logf(s.sum);
  const float chosen = valid ? cap<T, capped>(p, to_float(x[wanted])) : not_a_number();
  p.logprobs[row] = distance<T>(p, chosen, base) / kUnit<T> - log;
  p.entropy[row] = valid ? log - s.weighted / (s.sum * kUnit<T>) : not_a_number();
  p.stats[row] = base / kUnit<T>, p.stats[p.rows + row] = s.sum;
}

/// The gradient of the logits.
template <typename T, bool capped>
__global__ void __launch_bounds__(kThreads)
    logprobs_gradient(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kHeld<T, capped>;
  const i64 row = blockIdx.x / static_cast<u32>(p.parts), wanted = p.target[row];
  const int part = static_cast<int>(blockIdx.x % static_cast<u32>(p.parts)),
            thread = static_cast<int>(threadIdx.x);
  const T* x = static_cast<const T*>(p.logits) + row * p.stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const int step = static_cast<int>(blockDim.x) * N;
  const int from = part * step * kVectors + thread * N - head_of<T>(x);
  const bool used = wanted != p.ignore_index, valid = wanted >= 0 && wanted < p.length;

  // The row's numbers: an element is -power * (slope + bend * exponent), plus `rise` at the target.
  const float base = p.stats[row] * kUnit<T>, sum = p.stats[p.rows + row];
  const float rise = p.of_logprobs[row] * p.inverse_temperature,
              of_entropy = p.of_entropy[row] * p.inverse_temperature;
  const float slope =
      valid ? (rise + of_entropy * (p.entropy[row] - logf(sum))) / sum : not_a_number();
  const float bend = of_entropy / (sum * kUnit<T>);
  const int target = valid ? static_cast<int>(wanted) : -N;

#pragma unroll 1
  for (int first = 0; first < kVectors; first += V) {
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (first + k) * step;
      if (used && at < p.length) raw[k] = load_vector<T, kRead>(x, at);
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (first + k) * step;
      if (at >= p.length) return;
      if (!used) {
        store_vector<T, kWrite>(out, at, p.length, Packed{{0, 0, 0, 0}});
        continue;
      }
      float y[N];
      widen<T>(y, raw[k]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float capped_logit = cap<T, capped>(p, y[i]);
        const float exponent = distance<T>(p, capped_logit, base);
        float gradient = -power<T>(exponent) * __fmaf_rn(bend, fmaxf(exponent, kLeast), slope);
        if (at + i == target) gradient += rise;
        if constexpr (capped) {
          const float tanh = capped_logit * p.inverse_softcap;
          gradient *= y[i] == -infinity() ? 0.0f : 1.0f - tanh * tanh;
        }
        y[i] = gradient;
      }
      store_vector<T, kWrite>(out, at, p.length, packed<T>(y));
    }
  }
}

}  // namespace flexops::logprobs
