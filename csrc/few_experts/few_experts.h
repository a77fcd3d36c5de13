// What the binding of experts of few tokens hands to the launcher. Meaning of the arguments:
// flexops/ops/few_experts.py.
#pragma once

#include <stdint.h>

#include "common/tensor_view.h"
#include "few_rows/few_rows_kinds.h"

namespace flexops {

struct FewExperts {
  TensorView x, choices, weights;  // [tokens, hidden], [tokens, k], [tokens, k]
  TensorView gate_up, down;        // [experts, 2 inner, hidden], [experts, hidden, inner]
  TensorView gate_up_bias, down_bias;
  TensorView out;      // as x
  void* inner;         // [tokens k, inner], scratch memory
  bool columns;        // of each expert's matrices, the last two dimensions are swapped
  bool interleaved;    // rows of gate_up are a gate and an up in turn
  int64_t activation;  // a FewRowsActivation, or kFewClamped
  float alpha, limit;
};

/// Queued on `stream`. Returns nullptr, or CUDA's error text.
const char* few_experts_cuda(const FewExperts& call, void* stream);

}  // namespace flexops
