// The gated RMS norm on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/gated_norm.py.

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

constexpr int64_t kPartRows = 16;  // of gated_norm.cuh

static float logistic(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

/// The gate's activation.
static float activated(float gate, bool sigmoid) {
  return logistic(gate) * (sigmoid ? 1.0f : gate);
}

static float scale_of(double squares, int64_t width, double eps) {
  return static_cast<float>(1.0 / __builtin_sqrt(squares / static_cast<double>(width) + eps));
}

/// Calls body with a function that gives the weight of a column.
template <typename F>
static void with_weights(const TensorView& weight, const F& body) {
  if (!weight) return body([](int64_t) { return 1.0f; });
  with_floats(weight.dtype, [&](auto type) {
    const auto* from = weight.as<decltype(type)>();
    body([=](int64_t column) { return load(from, column); });
  });
}

void gated_rms_norm_cpu(const TensorView& x, const TensorView& gate, const TensorView& weight,
                        double eps, int64_t groups, bool norm_first, bool sigmoid,
                        const TensorView& out, int64_t begin, int64_t end) {
  const int64_t columns = x.size(1), width = columns / groups;
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    with_weights(weight, [&](const auto& weight_of) {
      for (int64_t row = begin * groups; row < end * groups; ++row) {
        const T *const values = x.as<T>() + row * width, *const gates = gate.as<T>() + row * width;
        const int64_t column = row % groups * width;
        double sum = 0.0;  // in one chain
        for (int64_t i = 0; i < width; ++i) {
          const float act = norm_first ? 1.0f : activated(load(gates, i), sigmoid);
          const float u = load(values, i) * act;
          sum += u * u;
        }
        const float scale = scale_of(sum, width, eps);
        for (int64_t i = 0; i < width; ++i) {
          const float n = load(values, i) * scale * weight_of(column + i);
          const float y = n * activated(load(gates, i), sigmoid);
          store(out.as<T>() + row * width, i, y);
        }
      }
    });
  });
}

void gated_rms_norm_backward_cpu(const TensorView& grad, const TensorView& x,
                                 const TensorView& gate, const TensorView& weight, double eps,
                                 int64_t groups, bool norm_first, bool sigmoid,
                                 const TensorView& partial, const TensorView& x_grad,
                                 const TensorView& gate_grad, int64_t begin, int64_t end) {
  const int64_t columns = x.size(1), width = columns / groups;
  for (int64_t part = begin; part < end; ++part)
    for (int64_t i = 0; i < columns; ++i) partial.as<float>()[part * columns + i] = 0.0f;
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    with_weights(weight, [&](const auto& weight_of) {
      const int64_t last = end * kPartRows < x.size(0) ? end * kPartRows : x.size(0);
      for (int64_t row = begin * kPartRows * groups; row < last * groups; ++row) {
        const T *const upstream = grad.as<T>() + row * width,
                       *const values = x.as<T>() + row * width,
                       *const gates = gate.as<T>() + row * width;
        const int64_t column = row % groups * width;
        double squares = 0.0, products = 0.0;
        for (int64_t i = 0; i < width; ++i) {
          const float act = activated(load(gates, i), sigmoid);
          const float u = load(values, i) * (norm_first ? 1.0f : act);
          squares += u * u;
          products += u * load(upstream, i) * weight_of(column + i) * (norm_first ? act : 1.0f);
        }
        const float scale = scale_of(squares, width, eps);
        const float mean =
            static_cast<float>(products / static_cast<double>(width)) * scale * scale;
        float* const sums = partial.as<float>() + row / groups / kPartRows * columns + column;
        for (int64_t i = 0; i < width; ++i) {
          const float g = load(gates, i), half = logistic(g), act = activated(g, sigmoid);
          const float value = load(values, i), d = load(upstream, i);
          const float u = norm_first ? value : value * act;
          const float weighted = d * weight_of(column + i);
          const float of_u = scale * (weighted * (norm_first ? act : 1.0f) - u * mean);
          const float slope =
              half * ((sigmoid ? 0.0f : 1.0f) + (sigmoid ? 1.0f : g) * (1.0f - half));
          store(x_grad.as<T>() + row * width, i, norm_first ? of_u : of_u * act);
          store(gate_grad.as<T>() + row * width, i,
                slope * (norm_first ? weighted * (u * scale) : of_u * value));
          sums[i] += d * u * scale * (norm_first ? act : 1.0f);
        }
      }
    });
  });
}

}  // namespace flexops::FLEXOPS_ISA
