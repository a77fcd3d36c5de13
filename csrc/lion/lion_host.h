// flexops::lion_: from its arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include "lion/lion.h"

namespace flexops {

inline LionStep make_lion_step(const AverageOptions& o, const float* count) {
  return {make_average_step(o, count), static_cast<float>(rate_of(o))};
}

inline void lion__host(Host& host, TensorRow* rows, int64_t count, double lr, double beta1,
                       double beta2, double weight_decay, bool maximize, const float* lr_tensor,
                       const float* grad_scale, const float* found_inf, bool stochastic) {
  FLEXOPS_CHECK(!stochastic || rows[0].step, host.op,
                ": state_steps must be given to round stochastically");
  const AverageOptions options = {
      {lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf}, beta1, beta2, stochastic};
  if (FLEXOPS_DEVICE_CUDA) return host.check(lion_cuda(rows, count, options, host.stream()));
  step_rows(rows, count, options, make_lion_step, FLEXOPS_ISA_CALL(lion_cpu));
}

}  // namespace flexops
