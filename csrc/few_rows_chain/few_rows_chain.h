// What the binding of chains of products of a few rows hands to the launcher. Meaning of the
// arguments: flexops/ops/few_rows_chain.py.
#pragma once

#include "common/tensor_view.h"

namespace flexops {

constexpr int kMostPhases = 6, kMostChainRows = 2;

struct FewRowsChain {
  TensorView x;                                                  // of the first phase
  TensorViews xs;                                                // of the others
  TensorViews weights, scales, zeros, biases, norms, residuals;  // those that there are
  TensorViews outs;
  TensorView workspace;
  float eps, offset;
  int64_t kinds;
};

/// What a phase has: its ten bits of `kinds`.
struct PhaseKind {
  int weights, activation;
  bool four_bits, zeros, biases, norm, residual;
  PhaseKind(int64_t kinds, int64_t phase) {
    const auto bits = static_cast<int>(kinds >> 10 * phase & 1023);
    weights = bits & 3, activation = bits >> 2 & 3, four_bits = bits >> 4 & 1;
    zeros = bits >> 5 & 1, biases = bits >> 6 & 1, norm = bits >> 7 & 1, residual = bits >> 8 & 1;
  }
};

/// Queued on `stream`. Returns nullptr, or CUDA's error text.
const char* few_rows_chain_cuda(const FewRowsChain& call, void* stream);

}  // namespace flexops
