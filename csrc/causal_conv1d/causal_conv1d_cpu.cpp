// The causal convolution on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/causal_conv1d.py.

#include "causal_conv1d/causal_conv1d.h"

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

static float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

/// Channels [at, at + count) of the steps [step - kConvTaps + 1, step], as floats: zeros before the
/// sequence.
struct Window {
  alignas(64) float data[kConvTaps][kRowBlock];
  const float* rows[kConvTaps];

  void read(const void* x, int64_t sequence, int64_t step, int64_t at, int64_t count,
            const ConvShape& shape) {
    for (int k = 0; k < kConvTaps; ++k) {
      const int64_t from = step - kConvTaps + 1 + k;
      rows[k] = data[k];
      if (from >= 0 && from < shape.length) {
        const int64_t offset = (sequence * shape.length + from) * shape.channels + at;
        rows[k] = widen(x, offset, count, shape.type, data[k]);
      } else {
        for (int64_t i = 0; i < count; ++i) data[k][i] = 0.0f;
      }
    }
  }
};

/// The filter's results for the window.
static void filter_block(const Window& window, const ConvFilter& filter, int64_t at, int64_t count,
                         int64_t channels, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    float sum = filter.bias ? filter.bias[at + i] : 0.0f;
    for (int k = 0; k < kConvTaps; ++k)
      sum += filter.weight[k * channels + at + i] * window.rows[k][i];
    out[i] = sum;
  }
}

void causal_conv1d_cpu(const void* x, const ConvFilter& filter, void* out, const ConvShape& shape,
                       int64_t begin, int64_t end) {
  Window window;
  alignas(64) float results[kRowBlock];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t sequence = row / shape.length, step = row % shape.length;
    for (int64_t at = 0; at < shape.channels; at += kRowBlock) {
      const int64_t count = least(shape.channels - at, kRowBlock);
      window.read(x, sequence, step, at, count, shape);
      float* const to = place_in_row(out, row * shape.channels + at, shape.type, results);
      filter_block(window, filter, at, count, shape.channels, to);
      if (shape.silu)
        for (int64_t i = 0; i < count; ++i) to[i] *= sigmoid(to[i]);
      narrow(to, out, row * shape.channels + at, count, shape.type);
    }
  }
}

/// The gradients of the filter's results of a step; zeros behind the sequence.
static void inner_block(const void* grad, const void* x, const ConvFilter& filter, int64_t sequence,
                        int64_t step, int64_t at, int64_t count, const ConvShape& shape,
                        Window& window, float* out) {
  if (step >= shape.length) {
    for (int64_t i = 0; i < count; ++i) out[i] = 0.0f;
    return;
  }
  alignas(64) float buffer[kRowBlock];
  const int64_t offset = (sequence * shape.length + step) * shape.channels + at;
  const float* upstream = widen(grad, offset, count, shape.type, buffer);
  window.read(x, sequence, step, at, count, shape);
  if (shape.silu) {
    filter_block(window, filter, at, count, shape.channels, out);
    for (int64_t i = 0; i < count; ++i) {
      const float y = out[i], s = sigmoid(y);
      out[i] = upstream[i] * (s * (1.0f + y * (1.0f - s)));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = upstream[i];
  }
}

void causal_conv1d_backward_cpu(const void* grad, const void* x, const ConvFilter& filter,
                                void* x_grad, float* partial, const ConvShape& shape, int64_t begin,
                                int64_t end) {
  Window window;
  alignas(64) float inner[kConvTaps][kRowBlock], results[kRowBlock];
  const int64_t channels = shape.channels;
  for (int64_t run = begin; run < end; ++run) {
    const int64_t sequence = run / shape.runs(), first = run % shape.runs() * kConvRun;
    const int64_t last = least(first + kConvRun, shape.length);
    for (int64_t at = 0; at < channels; at += kRowBlock) {
      const int64_t count = least(channels - at, kRowBlock);
      float* const sums = partial + run * (kConvTaps + 1) * channels + at;
      for (int k = 0; k <= kConvTaps; ++k)
        for (int64_t i = 0; i < count; ++i) sums[k * channels + i] = 0.0f;
      for (int64_t step = first; first < last && step < last + kConvTaps - 1; ++step) {
        float* const now = inner[step % kConvTaps];
        inner_block(grad, x, filter, sequence, step, at, count, shape, window, now);
        if (step < last) {
          for (int k = 0; k < kConvTaps; ++k)
            for (int64_t i = 0; i < count; ++i)
              sums[k * channels + i] += now[i] * window.rows[k][i];
          for (int64_t i = 0; i < count; ++i) sums[kConvTaps * channels + i] += now[i];
        }
        const int64_t made = step - kConvTaps + 1;  // the step whose gradient is complete
        if (made < first) continue;
        const int64_t offset = (sequence * shape.length + made) * channels + at;
        float* const to = place_in_row(x_grad, offset, shape.type, results);
        for (int64_t i = 0; i < count; ++i) {
          float sum = 0.0f;
          for (int k = 0; k < kConvTaps; ++k)
            sum += filter.weight[(kConvTaps - 1 - k) * channels + at + i] *
                   inner[(made + k) % kConvTaps][i];
          to[i] = sum;
        }
        narrow(to, x_grad, offset, count, shape.type);
      }
    }
  }
}

void causal_conv1d_update_cpu(void* state, const void* x, void* out, const ConvUpdate& shape,
                              int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const int64_t channel = index % shape.channels, first = index * shape.size;
    const int64_t from = index / shape.channels * shape.x_batch + channel * shape.x_channel;
    const auto tap = [&](int64_t k) {
      return load(shape.weight, channel * shape.width + k, shape.weight_type);
    };
    for (int64_t step = 0; step < shape.length; ++step) {
      const float newest = load(x, from + step * shape.x_step, shape.type);
      float y = shape.bias ? load(shape.bias, channel, shape.weight_type) : 0.0f;
      for (int64_t k = 0; k + 1 < shape.width; ++k)
        y += tap(k) * load(state, first + shape.size - shape.width + 1 + k, shape.type);
      y += tap(shape.width - 1) * newest;
      for (int64_t k = 0; k + 1 < shape.size; ++k)
        store(state, first + k, load(state, first + k + 1, shape.type), shape.type);
      if (shape.size > 0) store(state, first + shape.size - 1, newest, shape.type);
      store(out, index * shape.length + step, shape.silu ? y * sigmoid(y) : y, shape.type);
    }
  }
}

}  // namespace flexops::FLEXOPS_ISA
