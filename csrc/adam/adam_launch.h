// What the launchers of Adam, of Adam with 8-bit states and of LAMB share.
#pragma once

#include <math.h>

#include "adam/adam.h"
#include "adam/adam_numbers.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops::adam {

inline Numbers make_numbers(const AdamOptions& o) {
  Numbers n = multi::make_average_numbers<Numbers>(o);
  n.grad_factor = o.grad_factor;
  n.log_beta1 = static_cast<float>(log(o.beta1)), n.log_beta2 = static_cast<float>(log(o.beta2));
  n.eps = static_cast<float>(o.eps), n.decoupled = o.decoupled;
  return n;
}

}  // namespace flexops::adam
