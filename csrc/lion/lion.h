// The launchers of Lion: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are. The gradient is written only if there is a grad_scale.
enum LionArray { kLionParam, kLionGrad, kLionExpAvg };

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* lion_cuda(const TensorRow* rows, int64_t count,
                                           const AverageOptions& options, void* stream))

/// What every element shares in one step, on the CPU.
struct LionStep : AverageStep {
  float lr;
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(void lion_cpu(const TensorRow& row, const LionStep& step, int64_t begin,
                                  int64_t end))

}  // namespace flexops
