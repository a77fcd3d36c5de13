// The launchers of LAMB: raw pointers and numbers, no torch. A step has two passes: the first moves
// the averages and measures the parameter and its update, the second computes the update again
// (which moves fewer bytes than keeping it) and makes the step.
#pragma once

#include "adam/adam.h"
#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are in the first pass, and in the second. The gradient is written only if
/// there is a grad_scale.
enum LambArray { kLambParam, kLambGrad, kLambExpAvg, kLambExpAvgSq };
enum LambApplyArray { kLambApplyParam, kLambApplyExpAvg, kLambApplyExpAvgSq };

/// Adam's. The first pass reads no learning rate, and the second neither maximize nor grad_scale;
/// decoupled means nothing.
struct LambOptions : AdamOptions {
  bool adapt;  // second pass: whether there is a trust ratio
};

/// How many floats of working memory lamb_moments_cuda needs.
FLEXOPS_CUDA_DECLARE(int64_t lamb_partials(const TensorRow* rows, int64_t count))

/// The first pass, queued on `stream`. norms[2 i] and norms[2 i + 1] become the sums of squares of
/// row i's parameter and update. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* lamb_moments_cuda(const TensorRow* rows, int64_t count,
                                                   const LambOptions& options, float* partials,
                                                   float* norms, void* stream))

/// The second pass.
FLEXOPS_CUDA_DECLARE(const char* lamb_apply_cuda(const TensorRow* rows, int64_t count,
                                                 const LambOptions& options, const float* norms,
                                                 void* stream))

/// What every element of one tensor shares in one step, on the CPU.
struct LambStep : AdamStep {
  float weight_decay;
  float inverse_bias1;  // 1 / (1 - beta1^step)
  float rate;           // second pass: learning rate times trust ratio
};

struct LambSums {
  double param, update;
};

/// Elements [begin, end) of one tensor.
FLEXOPS_ISA_DECLARE(LambSums lamb_moments_cpu(const TensorRow& row, const LambStep& step,
                                              int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void lamb_apply_cpu(const TensorRow& row, const LambStep& step, int64_t begin,
                                        int64_t end))

}  // namespace flexops
