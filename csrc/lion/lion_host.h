// flexops::lion_: from its arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include "common/stochastic.h"
#include "lion/lion.h"

namespace flexops {

inline LionStep make_lion_step(const LionOptions& o, const float* count) {
  const double lr = o.lr_tensor ? *o.lr_tensor : o.lr;
  LionStep s;
  s.lr = static_cast<float>(lr);
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.decay = static_cast<float>(lr * o.weight_decay);
  s.sign = o.maximize ? -1.0f : 1.0f;
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  s.stochastic = o.stochastic;
  s.key = count ? scramble(static_cast<uint32_t>(*count)) : 0;
  return s;
}

inline void lion__host(Host& host, TensorRow* rows, int64_t count, double lr, double beta1,
                       double beta2, double weight_decay, bool maximize, const float* lr_tensor,
                       const float* grad_scale, const float* found_inf, bool stochastic) {
  FLEXOPS_CHECK(!stochastic || rows[0].step, host.op,
                ": state_steps must be given to round stochastically");
  const LionOptions options = {
      {lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf}, beta1, beta2, stochastic};
  if (FLEXOPS_DEVICE_CUDA) return host.check(lion_cuda(rows, count, options, host.stream()));
  step_rows(rows, count, options, make_lion_step, FLEXOPS_ISA_CALL(lion_cpu));
}

}  // namespace flexops
