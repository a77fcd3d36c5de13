// Products of a few rows on the CPU: one dot product for each number of the result. Formulas:
// flexops/ops/few_rows.py.

#include "few_rows/few_rows.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {
namespace {

template <class T>
Floats load_vector(const T* from) {
  if constexpr (sizeof(T) == 4) return load_floats(reinterpret_cast<const float*>(from));
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  if constexpr (__is_same(T, F16)) return load_f16(bits);
  return load_bf16(bits);
}

float total_of(Floats values) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += values[i];
  return sum;
}

template <class T>
float rounded(float value) {
  T kept;
  store(&kept, 0, value);
  return load(&kept, 0);
}

float activated(float x, int64_t which) {
  if (which == kFewSilu) return x / (1 + __builtin_expf(-x));
  if (which == kFewGelu) return 0.5f * x * (1 + __builtin_erff(0.70710678f * x));
  return 0.5f * x * (1 + __builtin_tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

/// x . weight, x normalized by `factor` and `norm` if that is given.
template <class T>
float dot(const T* x, const T* weight, const T* norm, float factor, float offset, int64_t k) {
  Floats sum = {};
  int64_t i = 0;
  float rest = 0;
  if (norm) {
    for (; i < k; ++i) {
      const float gain = load(norm, i) + offset;
      rest += rounded<T>(load(x, i) * factor * gain) * load(weight, i);
    }
    return rest;
  }
  for (; i + kLanes <= k; i += kLanes) sum += load_vector(x + i) * load_vector(weight + i);
  for (; i < k; ++i) rest += load(x, i) * load(weight, i);
  return total_of(sum) + rest;
}

}  // namespace

void few_rows_cpu(const FewRows& o, int64_t begin, int64_t end) {
  const TensorView &x = o.x, &norm = o.norm, &residual = o.residual;
  const int64_t width = o.out.columns();
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t k = x.columns();
    const T* const gain = norm ? norm.as<T>() : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const T* const row = x.as<T>() + i / width * k;
      int64_t column = i % width, which = 0;
      while (o.activation == kFewNone && column >= o.weights[which].size(0))
        column -= o.weights[which++].size(0);
      float factor = 1;
      if (norm) {
        float squares = 0;
        for (int64_t j = 0; j < k; ++j) squares += load(row, j) * load(row, j);
        factor = 1 / __builtin_sqrtf(squares / static_cast<float>(k) + o.eps);
      }
      const auto result = [&](int64_t number) {
        float value = dot(row, o.weights[number].as<T>() + column * k, gain, factor, o.offset, k);
        if (o.biases.count) value += load(o.biases[number].as<T>(), column);
        return rounded<T>(value);
      };
      float value = result(which);
      if (o.activation != kFewNone) value = activated(value, o.activation) * result(1);
      if (residual) value = rounded<T>(value) + load(residual.as<T>(), i);
      store(o.out.as<T>(), i, value);
    }
  });
}

}  // namespace flexops::FLEXOPS_ISA
