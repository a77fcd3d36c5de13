// From the arguments of the gated RMS norm to its launchers' (declared in
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"
#include "gated_norm/gated_norm.h"

namespace flexops {

inline void check_groups(const Host& host, const TensorView& x, int64_t groups) {
  FLEXOPS_CHECK(x.dim == 2 && groups >= 1 && x.size(1) % groups == 0, host.op, ": groups must",
                " divide the columns of x, got ", groups, " for shape ", shape_text(x));
}

inline void gated_rms_norm_host(Host& host, const TensorView& x, const TensorView& gate,
                                const TensorView& weight, double eps, int64_t groups,
                                bool norm_first, bool sigmoid, const TensorView& out) {
  check_groups(host, x, groups);
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(
        gated_rms_norm_cuda(x, gate, weight, eps, groups, norm_first, sigmoid, out, host.stream()));
  parallel_for(0, x.size(0), 16384 / (x.size(1) + 1) + 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(gated_rms_norm_cpu)(x, gate, weight, eps, groups, norm_first, sigmoid, out,
                                         begin, end);
  });
}

inline void gated_rms_norm_backward_host(Host& host, const TensorView& grad, const TensorView& x,
                                         const TensorView& gate, const TensorView& weight,
                                         double eps, int64_t groups, bool norm_first, bool sigmoid,
                                         const TensorView& weight_grad, const TensorView& x_grad,
                                         const TensorView& gate_grad) {
  GatedNormBackward call{grad,      x,   gate,   weight,     weight_grad, x_grad,
                         gate_grad, eps, groups, norm_first, sigmoid};
  check_groups(host, x, groups);
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
