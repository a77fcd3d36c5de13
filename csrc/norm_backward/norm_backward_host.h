// From the arguments of the norms' backward pass to its launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"
#include "norm_backward/norm_backward.h"

namespace flexops {

using View = TensorView;

/// Gradients that are not wanted are views that are false.
inline void norm_backward(Host& host, bool centered, double offset, const View& grad,
                          const View& grad_residual, const View& x, const View& weight,
                          const View& statistics, const View& grad_x, const View& grad_weight,
                          const View& grad_bias) {
  FLEXOPS_CHECK(1 <= x.columns() && x.columns() <= kMostColumns, host.op,
                ": x's last dimension must be from 1 to ", kMostColumns, ", got ", x.columns());
  if (!grad_x && !grad_weight && !grad_bias) return;
  NormBackward n{};
  n.type = n.weight_type = n.bias_type = element_type(x);
  if (weight) n.weight_type = element_type(weight);
  if (grad_bias) n.bias_type = element_type(host.op, "bias_dtype", grad_bias.dtype);
  n.columns = x.columns(), n.rows = x.rows(), n.centered = centered;
  n.offset = static_cast<float>(offset);
  n.x = x.data, n.grad = grad.data, n.grad_residual = grad_residual.data, n.weight = weight.data;
  n.x_stride = x.row_stride(), n.grad_stride = grad.row_stride();
  if (grad_residual) n.grad_residual_stride = grad_residual.row_stride();
  n.rstd = statistics.as<float>() + (centered ? n.rows : 0);
  n.mean = centered ? statistics.as<float>() : nullptr;
  n.grad_x = grad_x.data, n.grad_weight = grad_weight.data, n.grad_bias = grad_bias.data;
  const int64_t sums = int64_t{bool(grad_weight)} + bool(grad_bias);
  if (FLEXOPS_DEVICE_CPU) n.partial_rows = norm_partial_rows_cpu(n);
  if (FLEXOPS_DEVICE_CUDA && sums) n.partial_rows = norm_partial_rows_cuda(n);
  if (sums) n.partial = host.workspace<float>(sums * n.partial_rows * n.columns);
  if (FLEXOPS_DEVICE_CUDA) return host.check(norm_backward_cuda(n, host.stream()));
  parallel_for(0, n.partial_rows, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(norm_backward_cpu)(n, begin, end);
  });
  if (sums == 0) return;
  const int64_t grain = 32768 / (n.partial_rows * sums + 1);
  parallel_for(0, n.columns, grain, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(norm_reduce_cpu)(n, begin, end);
  });
}

inline void layer_norm_backward_host(Host& host, const View& grad, const View& grad_residual,
                                     const View& x, const View& weight, const View& statistics,
                                     double offset, bool, bool, bool, Dtype, const View& grad_x,
                                     const View& grad_weight, const View& grad_bias) {
  norm_backward(host, true, offset, grad, grad_residual, x, weight, statistics, grad_x, grad_weight,
                grad_bias);
}
inline void rms_norm_backward_host(Host& host, const View& grad, const View& grad_residual,
                                   const View& x, const View& weight, const View& statistics,
                                   double offset, bool, bool, const View& grad_x,
                                   const View& grad_weight) {
  norm_backward(host, false, offset, grad, grad_residual, x, weight, statistics, grad_x,
                grad_weight, {});
}

}  // namespace flexops
