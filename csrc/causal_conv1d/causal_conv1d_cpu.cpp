// The causal convolution on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/causal_conv1d.py.

#include "causal_conv1d/causal_conv1d.h"

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

/// Channels [at, at + count) of the last kConvTaps steps, as floats: zeros before the sequence.
struct Window {
  alignas(64) float data[kConvTaps][kRowBlock];
  const float* rows[kConvTaps];  // the newest last

  /// Starts at the steps before `step`.
  void start(const void* x, int64_t sequence, int64_t step, int64_t at, int64_t count,
             const ConvShape& shape) {
    for (int64_t before = step - kConvTaps + 1; before < step; ++before)
      advance(x, sequence, before, at, count, shape);
  }

  void advance(const void* x, int64_t sequence, int64_t step, int64_t at, int64_t count,
               const ConvShape& shape) {
    float* const buffer = data[(step + kConvTaps) % kConvTaps];
    for (int k = 0; k + 1 < kConvTaps; ++k) rows[k] = rows[k + 1];
    if (step < 0) {
      memset(buffer, 0, static_cast<size_t>(count) * sizeof(float));
      rows[kConvTaps - 1] = buffer;
    } else {
      const int64_t offset = (sequence * shape.length + step) * shape.channels + at;
      rows[kConvTaps - 1] = widen(x, offset, count, shape.type, buffer);
    }
  }
};

alignas(64) static const float kNothing[kRowBlock] = {};

/// The window's rows, but for those of other sequences than the newest one's.
struct Rows {
  const float* of[kConvTaps];

  Rows(const Window& window, const ConvShape& shape, int64_t sequence, int64_t step) {
    const int* const sequences =
        shape.sequences ? shape.sequences + sequence * shape.length + step : nullptr;
    for (int k = 0; k < kConvTaps; ++k) {
      const int64_t before = kConvTaps - 1 - k;
      const bool same = !sequences || step < before || sequences[-before] == *sequences;
      of[k] = same ? window.rows[k] : kNothing;
    }
  }
};

/// The sum of weight[k] * rows[k] for `some` channels from i on.
static inline Floats filter_lanes(const float* const (&rows)[kConvTaps], const float* weight,
                                  int64_t channels, int64_t i, int64_t some, Floats sum) {
#pragma GCC unroll 4
  for (int k = 0; k < kConvTaps; ++k)
    sum += load_up_to(weight + k * channels + i, some) * load_up_to(rows[k] + i, some);
  return sum;
}

/// The filter's results for the window.
static void filter_block(const Rows& rows, const ConvFilter& filter, int64_t at, int64_t count,
                         const ConvShape& shape, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    Floats y = filter.bias ? load_up_to(filter.bias + at + i, some) : Floats{};
    y = filter_lanes(rows.of, filter.weight + at, shape.channels, i, some, y);
    store_up_to(out + i, shape.silu ? y / (exponential(-y) + 1.0f) : y, some);
  }
}

void causal_conv1d_cpu(const void* x, const ConvFilter& filter, void* out, const ConvShape& shape,
                       int64_t begin, int64_t end) {
  Window window;
  alignas(64) float results[kRowBlock];
  for (int64_t at = 0; at < shape.channels; at += kRowBlock) {
    const int64_t count = least(shape.channels - at, kRowBlock);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t sequence = row / shape.length, step = row % shape.length;
      if (row == begin || step == 0) window.start(x, sequence, step, at, count, shape);
      window.advance(x, sequence, step, at, count, shape);
      float* const to = place_in_row(out, row * shape.channels + at, shape.type, results);
      filter_block(Rows(window, shape, sequence, step), filter, at, count, shape, to);
      narrow(to, out, row * shape.channels + at, count, shape.type);
    }
  }
}

/// The gradients of the filter's results for the window.
static void inner_block(const float* upstream, const Rows& rows, const ConvFilter& filter,
                        int64_t at, int64_t count, const ConvShape& shape, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    Floats grad = load_up_to(upstream + i, some);
    if (shape.silu) {
      Floats y = filter.bias ? load_up_to(filter.bias + at + i, some) : Floats{};
      y = filter_lanes(rows.of, filter.weight + at, shape.channels, i, some, y);
      const Floats sigmoid = 1.0f / (exponential(-y) + 1.0f);
      grad *= sigmoid * (1.0f + y * (1.0f - sigmoid));
    }
    store_up_to(out + i, grad, some);
  }
}

/// sums += the gradients of weight and bias for the window.
static void add_gradients(const float* inner, const Rows& rows, int64_t count, int64_t channels,
                          float* sums) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    const Floats grad = load_up_to(inner + i, some);
    for (int k = 0; k <= kConvTaps; ++k) {
      float* const sum = sums + k * channels + i;
      const Floats more = k < kConvTaps ? grad * load_up_to(rows.of[k] + i, some) : grad;
      store_up_to(sum, load_up_to(sum, some) + more, some);
    }
  }
}

void causal_conv1d_backward_cpu(const void* grad, const void* x, const ConvFilter& filter,
                                void* x_grad, float* partial, int64_t run, const ConvShape& shape,
                                int64_t begin, int64_t end) {
  Window window;
  alignas(64) float inner[kConvTaps][kRowBlock], results[kRowBlock], buffer[kRowBlock];
  const int64_t channels = shape.channels, runs = ceil_div(shape.length, run);
  for (int64_t part = begin; part < end; ++part) {
    const int64_t sequence = part / runs, first = part % runs * run;
    const int64_t last = least(first + run, shape.length);
    for (int64_t at = 0; at < channels; at += kRowBlock) {
      const int64_t count = least(channels - at, kRowBlock);
      const size_t bytes = static_cast<size_t>(count) * sizeof(float);
      float* const sums = partial + part * kConvSums * channels + at;
      for (int k = 0; k < kConvSums; ++k) memset(sums + k * channels, 0, bytes);
      window.start(x, sequence, first, at, count, shape);
      for (int64_t step = first; step < last + kConvTaps - 1; ++step) {
        float* const now = inner[step % kConvTaps];
        if (step < shape.length) {
          const int64_t offset = (sequence * shape.length + step) * channels + at;
          window.advance(x, sequence, step, at, count, shape);
          const Rows rows(window, shape, sequence, step);
          inner_block(widen(grad, offset, count, shape.type, buffer), rows, filter, at, count,
                      shape, now);
          if (step < last) add_gradients(now, rows, count, channels, sums);
        } else {
          memset(now, 0, bytes);
        }
        const int64_t made = step - kConvTaps + 1;  // the step whose gradient is complete
        if (made < first) continue;
        const int64_t offset = (sequence * shape.length + made) * channels + at;
        float* const to = place_in_row(x_grad, offset, shape.type, results);
        const float* behind[kConvTaps];
        for (int k = 0; k < kConvTaps; ++k) {
          const int64_t later = step - k;
          const int* const own = shape.sequences + sequence * shape.length;
          const bool same = !shape.sequences || later >= shape.length || own[made] == own[later];
          behind[k] = same ? inner[later % kConvTaps] : kNothing;
        }
        for (int64_t i = 0; i < count; i += kLanes) {
          const int64_t some = least(count - i, kLanes);
          store_up_to(to + i, filter_lanes(behind, filter.weight + at, channels, i, some, Floats{}),
                      some);
        }
        narrow(to, x_grad, offset, count, shape.type);
      }
    }
  }
}

void causal_conv1d_sum_cpu(const float* partial, int64_t count, int64_t columns, float* sums,
                           int64_t begin, int64_t end) {
  sum_parts(partial, count, columns, sums, ElementType::f32, begin, end);
}

/// One step of `count` channels from the `index`-th of all batches on; they are of one batch.
template <typename T, typename W>
static void update_block(T* state, const T* x, T* out, const ConvUpdate& shape, int64_t index,
                         int64_t count, int64_t step) {
  const int64_t channel = index % shape.channels, size = shape.size, width = shape.width;
  const W* const taps = static_cast<const W*>(shape.weight) + channel * width;
  const T* const steps = x + index / shape.channels * shape.x_batch + step * shape.x_step;
  alignas(64) float y[kRowBlock];
  for (int64_t i = 0; i < count; ++i) {
    const T newest = steps[(channel + i) * shape.x_channel];
    T* const kept = state + (index + i) * size;
    float sum = shape.bias ? load(static_cast<const W*>(shape.bias), channel + i) : 0.0f;
    for (int64_t k = 0; k + 1 < width; ++k)
      sum += load(taps, i * width + k) * load(kept, size - width + 1 + k);
    y[i] = sum + load(taps, i * width + width - 1) * load(&newest, 0);
    for (int64_t k = 0; k + 1 < size; ++k) kept[k] = kept[k + 1];
    if (size > 0) kept[size - 1] = newest;
  }
  for (int64_t i = 0; shape.silu && i < count; i += kLanes) {
    const int64_t some = least(count - i, kLanes);
    const Floats value = load_up_to(y + i, some);
    store_up_to(y + i, value / (exponential(-value) + 1.0f), some);
  }
  for (int64_t i = 0; i < count; ++i) store(out, (index + i) * shape.length + step, y[i]);
}

void causal_conv1d_update_cpu(void* state, const void* x, void* out, const ConvUpdate& shape,
                              int64_t begin, int64_t end) {
  with_floats(static_cast<Dtype>(shape.type), [&](auto type) {
    with_floats(static_cast<Dtype>(shape.weight_type), [&](auto weight_type) {
      using T = decltype(type);
      for (int64_t index = begin, count; index < end; index += count) {
        count = least(least(end - index, kRowBlock), shape.channels - index % shape.channels);
        for (int64_t step = 0; step < shape.length; ++step)
          update_block<T, decltype(weight_type)>(static_cast<T*>(state), static_cast<const T*>(x),
                                                 static_cast<T*>(out), shape, index, count, step);
      }
    });
  });
}

}  // namespace flexops::FLEXOPS_ISA
