// torch's view of cross entropy: checks and registration.

#include "common/binding.h"
#include "cross_entropy/cross_entropy.h"

namespace flexops {
namespace {

constexpr int64_t kLongest = int64_t{1} << 30;

struct Options {
  int64_t ignore_index;
  double smoothing, z_loss;
  int64_t reduction;  // 0: none, 1: sum, 2: mean
};

Logits check(const char* op, const Tensor& logits, const Tensor& target, const Options& o) {
  Logits shape;
  shape.type = element_type(op, "logits", logits.dtype());
  FLEXOPS_CHECK(logits.dim() == 2, op, ": logits must be [N, V], got shape ", shape_text(logits));
  FLEXOPS_CHECK(target.dtype() == Dtype::i64, op, ": target must be int64, got ", dtype_name(target.dtype()));
  FLEXOPS_CHECK(target.dim() == 1 && target.size(0) == logits.size(0), op, ": target must be [N], one for each row of logits, got shape ",
                shape_text(target), " for ", shape_text(logits));
  check_device(op, "target", target, "logits", logits);
  FLEXOPS_CHECK(0 <= o.reduction && o.reduction <= 2, op, ": reduction must be 0 (none), 1 (sum) or 2 (mean), got ", o.reduction);
  shape.rows = logits.size(0), shape.length = logits.size(1);
  FLEXOPS_CHECK(1 <= shape.length && shape.length <= kLongest, op, ": logits must have 1 to ", kLongest, " classes, got shape ",
                shape_text(logits));
  shape.stride = shape.rows > 1 ? logits.strides()[0] : shape.length;
  shape.ignore_index = o.ignore_index;
  shape.smoothing = static_cast<float>(o.smoothing), shape.z_loss = static_cast<float>(o.z_loss);
  return shape;
}

bool rows_are_contiguous(const Tensor& x) { return x.size(1) == 1 || x.strides()[1] == 1; }

/// The loss, or the rows' losses, and what the backward pass wants.
struct Results {
  Tensor loss, stats;
};

#if FLEXOPS_DEVICE_CPU
int64_t grain(const Logits& shape) { return 8192 / (shape.length < 8192 ? shape.length : 8192); }

void run_cpu(void* logits, const int64_t* target, const Logits& shape, Reduction reduction, bool write_gradient,
             const GradientFactors& factors, const LossStats& stats, float* loss) {
  int64_t used = 0;
  for (int64_t row = 0; row < shape.rows; ++row) used += target[row] != shape.ignore_index;
  const float divisor = reduction == Reduction::mean ? static_cast<float>(used) : 1.0f;
  parallel_for(0, shape.rows, grain(shape), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cross_entropy_cpu)(logits, target, shape, divisor, write_gradient, factors, stats, begin, end);
  });
  if (reduction == Reduction::none) return;
  double sum = 0.0;
  for (int64_t row = 0; row < shape.rows; ++row) sum += static_cast<double>(stats.losses[row]);
  *stats.divisor = divisor;
  *loss = static_cast<float>(sum / static_cast<double>(divisor));
}
#endif

void check_factors(const char* op, const char* argument, const Tensor& factors, const Tensor& values, int64_t rows) {
  FLEXOPS_CHECK(factors.dtype() == Dtype::f32, op, ": ", argument, " must be float32, got ", dtype_name(factors.dtype()));
  FLEXOPS_CHECK(factors.dim() == 0 || (factors.dim() == 1 && factors.size(0) == rows), op, ": ", argument,
                " must be a scalar or have one element for each of ", rows, " rows, got shape ", shape_text(factors));
  check_device(op, argument, factors, "the rest", values);
}

/// `factors`: of the gradient, if it is written.
Results run(const char* op, Tensor& logits, Tensor& target, const Options& o, bool write_gradient, Tensor* factors) {
  const Logits shape = check(op, logits, target, o);
  const auto reduction = static_cast<Reduction>(o.reduction);
  if (factors) check_factors(op, "factors", *factors, logits, shape.rows);
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(logits);
#endif
  const int64_t size = LossStats::size(shape.rows, reduction);
  Results r = {empty(&shape.rows, reduction == Reduction::none ? 1 : 0, Dtype::f32, logits), empty(&size, 1, Dtype::f32, logits)};
  float* loss = r.loss.data<float>();
  const LossStats stats(r.stats.data<float>(), shape.rows, reduction, loss);
  target = contiguous(target);
  GradientFactors by = {nullptr, false};
  if (factors) {
    *factors = contiguous(*factors);
    by = {factors->data<float>(), factors->dim() == 1};
  }
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, cross_entropy_cuda(logits.data(), target.data<int64_t>(), shape, reduction, write_gradient, by, stats, loss,
                                      current_stream(logits)));
#else
  run_cpu(logits.data(), target.data<int64_t>(), shape, reduction, write_gradient, by, stats, loss);
#endif
  return r;
}

std::tuple<Tensor, Tensor> both(Results r) { return {std::move(r.loss), std::move(r.stats)}; }

std::tuple<Tensor, Tensor> cross_entropy(Tensor logits, Tensor target, int64_t ignore_index, double smoothing, double z_loss,
                                         int64_t reduction) {
  if (logits.dim() == 2 && !rows_are_contiguous(logits)) logits = contiguous(logits);
  return both(run("flexops::cross_entropy", logits, target, {ignore_index, smoothing, z_loss, reduction}, false, nullptr));
}

std::tuple<Tensor, Tensor> cross_entropy_(Tensor logits, Tensor target, std::optional<Tensor> factors, int64_t ignore_index,
                                          double smoothing, double z_loss, int64_t reduction) {
  const char* op = "flexops::cross_entropy_";
  FLEXOPS_CHECK(logits.dim() != 2 || rows_are_contiguous(logits), op, ": logits must have contiguous rows to be overwritten");
  FLEXOPS_CHECK(logits.dim() != 2 || logits.size(0) < 2 || logits.strides()[0] >= logits.size(1), op, ": logits' rows must not overlap");
  return both(run(op, logits, target, {ignore_index, smoothing, z_loss, reduction}, true, factors ? &*factors : nullptr));
}

Tensor cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor stats, int64_t ignore_index, double smoothing,
                              double z_loss, int64_t reduction) {
  const char* op = "flexops::cross_entropy_backward";
  Logits shape = check(op, logits, target, {ignore_index, smoothing, z_loss, reduction});
  check_factors(op, "grad", grad, logits, shape.rows);
  const bool each_row = grad.dim() == 1;
  const auto reduced = static_cast<Reduction>(reduction);
  check_device(op, "stats", stats, "logits", logits);
  FLEXOPS_CHECK(stats.dtype() == Dtype::f32 && stats.numel() == LossStats::size(shape.rows, reduced), op,
                ": stats must be what the forward pass gave");
  Tensor out = empty_like_contiguous(logits, logits.dtype());
  if (out.numel() == 0) return out;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(logits);
#endif
  const int64_t vector = 16 / dtype_size(logits.dtype());
  const bool as_it_lies =
      rows_are_contiguous(logits) && (FLEXOPS_DEVICE_CPU || (aligned(logits.data()) && (shape.stride - shape.length) % vector == 0));
  if (!as_it_lies) {
    logits = contiguous_copy(logits);
    shape.stride = shape.length;
  }
  target = contiguous(target), stats = contiguous(stats), grad = contiguous(grad);
  const void* from = logits.data();
  const auto* targets = target.data<int64_t>();
  const auto* upstream = grad.data<float>();
  const LossStats known(stats.data<float>(), shape.rows, reduced, nullptr);
  void* to = out.data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, cross_entropy_backward_cuda(from, targets, known, {upstream, each_row}, to, shape, current_stream(logits)));
#else
  const float divisor = known.divisor ? *known.divisor : 1.0f;
  parallel_for(0, shape.rows, grain(shape), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cross_entropy_backward_cpu)(from, targets, known, {upstream, each_row}, divisor, to, shape, begin, end);
  });
#endif
  return out;
}

void scale_rows_(Tensor values, Tensor factors) {
  const char* op = "flexops::scale_rows_";
  const ElementType type = element_type(op, "values", values.dtype());
  FLEXOPS_CHECK(values.dim() >= 1 && values.is_contiguous(), op, ": values must be contiguous, got shape ", shape_text(values));
  const int64_t rows = values.size(0), length = rows > 0 ? values.numel() / rows : 0;
  check_factors(op, "factors", factors, values, rows);
  if (values.numel() == 0) return;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(values);
#endif
  factors = contiguous(factors);
  const bool each_row = factors.dim() == 1;
  void* data = values.data();
  const auto* by = factors.data<float>();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, scale_rows_cuda(data, type, rows, length, by, each_row, current_stream(values)));
#else
  if (each_row) {
    parallel_for(0, rows, 8192 / (length < 8192 ? length : 8192), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) FLEXOPS_ISA_CALL(scale_rows_cpu)(data, type, row * length, (row + 1) * length, by[row]);
    });
  } else {
    parallel_for(0, rows * length, 16384,
                 [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(scale_rows_cpu)(data, type, begin, end, by[0]); });
  }
#endif
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "cross_entropy", cross_entropy);
  FLEXOPS_IMPL(m, "cross_entropy_", cross_entropy_);
  FLEXOPS_IMPL(m, "cross_entropy_backward", cross_entropy_backward);
  FLEXOPS_IMPL(m, "scale_rows_", scale_rows_);
}

}  // namespace flexops
