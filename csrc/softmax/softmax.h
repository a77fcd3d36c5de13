// The launchers of softmax: raw pointers and numbers, no torch. What they compute:
// flexops/ops/softmax.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

constexpr int kSoftmaxDims = 8;

/// Rows of `length` elements; row r of `x` starts at element r * stride. Row r of the mask starts
/// at the sum of strides[d] * i[d], where the i are r's coordinates in a space of sizes[0] x
/// sizes[1] x ..., the first of which runs fastest.
struct SoftmaxRows {
  int64_t rows, length, stride;
  float scale;
  bool causal;
  int64_t queries;  // causal: row r is query r % queries, which sees the first (r % queries) + 1 +
                    // length - queries elements
  ElementType type;
  Dtype mask;     // boolean, f32, f16, bf16, or none
  int mask_step;  // elements from one column of the mask to the next: 0 or 1
  int mask_dims;
  int64_t mask_sizes[kSoftmaxDims], mask_strides[kSoftmaxDims];
};

/// Queued on `stream`; the pointers are the device's. `out` is contiguous. Returns nullptr, or
/// CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* softmax_cuda(const void* x, const void* mask, void* out,
                                              const SoftmaxRows& rows, void* stream))
/// `rows.stride` is y's, and no mask is looked at.
FLEXOPS_CUDA_DECLARE(const char* softmax_backward_cuda(const void* grad, int64_t grad_stride,
                                                       const void* y, void* out,
                                                       const SoftmaxRows& rows, void* stream))

FLEXOPS_ISA_DECLARE(void softmax_cpu(const void* x, const void* mask, void* out,
                                     const SoftmaxRows& rows, int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void softmax_backward_cpu(const void* grad, int64_t grad_stride, const void* y,
                                              void* out, const SoftmaxRows& rows, int64_t begin,
                                              int64_t end))

}  // namespace flexops
