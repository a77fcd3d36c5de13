// flexops::adam_ and flexops::adam_copy_: from their arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include "adam/adam.h"
#include "adam/adam_step.h"

namespace flexops {

inline void adam__host(Host& host, TensorRow* rows, int64_t count, double lr, double beta1,
                       double beta2, double eps, double weight_decay, bool amsgrad, bool maximize,
                       bool decoupled, const float* lr_tensor, const float* grad_scale,
                       const float* found_inf, bool stochastic, const float* grad_factor) {
  for (TensorRow* row = rows; row < rows + count;
       ++row) {  // the list may be empty, and is ignored without amsgrad
    FLEXOPS_CHECK(!amsgrad || row->numel == 0 || row->array[kAdamMaxExpAvgSq], host.op,
                  ": max_exp_avg_sqs must hold ", count, " tensors, as params does, got 0");
    if (!amsgrad) row->drop(kAdamMaxExpAvgSq);
  }
  const AverageOptions average = {
      {lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf}, beta1, beta2, stochastic};
  const AdamOptions options = {average, eps, decoupled, grad_factor};
  if (FLEXOPS_DEVICE_CUDA) return host.check(adam_cuda(rows, count, options, host.stream()));
  step_rows(rows, count, options, make_adam_step, FLEXOPS_ISA_CALL(adam_cpu));
}

inline void adam_copy__host(Host& host, TensorRow* rows, int64_t count, double lr, double beta1,
                            double beta2, double eps, double weight_decay, bool amsgrad,
                            bool maximize, bool decoupled, const float* lr_tensor,
                            const float* grad_scale, const float* found_inf, bool stochastic,
                            const float* grad_factor) {
  adam__host(host, rows, count, lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled,
             lr_tensor, grad_scale, found_inf, stochastic, grad_factor);
}

}  // namespace flexops
