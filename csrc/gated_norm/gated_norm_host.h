// From the arguments of the gated RMS norm's backward pass to its launchers' (declared in
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"
#include "gated_norm/gated_norm.h"

namespace flexops {

inline void gated_rms_norm_backward_host(Host& host, const TensorView& grad, const TensorView& x,
                                         const TensorView& gate, const TensorView& weight,
                                         double eps, int64_t groups, bool norm_first, bool sigmoid,
                                         const TensorView& weight_grad, const TensorView& x_grad,
                                         const TensorView& gate_grad) {
  GatedNormBackward call{grad,      x,   gate,   weight,     weight_grad, x_grad,
                         gate_grad, eps, groups, norm_first, sigmoid};
  const int64_t columns = x.size(1);
  if (columns == 0) return;
  constexpr int64_t kMost = 64, kElements = 16384;  // of the CPU's parts
  if (FLEXOPS_DEVICE_CPU) call.parts = least(least(ceil_div(x.numel, kElements), kMost), x.size(0));
  if (FLEXOPS_DEVICE_CUDA) call.parts = gated_norm_parts_cuda(call);
  if (weight) call.partial = host.workspace<float>(call.parts * columns);
  if (FLEXOPS_DEVICE_CUDA) return host.check(gated_norm_backward_cuda(call, host.stream()));
  parallel_for(0, call.parts, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(gated_norm_backward_cpu)(call, begin, end);
  });
  if (!weight) return;
  parallel_for(0, columns, 32768 / (call.parts + 1), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(gated_norm_sum_cpu)(call, begin, end);
  });
}

}  // namespace flexops
