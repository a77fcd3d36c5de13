// The launchers of Muon's passes over lists of matrices: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// What a row's arrays are. All rows have as many elements.
enum MuonAverageArray { kMuonGrad, kMuonBuffer, kMuonAverage };

/// How many numbers of scratch memory the averages take.
FLEXOPS_CUDA_DECLARE(int64_t muon_scratch(const TensorRow* rows, int64_t count))
FLEXOPS_CUDA_DECLARE(const char* muon_average_cuda(const TensorRow* rows, int64_t count,
                                                   double momentum, bool nesterov, double scale,
                                                   double eps, const float* grad_scale,
                                                   float* scratch, void* stream))
/// Rows of a parameter and its step.
FLEXOPS_CUDA_DECLARE(const char* muon_apply_cuda(const TensorRow* rows, int64_t count, double lr,
                                                 double decay, double factor,
                                                 const float* lr_tensor, void* stream))

}  // namespace flexops
