// The numbers of an Adam step on the device; adam8bit's and LAMB's, too.
#pragma once

#include "common/multi_tensor.cuh"

namespace flexops::adam {

/// What all tensors share; pointers null where not used.
struct Numbers : multi::AverageNumbers {
  const float* grad_factor;
  float log_beta1, log_beta2;  // for 1 - beta^step = -expm1(step * log(beta)): exact to a rounding,
                               // without double arithmetic
  float eps;
  bool decoupled;
};

/// 1 - beta^step: what an average that began with 0 is too small by.
FLEXOPS_DEVICE float bias(float log_beta, float step) { return -expm1f(step * log_beta); }

// One instruction each; subnormal numbers are taken for 0.
FLEXOPS_DEVICE float approximate_sqrt(float x) {
#if FLEXOPS_HIP
  return sqrtf(x);
#else
  float out;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#endif
}
FLEXOPS_DEVICE float approximate_inverse(float x) {
#if FLEXOPS_HIP
  return 1.0f / x;
#else
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#endif
}

/// What all elements of one tensor share.
struct Factors {
  float step_size, inverse_bias2;
  float l2, decay;
  float sign, grad_scale;

  /// step: how many steps were made, this one included.
  FLEXOPS_DEVICE void find(const Numbers& n, float step) {
    const float rate = n.rate();
    step_size = rate / bias(n.log_beta1, step);
    inverse_bias2 = 1.0f / sqrtf(bias(n.log_beta2, step));
    l2 = n.decoupled ? 0.0f : n.weight_decay;
    decay = n.decoupled ? rate * n.weight_decay : 0.0f;
    sign = n.sign() * (n.grad_factor ? *n.grad_factor : 1.0f);
    grad_scale = n.scale();
  }
};

}  // namespace flexops::adam
