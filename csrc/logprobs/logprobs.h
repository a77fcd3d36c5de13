// The launchers of log-probabilities: raw pointers and numbers, no torch. What they compute:
// flexops/ops/logprobs.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/logit_rows.h"

namespace flexops {

/// The distribution of a row is the softmax of its logits, after softcap * tanh(logit / softcap)
/// unless softcap is 0, over the temperature.
struct LogprobRows : LogitRows {
  float temperature, softcap;
};

/// Of each row: what the forward pass gives and the backward pass reads. `stats` holds the rows'
/// greatest scaled logits, then the sums of the powers of the distances to them.
struct LogprobResults {
  float *logprobs, *entropy, *stats;
};

/// Of each row: the gradients of its log-probability and of its entropy.
struct LogprobGradients {
  const float *of_logprobs, *of_entropy;
};

/// Queued on `stream`; the pointers are the device's. Return nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* logprobs_cuda(const void* logits, const int64_t* target,
                                               const LogprobRows& shape,
                                               const LogprobResults& results, void* stream))
/// `out` may be the logits; its rows are `out_stride` elements apart, and as far from multiples of
/// 16 bytes as those of the logits.
FLEXOPS_CUDA_DECLARE(const char* logprobs_backward_cuda(
    const void* logits, const int64_t* target, const LogprobRows& shape,
    const LogprobResults& results, const LogprobGradients& gradients, void* out, int64_t out_stride,
    void* stream))

/// Rows [begin, end).
FLEXOPS_ISA_DECLARE(void logprobs_cpu(const void* logits, const int64_t* target,
                                      const LogprobRows& shape, const LogprobResults& results,
                                      int64_t begin, int64_t end))
FLEXOPS_ISA_DECLARE(void logprobs_backward_cpu(const void* logits, const int64_t* target,
                                               const LogprobRows& shape,
                                               const LogprobResults& results,
                                               const LogprobGradients& gradients, void* out,
                                               int64_t out_stride, int64_t begin, int64_t end))

}  // namespace flexops
