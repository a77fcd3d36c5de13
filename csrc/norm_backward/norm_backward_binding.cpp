// torch's view of the norms' backward pass: checks, shapes and registration.

#include "norm/norm_binding.h"
#include "norm_backward/norm_backward.h"

namespace flexops {
namespace {

Tensor empty_nothing(const Tensor& x, Dtype dtype) {
  const int64_t none = 0;
  return empty(&none, 1, dtype, x);
}

void check_gradient(const char* op, const char* argument, const Tensor& grad, const Tensor& x) {
  check_device(op, argument, grad, "x", x);
  element_type(op, argument, grad.dtype());
  FLEXOPS_CHECK(same_shape(grad, x), op, ": ", argument, " must have x's shape, ", shape_text(x),
                ", got ", shape_text(grad));
}

void make_float32(Tensor& tensor) {
  if (tensor.dtype() != Dtype::f32) tensor = cast(tensor, Dtype::f32);
}

struct Backward {
  Tensor grad_x, grad_weight, grad_bias;
};

Backward backward(const char* op, Tensor grad, Maybe grad_residual, Tensor x, Maybe weight,
                  Tensor statistics, bool centered, bool need_x, bool need_weight, bool need_bias,
                  Dtype bias_dtype) {
  element_type(op, "x", x.dtype());
  check_x(op, x);
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  check_gradient(op, "grad", grad, x);
  if (grad_residual) check_gradient(op, "grad_residual", *grad_residual, x);
  const Dtype x_dtype = x.dtype();
  if (grad.dtype() != x_dtype ||
      (grad_residual &&
       grad_residual->dtype() != x_dtype)) {  // a residual of another dtype than x had
    make_float32(x), make_float32(grad);
    if (grad_residual) make_float32(*grad_residual);
  }
  NormBackward n{};
  n.type = n.weight_type = element_type(op, "x", x.dtype());
  need_weight = need_weight && weight.has_value();
  const Dtype weight_dtype = weight ? weight->dtype() : Dtype::f32;
  if (weight) {
    element_type(op, "weight", weight_dtype);
#if FLEXOPS_DEVICE_CPU
    if (weight_dtype != x.dtype()) make_float32(*weight);  // the kernels take these two
#endif
    n.weight_type = element_type(op, "weight", weight->dtype());
  }
  n.bias_type = element_type(op, "bias_dtype", bias_dtype);
  n.weight = parameter(op, "weight", weight, x);
  n.columns = x.size(-1), n.rows = x.numel() / n.columns, n.centered = centered;
  check_device(op, "statistics", statistics, "x", x);
  FLEXOPS_CHECK(
      statistics.dtype() == Dtype::f32 && statistics.numel() == (centered ? 2 : 1) * n.rows, op,
      ": statistics must be those that the forward operator returned");
  if (!statistics.is_contiguous()) statistics = contiguous(statistics);
  n.mean = centered ? statistics.data<float>() : nullptr;
  n.rstd = statistics.data<float>() + (centered ? n.rows : 0);

  Backward out;
  const int64_t columns = n.columns;
  out.grad_x = need_x ? empty_like_contiguous(x, x.dtype()) : empty_nothing(x, x_dtype);
  out.grad_weight =
      need_weight ? empty(&columns, 1, weight->dtype(), x) : empty_nothing(x, weight_dtype);
  out.grad_bias = need_bias ? empty(&columns, 1, bias_dtype, x) : empty_nothing(x, bias_dtype);
  if (need_x) n.grad_x = out.grad_x.data();
  if (need_weight) n.grad_weight = out.grad_weight.data();
  if (need_bias) n.grad_bias = out.grad_bias.data();
  if (!need_x && !need_weight && !need_bias) return out;
  if (n.rows > 0) {
    n.x_stride = take_rows(x), n.grad_stride = take_rows(grad);
    if (grad_residual) n.grad_residual_stride = take_rows(*grad_residual);
  }
  n.x = x.data(), n.grad = grad.data(),
  n.grad_residual = grad_residual ? grad_residual->data() : nullptr;
  const int64_t sums = need_weight + need_bias;
  Tensor partial;
#if FLEXOPS_DEVICE_CUDA
  if (sums) n.partial_rows = norm_partial_rows_cuda(n);
#else
  n.partial_rows = norm_partial_rows_cpu(n);
#endif
  if (sums) {
    const int64_t sizes[] = {sums * n.partial_rows, columns};
    partial = empty(sizes, 2, Dtype::f32, x);
    n.partial = partial.data<float>();
  }
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, norm_backward_cuda(n, current_stream(x)));
#else
  parallel_for(0, n.partial_rows, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(norm_backward_cpu)(n, begin, end);
  });
  if (sums)
    parallel_for(0, columns, 32768 / (n.partial_rows * sums + 1), [&](int64_t begin, int64_t end) {
      FLEXOPS_ISA_CALL(norm_reduce_cpu)(n, begin, end);
    });
  if (need_weight && weight->dtype() != weight_dtype)
    out.grad_weight = cast(out.grad_weight, weight_dtype);
#endif
  if (need_x && x.dtype() != x_dtype) out.grad_x = cast(out.grad_x, x_dtype);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(Tensor grad, Maybe grad_residual, Tensor x,
                                                       Maybe weight, Tensor statistics, bool need_x,
                                                       bool need_weight, bool need_bias,
                                                       int64_t bias_dtype) {
  Backward out = backward("flexops::layer_norm_backward", std::move(grad), std::move(grad_residual),
                          std::move(x), std::move(weight), std::move(statistics), true, need_x,
                          need_weight, need_bias, dtype_of_code(bias_dtype));
  return {std::move(out.grad_x), std::move(out.grad_weight), std::move(out.grad_bias)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad, Maybe grad_residual, Tensor x,
                                             Maybe weight, Tensor statistics, bool need_x,
                                             bool need_weight) {
  Backward out = backward("flexops::rms_norm_backward", std::move(grad), std::move(grad_residual),
                          std::move(x), std::move(weight), std::move(statistics), false, need_x,
                          need_weight, false, Dtype::f32);
  return {std::move(out.grad_x), std::move(out.grad_weight)};
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "layer_norm_backward", layer_norm_backward);
  FLEXOPS_IMPL(m, "rms_norm_backward", rms_norm_backward);
}

}  // namespace flexops
