// What the bindings of Adam, of Adam with 8-bit states and of LAMB share.
#pragma once

#include <math.h>

#include "adam/adam.h"
#include "common/stochastic.h"

namespace flexops {

/// What Adam's options are on top of every step's, which TensorTable fills in.
inline void fill_adam(AdamOptions& options, double beta1, double beta2, double eps, bool decoupled) {
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.eps = eps;
  options.decoupled = decoupled;
}

#if FLEXOPS_DEVICE_CPU

inline AdamStep make_adam_step(const AdamOptions& o, double step) {
  const double lr = o.lr_tensor ? *o.lr_tensor : o.lr;
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

#endif

}  // namespace flexops
