// The launchers of Adam and AdamW: raw pointers and numbers, no torch.
#pragma once

#include <stdint.h>

#include "common/cpu.h"

namespace flexops {

enum class AdamType : uint8_t { f32, f16, bf16 };

/// One parameter and what belongs to it. All arrays hold `numel` elements in the same order.
struct AdamTensor {
  void* param;
  void* grad;  // written only if there is a grad_scale
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // nullptr without amsgrad
  void* copy;             // nullptr, or where the new parameter is written in a second dtype
  float* step;            // how many steps were made before this one; incremented
  int64_t numel;
  AdamType param_type, grad_type, copy_type;
};

struct AdamOptions {
  double lr;
  const float* lr_tensor;  // overrides lr if not nullptr
  double beta1, beta2, eps, weight_decay;
  bool amsgrad, maximize, decoupled;
  const float* grad_scale;  // nullptr, or what the gradients are divided by first, in place
  const float* found_inf;   // nullptr, or nonzero to do nothing at all
};

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
const char* adam_cuda(const AdamTensor* tensors, int64_t count, const AdamOptions& options, void* stream);

/// What every element of one tensor shares in one step, on the CPU.
struct AdamStep {
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float eps;
  float step_size;      // lr / (1 - beta1^step)
  float inverse_bias2;  // 1 / sqrt(1 - beta2^step)
  float l2;             // weight decay added to the gradient
  float decay;          // the share of the parameter that decoupled weight decay takes
  float sign;           // -1 to maximize
  float grad_scale;     // 0 for none
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(void adam_cpu(const AdamTensor& tensor, const AdamStep& step, int64_t begin, int64_t end))

}  // namespace flexops
