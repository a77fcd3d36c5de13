// The launcher of recurrences over long sequences: raw pointers and numbers, no torch.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "state_scan/state_scan_kinds.h"

namespace flexops {

/// The most rows of a state, with the delta rule and without; and the steps of a chunk, whose
/// products with each other are computed at once.
constexpr int kMostDeltaRows = 128, kMostChunkRows = 256, kChunkSteps = 64;
/// Of a chunk and a head, in bytes: two square matrices of 16 bits, four numbers of each step.
constexpr int64_t kChunkBytes = 2 * kChunkSteps * kChunkSteps * 2 + 4 * kChunkSteps * 4;

/// Queued on `stream`; the pointers are the device's. `initial` lies as the state does, and may be
/// that; null: zeros. `work` is kChunkBytes for each state and each of `together` chunks. Returns
/// nullptr, or CUDA's error text.
FLEXOPS_CUDA_DECLARE(const char* state_chunks_cuda(const StateScan& scan, const float* initial,
                                                   void* work, int64_t together, void* stream))

struct ChunkGradients {
  const float* initial;        // the state to begin with, as scan.state lies; null: zeros
  const float* last;           // the gradient of the last state, so, too; null: zeros
  const void* grad;            // of out, [batch, length, heads, columns]
  void *q, *k, *v;             // of each head, [batch, length, heads, ...]
  float *decay, *rate, *skip;  // of steps, [batch, length, heads]; skip may be null
  void *work, *states, *changes, *values;  // of a chunk kChunkBytes; S, dS' (rows x columns of 16
                                           // bits); z (as v; not without the delta rule)
};

/// Queued on `stream`. `scan.state` is written, unless null: the gradient of the state to begin
/// with. Gates are given.
FLEXOPS_CUDA_DECLARE(const char* state_chunks_backward_cuda(const StateScan& scan,
                                                            const ChunkGradients& gradients,
                                                            void* stream))

}  // namespace flexops
