// The launchers of the norms: raw pointers and numbers, no torch. Formulas: flexops/ops/norm.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

constexpr int64_t kMostColumns = 65536;

/// Rows of `columns` elements: x + residual, rounded to row_type, is what is normalized; x alone,
/// and row_type is type, without a residual. Rows of x and residual are x_stride and
/// residual_stride apart; everything else is contiguous.
struct NormForward {
  const void *x, *residual;   // of type, of row_type; residual may be null
  const void *weight, *bias;  // of weight_type; either may be null
  void *y, *new_residual;     // of type (or codes, a byte each), of row_type, aligned to 16 bytes;
                              // new_residual is null without a residual
  float *mean, *rstd;         // one a row; mean if centered, or null; either may be null
  float* scales;              // one a row, with codes
  int64_t rows, columns, x_stride, residual_stride;
  float eps, offset;  // offset: added to the weight
  ElementType type, row_type, weight_type;
  Dtype codes;    // i8, e4m3, or none
  bool centered;  // layer norm: the mean is taken off
};

/// Queued on `stream`; the pointers are the device's. Returns nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* norm_forward_cuda(const NormForward& arguments, void* stream))

/// The CPU's work, cut into rows.
FLEXOPS_ISA_DECLARE(void norm_forward_cpu(const NormForward& arguments, int64_t begin, int64_t end))

}  // namespace flexops
