// The launchers of Adam and AdamW: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are. max_exp_avg_sq is nullptr without amsgrad; copy, where the new
/// parameter is written in a second dtype, may be. The gradient is written only if there is a
/// grad_scale.
enum AdamArray { kAdamParam, kAdamGrad, kAdamExpAvg, kAdamExpAvgSq, kAdamMaxExpAvgSq, kAdamCopy };

struct AdamOptions : AverageOptions {
  double eps;
  bool decoupled;
  const float* grad_factor =
      nullptr;  // nullptr, or what the step multiplies gradients by, after grad_scale
};

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* adam_cuda(const TensorRow* rows, int64_t count,
                                           const AdamOptions& options, void* stream))

/// What every element of one tensor shares in one step, on the CPU.
struct AdamStep : AverageStep {
  float eps;
  float step_size;      // lr / (1 - beta1^step)
  float inverse_bias2;  // 1 / sqrt(1 - beta2^step)
  float l2;             // weight decay added to the gradient
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(void adam_cpu(const TensorRow& row, const AdamStep& step, int64_t begin,
                                  int64_t end))

}  // namespace flexops
