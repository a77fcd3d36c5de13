// The launchers of the gradients' norm and of clipping: raw pointers and numbers, no torch.
#pragma once

#include "common/cpu.h"
#include "common/multi_tensor.h"

namespace flexops {

/// How many floats of working memory grad_norm_cuda needs, at least one.
FLEXOPS_CUDA_DECLARE(int64_t grad_norm_partials(const TensorRow* rows, int64_t count))

/// The norm of all rows' first array as one vector, written to *norm; queued on `stream`. Returns
/// nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* grad_norm_cuda(const TensorRow* rows, int64_t count,
                                                double norm_type, float* partials, float* norm,
                                                void* stream))

/// Scales all rows' first array by min(1, max_norm / (*total_norm + 1e-6)), which is read on the
/// device; memory is left alone if that is 1.
FLEXOPS_CUDA_DECLARE(const char* clip_grads_cuda(const TensorRow* rows, int64_t count,
                                                 const float* total_norm, double max_norm,
                                                 void* stream))

enum class NormKind { two, infinity, other };

inline NormKind norm_kind(double norm_type) {
  return norm_type == 2        ? NormKind::two
         : norm_type > 1.7e308 ? NormKind::infinity
                               : NormKind::other;
}

/// The sum of |x|^norm_type, or the largest |x|, of elements [begin, end).
FLEXOPS_ISA_DECLARE(double grad_norm_cpu(const TensorRow& row, double norm_type, int64_t begin,
                                         int64_t end))
/// Scales elements [begin, end).
FLEXOPS_ISA_DECLARE(void clip_grads_cpu(const TensorRow& row, float factor, int64_t begin,
                                        int64_t end))

}  // namespace flexops
