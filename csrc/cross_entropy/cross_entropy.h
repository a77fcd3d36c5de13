// The launchers of cross entropy: raw pointers and numbers, no torch. What they compute:
// flexops/ops/cross_entropy.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/logit_rows.h"

namespace flexops {

struct Logits : LogitRows {
  float smoothing, z_loss;
};

/// What the factor of a row's gradient is, and what becomes of the rows' losses.
enum class Reduction : uint8_t { none, sum, mean };

/// What the forward pass leaves for the backward pass, in one piece of memory: of each row its
/// greatest logit, and the sum of the powers of the distances to it (both 0 if the row is ignored);
/// and, unless losses are not reduced, the rows' losses and what their sum is divided by: 1, or the
/// number of rows that are not ignored for the mean.
struct LossStats {
  float *maxima, *sums, *losses, *divisor;

  /// `own_losses`: where losses go that are not reduced.
  LossStats(float* data, int64_t rows, Reduction reduction, float* own_losses)
      : maxima(data),
        sums(data + rows),
        losses(reduction == Reduction::none ? own_losses : data + 2 * rows),
        divisor(reduction == Reduction::none ? nullptr : data + 3 * rows) {}
  static int64_t size(int64_t rows, Reduction reduction) {
    return reduction == Reduction::none ? 2 * rows : 3 * rows + 1;
  }
};

/// What a row's gradient is multiplied by: nothing (null), one number, or one for each row.
struct GradientFactors {
  const float* data;
  bool each_row;
};

/// Queued on `stream`; the pointers are the device's. Return nullptr, or CUDA's error text.
///
/// `write_gradient`: the gradient of the (reduced) loss, times its factor, is written over the
/// logits. `loss`: the losses' sum or mean.
FLEXOPS_CUDA_DECLARE(const char* cross_entropy_cuda(
    void* logits, const int64_t* target, const Logits& shape, Reduction reduction,
    bool write_gradient, const GradientFactors& factors, const LossStats& stats, float* loss,
    void* stream))
/// `out` is contiguous.
FLEXOPS_CUDA_DECLARE(const char* cross_entropy_backward_cuda(
    const void* logits, const int64_t* target, const LossStats& stats,
    const GradientFactors& factors, void* out, const Logits& shape, void* stream))
/// values[r, :] *= factors[r], or factors[0]; nothing is read or written where that is 1. `values`
/// is contiguous.
FLEXOPS_CUDA_DECLARE(const char* scale_rows_cuda(void* values, ElementType type, int64_t rows,
                                                 int64_t length, const float* factors,
                                                 bool each_row, void* stream))

/// Rows [begin, end): losses and statistics, and the gradient, times its factor and divided by
/// `divisor`, over the logits.
FLEXOPS_ISA_DECLARE(void cross_entropy_cpu(void* logits, const int64_t* target, const Logits& shape,
                                           float divisor, bool write_gradient,
                                           const GradientFactors& factors, const LossStats& stats,
                                           int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void cross_entropy_backward_cpu(const void* logits, const int64_t* target,
                                                    const LossStats& stats,
                                                    const GradientFactors& factors, float divisor,
                                                    void* out, const Logits& shape, int64_t begin,
                                                    int64_t end))
FLEXOPS_ISA_DECLARE(void scale_rows_cpu(void* values, ElementType type, int64_t begin, int64_t end,
                                        float factor))

}  // namespace flexops
