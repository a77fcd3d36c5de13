// What the binding of experts of few tokens hands to the launcher. Meaning of the arguments:
// flexops/ops/few_experts.py.
#pragma once

#include <stdint.h>

#include "common/element_type.h"
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

/// The same with weights of 4 bits.
struct FewExpertsInt4 {
  struct Weight {
    TensorView packed, scales, zeros;  // of all experts; an Int4Weight's
  };
  TensorView x, choices, weights;
  Weight gate_up, down;
  TensorView gate_up_bias, down_bias;
  TensorView out;
  void* inner;
  int64_t experts, width;  // width: of inner
  int64_t group_size;
  bool mxfp4;  // codes are MXFP4's numbers
  bool interleaved;
  int64_t activation;
  float alpha, limit;
};

/// A weight [n, k] whose codes are MXFP4's numbers, in float32, float16 or bfloat16.
struct Mxfp4Weight {
  TensorView packed, scales;
  TensorView out;
  ElementType scale_type;
};

/// Queued on `stream`. Return nullptr, or CUDA's error text.
const char* few_experts_cuda(const FewExperts& call, void* stream);
const char* few_experts_int4_cuda(const FewExpertsInt4& call, void* stream);
const char* mxfp4_unpack_cuda(const Mxfp4Weight& weight, void* stream);

}  // namespace flexops
