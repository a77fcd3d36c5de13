// flexops::lamb_, and its two passes, lamb_moments_ and lamb_apply_: from their arguments to the
// launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include <math.h>

#include "adam/adam_step.h"
#include "lamb/lamb.h"

namespace flexops {

inline LambStep make_lamb_step(const LambOptions& o, const float* count) {
  LambStep s;
  static_cast<AdamStep&>(s) = make_adam_step(o, count);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.inverse_bias1 = static_cast<float>(1 / (1 - pow(o.beta1, static_cast<double>(*count))));
  s.rate = 0.0f;
  return s;
}

/// The sums of squares of every row's parameter and update.
inline void measure(Host& host, const TensorRow* rows, int64_t count, const LambOptions& options,
                    float* norms) {
  if (FLEXOPS_DEVICE_CUDA) {
    float* partials = host.workspace<float>(lamb_partials(rows, count));
    return host.check(lamb_moments_cuda(rows, count, options, partials, norms, host.stream()));
  }
  memset(norms, 0, count * 2 * sizeof *norms);
  if (options.found_inf && *options.found_inf != 0) return;
  std::vector<LambStep> steps(count);
  for (int64_t i = 0; i < count; ++i) {
    *rows[i].step += 1.0f;
    steps[i] = make_lamb_step(options, rows[i].step);
  }
  std::vector<LambSums> totals(count, LambSums{0, 0});
  for (const Piece<LambSums>&piece : reduce_pieces<LambSums>(
           rows, count, [&](const TensorRow& row, size_t i, int64_t begin, int64_t end) {
             return FLEXOPS_ISA_CALL(lamb_moments_cpu)(row, steps[i], begin, end);
           })) {
    totals[piece.row].param += piece.value.param;
    totals[piece.row].update += piece.value.update;
  }
  for (int64_t i = 0; i < count; ++i) {
    norms[2 * i] = static_cast<float>(totals[i].param);
    norms[2 * i + 1] = static_cast<float>(totals[i].update);
  }
}

inline void apply(Host& host, const TensorRow* rows, int64_t count, const LambOptions& options,
                  const float* norms) {
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(lamb_apply_cuda(rows, count, options, norms, host.stream()));
  if (options.found_inf && *options.found_inf != 0) return;
  const double lr = rate_of(options);
  std::vector<LambStep> steps(count);
  for (int64_t i = 0; i < count; ++i) {
    const double param = sqrt(norms[2 * i]), update = sqrt(norms[2 * i + 1]);
    steps[i] = make_lamb_step(options, rows[i].step);
    steps[i].rate =
        static_cast<float>(options.adapt && param > 0 && update > 0 ? lr * (param / update) : lr);
  }
  for_each_piece(rows, count, 32, [&](size_t i, int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(lamb_apply_cpu)(rows[i], steps[i], begin, end);
  });
}

inline LambOptions lamb_options(const StepOptions& step, double beta1, double beta2, double eps,
                                bool stochastic, bool adapt) {
  return {{{step, beta1, beta2, stochastic}, eps, false}, adapt};
}

inline void lamb_moments__host(Host& host, TensorRow* rows, int64_t count, double beta1,
                               double beta2, double eps, double weight_decay, bool maximize,
                               const float* grad_scale, const float* found_inf, bool stochastic,
                               const TensorView& norms) {
  const StepOptions step = {0.0, nullptr, weight_decay, maximize, grad_scale, found_inf};
  measure(host, rows, count, lamb_options(step, beta1, beta2, eps, stochastic, false),
          norms.as<float>());
}

inline void lamb_apply__host(Host& host, TensorRow* rows, int64_t count, const TensorView& norms,
                             double lr, double beta1, double beta2, double eps, double weight_decay,
                             bool adapt, const float* lr_tensor, const float* found_inf) {
  const StepOptions step = {lr, lr_tensor, weight_decay, false, nullptr, found_inf};
  apply(host, rows, count, lamb_options(step, beta1, beta2, eps, false, adapt), norms.as<float>());
}

/// Both passes, for tensors that lie on one rank: torch hands their lists over once.
inline void lamb__host(Host& host, TensorRow* rows, int64_t count, double lr, double beta1,
                       double beta2, double eps, double weight_decay, bool adapt, bool maximize,
                       const float* lr_tensor, const float* grad_scale, const float* found_inf,
                       bool stochastic) {
  const StepOptions step = {lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf};
  const LambOptions options = lamb_options(step, beta1, beta2, eps, stochastic, adapt);
  float* norms = host.workspace<float>(count * 2);
  measure(host, rows, count, options, norms);
  for (TensorRow* row = rows; row < rows + count; ++row) {  // the second pass has no gradients
    row->array[kLambApplyExpAvg] = row->array[kLambExpAvg],
    row->type[kLambApplyExpAvg] = row->type[kLambExpAvg];
    row->array[kLambApplyExpAvgSq] = row->array[kLambExpAvgSq],
    row->type[kLambApplyExpAvgSq] = row->type[kLambExpAvgSq];
  }
  apply(host, rows, count, options, norms);
}

}  // namespace flexops
