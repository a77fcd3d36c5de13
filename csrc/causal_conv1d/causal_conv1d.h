// The launchers of the causal convolution: raw pointers and numbers, no torch. What they compute:
// flexops/ops/causal_conv1d.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

constexpr int kConvTaps = 4;   // narrower filters begin with zeros
constexpr int kConvRun = 128;  // time steps whose part of the weight's gradient is added up

/// [batch, length, channels], contiguous.
struct ConvShape {
  int64_t batch, length, channels;
  ElementType type;
  bool silu;

  int64_t runs() const { return length / kConvRun + 1; }
};

/// float32: weight [kConvTaps, channels]; bias [channels], or null.
struct ConvFilter {
  const float *weight, *bias;
};

/// One step after another, of states [batch, channels, size], contiguous; x has any strides, and
/// out is contiguous. weight: [channels, width], width <= size + 1; bias: [channels], or null.
struct ConvUpdate {
  const void *weight, *bias;
  ElementType weight_type;  // and the bias's
  int64_t batch, channels, length, size, width;
  int64_t x_batch, x_channel, x_step;  // strides
  ElementType type;
  bool silu;
};

/// Queued on `stream`; the pointers are the device's. Return nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* causal_conv1d_cuda(const void* x, const ConvFilter& filter,
                                                    void* out, const ConvShape& shape,
                                                    void* stream))
/// `partial`: [batch, runs, kConvTaps + 1, channels], the gradients of weight and bias of each run.
FLEXOPS_CUDA_DECLARE(const char* causal_conv1d_backward_cuda(const void* grad, const void* x,
                                                             const ConvFilter& filter, void* x_grad,
                                                             float* partial, const ConvShape& shape,
                                                             void* stream))
FLEXOPS_CUDA_DECLARE(const char* causal_conv1d_update_cuda(void* state, const void* x, void* out,
                                                           const ConvUpdate& shape, void* stream))

/// Time steps [begin, end) of all batches.
FLEXOPS_ISA_DECLARE(void causal_conv1d_cpu(const void* x, const ConvFilter& filter, void* out,
                                           const ConvShape& shape, int64_t begin, int64_t end))
/// Runs [begin, end) of all batches.
FLEXOPS_ISA_DECLARE(void causal_conv1d_backward_cpu(const void* grad, const void* x,
                                                    const ConvFilter& filter, void* x_grad,
                                                    float* partial, const ConvShape& shape,
                                                    int64_t begin, int64_t end))
/// Channels [begin, end) of all batches.
FLEXOPS_ISA_DECLARE(void causal_conv1d_update_cpu(void* state, const void* x, void* out,
                                                  const ConvUpdate& shape, int64_t begin,
                                                  int64_t end))

}  // namespace flexops
