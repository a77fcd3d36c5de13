// What the host functions of Adam, of Adam with 8-bit states and of LAMB share.
#pragma once

#include "common/multi_tensor_host.h"

#include <math.h>

#include "adam/adam.h"
#include "common/stochastic.h"

namespace flexops {

inline AdamStep make_adam_step(const AdamOptions& o, const float* count) {
  const double lr = o.lr_tensor ? *o.lr_tensor : o.lr, step = *count;
  AdamStep s;
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.step_size = static_cast<float>(lr / (1 - pow(o.beta1, step)));
  s.inverse_bias2 = static_cast<float>(1 / sqrt(1 - pow(o.beta2, step)));
  s.l2 = o.decoupled ? 0.0f : static_cast<float>(o.weight_decay);
  s.decay = o.decoupled ? static_cast<float>(lr * o.weight_decay) : 0.0f;
  s.sign = (o.maximize ? -1.0f : 1.0f) * (o.grad_factor ? *o.grad_factor : 1.0f);
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  s.stochastic = o.stochastic;
  s.key = scramble(static_cast<uint32_t>(step));
  return s;
}

}  // namespace flexops
