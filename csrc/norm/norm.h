// The launchers of the norms: raw pointers and numbers, no torch. Formulas: flexops/ops/norm.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"

namespace flexops {

enum class NormType : uint8_t { f32, f16, bf16 };
enum class NormCodes : uint8_t { none, int8, e4m3 };

/// Rows of `columns` elements: x + residual, rounded to row_type, is what is normalized; x alone, and row_type is type, without a residual.
/// Rows of x and residual are x_stride and residual_stride apart; everything else is contiguous.
struct NormForward {
  const void *x, *residual;   // of type, of row_type; residual may be null
  const void *weight, *bias;  // of weight_type; either may be null
  void *y, *new_residual;     // of type (or codes, a byte each), of row_type; new_residual is null without a residual
  float *mean, *rstd;         // one a row; mean if centered, or null; either may be null
  float* scales;              // one a row, with codes
  int64_t rows, columns, x_stride, residual_stride;
  float eps;
  NormType type, row_type, weight_type;
  NormCodes codes;
  bool centered;  // layer norm: the mean is taken off
};

/// The gradients of rows that were normalized. All of `type` and dense rows apart by their strides, but for the parameters.
struct NormBackward {
  const void *x, *grad, *grad_residual;  // what was normalized; the result's gradient; what is added to grad_x, or null
  const void* weight;                    // or null
  const float *mean, *rstd;              // mean if centered
  void* grad_x;                          // contiguous; null if nobody wants it
  void *grad_weight, *grad_bias;         // of weight_type and bias_type; null if nobody wants them
  float* partial;                        // work space of norm_partial_rows(...) * columns floats for each of the two that is wanted
  int64_t partial_rows;
  int64_t rows, columns, x_stride, grad_stride, grad_residual_stride;
  NormType type, weight_type, bias_type;
  bool centered;
};

/// Queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
const char* norm_forward_cuda(const NormForward& arguments, void* stream);
const char* norm_backward_cuda(const NormBackward& arguments, void* stream);

/// How many partial sums of each column the current GPU makes.
int64_t norm_partial_rows_cuda(const NormBackward& arguments);

/// The CPU's work. Forward is cut into rows; backward, whose weight_type is type or float32, into partial sums, of so many rows each
/// whatever the number of threads, and the sums' sum into columns.
inline int64_t norm_partial_rows_cpu(const NormBackward& arguments) {
  constexpr int64_t kMost = 64, kElements = 16384;
  const int64_t wanted = arguments.rows * arguments.columns / kElements, most = arguments.rows < kMost ? arguments.rows : kMost;
  return wanted < most ? (wanted > 1 || most == 0 ? wanted : 1) : most;
}

FLEXOPS_ISA_DECLARE(void norm_forward_cpu(const NormForward& arguments, int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void norm_backward_cpu(const NormBackward& arguments, int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void norm_reduce_cpu(const NormBackward& arguments, int64_t begin, int64_t end))

}  // namespace flexops
