// torch's view of the norms: checks, shapes and registration.

#include "norm/norm_binding.h"

namespace flexops {
namespace {

/// A number for each row, or two, the second behind all the first.
Tensor empty_statistics(const Tensor& x, bool two) {
  if (!two) return empty(x.sizes(), x.dim() - 1, Dtype::f32, x);
  std::vector<int64_t> sizes(x.sizes(), x.sizes() + x.dim() - 1);
  sizes.insert(sizes.begin(), 2);
  return empty(sizes.data(), x.dim(), Dtype::f32, x);
}

#if FLEXOPS_DEVICE_CPU
/// The rows that are not worth waking threads for.
int64_t grain(int64_t columns) { return columns < 12288 ? 12288 / columns : 1; }
#endif

struct Forward {
  Tensor y, statistics, scales, new_residual;
};

/// What an operator gives: results of x's dtype, these and the rows' statistics for a gradient, or
/// codes.
enum class Gives { results, statistics, int8, e4m3 };

/// All forward operators: what is not asked for stays undefined.
Forward forward(const char* op, Tensor x, Maybe residual, Maybe weight, Maybe bias, double eps,
                bool centered, Gives gives) {
  NormForward n{};
  n.type = n.row_type = n.weight_type = element_type(op, "x", x.dtype());
  check_x(op, x);
  FLEXOPS_CHECK(on_this_device_type(x), op, ": x must be on the device of the other tensors");
  if (residual) {
    n.row_type = element_type(op, "residual", residual->dtype());
    check_device(op, "residual", *residual, "x", x);
    FLEXOPS_CHECK(same_shape(x, *residual), op, ": residual must have x's shape, ", shape_text(x),
                  ", got ", shape_text(*residual));
  }
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  FLEXOPS_CHECK(eps >= 0, op, ": eps must be at least 0");
  if (weight) n.weight_type = element_type(op, "weight", weight->dtype());
  if (bias) {
    const ElementType type = element_type(op, "bias", bias->dtype());
    if (weight && type != n.weight_type) {  // one type for both
      if (type != ElementType::f32) bias = cast(*bias, Dtype::f32);
      if (n.weight_type != ElementType::f32) weight = cast(*weight, Dtype::f32);
      n.weight_type = ElementType::f32;
    } else {
      n.weight_type = type;
    }
  }
  n.weight = parameter(op, "weight", weight, x), n.bias = parameter(op, "bias", bias, x);
  n.columns = x.size(-1), n.rows = x.numel() / n.columns;
  n.eps = static_cast<float>(eps), n.centered = centered;
  n.codes = gives == Gives::int8 ? Dtype::i8 : gives == Gives::e4m3 ? Dtype::e4m3 : Dtype::none;
  Forward out;
  const bool quantized = n.codes != Dtype::none;
  out.y = empty_like_contiguous(x, quantized ? n.codes : x.dtype());
  n.y = out.y.data();
  if (quantized) {
    std::vector<int64_t> sizes(x.sizes(), x.sizes() + x.dim());
    sizes.back() = 1;
    out.scales = empty(sizes.data(), x.dim(), Dtype::f32, x);
    n.scales = out.scales.data<float>();
  } else if (gives == Gives::statistics) {
    out.statistics = empty_statistics(x, centered);
    auto* statistics = out.statistics.data<float>();
    n.mean = centered ? statistics : nullptr;
    n.rstd = centered ? statistics + n.rows : statistics;
  }
  if (residual) {
    out.new_residual = empty_like_contiguous(x, residual->dtype());
    n.new_residual = out.new_residual.data();
  }
  if (n.rows == 0) return out;
  n.x_stride = take_rows(x), n.x = x.data();
  if (residual) n.residual_stride = take_rows(*residual), n.residual = residual->data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, norm_forward_cuda(n, current_stream(x)));
#else
  parallel_for(0, n.rows, grain(n.columns), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(norm_forward_cpu)(n, begin, end);
  });
#endif
  return out;
}

Forward layer_norm(const char* op, Tensor x, Maybe residual, Maybe weight, Maybe bias, double eps,
                   Gives gives) {
  return forward(op, std::move(x), std::move(residual), std::move(weight), std::move(bias), eps,
                 true, gives);
}

Forward rms_norm(const char* op, Tensor x, Maybe residual, Maybe weight, double eps, Gives gives) {
  return forward(op, std::move(x), std::move(residual), std::move(weight), std::nullopt, eps, false,
                 gives);
}

Tensor layer_norm_plain(Tensor x, Maybe weight, Maybe bias, double eps) {
  return layer_norm("flexops::layer_norm", std::move(x), std::nullopt, std::move(weight),
                    std::move(bias), eps, Gives::results)
      .y;
}

std::tuple<Tensor, Tensor> layer_norm_forward(Tensor x, Maybe weight, Maybe bias, double eps) {
  Forward out = layer_norm("flexops::layer_norm", std::move(x), std::nullopt, std::move(weight),
                           std::move(bias), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.statistics)};
}

Tensor rms_norm_plain(Tensor x, Maybe weight, double eps) {
  return rms_norm("flexops::rms_norm", std::move(x), std::nullopt, std::move(weight), eps,
                  Gives::results)
      .y;
}

std::tuple<Tensor, Tensor> rms_norm_forward(Tensor x, Maybe weight, double eps) {
  Forward out = rms_norm("flexops::rms_norm", std::move(x), std::nullopt, std::move(weight), eps,
                         Gives::statistics);
  return {std::move(out.y), std::move(out.statistics)};
}

std::tuple<Tensor, Tensor> add_layer_norm_plain(Tensor x, Tensor residual, Maybe weight, Maybe bias,
                                                double eps) {
  Forward out = layer_norm("flexops::add_layer_norm", std::move(x), std::move(residual),
                           std::move(weight), std::move(bias), eps, Gives::results);
  return {std::move(out.y), std::move(out.new_residual)};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward(Tensor x, Tensor residual, Maybe weight,
                                                          Maybe bias, double eps) {
  Forward out = layer_norm("flexops::add_layer_norm", std::move(x), std::move(residual),
                           std::move(weight), std::move(bias), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.new_residual), std::move(out.statistics)};
}

std::tuple<Tensor, Tensor> add_rms_norm_plain(Tensor x, Tensor residual, Maybe weight, double eps) {
  Forward out = rms_norm("flexops::add_rms_norm", std::move(x), std::move(residual),
                         std::move(weight), eps, Gives::results);
  return {std::move(out.y), std::move(out.new_residual)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_forward(Tensor x, Tensor residual, Maybe weight,
                                                        double eps) {
  Forward out = rms_norm("flexops::add_rms_norm", std::move(x), std::move(residual),
                         std::move(weight), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.new_residual), std::move(out.statistics)};
}

Gives codes_of(const char* op, int64_t code) {
  const Dtype dtype = dtype_of_code(code);
  FLEXOPS_CHECK(dtype == Dtype::i8 || dtype == Dtype::e4m3, op,
                ": dtype must be int8 or float8_e4m3fn");
  return dtype == Dtype::i8 ? Gives::int8 : Gives::e4m3;
}

std::tuple<Tensor, Tensor> rms_norm_quantized(Tensor x, Maybe weight, double eps, int64_t dtype) {
  const char* op = "flexops::rms_norm_quantized";
  Forward out =
      rms_norm(op, std::move(x), std::nullopt, std::move(weight), eps, codes_of(op, dtype));
  return {std::move(out.y), std::move(out.scales)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantized(Tensor x, Tensor residual, Maybe weight,
                                                          double eps, int64_t dtype) {
  const char* op = "flexops::add_rms_norm_quantized";
  Forward out =
      rms_norm(op, std::move(x), std::move(residual), std::move(weight), eps, codes_of(op, dtype));
  return {std::move(out.y), std::move(out.scales), std::move(out.new_residual)};
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "layer_norm", layer_norm_plain);
  FLEXOPS_IMPL(m, "layer_norm_plain", layer_norm_plain);
  FLEXOPS_IMPL(m, "layer_norm.forward", layer_norm_forward);
  FLEXOPS_IMPL(m, "rms_norm", rms_norm_plain);
  FLEXOPS_IMPL(m, "rms_norm_plain", rms_norm_plain);
  FLEXOPS_IMPL(m, "rms_norm.forward", rms_norm_forward);
  FLEXOPS_IMPL(m, "add_layer_norm", add_layer_norm_plain);
  FLEXOPS_IMPL(m, "add_layer_norm_plain", add_layer_norm_plain);
  FLEXOPS_IMPL(m, "add_layer_norm.forward", add_layer_norm_forward);
  FLEXOPS_IMPL(m, "add_rms_norm", add_rms_norm_plain);
  FLEXOPS_IMPL(m, "add_rms_norm_plain", add_rms_norm_plain);
  FLEXOPS_IMPL(m, "add_rms_norm.forward", add_rms_norm_forward);
  FLEXOPS_IMPL(m, "rms_norm_quantized", rms_norm_quantized);
  FLEXOPS_IMPL(m, "add_rms_norm_quantized", add_rms_norm_quantized);
}

}  // namespace flexops
