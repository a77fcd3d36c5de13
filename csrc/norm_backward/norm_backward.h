// The launchers of the norms' backward pass: raw pointers and numbers, no torch. Formulas:
// flexops/ops/norm_backward.py.
#pragma once

#include "norm/norm.h"

namespace flexops {

/// The gradients of rows that were normalized. All of `type` and dense rows apart by their strides,
/// but for the parameters.
struct NormBackward {
  const void *x, *grad, *grad_residual;  // what was normalized; the result's gradient; what is
                                         // added to grad_x, or null
  const void* weight;                    // or null
  float offset;                          // added to it
  const float *mean, *rstd;              // mean if centered
  void* grad_x;                          // contiguous; null if not wanted
  void *grad_weight, *grad_bias;         // of weight_type and bias_type; null if not wanted
  float* partial;  // work space of norm_partial_rows(...) * columns floats for each of the two that
                   // is wanted
  int64_t partial_rows;
  int64_t rows, columns, x_stride, grad_stride, grad_residual_stride;
  ElementType type, weight_type, bias_type;
  bool centered;
};

/// Queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* norm_backward_cuda(const NormBackward& arguments, void* stream))

/// How many partial sums of each column the current GPU makes.
FLEXOPS_CUDA_DECLARE(int64_t norm_partial_rows_cuda(const NormBackward& arguments))

/// How many partial sums of each column the CPU makes, whatever the number of threads.
inline int64_t norm_partial_rows_cpu(const NormBackward& arguments) {
  constexpr int64_t kMost = 64, kElements = 16384;
  const int64_t wanted = arguments.rows * arguments.columns / kElements,
                most = arguments.rows < kMost ? arguments.rows : kMost;
  return wanted < most ? (wanted > 1 || most == 0 ? wanted : 1) : most;
}

/// The CPU's work: cut into partial sums, and the sums' sum into columns.
FLEXOPS_ISA_DECLARE(void norm_backward_cpu(const NormBackward& arguments, int64_t begin,
                                           int64_t end))
FLEXOPS_ISA_DECLARE(void norm_reduce_cpu(const NormBackward& arguments, int64_t begin, int64_t end))

}  // namespace flexops
