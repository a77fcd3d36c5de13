// The launchers of Adam and AdamW with 8-bit states: raw pointers and numbers, no torch.
#pragma once

#include "adam/adam.h"
#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are: exp_avg is int8 codes, exp_avg_sq uint8 codes, in row-major order;
/// scales are float32, one for each block. The gradient is written only if there is a grad_scale.
enum Adam8bitArray {
  kAdam8bitParam,
  kAdam8bitGrad,
  kAdam8bitExpAvg,
  kAdam8bitExpAvgSq,
  kAdam8bitExpAvgScale,
  kAdam8bitExpAvgSqScale
};

constexpr int64_t kAdam8bitBlock = 256;  // elements that share a scale

/// One step of every tensor, queued on `stream`; the pointers are the device's. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* adam8bit_cuda(const TensorRow* rows, int64_t count,
                                               const AdamOptions& options, void* stream))

/// What every element of one tensor shares in one step, on the CPU.
struct Adam8bitStep : AdamStep {
  uint32_t step;  // seeds the rounding
};

/// Elements [begin, end) of one tensor; begin is a multiple of the block.
FLEXOPS_ISA_DECLARE(void adam8bit_cpu(const TensorRow& row, const Adam8bitStep& step, int64_t begin,
                                      int64_t end))

}  // namespace flexops
