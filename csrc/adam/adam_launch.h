// What the launchers of Adam, of Adam with 8-bit states and of LAMB share.
#pragma once

#include <math.h>

#include "adam/adam.h"
#include "adam/adam_numbers.cuh"

namespace flexops::adam {

inline Numbers make_numbers(const AdamOptions& o) {
  Numbers n;
  n.grad_scale = o.grad_scale;
  n.found_inf = o.found_inf;
  n.lr_tensor = o.lr_tensor;
  n.grad_factor = o.grad_factor;
  n.lr = static_cast<float>(o.lr);
  n.log_beta1 = static_cast<float>(log(o.beta1));
  n.log_beta2 = static_cast<float>(log(o.beta2));
  n.beta1 = static_cast<float>(o.beta1);
  n.beta2 = static_cast<float>(o.beta2);
  n.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  n.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  n.eps = static_cast<float>(o.eps);
  n.weight_decay = static_cast<float>(o.weight_decay);
  n.decoupled = o.decoupled;
  n.maximize = o.maximize;
  n.stochastic = o.stochastic;
  return n;
}

}  // namespace flexops::adam
