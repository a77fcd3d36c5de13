// Lion's kernel: the formula, on the memory access of common/multi_tensor.cuh. fp32 reads 12 and
// writes 8 bytes an element.
#pragma once

#include "common/multi_tensor_modes.cuh"

namespace flexops::lion {

using multi::Mode;

using Shared = multi::AverageNumbers;

template <Mode mode>
struct Rule : multi::RuleDefaults {
  static constexpr bool random = multi::is_random(mode);
  enum { kParam, kGrad, kExpAvg };
  enum {
    kStep
  };  // the extra input where averages may be of 16 bits: how many steps were made, this one
      // included, or null
  static constexpr multi::Data kData = multi::data_of(mode);
  // Tuned on one H200.
  static constexpr int kUnroll = mode == Mode::bf16 ? 3 : 2;  // half as many bytes a vector
  static constexpr int kMinBlocks = 8;
  static constexpr int kArrays = 3, kExtras = random ? 1 : 0, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b111, kWrites = 0b101,
                       kTyped = mode == Mode::bf16_average_f32 ? 0b011 : 0b111;
  using Shared = lion::Shared;

  struct Factors {
    float lr, decay, sign, grad_scale;
    u32 key;  // of the step's random numbers
  };

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Rule>& launch,
                                        int tensor) {
    const float lr = s.rate();
    Factors f = {lr, lr * s.weight_decay, s.sign(), s.scale(), 0};
    if constexpr (random) f.key = multi::key_of(launch.row[tensor].extra[kStep]);
    return f;
  }

  static FLEXOPS_DEVICE void update(multi::Element<Rule>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Rule>& p, float*, bool) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &exp_avg = e.at[kExpAvg];
    if (s.grad_scale) grad /= f.grad_scale;
    const float g = grad * f.sign;
    const float mixed = exp_avg * s.beta1 + g * s.one_minus_beta1;
    const float direction = mixed > 0.0f   ? 1.0f
                            : mixed < 0.0f ? -1.0f
                                           : mixed;  // as torch.sign, but NaN stays NaN
    param = param - param * f.decay - f.lr * direction;
    exp_avg = exp_avg * s.beta2 + g * s.one_minus_beta2;
    if constexpr (random) {
      if (s.stochastic) multi::round_average(e, p, kExpAvg, scramble(e.index + f.key));
    }
  }
};

template <Mode mode>
__global__ void __launch_bounds__(Rule<mode>::kThreads, Rule<mode>::kMinBlocks)
    lion_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<mode>> launch) {
  multi::run(launch);
}

}  // namespace flexops::lion
