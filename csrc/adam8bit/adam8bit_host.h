// flexops::adam8bit_: from its arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include "adam/adam_step.h"
#include "adam8bit/adam8bit.h"

namespace flexops {

inline Adam8bitStep make_adam8bit_step(const AdamOptions& options, const float* count) {
  return {make_adam_step(options, count), static_cast<uint32_t>(*count)};
}

inline void adam8bit__host(Host& host, TensorRow* rows, int64_t count, double lr, double beta1,
                           double beta2, double eps, double weight_decay, bool maximize,
                           bool decoupled, const float* lr_tensor, const float* grad_scale,
                           const float* found_inf) {
  const StepOptions step = {lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf};
  const AdamOptions options = {{step, beta1, beta2}, eps, decoupled};
  if (FLEXOPS_DEVICE_CUDA) return host.check(adam8bit_cuda(rows, count, options, host.stream()));
  step_rows(rows, count, options, make_adam8bit_step, FLEXOPS_ISA_CALL(adam8bit_cpu),
            kAdam8bitBlock);
}

}  // namespace flexops
