// The launchers of the gated RMS norm. What they compute: flexops/ops/gated_norm.py.
#pragma once

#include "common/cpu.h"
#include "common/tensor_view.h"

namespace flexops {

struct GatedNormBackward {
  TensorView grad, x, gate, weight, weight_grad, x_grad, gate_grad;
  double eps;
  int64_t groups;
  bool norm_first, sigmoid;
  float* partial = nullptr;  // [parts, columns]: the weight's gradient of each part of the tokens
  int64_t parts = 0;
};

/// Queued on `stream`. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* gated_rms_norm_cuda(const TensorView& x, const TensorView& gate,
                                                     const TensorView& weight, double eps,
                                                     int64_t groups, bool norm_first, bool sigmoid,
                                                     const TensorView& out, void* stream))
/// How many parts the current GPU makes.
FLEXOPS_CUDA_DECLARE(int64_t gated_norm_parts_cuda(const GatedNormBackward& call))
/// Queued on `stream`. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* gated_norm_backward_cuda(const GatedNormBackward& call,
                                                          void* stream))

/// Rows [begin, end).
FLEXOPS_ISA_DECLARE(void gated_rms_norm_cpu(const TensorView& x, const TensorView& gate,
                                            const TensorView& weight, double eps, int64_t groups,
                                            bool norm_first, bool sigmoid, const TensorView& out,
                                            int64_t begin, int64_t end))
/// Parts [begin, end), and columns [begin, end) of the weight's gradient.
FLEXOPS_ISA_DECLARE(void gated_norm_backward_cpu(const GatedNormBackward& call, int64_t begin,
                                                 int64_t end))
FLEXOPS_ISA_DECLARE(void gated_norm_sum_cpu(const GatedNormBackward& call, int64_t begin,
                                            int64_t end))

}  // namespace flexops
