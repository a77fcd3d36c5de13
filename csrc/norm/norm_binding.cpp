// torch's view of the norms: checks, shapes and registration.

#include "common/binding.h"
#include "norm/norm.h"

namespace flexops {
namespace {

constexpr int64_t kMostColumns = 65536;

using Maybe = std::optional<Tensor>;

NormType norm_type(const char* op, const char* argument, Dtype dtype) {
  FLEXOPS_CHECK(dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16, op, ": ", argument,
                " must be float32, float16 or bfloat16, got ", dtype_name(dtype));
  return dtype == Dtype::f32 ? NormType::f32 : dtype == Dtype::f16 ? NormType::f16 : NormType::bf16;
}

void check_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& x) {
  FLEXOPS_CHECK(on_this_device_type(tensor) && tensor.device_index() == x.device_index(), op, ": ", argument, " must be on x's device");
}

void check_x(const char* op, const Tensor& x) {
  FLEXOPS_CHECK(x.dim() > 0, op, ": x must have at least one dimension, got a scalar");
  const int64_t columns = x.size(-1);
  FLEXOPS_CHECK(1 <= columns && columns <= kMostColumns, op, ": x's last dimension must be from 1 to ", kMostColumns, ", got ", columns);
}

Tensor cast(const Tensor& tensor, Dtype dtype) {
  Tensor out = empty_like_contiguous(tensor, dtype);
  copy(out, tensor);
  return out;
}

/// A weight or a bias, contiguous.
const void* parameter(const char* op, const char* argument, Maybe& tensor, const Tensor& x) {
  if (!tensor) return nullptr;
  check_device(op, argument, *tensor, x);
  FLEXOPS_CHECK(tensor->dim() == 1 && tensor->size(0) == x.size(-1), op, ": ", argument, " must have shape [", x.size(-1), "], got ",
                shape_text(*tensor));
  if (!tensor->is_contiguous()) tensor = contiguous(*tensor);
  return tensor->data();
}

/// Elements between rows that lie at equal distances, each of them in one piece; else makes the tensor contiguous.
int64_t row_stride(Tensor& tensor) {
  const int64_t dim = tensor.dim(), columns = tensor.size(-1);
  if (tensor.is_contiguous()) return columns;
  const int64_t *sizes = tensor.sizes(), *strides = tensor.strides();
  int64_t stride = -1, expected = -1;
  bool regular = columns == 1 || strides[dim - 1] == 1;
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (stride == -1) stride = strides[d];
    if (expected != -1 && strides[d] != expected) regular = false;
    expected = strides[d] * sizes[d];
  }
  if (regular) return stride == -1 ? columns : stride;
  tensor = contiguous(tensor);
  return columns;
}

/// A number for each row, or two, the second behind all the first.
Tensor empty_statistics(const Tensor& x, bool two) {
  if (!two) return empty(x.sizes(), x.dim() - 1, Dtype::f32, x);
  std::vector<int64_t> sizes(x.sizes(), x.sizes() + x.dim() - 1);
  sizes.insert(sizes.begin(), 2);
  return empty(sizes.data(), x.dim(), Dtype::f32, x);
}

Tensor empty_nothing(const Tensor& x, Dtype dtype) {
  const int64_t none = 0;
  return empty(&none, 1, dtype, x);
}

#if FLEXOPS_DEVICE_CPU
/// The rows that are not worth waking threads for.
int64_t grain(int64_t columns) { return columns < 12288 ? 12288 / columns : 1; }
#endif

struct Forward {
  Tensor y, statistics, scales, new_residual;
};

/// What an operator gives: results of x's dtype, these and the rows' statistics for a gradient, or codes.
enum class Gives { results, statistics, int8, e4m3 };

/// All forward operators: what is not asked for stays undefined.
Forward forward(const char* op, Tensor x, Maybe residual, Maybe weight, Maybe bias, double eps, bool centered, Gives gives) {
  NormForward n{};
  n.type = n.row_type = n.weight_type = norm_type(op, "x", x.dtype());
  check_x(op, x);
  FLEXOPS_CHECK(on_this_device_type(x), op, ": x must be on the device of the other tensors");
  if (residual) {
    n.row_type = norm_type(op, "residual", residual->dtype());
    check_device(op, "residual", *residual, x);
    FLEXOPS_CHECK(same_shape(x, *residual), op, ": residual must have x's shape, ", shape_text(x), ", got ", shape_text(*residual));
  }
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  FLEXOPS_CHECK(eps >= 0, op, ": eps must be at least 0");
  if (weight) n.weight_type = norm_type(op, "weight", weight->dtype());
  if (bias) {
    const NormType type = norm_type(op, "bias", bias->dtype());
    if (weight && type != n.weight_type) {  // one type for both
      if (type != NormType::f32) bias = cast(*bias, Dtype::f32);
      if (n.weight_type != NormType::f32) weight = cast(*weight, Dtype::f32);
      n.weight_type = NormType::f32;
    } else {
      n.weight_type = type;
    }
  }
  n.weight = parameter(op, "weight", weight, x), n.bias = parameter(op, "bias", bias, x);
  n.columns = x.size(-1), n.rows = x.numel() / n.columns;
  n.eps = static_cast<float>(eps), n.centered = centered;
  n.codes = gives == Gives::int8 ? NormCodes::int8 : gives == Gives::e4m3 ? NormCodes::e4m3 : NormCodes::none;
  Forward out;
  const bool quantized = n.codes != NormCodes::none;
  out.y = empty_like_contiguous(x, gives == Gives::int8 ? Dtype::i8 : gives == Gives::e4m3 ? Dtype::e4m3 : x.dtype());
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
  n.x_stride = row_stride(x), n.x = x.data();
  if (residual) n.residual_stride = row_stride(*residual), n.residual = residual->data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, norm_forward_cuda(n, current_stream(x)));
#else
  parallel_for(0, n.rows, grain(n.columns), [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(norm_forward_cpu)(n, begin, end); });
#endif
  return out;
}

Forward layer_norm(const char* op, Tensor x, Maybe residual, Maybe weight, Maybe bias, double eps, Gives gives) {
  return forward(op, std::move(x), std::move(residual), std::move(weight), std::move(bias), eps, true, gives);
}

Forward rms_norm(const char* op, Tensor x, Maybe residual, Maybe weight, double eps, Gives gives) {
  return forward(op, std::move(x), std::move(residual), std::move(weight), std::nullopt, eps, false, gives);
}

Tensor layer_norm_plain(Tensor x, Maybe weight, Maybe bias, double eps) {
  return layer_norm("flexops::layer_norm", std::move(x), std::nullopt, std::move(weight), std::move(bias), eps, Gives::results).y;
}

std::tuple<Tensor, Tensor> layer_norm_forward(Tensor x, Maybe weight, Maybe bias, double eps) {
  Forward out = layer_norm("flexops::layer_norm", std::move(x), std::nullopt, std::move(weight), std::move(bias), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.statistics)};
}

Tensor rms_norm_plain(Tensor x, Maybe weight, double eps) {
  return rms_norm("flexops::rms_norm", std::move(x), std::nullopt, std::move(weight), eps, Gives::results).y;
}

std::tuple<Tensor, Tensor> rms_norm_forward(Tensor x, Maybe weight, double eps) {
  Forward out = rms_norm("flexops::rms_norm", std::move(x), std::nullopt, std::move(weight), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.statistics)};
}

std::tuple<Tensor, Tensor> add_layer_norm_plain(Tensor x, Tensor residual, Maybe weight, Maybe bias, double eps) {
  Forward out =
      layer_norm("flexops::add_layer_norm", std::move(x), std::move(residual), std::move(weight), std::move(bias), eps, Gives::results);
  return {std::move(out.y), std::move(out.new_residual)};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward(Tensor x, Tensor residual, Maybe weight, Maybe bias, double eps) {
  Forward out =
      layer_norm("flexops::add_layer_norm", std::move(x), std::move(residual), std::move(weight), std::move(bias), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.new_residual), std::move(out.statistics)};
}

std::tuple<Tensor, Tensor> add_rms_norm_plain(Tensor x, Tensor residual, Maybe weight, double eps) {
  Forward out = rms_norm("flexops::add_rms_norm", std::move(x), std::move(residual), std::move(weight), eps, Gives::results);
  return {std::move(out.y), std::move(out.new_residual)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_forward(Tensor x, Tensor residual, Maybe weight, double eps) {
  Forward out = rms_norm("flexops::add_rms_norm", std::move(x), std::move(residual), std::move(weight), eps, Gives::statistics);
  return {std::move(out.y), std::move(out.new_residual), std::move(out.statistics)};
}

Gives codes_of(const char* op, int64_t code) {
  const Dtype dtype = dtype_of_code(code);
  FLEXOPS_CHECK(dtype == Dtype::i8 || dtype == Dtype::e4m3, op, ": dtype must be int8 or float8_e4m3fn");
  return dtype == Dtype::i8 ? Gives::int8 : Gives::e4m3;
}

std::tuple<Tensor, Tensor> rms_norm_quantized(Tensor x, Maybe weight, double eps, int64_t dtype) {
  const char* op = "flexops::rms_norm_quantized";
  Forward out = rms_norm(op, std::move(x), std::nullopt, std::move(weight), eps, codes_of(op, dtype));
  return {std::move(out.y), std::move(out.scales)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantized(Tensor x, Tensor residual, Maybe weight, double eps, int64_t dtype) {
  const char* op = "flexops::add_rms_norm_quantized";
  Forward out = rms_norm(op, std::move(x), std::move(residual), std::move(weight), eps, codes_of(op, dtype));
  return {std::move(out.y), std::move(out.scales), std::move(out.new_residual)};
}

void check_gradient(const char* op, const char* argument, const Tensor& grad, const Tensor& x) {
  check_device(op, argument, grad, x);
  norm_type(op, argument, grad.dtype());
  FLEXOPS_CHECK(same_shape(grad, x), op, ": ", argument, " must have x's shape, ", shape_text(x), ", got ", shape_text(grad));
}

void make_float32(Tensor& tensor) {
  if (tensor.dtype() != Dtype::f32) tensor = cast(tensor, Dtype::f32);
}

struct Backward {
  Tensor grad_x, grad_weight, grad_bias;
};

Backward backward(const char* op, Tensor grad, Maybe grad_residual, Tensor x, Maybe weight, Tensor statistics, bool centered, bool need_x,
                  bool need_weight, bool need_bias, Dtype bias_dtype) {
  norm_type(op, "x", x.dtype());
  check_x(op, x);
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  check_gradient(op, "grad", grad, x);
  if (grad_residual) check_gradient(op, "grad_residual", *grad_residual, x);
  const Dtype x_dtype = x.dtype();
  if (grad.dtype() != x_dtype || (grad_residual && grad_residual->dtype() != x_dtype)) {  // a residual of another dtype than x had
    make_float32(x), make_float32(grad);
    if (grad_residual) make_float32(*grad_residual);
  }
  NormBackward n{};
  n.type = n.weight_type = norm_type(op, "x", x.dtype());
  need_weight = need_weight && weight.has_value();
  const Dtype weight_dtype = weight ? weight->dtype() : Dtype::f32;
  if (weight) {
    norm_type(op, "weight", weight_dtype);
#if FLEXOPS_DEVICE_CPU
    if (weight_dtype != x.dtype()) make_float32(*weight);  // the kernels take these two
#endif
    n.weight_type = norm_type(op, "weight", weight->dtype());
  }
  n.bias_type = norm_type(op, "bias_dtype", bias_dtype);
  n.weight = parameter(op, "weight", weight, x);
  n.columns = x.size(-1), n.rows = x.numel() / n.columns, n.centered = centered;
  check_device(op, "statistics", statistics, x);
  FLEXOPS_CHECK(statistics.dtype() == Dtype::f32 && statistics.numel() == (centered ? 2 : 1) * n.rows, op,
                ": statistics must be those that the forward operator returned");
  if (!statistics.is_contiguous()) statistics = contiguous(statistics);
  n.mean = centered ? statistics.data<float>() : nullptr;
  n.rstd = statistics.data<float>() + (centered ? n.rows : 0);

  Backward out;
  const int64_t columns = n.columns;
  out.grad_x = need_x ? empty_like_contiguous(x, x.dtype()) : empty_nothing(x, x_dtype);
  out.grad_weight = need_weight ? empty(&columns, 1, weight->dtype(), x) : empty_nothing(x, weight_dtype);
  out.grad_bias = need_bias ? empty(&columns, 1, bias_dtype, x) : empty_nothing(x, bias_dtype);
  if (need_x) n.grad_x = out.grad_x.data();
  if (need_weight) n.grad_weight = out.grad_weight.data();
  if (need_bias) n.grad_bias = out.grad_bias.data();
  if (!need_x && !need_weight && !need_bias) return out;
  if (n.rows > 0) {
    n.x_stride = row_stride(x), n.grad_stride = row_stride(grad);
    if (grad_residual) n.grad_residual_stride = row_stride(*grad_residual);
  }
  n.x = x.data(), n.grad = grad.data(), n.grad_residual = grad_residual ? grad_residual->data() : nullptr;
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
  parallel_for(0, n.partial_rows, 1, [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(norm_backward_cpu)(n, begin, end); });
  if (sums)
    parallel_for(0, columns, 32768 / (n.partial_rows * sums + 1),
                 [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(norm_reduce_cpu)(n, begin, end); });
  if (need_weight && weight->dtype() != weight_dtype) out.grad_weight = cast(out.grad_weight, weight_dtype);
#endif
  if (need_x && x.dtype() != x_dtype) out.grad_x = cast(out.grad_x, x_dtype);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(Tensor grad, Maybe grad_residual, Tensor x, Maybe weight, Tensor statistics,
                                                       bool need_x, bool need_weight, bool need_bias, int64_t bias_dtype) {
  Backward out = backward("flexops::layer_norm_backward", std::move(grad), std::move(grad_residual), std::move(x), std::move(weight),
                          std::move(statistics), true, need_x, need_weight, need_bias, dtype_of_code(bias_dtype));
  return {std::move(out.grad_x), std::move(out.grad_weight), std::move(out.grad_bias)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad, Maybe grad_residual, Tensor x, Maybe weight, Tensor statistics, bool need_x,
                                             bool need_weight) {
  Backward out = backward("flexops::rms_norm_backward", std::move(grad), std::move(grad_residual), std::move(x), std::move(weight),
                          std::move(statistics), false, need_x, need_weight, false, Dtype::f32);
  return {std::move(out.grad_x), std::move(out.grad_weight)};
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "layer_norm", layer_norm_plain);
  FLEXOPS_IMPL(m, "layer_norm_plain", layer_norm_plain);
  FLEXOPS_IMPL(m, "layer_norm_forward", layer_norm_forward);
  FLEXOPS_IMPL(m, "rms_norm", rms_norm_plain);
  FLEXOPS_IMPL(m, "rms_norm_plain", rms_norm_plain);
  FLEXOPS_IMPL(m, "rms_norm_forward", rms_norm_forward);
  FLEXOPS_IMPL(m, "add_layer_norm", add_layer_norm_plain);
  FLEXOPS_IMPL(m, "add_layer_norm_plain", add_layer_norm_plain);
  FLEXOPS_IMPL(m, "add_layer_norm_forward", add_layer_norm_forward);
  FLEXOPS_IMPL(m, "add_rms_norm", add_rms_norm_plain);
  FLEXOPS_IMPL(m, "add_rms_norm_plain", add_rms_norm_plain);
  FLEXOPS_IMPL(m, "add_rms_norm_forward", add_rms_norm_forward);
  FLEXOPS_IMPL(m, "rms_norm_quantized", rms_norm_quantized);
  FLEXOPS_IMPL(m, "add_rms_norm_quantized", add_rms_norm_quantized);
  FLEXOPS_IMPL(m, "layer_norm_backward", layer_norm_backward);
  FLEXOPS_IMPL(m, "rms_norm_backward", rms_norm_backward);
}

}  // namespace flexops
