// flexops::few_rows_linear: from its arguments to the launcher's, or to threads.
#pragma once

#include "common/host.h"

#include "few_rows/few_rows.h"

namespace flexops {

FLEXOPS_CUDA_DECLARE(const char* few_rows_cuda(const FewRows& product, void* stream));
FLEXOPS_ISA_DECLARE(void few_rows_cpu(const FewRows& product, int64_t begin, int64_t end));

inline void few_rows_linear_host(Host& host, const TensorView& x, const TensorViews& weights,
                                 const TensorViews& biases, const TensorView& norm, double eps,
                                 double offset, const TensorView& residual, int64_t activation,
                                 int64_t width, bool early, const TensorView& out) {
  const int64_t k = x.columns();
  FLEXOPS_CHECK(x.dim > 0 && x.numel <= kMostFewRows * k, host.op, ": x must have at most ",
                kMostFewRows, " rows, got shape ", shape_text(x));
  FLEXOPS_CHECK(activation >= 0 && activation < kFewActivations, host.op,
                ": activation must be from 0 to 3, got ", activation);
  FLEXOPS_CHECK(weights.count > 0 && weights.count <= kMostFewWeights &&
                    (activation == kFewNone || weights.count == 2),
                host.op, ": weights must be ", activation == kFewNone ? "1 to 3" : "2",
                " tensors, got ", weights.count);
  FLEXOPS_CHECK(biases.count == 0 || biases.count == weights.count, host.op,
                ": biases must be none or ", weights.count, " tensors, got ", biases.count);
  int64_t columns = 0;
  for (int64_t i = 0; i < weights.count; ++i) {
    const TensorView& weight = weights[i];
    FLEXOPS_CHECK(weight.dim == 2 && weight.size(1) == k, host.op, ": weights[", i,
                  "] must have shape [any, ", k, "], got ", shape_text(weight));
    if (biases.count) {
      const TensorView& bias = biases[i];
      FLEXOPS_CHECK(bias.dim == 1 && bias.size(0) == weight.size(0), host.op, ": biases[", i,
                    "] must have shape [", weight.size(0), "], got ", shape_text(bias));
    }
    columns = activation == kFewNone ? columns + weight.size(0) : weight.size(0);
    FLEXOPS_CHECK(activation == kFewNone || weight.size(0) == width, host.op, ": weights[", i,
                  "] must have weights[0]'s shape, got ", shape_text(weight));
  }
  FLEXOPS_CHECK(columns == width, host.op, ": width must be ", columns, ", got ", width);
  if (out.numel == 0) return;
  const FewRows product = {x,
                           weights,
                           biases,
                           norm,
                           residual,
                           out,
                           static_cast<float>(eps),
                           static_cast<float>(offset),
                           activation,
                           early};
  if (FLEXOPS_DEVICE_CUDA) return host.check(few_rows_cuda(product, host.stream()));
  parallel_for(0, out.numel, 16, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(few_rows_cpu)(product, begin, end);
  });
}

}  // namespace flexops
