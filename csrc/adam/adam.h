// The launchers of Adam and AdamW: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are. max_exp_avg_sq is nullptr without amsgrad; copy, where the new
/// parameter is written in a second dtype, may be. The gradient is written only if there is a
/// grad_scale.
enum AdamArray { kAdamParam, kAdamGrad, kAdamExpAvg, kAdamExpAvgSq, kAdamMaxExpAvgSq, kAdamCopy };

struct AdamOptions : StepOptions {
  double beta1, beta2, eps;
  bool decoupled;
  bool stochastic = false;  // averages in bfloat16 are rounded stochastically
  const float* grad_factor =
      nullptr;  // nullptr, or what the step multiplies gradients by, after grad_scale
};

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* adam_cuda(const TensorRow* rows, int64_t count,
                                           const AdamOptions& options, void* stream))

/// What every element of one tensor shares in one step, on the CPU.
struct AdamStep {
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float eps;
  float step_size;      // lr / (1 - beta1^step)
  float inverse_bias2;  // 1 / sqrt(1 - beta2^step)
  float l2;             // weight decay added to the gradient
  float decay;          // the share of the parameter that decoupled weight decay takes
  float sign;           // -1 to maximize, times grad_factor
  float grad_scale;     // 0 for none
  bool stochastic;
  uint32_t key;  // of the step's random numbers
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(void adam_cpu(const TensorRow& row, const AdamStep& step, int64_t begin,
                                  int64_t end))

}  // namespace flexops
