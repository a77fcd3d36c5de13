// The launchers of Adagrad: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are. The sum of squares is float32; the gradient is written only if there is
/// a grad_scale.
enum AdagradArray { kAdagradParam, kAdagradGrad, kAdagradSum };

struct AdagradOptions : StepOptions {
  double lr_decay, eps;
};

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* adagrad_cuda(const TensorRow* rows, int64_t count,
                                              const AdagradOptions& options, void* stream))

/// What every element of one tensor shares in one step, on the CPU.
struct AdagradStep {
  float lr;  // decayed
  float eps;
  float l2;          // weight decay added to the gradient
  float sign;        // -1 to maximize
  float grad_scale;  // 0 for none
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(void adagrad_cpu(const TensorRow& row, const AdagradStep& step, int64_t begin,
                                     int64_t end))

}  // namespace flexops
