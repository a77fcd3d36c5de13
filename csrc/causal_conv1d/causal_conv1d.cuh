// The kernels of the causal convolution. What they compute: flexops/ops/causal_conv1d.py.
//
// Memory bandwidth bounds them. A thread has a vector of neighbouring channels, and goes over a run
// of time steps with the last steps in registers, so that each step is read once but for the few
// before a run. The loads of the next steps are issued before the present ones are computed.
#pragma once

#include "common/async.cuh"
#include "common/elements.cuh"

namespace flexops::causal_conv1d {

inline constexpr int kTaps = 4;  // kConvTaps
inline constexpr int kThreads = 128;
// Steps whose loads are issued at once, while as many before them are computed.
inline constexpr int kAhead = 4;

struct Params {
  const void *x, *grad;
  void* out;  // of the forward pass, or x's gradient
  const float *weight, *bias;
  float* partial;
  const int* sequences;  // of each step, the sequence that it belongs to; or null
  i64 length, channels;
  int run, runs;  // time steps of a thread; runs of a sequence
};

FLEXOPS_DEVICE float sigmoid(float x) {
  return quick_reciprocal(1.0f + quick_exp2(-1.44269504088896341f * x));
}

/// The sequences of a window's steps, where several are packed.
template <bool Packed>
struct Sequences {
  int of[kTaps - 1 + kAhead];

  /// The steps before `step`.
  FLEXOPS_DEVICE void read_window(const int* from, i64 step) {
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k) {
      const i64 at = step - kTaps + 1 + k;
      of[k] = at >= 0 ? from[at] : 0;  // there x is 0
    }
  }
  /// The next ones, of which some exist.
  FLEXOPS_DEVICE void read(const int* from, int some) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) of[kTaps - 1 + k] = k < some ? from[k] : 0;
  }
  FLEXOPS_DEVICE void shift() {
#pragma unroll
    for (int k = 0; Packed && k + 1 < kTaps; ++k) of[k] = of[k + kAhead];
  }
  /// Whether two steps of the window belong together.
  FLEXOPS_DEVICE bool same(int one, int other) const { return !Packed || of[one] == of[other]; }
};

/// The filter's result for the window that begins at step k.
template <int N, bool Packed>
FLEXOPS_DEVICE float filtered(const float (&weight)[kTaps][N],
                              const float (&window)[kTaps - 1 + kAhead][N],
                              const Sequences<Packed>& sequences, float bias, int k, int i) {
  float sum = bias;
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    if (sequences.same(k + tap, k + kTaps - 1))
      sum = __fmaf_rn(weight[tap][i], window[k + tap][i], sum);
  }
  return sum;
}

/// The last steps become the first.
template <int N>
FLEXOPS_DEVICE void shift(float (&window)[kTaps - 1 + kAhead][N]) {
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) window[k][i] = window[k + kAhead][i];
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

/// The steps before `step`.
template <typename T, int N>
FLEXOPS_DEVICE void read_window(const Params& p, const T* x, i64 step,
                                float (&window)[kTaps - 1 + kAhead][N]) {
#pragma unroll
  for (int k = 0; k + 1 < kTaps; ++k) {
    const i64 at = step - kTaps + 1 + k;
    Raw<T, N> raw;
    if (at >= 0) raw.read(x + at * p.channels);
    widen(window[k], raw);
  }
}

/// Where a thread works: its channels, and its run of a sequence.
template <int N>
struct Place {
  i64 channel, begin, end, offset;

  FLEXOPS_DEVICE explicit Place(const Params& p)
      : channel((static_cast<i64>(blockIdx.y) * kThreads + threadIdx.x) * N),
        begin(static_cast<i64>(blockIdx.x % static_cast<u32>(p.runs)) * p.run),
        end(begin + p.run < p.length ? begin + p.run : p.length),
        offset(blockIdx.x / static_cast<u32>(p.runs) * p.length * p.channels + channel) {}

  FLEXOPS_DEVICE const int* sequences(const Params& p) const {
    return p.sequences + blockIdx.x / static_cast<u32>(p.runs) * p.length;
  }
};

/// A thread has N neighbouring channels.
template <typename T, int N, bool Silu, bool Packed>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_forward(const FLEXOPS_GRID_CONSTANT Params p) {
  const Place<N> at(p);
  if (at.channel >= p.channels) return;
  const T* x = static_cast<const T*>(p.x) + at.offset;
  T* out = static_cast<T*>(p.out) + at.offset + at.begin * p.channels;
  float weight[kTaps][N], bias[N], window[kTaps - 1 + kAhead][N];
  read_filter(p, at.channel, weight, bias);
  read_window(p, x, at.begin, window);
  Raw<T, N> ahead[kAhead];
  Sequences<Packed> sequences;
  const int* steps = Packed ? at.sequences(p) : nullptr;
  if (Packed) sequences.read_window(steps, at.begin), steps += at.begin;
  x += at.begin * p.channels;
  int left = static_cast<int>(at.end - at.begin);
  const auto fetch = [&](int steps) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k, x += p.channels) {
      if (k < steps) ahead[k].read(x);
    }
  };
  fetch(left);
  for (; left > 0; left -= kAhead) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) widen(window[kTaps - 1 + k], ahead[k]);
    fetch(left - kAhead);  // while these steps are computed
    if (Packed) sequences.read(steps, left), steps += kAhead;
#pragma unroll
    for (int k = 0; k < kAhead; ++k, out += p.channels) {
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[i] = filtered(weight, window, sequences, bias[i], k, i);
        if (Silu) y[i] *= sigmoid(y[i]);
      }
      if (k < left) store<T, Cache::streaming>(out, 0, y);
    }
    shift(window), sequences.shift();
  }
}

/// x's gradient for a run, and the run's part of those of weight and bias. The steps behind the run
/// are computed too: its last inputs reach them.
template <typename T, int N, bool Silu, bool Packed>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_gradient(const FLEXOPS_GRID_CONSTANT Params p) {
  const Place<N> at(p);
  if (at.channel >= p.channels) return;
  const T* x = static_cast<const T*>(p.x) + at.offset;
  const T* grad = static_cast<const T*>(p.grad) + at.offset + at.begin * p.channels;
  T* out = static_cast<T*>(p.out) + at.offset + (at.begin - kTaps + 1) * p.channels;
  float weight[kTaps][N], bias[N], window[kTaps - 1 + kAhead][N];
  // Gradients of the filter's results, newest last.
  float inner[kTaps - 1 + kAhead][N] = {};
  float of_weight[kTaps][N] = {}, of_bias[N] = {};
  read_filter(p, at.channel, weight, bias);
  read_window(p, x, at.begin, window);
  Sequences<Packed> sequences;
  const int* steps = Packed ? at.sequences(p) : nullptr;
  if (Packed) sequences.read_window(steps, at.begin), steps += at.begin;
  x += at.begin * p.channels;
  // Loads and stores are predicated, without a branch: gradients of steps that do not exist are
  // zeros.
  Raw<T, N> next[kAhead], next_grad[kAhead];
  const int length = static_cast<int>(at.end - at.begin);
  const int readable = static_cast<int>(
      p.length - at.begin < length + kTaps - 1 ? p.length - at.begin : length + kTaps - 1);
  const auto fetch = [&](int from) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k, x += p.channels, grad += p.channels) {
      next[k] = {}, next_grad[k] = {};
      if (from + k < readable) next[k].read(x), next_grad[k].read(grad);
    }
  };
  fetch(0);
  for (int from = 0; from < length + kTaps - 1; from += kAhead) {
    const bool own = from < length;  // those behind the run are other runs' part of the sums
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      widen(window[kTaps - 1 + k], next[k]);
      widen(inner[kTaps - 1 + k], next_grad[k]);
    }
    fetch(from + kAhead);  // while these steps are computed
    if (Packed) sequences.read(steps, readable - from), steps += kAhead;
#pragma unroll
    for (int k = 0; k < kAhead; ++k, out += p.channels) {
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float& g = inner[kTaps - 1 + k][i];
        if (Silu) {
          const float z = filtered(weight, window, sequences, bias[i], k, i), s = sigmoid(z);
          g *= s * __fmaf_rn(z, 1.0f - s, 1.0f);
        }
        if (own) of_bias[i] += g;
        y[i] = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          if (own && sequences.same(k + tap, k + kTaps - 1))
            of_weight[tap][i] = __fmaf_rn(g, window[k + tap][i], of_weight[tap][i]);
          if (sequences.same(k, k + tap))
            y[i] = __fmaf_rn(weight[kTaps - 1 - tap][i], inner[k + tap][i], y[i]);
        }
      }
      const int step = from + k - kTaps + 1;
      if (step >= 0 && step < length) store<T, Cache::streaming>(out, 0, y);
    }
    shift(window), shift(inner), sequences.shift();
  }
  // The run's sums.
  float* partial = p.partial + static_cast<i64>(blockIdx.x) * (kTaps + 1) * p.channels + at.channel;
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
  const void *weight, *bias;
  i64 count, channels, x_batch, x_channel, x_step;
  int length, size, width, silu;
  int whole;  // one step of kTaps: the state is read and written whole
  int early;  // few blocks: the kernel starts before the one ahead has ended
};

/// A thread to each channel of each sequence.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_step(const FLEXOPS_GRID_CONSTANT UpdateParams p) {
  if (p.early) wait_for_previous(), let_next_start();
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.count) return;
  const i64 channel = index % p.channels;
  T* state = static_cast<T*>(p.state) + index * p.size;
  const T* x = static_cast<const T*>(p.x) + index / p.channels * p.x_batch + channel * p.x_channel;
  T* out = static_cast<T*>(p.out) + index * p.length;
  const W* weight = static_cast<const W*>(p.weight) + channel * p.width;
  const float bias = p.bias ? to_float(static_cast<const W*>(p.bias)[channel]) : 0.0f;
  if (p.whole) {
    Vec<T, kTaps> window = load<Cache::normal>(reinterpret_cast<const Vec<T, kTaps>*>(state));
    const Vec<W, kTaps> taps = load<Cache::normal>(reinterpret_cast<const Vec<W, kTaps>*>(weight));
#pragma unroll
    for (int k = 0; k + 1 < kTaps; ++k) window.at[k] = window.at[k + 1];
    window.at[kTaps - 1] = *x;
    float y = bias;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) y = __fmaf_rn(to_float(taps.at[k]), to_float(window.at[k]), y);
    store<Cache::normal>(reinterpret_cast<Vec<T, kTaps>*>(state), window);
    *out = from_float<T>(p.silu ? y * sigmoid(y) : y);
    return;
  }
  for (int step = 0; step < p.length; ++step) {
    // The window ends with the new element; before it is the state's end.
    const T newest = x[step * p.x_step];
    float y = bias;
    for (int k = 0; k + 1 < p.width; ++k)
      y = __fmaf_rn(to_float(weight[k]), to_float(state[p.size - p.width + 1 + k]), y);
    y = __fmaf_rn(to_float(weight[p.width - 1]), to_float(newest), y);
    for (int k = 0; k + 1 < p.size; ++k) state[k] = state[k + 1];
    if (p.size > 0) state[p.size - 1] = newest;
    out[step] = from_float<T>(p.silu ? y * sigmoid(y) : y);
  }
}

}  // namespace flexops::causal_conv1d
