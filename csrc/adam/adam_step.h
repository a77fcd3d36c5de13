// What the host functions of Adam, of Adam with 8-bit states and of LAMB share.
#pragma once

#include "common/multi_tensor_host.h"

#include <math.h>

#include "adam/adam.h"

namespace flexops {

inline AdamStep make_adam_step(const AdamOptions& o, const float* count) {
  const double step = *count;
  AdamStep s;
  static_cast<AverageStep&>(s) = make_average_step(o, count);
  s.eps = static_cast<float>(o.eps);
  s.step_size = static_cast<float>(rate_of(o) / (1 - pow(o.beta1, step)));
  s.inverse_bias2 = static_cast<float>(1 / sqrt(1 - pow(o.beta2, step)));
  s.l2 = o.decoupled ? 0.0f : static_cast<float>(o.weight_decay);
  if (!o.decoupled) s.decay = 0.0f;
  if (o.grad_factor) s.sign *= *o.grad_factor;
  return s;
}

}  // namespace flexops
