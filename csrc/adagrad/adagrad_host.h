// flexops::adagrad_: from its arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include "adagrad/adagrad.h"

namespace flexops {

inline AdagradStep make_adagrad_step(const AdagradOptions& o, const float* count) {
  const double step = *count;
  AdagradStep s;
  s.lr = static_cast<float>(rate_of(o) / (1 + (step - 1) * o.lr_decay));
  s.eps = static_cast<float>(o.eps);
  s.l2 = static_cast<float>(o.weight_decay);
  s.sign = o.maximize ? -1.0f : 1.0f;
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  return s;
}

inline void adagrad__host(Host& host, TensorRow* rows, int64_t count, double lr, double lr_decay,
                          double weight_decay, double eps, bool maximize, const float* lr_tensor,
                          const float* grad_scale, const float* found_inf) {
  const AdagradOptions options = {
      {lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf}, lr_decay, eps};
  if (FLEXOPS_DEVICE_CUDA) return host.check(adagrad_cuda(rows, count, options, host.stream()));
  step_rows(rows, count, options, make_adagrad_step, FLEXOPS_ISA_CALL(adagrad_cpu));
}

}  // namespace flexops
