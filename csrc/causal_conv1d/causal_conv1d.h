// The launchers of the causal convolution: raw pointers and numbers, no torch. What they compute:
// flexops/ops/causal_conv1d.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

constexpr int kConvTaps = 4;              // narrower filters begin with zeros
constexpr int kConvSums = kConvTaps + 1;  // rows of the gradients of weight and bias

/// [batch, length, channels], contiguous.
struct ConvShape {
  int64_t batch, length, channels;
  ElementType type;
  bool silu;
  const int* sequences;  // [batch, length]: which sequence a step belongs to; null: one each
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
/// Time steps whose part of the gradients of weight and bias is added up.
FLEXOPS_CUDA_DECLARE(int64_t causal_conv1d_run_cuda(const ConvShape& shape))
/// `partial`: [batch, runs of `run` steps, kConvSums, channels]; `sums`: [kConvSums, channels].
FLEXOPS_CUDA_DECLARE(const char* causal_conv1d_backward_cuda(
    const void* grad, const void* x, const ConvFilter& filter, void* x_grad, float* partial,
    float* sums, int64_t run, const ConvShape& shape, void* stream))
FLEXOPS_CUDA_DECLARE(const char* causal_conv1d_update_cuda(void* state, const void* x, void* out,
                                                           const ConvUpdate& shape, void* stream))

/// Time steps [begin, end) of all batches.
FLEXOPS_ISA_DECLARE(void causal_conv1d_cpu(const void* x, const ConvFilter& filter, void* out,
                                           const ConvShape& shape, int64_t begin, int64_t end))
/// Runs [begin, end) of all batches, and columns [begin, end) of the sum over `count` runs.
FLEXOPS_ISA_DECLARE(void causal_conv1d_backward_cpu(
    const void* grad, const void* x, const ConvFilter& filter, void* x_grad, float* partial,
    int64_t run, const ConvShape& shape, int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void causal_conv1d_sum_cpu(const float* partial, int64_t count, int64_t columns,
                                               float* sums, int64_t begin, int64_t end))
/// Channels [begin, end) of all batches.
FLEXOPS_ISA_DECLARE(void causal_conv1d_update_cpu(void* state, const void* x, void* out,
                                                  const ConvUpdate& shape, int64_t begin,
                                                  int64_t end))

}  // namespace flexops
