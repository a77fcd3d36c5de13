// The norms' backward pass on the CPU: compiled once per ISA level (common/cpu.h). Formulas:
// flexops/ops/norm_backward.py.

#include "norm_backward/norm_backward.h"

#include "norm/norm_cpu.h"

namespace flexops::FLEXOPS_ISA {

template <ElementType type, bool kWide>
static void backward_row(const NormBackward& n, int64_t row, float* sum_weight, float* sum_bias) {
  const auto* x = static_cast<const Stored<type>*>(n.x) + row * n.x_stride;
  const auto* grad = static_cast<const Stored<type>*>(n.grad) + row * n.grad_stride;
  const Floats mean = spread(n.centered ? n.mean[row] : 0.0f), rstd = spread(n.rstd[row]);
  const auto scaled = [&](Floats value, int64_t i, int64_t count) {
    return n.weight ? value * (load_parameter<type, kWide>(n.weight, i, count) + n.offset) : value;
  };
  const auto unit = [&](int64_t i, int64_t count) {
    return (load_at<type>(x, i, count) - mean) * rstd;
  };
  Floats slope = zeros(), level = zeros();
  if (n.grad_x) {
    Sums products, sums;
    for_each_sum(0, n.columns, [&](int64_t i, int64_t count, int k) {
      const Floats value = scaled(load_at<type>(grad, i, count), i, count);
      products.at[k] += value * unit(i, count);
      sums.at[k] += value;
    });
    const float inverse = 1.0f / static_cast<float>(n.columns);
    slope = spread(products.total() * inverse);
    if (n.centered) level = spread(sums.total() * inverse);
  }
  auto* out = static_cast<Stored<type>*>(n.grad_x) + (n.grad_x ? row * n.columns : 0);
  const auto* also = static_cast<const Stored<type>*>(n.grad_residual) +
                     (n.grad_residual ? row * n.grad_residual_stride : 0);
  for_each(n.columns, [&](int64_t i, int64_t count) {
    const Floats value = load_at<type>(grad, i, count), place = unit(i, count);
    if (sum_weight)
      store_at<ElementType::f32>(
          sum_weight, i, load_at<ElementType::f32>(sum_weight, i, count) + value * place, count);
    if (sum_bias)
      store_at<ElementType::f32>(sum_bias, i, load_at<ElementType::f32>(sum_bias, i, count) + value,
                                 count);
    if (n.grad_x) {
      Floats change = (scaled(value, i, count) - level - place * slope) * rstd;
      if (n.grad_residual) change += load_at<type>(also, i, count);
      store_at<type>(out, i, change, count);
    }
  });
}

template <ElementType type, bool kWide>
static void backward_parts(const NormBackward& n, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    float* sum_weight = n.grad_weight ? n.partial + part * n.columns : nullptr;
    float* sum_bias = n.grad_bias
                          ? n.partial + (part + (n.grad_weight ? n.partial_rows : 0)) * n.columns
                          : nullptr;
    if (sum_weight) memset(sum_weight, 0, static_cast<size_t>(n.columns) * 4);
    if (sum_bias) memset(sum_bias, 0, static_cast<size_t>(n.columns) * 4);
    const int64_t last = n.rows * (part + 1) / n.partial_rows;
    for (int64_t row = n.rows * part / n.partial_rows; row < last; ++row)
      backward_row<type, kWide>(n, row, sum_weight, sum_bias);
  }
}

template <ElementType type>
static void backward_of(const NormBackward& n, int64_t begin, int64_t end) {
  if (type != ElementType::f32 && n.weight_type == type)
    return backward_parts<type, false>(n, begin, end);
  alignas(64) float weight[kMostColumns];
  NormBackward wide = n;
  if (n.weight) wide.weight = widen(n.weight, 0, n.columns, n.weight_type, weight);
  backward_parts<type, true>(wide, begin, end);
}

void norm_backward_cpu(const NormBackward& n, int64_t begin, int64_t end) {
  n.type == ElementType::f32   ? backward_of<ElementType::f32>(n, begin, end)
  : n.type == ElementType::f16 ? backward_of<ElementType::f16>(n, begin, end)
                               : backward_of<ElementType::bf16>(n, begin, end);
}

void norm_reduce_cpu(const NormBackward& n, int64_t begin, int64_t end) {
  const auto reduce = [&](const float* parts, void* out, ElementType type) {
    if (out) sum_parts(parts, n.partial_rows, n.columns, out, type, begin, end);
  };
  reduce(n.partial, n.grad_weight, n.weight_type);
  reduce(n.partial + (n.grad_weight ? n.partial_rows * n.columns : 0), n.grad_bias, n.bias_type);
}

}  // namespace flexops::FLEXOPS_ISA
