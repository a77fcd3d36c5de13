// From the arguments of the causal convolution to the launchers' (declared in
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"

#include "causal_conv1d/causal_conv1d.h"

namespace flexops {

inline ConvShape conv_shape(Host& host, const TensorView& x, const TensorView& sequences,
                            bool silu) {
  FLEXOPS_CHECK(x.dim == 3, host.op, ": x must be [batch, length, channels], got shape ",
                shape_text(x));
  return {x.size(0), x.size(1), x.size(2), element_type(x), silu, sequences.as<int>()};
}

inline void causal_conv1d_host(Host& host, const TensorView& x, const TensorView& weight,
                               const TensorView& bias, const TensorView& sequences, bool silu,
                               const TensorView& out) {
  const ConvShape shape = conv_shape(host, x, sequences, silu);
  const ConvFilter filter = {weight.as<float>(), bias.as<float>()};
  if (x.numel == 0) return;
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(causal_conv1d_cuda(x.data, filter, out.data, shape, host.stream()));
  const int64_t grain = 4096 / least(shape.channels, 4096);
  parallel_for(0, shape.batch * shape.length, grain, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(causal_conv1d_cpu)(x.data, filter, out.data, shape, begin, end);
  });
}

inline void causal_conv1d_backward_host(Host& host, const TensorView& grad, const TensorView& x,
                                        const TensorView& weight, const TensorView& bias,
                                        const TensorView& sequences, bool silu,
                                        const TensorView& x_grad, const TensorView& sums) {
  const ConvShape shape = conv_shape(host, x, sequences, silu);
  const ConvFilter filter = {weight.as<float>(), bias.as<float>()};
  if (sums.numel == 0) return;
  int64_t run = 128;
  if (FLEXOPS_DEVICE_CUDA) run = causal_conv1d_run_cuda(shape);
  const int64_t count = shape.batch * ceil_div(shape.length, run);
  float* const partial = host.workspace<float>(count * sums.numel);
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(causal_conv1d_backward_cuda(grad.data, x.data, filter, x_grad.data, partial,
                                                  sums.as<float>(), run, shape, host.stream()));
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(causal_conv1d_backward_cpu)(grad.data, x.data, filter, x_grad.data, partial,
                                                 run, shape, begin, end);
  });
  parallel_for(0, sums.numel, 32768 / (count + 1), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(causal_conv1d_sum_cpu)(partial, count, sums.numel, sums.as<float>(), begin,
                                            end);
  });
}

inline void causal_conv1d_update__host(Host& host, const TensorView& state, const TensorView& x,
                                       const TensorView& weight, const TensorView& bias, bool silu,
                                       const TensorView& out) {
  FLEXOPS_CHECK(state.dim == 3 && x.dim == 3, host.op,
                ": state and x must be [batch, channels, length], got shapes ", shape_text(state),
                " and ", shape_text(x));
  FLEXOPS_CHECK(weight.dim == 2 && weight.size(1) <= state.size(2) + 1, host.op,
                ": state must hold at least ", weight.size(1) - 1, " steps, got shape ",
                shape_text(state));
  FLEXOPS_CHECK(!bias || bias.dtype == weight.dtype, host.op, ": bias must have weight's dtype");
  const ConvUpdate shape = {weight.data, bias.data,   element_type(weight), x.size(0),
                            x.size(1),   x.size(2),   state.size(2),        weight.size(1),
                            x.stride(0), x.stride(1), x.stride(2),          element_type(x),
                            silu};
  if (x.numel == 0) return;
  if (FLEXOPS_DEVICE_CUDA)
    return host.check(
        causal_conv1d_update_cuda(state.data, x.data, out.data, shape, host.stream()));
  parallel_for(0, shape.batch * shape.channels, 1024, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(causal_conv1d_update_cpu)(state.data, x.data, out.data, shape, begin, end);
  });
}

}  // namespace flexops
