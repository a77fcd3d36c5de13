// The launchers of Lion: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are. The gradient is written only if there is a grad_scale.
enum LionArray { kLionParam, kLionGrad, kLionExpAvg };

struct LionOptions : StepOptions {
  double beta1, beta2;
  bool stochastic = false;  // averages in bfloat16 are rounded stochastically, by the rows' steps
};

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* lion_cuda(const TensorRow* rows, int64_t count,
                                           const LionOptions& options, void* stream))

/// What every element shares in one step, on the CPU.
struct LionStep {
  float lr, beta1, beta2, one_minus_beta1, one_minus_beta2;
  float decay;       // the share of the parameter that weight decay takes
  float sign;        // -1 to maximize
  float grad_scale;  // 0 for none
  bool stochastic;
  uint32_t key;  // of the step's random numbers
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(void lion_cpu(const TensorRow& row, const LionStep& step, int64_t begin,
                                  int64_t end))

}  // namespace flexops
