// Adagrad's kernel: the formula, on the memory access of common/multi_tensor.cuh. fp32 reads 12 and
// writes 8 bytes an element.
#pragma once

#include "common/multi_tensor.cuh"

namespace flexops::adagrad {

using multi::Data;

// Tuned on one H200.

struct Shared : multi::StepNumbers {
  float lr_decay, eps;
};

template <Data data>
struct Rule : multi::RuleDefaults {
  enum { kParam, kGrad, kSum };
  enum { kStep };  // the extra input: how many steps were made, this one included
  static constexpr Data kData = data;
  static constexpr int kUnroll = 2;
  static constexpr int kMinBlocks = data == Data::mixed ? 8 : 10;
  static constexpr int kArrays = 3, kExtras = 1, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b111, kWrites = 0b101, kTyped = 0b011;
  using Shared = adagrad::Shared;

  struct Factors {
    float lr, sign, grad_scale;
  };

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Rule>& launch,
                                        int tensor) {
    const float decayed =
        s.rate() / (1.0f + (*launch.row[tensor].extra[kStep] - 1.0f) * s.lr_decay);
    return {decayed, s.sign(), s.scale()};
  }

  /// The formula, as in torch's fused Adagrad.
  static FLEXOPS_DEVICE void update(multi::Element<Rule>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Rule>&, float*, bool) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &sum = e.at[kSum];
    if (s.grad_scale) grad /= f.grad_scale;
    float g = grad * f.sign;
    if (s.weight_decay != 0.0f) g += param * s.weight_decay;
    sum += g * g;
    param -= f.lr * g / (sqrtf(sum) + s.eps);
  }
};

template <Data data>
__global__ void __launch_bounds__(Rule<data>::kThreads, Rule<data>::kMinBlocks)
    adagrad_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<data>> launch) {
  multi::run(launch);
}

}  // namespace flexops::adagrad
