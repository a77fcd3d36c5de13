// From the arguments of log-probabilities to the launchers' (declared in
// flexops/build/describe/families.py).
#pragma once

#include "common/logit_rows_host.h"

#include "logprobs/logprobs.h"

namespace flexops {

inline LogprobRows make_rows(Host& host, const TensorView& logits, int64_t ignore_index,
                             double temperature, double softcap) {
  return {make_logit_rows(host, logits, ignore_index), static_cast<float>(temperature),
          static_cast<float>(softcap)};
}

inline void logprobs_host(Host& host, const TensorView& logits, const TensorView& target,
                          int64_t ignore_index, double temperature, double softcap,
                          const TensorView& logprobs, const TensorView& entropy,
                          const TensorView& stats) {
  const LogprobRows shape = make_rows(host, logits, ignore_index, temperature, softcap);
  const LogprobResults results = {logprobs.as<float>(), entropy.as<float>(), stats.as<float>()};
  const auto* classes = target.as<int64_t>();
  if (shape.rows == 0) return;
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(logprobs_cuda(logits.data, classes, shape, results, host.stream()));
  for_rows(shape.rows, shape.length, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(logprobs_cpu)(logits.data, classes, shape, results, begin, end);
  });
}

inline void write_gradient(Host& host, const TensorView& grad, const TensorView& grad_entropy,
                           const TensorView& logits, const TensorView& target,
                           const TensorView& stats, const TensorView& entropy,
                           const LogprobRows& shape, void* out, int64_t out_stride) {
  const LogprobResults results = {nullptr, entropy.as<float>(), stats.as<float>()};
  const LogprobGradients gradients = {grad.as<float>(), grad_entropy.as<float>()};
  const auto* classes = target.as<int64_t>();
  if (shape.rows == 0) return;
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(logprobs_backward_cuda(logits.data, classes, shape, results, gradients, out,
                                             out_stride, host.stream()));
  for_rows(shape.rows, shape.length, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(logprobs_backward_cpu)(logits.data, classes, shape, results, gradients, out,
                                            out_stride, begin, end);
  });
}

inline void logprobs_backward_host(Host& host, const TensorView& grad,
                                   const TensorView& grad_entropy, const TensorView& logits,
                                   const TensorView& target, const TensorView& stats,
                                   const TensorView& entropy, int64_t ignore_index,
                                   double temperature, double softcap, const TensorView& out) {
  const LogprobRows shape = make_rows(host, logits, ignore_index, temperature, softcap);
  write_gradient(host, grad, grad_entropy, logits, target, stats, entropy, shape, out.data,
                 shape.length);
}

/// The gradient is written over the logits.
inline void logprobs_backward__host(Host& host, const TensorView& grad,
                                    const TensorView& grad_entropy, const TensorView& logits,
                                    const TensorView& target, const TensorView& stats,
                                    const TensorView& entropy, int64_t ignore_index,
                                    double temperature, double softcap) {
  const LogprobRows shape = make_rows(host, logits, ignore_index, temperature, softcap);
  FLEXOPS_CHECK(logits.is_contiguous(), host.op, ": logits must be contiguous to be overwritten");
  write_gradient(host, grad, grad_entropy, logits, target, stats, entropy, shape, logits.data,
                 shape.stride);
}

}  // namespace flexops
