// Lists of tensors as the launchers and CPU kernels of multi-tensor ops take them: raw pointers and
// numbers, no torch.
#pragma once

#include <stdint.h>

#include "common/element_type.h"

namespace flexops {

/// One tensor of each of an op's lists: a parameter, say, with its gradient and its states, in the
/// order that the op gives them. All arrays hold `numel` elements in the same order in memory,
/// unless the op says otherwise.
struct TensorRow {
  static constexpr int kMostArrays = 6;
  void* array[kMostArrays];  // nullptr where an optional one is absent
  float* step;  // how many steps were made before this one; nullptr if the op counts none
  int64_t numel;
  ElementType type[kMostArrays];

  bool is_f32(int k) const { return array[k] == nullptr || type[k] == ElementType::f32; }
  bool is_bf16(int k) const { return type[k] == ElementType::bf16; }
  void drop(int k) { array[k] = nullptr, type[k] = ElementType::f32; }
};

/// The numbers that every optimizer's step takes.
struct StepOptions {
  double lr;
  const float* lr_tensor;  // overrides lr if not nullptr
  double weight_decay;
  bool maximize;
  const float* grad_scale;  // nullptr, or what the gradients are divided by first, in place
  const float* found_inf;   // nullptr, or nonzero to do nothing at all
};

/// Of a step by moving averages.
struct AverageOptions : StepOptions {
  double beta1, beta2;
  bool stochastic = false;  // averages in bfloat16 are rounded stochastically, by the rows' steps
};

/// What every element of one tensor shares in a step on the CPU.
struct AverageStep {
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float decay;       // the share of the parameter that decoupled weight decay takes
  float sign;        // -1 to maximize
  float grad_scale;  // 0 for none
  bool stochastic;
  uint32_t key;  // of the step's random numbers
};

}  // namespace flexops
