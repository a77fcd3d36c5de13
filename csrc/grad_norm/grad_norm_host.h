// flexops::grad_norm and flexops::clip_grads_: from their arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include <math.h>

#include "grad_norm/grad_norm.h"

namespace flexops {

inline void grad_norm_host(Host& host, TensorRow* rows, int64_t count, double norm_type,
                           const TensorView& norm) {
  FLEXOPS_CHECK(norm_type > 0, host.op, ": norm_type must be positive");
  if (FLEXOPS_DEVICE_CUDA) {
    float* partials = host.workspace<float>(grad_norm_partials(rows, count));
    return host.check(
        grad_norm_cuda(rows, count, norm_type, partials, norm.as<float>(), host.stream()));
  }
  const NormKind kind = norm_kind(norm_type);
  double total = 0;
  for (const Piece<double>&piece : reduce_pieces<double>(
           rows, count, [&](const TensorRow& row, size_t, int64_t begin, int64_t end) {
             return FLEXOPS_ISA_CALL(grad_norm_cpu)(row, norm_type, begin, end);
           })) {
    if (kind == NormKind::infinity) {
      total = piece.value <= total ? total : total != total ? total : piece.value;  // NaN stays
    } else {
      total += piece.value;
    }
  }
  if (kind == NormKind::two) total = sqrt(total);
  if (kind == NormKind::other) total = pow(total, 1 / norm_type);
  *norm.as<float>() = static_cast<float>(total);
}

inline void clip_grads__host(Host& host, TensorRow* rows, int64_t count, const float* total_norm,
                             double max_norm) {
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(clip_grads_cuda(rows, count, total_norm, max_norm, host.stream()));
  const float raw = static_cast<float>(max_norm) / (*total_norm + 1e-6f),
              factor = raw > 1.0f ? 1.0f : raw;
  if (factor == 1.0f) return;
  for_each_piece(rows, count, 32, [&](size_t i, int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(clip_grads_cpu)(rows[i], factor, begin, end);
  });
}

}  // namespace flexops
