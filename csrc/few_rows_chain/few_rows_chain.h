// What the binding of chains of products of a few rows hands to the launcher. Meaning of the
// arguments: flexops/ops/few_rows_chain.py.
#pragma once

#include "common/element_type.h"
#include "common/tensor_view.h"

namespace flexops {

constexpr int kMostPhases = 28, kMostChainRows = 2;
constexpr int kMostProducts = 6;  // phases without an attention

/// Of the workspace's numbers: what blocks count in; partial results follow.
constexpr int64_t kChainCounters = 256;

struct FewRowsChain {
  TensorView x;                                                  // of the first phase
  TensorViews xs;                                                // of the others
  TensorViews weights, scales, zeros, biases, norms, residuals;  // those that there are
  TensorViews outs;
  TensorViews caches;  // of each attention, keys and values
  TensorView cos, sin, seqlens, leftpad;
  TensorView workspace;
  float eps, offset, scale;
  int64_t window_left;  // tokens that an attention sees beside its own; below 0: all
  int64_t kinds[4];
};

/// What a phase has: its eight bits of `kinds`, seven phases in each. Without weights it is an
/// attention, whose norms are two: of queries and of keys.
struct PhaseKind {
  int weights, activation;
  bool zeros, biases, norm, residual;
  PhaseKind(const int64_t (&kinds)[4], int64_t phase) {
    const auto bits = static_cast<int>(kinds[phase / 7] >> 8 * (phase % 7) & 255);
    weights = bits & 3, activation = bits >> 2 & 3;
    zeros = bits >> 4 & 1, biases = bits >> 5 & 1, norm = bits >> 6 & 1, residual = bits >> 7 & 1;
  }
};

/// Queued on `stream`. Returns nullptr, or CUDA's error text.
const char* few_rows_chain_cuda(const FewRowsChain& call, void* stream);

}  // namespace flexops
