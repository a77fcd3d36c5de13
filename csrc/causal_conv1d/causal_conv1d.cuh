// The kernels of the causal convolution. What they compute: flexops/ops/causal_conv1d.py.
//
// Memory bandwidth bounds them. A thread has a vector of neighbouring channels, and goes over a run
// of time steps with the last steps in registers, so that each step is read once but for the few
// before a run. Loads of several steps are issued before the first result is stored.
#pragma once

#include "common/elements.cuh"
#include "common/rows.cuh"

namespace flexops::causal_conv1d {

using rows::packed;
using rows::widen;

inline constexpr int kTaps = 4;  // kConvTaps
inline constexpr int kThreads = 128;
inline constexpr int kForwardRun = 32;    // time steps of a thread
inline constexpr int kBackwardRun = 128;  // kConvRun
inline constexpr int kAhead = 4;          // steps whose loads are issued at once

struct Params {
  const void *x, *grad;
  void* out;  // of the forward pass, or x's gradient
  const float *weight, *bias;
  float* partial;
  i64 length, channels;
  int runs, silu;
};

/// W words hold the thread's channels; or, with 0, one channel is all that it has.
template <typename T, int W>
struct Channels {
  static constexpr int N = W == 0 ? 1 : W * 4 / static_cast<int>(sizeof(T));
  using Raw = Vec<T, N>;

  FLEXOPS_DEVICE static void read(float (&out)[N], const Raw& raw) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(raw.at[i]);
  }
  FLEXOPS_DEVICE static Raw rounded(const float (&in)[N]) {
    Raw raw;
    if constexpr (W == 0 || sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) raw.at[i] = from_float<T>(in[i]);
      return raw;
    } else {
      return bit_cast<Raw>(packed<T, W>(in));
    }
  }
};

FLEXOPS_DEVICE float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + quick_exp2(-1.44269504088896341f * x));
}

/// The filter's result for the window of the last steps, newest last.
template <int N>
FLEXOPS_DEVICE float filtered(const float (&weight)[kTaps][N], const float (&window)[kTaps][N],
                              float bias, int i) {
  float sum = bias;
#pragma unroll
  for (int k = 0; k < kTaps; ++k) sum = __fmaf_rn(weight[k][i], window[k][i], sum);
  return sum;
}

template <int N>
FLEXOPS_DEVICE void shift(float (&window)[kTaps][N]) {
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) window[k][i] = window[k + 1][i];
  }
}

template <int N>
FLEXOPS_DEVICE void read_filter(const Params& p, i64 channel, float (&weight)[kTaps][N],
                                float (&bias)[N]) {
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) weight[k][i] = p.weight[k * p.channels + channel + i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) bias[i] = p.bias ? p.bias[channel + i] : 0.0f;
}

/// The steps before `step`, newest last but one.
template <typename T, int W, int N>
FLEXOPS_DEVICE void read_window(const Params& p, const T* x, i64 step, float (&window)[kTaps][N]) {
  using C = Channels<T, W>;
#pragma unroll
  for (int k = 1; k < kTaps; ++k) {
    const i64 at = step - kTaps + k;
    typename C::Raw raw = {};
    if (at >= 0)
      raw = load<Cache::normal>(reinterpret_cast<const typename C::Raw*>(x + at * p.channels));
    C::read(window[k], raw);
  }
}

template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_forward(const FLEXOPS_GRID_CONSTANT Params p) {
  using C = Channels<T, W>;
  constexpr int N = C::N;
  // The thread's channels, and its run of a sequence.
  const i64 channel = (static_cast<i64>(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (channel >= p.channels) return;
  const i64 sequence = blockIdx.x / static_cast<u32>(p.runs);
  const i64 begin = static_cast<i64>(blockIdx.x % static_cast<u32>(p.runs)) * kForwardRun;
  const i64 end = begin + kForwardRun < p.length ? begin + kForwardRun : p.length;
  const i64 offset = sequence * p.length * p.channels + channel;
  const T* x = static_cast<const T*>(p.x) + offset;
  T* out = static_cast<T*>(p.out) + offset;
  float weight[kTaps][N], bias[N], window[kTaps][N];
  read_filter(p, channel, weight, bias);
  read_window<T, W>(p, x, begin, window);
  for (i64 from = begin; from < end; from += kAhead) {
    typename C::Raw raw[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (from + k < end)
        raw[k] = load<Cache::normal>(
            reinterpret_cast<const typename C::Raw*>(x + (from + k) * p.channels));
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (from + k >= end) break;
      shift(window);
      C::read(window[kTaps - 1], raw[k]);
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[i] = filtered(weight, window, bias[i], i);
        if (p.silu) y[i] *= sigmoid(y[i]);
      }
      store<Cache::streaming>(reinterpret_cast<typename C::Raw*>(out + (from + k) * p.channels),
                              C::rounded(y));
    }
  }
}

/// x's gradient for a run, and the run's part of those of weight and bias. The steps behind the run
/// are computed too: its last inputs reach them.
template <typename T, int W>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_gradient(const FLEXOPS_GRID_CONSTANT Params p) {
  using C = Channels<T, W>;
  constexpr int N = C::N;
  const i64 channel = (static_cast<i64>(blockIdx.y) * kThreads + threadIdx.x) * N;
  if (channel >= p.channels) return;
  const i64 sequence = blockIdx.x / static_cast<u32>(p.runs);
  const i64 begin = static_cast<i64>(blockIdx.x % static_cast<u32>(p.runs)) * kBackwardRun;
  const i64 end = begin + kBackwardRun < p.length ? begin + kBackwardRun : p.length;
  const i64 offset = sequence * p.length * p.channels + channel;
  const T* x = static_cast<const T*>(p.x) + offset;
  const T* grad = static_cast<const T*>(p.grad) + offset;
  T* out = static_cast<T*>(p.out) + offset;
  float weight[kTaps][N], bias[N], window[kTaps][N];
  float inner[kTaps][N] = {};  // gradients of the filter's results, newest last
  float of_weight[kTaps][N] = {}, of_bias[N] = {};
  read_filter(p, channel, weight, bias);
  read_window<T, W>(p, x, begin, window);
  const i64 last = end > begin ? end + kTaps - 1 : begin;
  for (i64 from = begin; from < last; from += 2) {
    typename C::Raw raw[2], upstream[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      raw[k] = {}, upstream[k] = {};
      if (from + k >= last || from + k >= p.length) continue;
      const i64 at = (from + k) * p.channels;
      raw[k] = load<Cache::normal>(reinterpret_cast<const typename C::Raw*>(x + at));
      upstream[k] = load<Cache::normal>(reinterpret_cast<const typename C::Raw*>(grad + at));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const i64 step = from + k;
      if (step >= last) break;
      shift(window), shift(inner);
      C::read(window[kTaps - 1], raw[k]);
      C::read(inner[kTaps - 1], upstream[k]);
      if (p.silu) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float y = filtered(weight, window, bias[i], i), s = sigmoid(y);
          inner[kTaps - 1][i] *= s * (1.0f + y * (1.0f - s));
        }
      }
      if (step < end) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float g = inner[kTaps - 1][i];
          of_bias[i] += g;
#pragma unroll
          for (int tap = 0; tap < kTaps; ++tap)
            of_weight[tap][i] = __fmaf_rn(g, window[tap][i], of_weight[tap][i]);
        }
      }
      if (step - begin < kTaps - 1) continue;
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[i] = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap)
          y[i] = __fmaf_rn(weight[kTaps - 1 - tap][i], inner[tap][i], y[i]);
      }
      store<Cache::streaming>(
          reinterpret_cast<typename C::Raw*>(out + (step - kTaps + 1) * p.channels), C::rounded(y));
    }
  }
  // The run's sums.
  float* partial = p.partial + static_cast<i64>(blockIdx.x) * (kTaps + 1) * p.channels + channel;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) partial[tap * p.channels + i] = of_weight[tap][i];
    partial[kTaps * p.channels + i] = of_bias[i];
  }
}

struct UpdateParams {
  void* state;
  const void* x;
  void* out;
  const float *weight, *bias;
  i64 count, channels, x_batch, x_channel, x_step;
  int length, size, width, silu;
};

/// A thread to each channel of each sequence.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_step(const FLEXOPS_GRID_CONSTANT UpdateParams p) {
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.count) return;
  const i64 channel = index % p.channels;
  T* state = static_cast<T*>(p.state) + index * p.size;
  const T* x = static_cast<const T*>(p.x) + index / p.channels * p.x_batch + channel * p.x_channel;
  T* out = static_cast<T*>(p.out) + index * p.length;
  const float* weight = p.weight + channel * p.width;
  for (int step = 0; step < p.length; ++step) {
    // The window ends with the new element; before it is the state's end.
    const T newest = x[step * p.x_step];
    float y = p.bias ? p.bias[channel] : 0.0f;
    for (int k = 0; k + 1 < p.width; ++k)
      y = __fmaf_rn(weight[k], to_float(state[p.size - p.width + 1 + k]), y);
    y = __fmaf_rn(weight[p.width - 1], to_float(newest), y);
    for (int k = 0; k + 1 < p.size; ++k) state[k] = state[k + 1];
    if (p.size > 0) state[p.size - 1] = newest;
    out[step] = from_float<T>(p.silu ? y * sigmoid(y) : y);
  }
}

}  // namespace flexops::causal_conv1d
