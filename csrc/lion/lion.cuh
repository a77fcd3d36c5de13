// Lion's kernel: the formula, on the memory access of common/multi_tensor.cuh. fp32 reads 12 and writes 8 bytes an element.
#pragma once

#include "common/multi_tensor.cuh"

namespace flexops::lion {

using multi::Data;

// Tuned on one H200.

template <Data data>
struct Rule {
  enum { kParam, kGrad, kExpAvg };
  static constexpr Data kData = data;
  static constexpr int kThreads = 128, kUnroll = 2, kIterations = 1;
  static constexpr int kMinBlocks = 8;
  static constexpr int kArrays = 3, kApart = 1, kExtras = 0, kSums = 0, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b111, kWrites = 0b101, kTyped = 0b011, kOptional = 0;
  static constexpr bool kReverse = false;
  static constexpr Cache kLoad = Cache::normal, kStore = Cache::normal;

  struct Shared {
    const float *grad_scale, *found_inf;
    const float* lr_tensor;
    float lr;
    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float weight_decay;
    bool maximize;
  };

  struct Factors {
    float lr, decay, sign, grad_scale;
  };

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Rule>&, int) {
    const float lr = s.lr_tensor ? *s.lr_tensor : s.lr;
    return {lr, lr * s.weight_decay, s.maximize ? -1.0f : 1.0f, s.grad_scale ? *s.grad_scale : 1.0f};
  }

  static FLEXOPS_DEVICE void update(multi::Element<Rule>& e, const Shared& s, const Factors& f, const multi::Pointers<Rule>&, float*,
                                    bool) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &exp_avg = e.at[kExpAvg];
    if (s.grad_scale) grad /= f.grad_scale;
    const float g = grad * f.sign;
    const float mixed = exp_avg * s.beta1 + g * s.one_minus_beta1;
    const float direction = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;  // as torch.sign, but NaN stays NaN
    param = param - param * f.decay - f.lr * direction;
    exp_avg = exp_avg * s.beta2 + g * s.one_minus_beta2;
  }
};

template <Data data>
__global__ void __launch_bounds__(Rule<data>::kThreads, Rule<data>::kMinBlocks)
    lion_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<data>> launch) {
  multi::run(launch);
}

}  // namespace flexops::lion
