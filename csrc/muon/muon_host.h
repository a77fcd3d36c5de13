// flexops::muon_average_ and flexops::muon_apply_: from their arguments to the launchers'.
#pragma once

#include "common/multi_tensor_host.h"

#include "muon/muon.h"

namespace flexops {

inline void muon_average__host(Host& host, TensorRow* rows, int64_t count, double momentum,
                               bool nesterov, double scale, double eps, const float* grad_scale) {
  float* const scratch = host.workspace<float>(muon_scratch(rows, count));
  host.check(muon_average_cuda(rows, count, momentum, nesterov, scale, eps, grad_scale, scratch,
                               host.stream()));
}

inline void muon_apply__host(Host& host, TensorRow* rows, int64_t count, double lr, double decay,
                             double factor, const float* lr_tensor) {
  host.check(muon_apply_cuda(rows, count, lr, decay, factor, lr_tensor, host.stream()));
}

}  // namespace flexops
