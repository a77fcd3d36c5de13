// From cross entropy's arguments to the launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/logit_rows_host.h"

#include "cross_entropy/cross_entropy.h"

namespace flexops {

inline Logits make_logits(Host& host, const TensorView& logits, int64_t ignore_index,
                          double smoothing, double z_loss, int64_t reduction) {
  FLEXOPS_CHECK(0 <= reduction && reduction <= 2, host.op,
                ": reduction must be 0 (none), 1 (sum) or 2 (mean), got ", reduction);
  return {make_logit_rows(host, logits, ignore_index), static_cast<float>(smoothing),
          static_cast<float>(z_loss)};
}

/// None if `factors` is not given.
inline GradientFactors make_factors(Host& host, const char* name, const TensorView& factors,
                                    int64_t rows) {
  FLEXOPS_CHECK(factors.dim <= 0 || (factors.dim == 1 && factors.size(0) == rows), host.op, ": ",
                name, " must be a scalar or have one element for each of ", rows,
                " rows, got shape ", shape_text(factors));
  return {factors.as<float>(), factors.dim == 1};
}

inline void losses(Host& host, const TensorView& logits, const TensorView& target,
                   const Logits& shape, int64_t reduced, bool write_gradient,
                   const GradientFactors& factors, const TensorView& loss, const TensorView& left) {
  const auto reduction = static_cast<Reduction>(reduced);
  const LossStats stats(left.as<float>(), shape.rows, reduction, loss.as<float>());
  const auto* classes = target.as<int64_t>();
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(cross_entropy_cuda(logits.data, classes, shape, reduction, write_gradient,
                                         factors, stats, loss.as<float>(), host.stream()));
  int64_t used = 0;
  for (int64_t row = 0; row < shape.rows; ++row) used += classes[row] != shape.ignore_index;
  const float divisor = reduction == Reduction::mean ? static_cast<float>(used) : 1.0f;
  for_rows(shape.rows, shape.length, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cross_entropy_cpu)(logits.data, classes, shape, divisor, write_gradient,
                                        factors, stats, begin, end);
  });
  if (reduction == Reduction::none) return;
  double sum = 0.0;
  for (int64_t row = 0; row < shape.rows; ++row) sum += static_cast<double>(stats.losses[row]);
  *stats.divisor = divisor;
  *loss.as<float>() = static_cast<float>(sum / static_cast<double>(divisor));
}

inline void cross_entropy_host(Host& host, const TensorView& logits, const TensorView& target,
                               int64_t ignore_index, double smoothing, double z_loss,
                               int64_t reduction, const TensorView& loss, const TensorView& stats) {
  const Logits shape = make_logits(host, logits, ignore_index, smoothing, z_loss, reduction);
  losses(host, logits, target, shape, reduction, false, {nullptr, false}, loss, stats);
}

/// The gradient is written over the logits.
inline void cross_entropy__host(Host& host, const TensorView& logits, const TensorView& target,
                                const TensorView& factors, int64_t ignore_index, double smoothing,
                                double z_loss, int64_t reduction, const TensorView& loss,
                                const TensorView& stats) {
  const Logits shape = make_logits(host, logits, ignore_index, smoothing, z_loss, reduction);
  FLEXOPS_CHECK(shape.length == 1 || logits.stride(1) == 1, host.op,
                ": logits must have contiguous rows to be overwritten");
  FLEXOPS_CHECK(shape.rows < 2 || shape.stride >= shape.length, host.op,
                ": logits' rows must not overlap");
  losses(host, logits, target, shape, reduction, true,
         make_factors(host, "factors", factors, shape.rows), loss, stats);
}

inline void cross_entropy_backward_host(Host& host, const TensorView& grad,
                                        const TensorView& logits, const TensorView& target,
                                        const TensorView& stats, int64_t ignore_index,
                                        double smoothing, double z_loss, int64_t reduction,
                                        const TensorView& out) {
  const Logits shape = make_logits(host, logits, ignore_index, smoothing, z_loss, reduction);
  const GradientFactors upstream = make_factors(host, "grad", grad, shape.rows);
  const auto reduced = static_cast<Reduction>(reduction);
  FLEXOPS_CHECK(stats.numel == LossStats::size(shape.rows, reduced), host.op,
                ": stats must be what the forward pass gave");
  if (out.numel == 0) return;
  const LossStats known(stats.as<float>(), shape.rows, reduced, nullptr);
  const auto* classes = target.as<int64_t>();
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(cross_entropy_backward_cuda(logits.data, classes, known, upstream, out.data,
                                                  shape, host.stream()));
  const float divisor = known.divisor ? *known.divisor : 1.0f;
  for_rows(shape.rows, shape.length, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(cross_entropy_backward_cpu)(logits.data, classes, known, upstream, divisor,
                                                 out.data, shape, begin, end);
  });
}

inline void scale_rows__host(Host& host, const TensorView& values, const TensorView& factors) {
  FLEXOPS_CHECK(values.dim >= 1 && values.is_contiguous(), host.op,
                ": values must be contiguous, got shape ", shape_text(values));
  const int64_t rows = values.size(0), length = rows > 0 ? values.numel / rows : 0;
  const GradientFactors by = make_factors(host, "factors", factors, rows);
  if (values.numel == 0) return;
  const ElementType type = element_type(values);
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(
        scale_rows_cuda(values.data, type, rows, length, by.data, by.each_row, host.stream()));
  const auto scale = [&](int64_t begin, int64_t end, float factor) {
    FLEXOPS_ISA_CALL(scale_rows_cpu)(values.data, type, begin, end, factor);
  };
  if (by.each_row) {
    for_rows(rows, length, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        scale(row * length, (row + 1) * length, by.data[row]);
    });
  } else {
    parallel_for(0, values.numel, 16384,
                 [&](int64_t begin, int64_t end) { scale(begin, end, by.data[0]); });
  }
}

}  // namespace flexops
