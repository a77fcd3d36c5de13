// Adam's kernels: the formula, on the memory access of common/multi_tensor.cuh. fp32 reads 16 and
// writes 12 bytes an element.
#pragma once

#include "adam/adam_numbers.cuh"
#include "common/multi_tensor_modes.cuh"

namespace flexops::adam {

using multi::Mode;

struct RandomFactors : Factors {
  u32 key;  // of the step's random numbers
};
template <bool random>
struct FactorsOf {
  using type = Factors;
};
template <>
struct FactorsOf<true> {
  using type = RandomFactors;
};

template <Mode mode>
struct Rule : multi::RuleDefaults {
  static constexpr bool mixed = mode == Mode::mixed, copies = mixed || mode == Mode::bf16_copy,
                        random = multi::is_random(mode);
  enum { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kCopy };
  enum { kStep };  // the extra input: how many steps were made, this one included
  static constexpr multi::Data kData = multi::data_of(mode);
  // Tuned on one H200.
  static constexpr int kApart = 2;
  static constexpr int kUnroll = mode == Mode::bf16 ? 3 : 2;  // half as many bytes a vector
  // What a block does first is a third of its instructions if it has one turn.
  static constexpr int kIterations = mode == Mode::bf16 ? 2 : 1;
  static constexpr int kMinBlocks = mode == Mode::f32 || mode == Mode::bf16_copy ? 8
                                    : mode == Mode::bf16                         ? 7
                                    : mixed                                      ? 5
                                                                                 : 6;
  static constexpr int kArrays = copies ? 6 : 4, kExtras = 1, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b011111, kWrites = 0b111101,
                       kTyped = mode == Mode::bf16_grad          ? 0b000010
                                : mode == Mode::bf16_average_f32 ? 0b000011
                                : mode == Mode::bf16_copy        ? 0b100000
                                                                 : 0b111111,
                       kOptional = mode == Mode::bf16_copy ? 0b010000 : 0b110000;

  using Shared = Numbers;
  using Factors = typename FactorsOf<random>::type;

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Rule>& launch,
                                        int tensor) {
    Factors f;
    const float step = *launch.row[tensor].extra[kStep];
    f.find(s, step);
    if constexpr (random) f.key = scramble(static_cast<u32>(step));
    return f;
  }

  /// The formula, as in torch's fused Adam.
  static FLEXOPS_DEVICE void update(multi::Element<Rule>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Rule>& p, float*, bool) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &exp_avg = e.at[kExpAvg],
          &exp_avg_sq = e.at[kExpAvgSq];
    if (s.grad_scale) grad /= f.grad_scale;
    float g = grad * f.sign;
    if (f.l2 != 0.0f) g += param * f.l2;
    if (f.decay != 0.0f) param -= param * f.decay;
    exp_avg = exp_avg * s.beta1 + g * s.one_minus_beta1;
    exp_avg_sq = exp_avg_sq * s.beta2 + g * g * s.one_minus_beta2;
    float largest = exp_avg_sq;
    if constexpr (mixed) {
      if (p.array[kMaxExpAvgSq]) {
        float& seen = e.at[kMaxExpAvgSq];
        largest = seen = largest <= seen ? seen : largest;  // NaN wins
      }
    }
    if constexpr (mode == Mode::bf16) {  // rounded to 8 bits; exact ones branch for each element
      param -= f.step_size * exp_avg *
               approximate_inverse(approximate_sqrt(largest) * f.inverse_bias2 + s.eps);
    } else {
      param -= f.step_size * exp_avg / (sqrtf(largest) * f.inverse_bias2 + s.eps);
    }
    if constexpr (copies) e.at[kCopy] = param;
    if constexpr (random) {
      if (s.stochastic) {
        const u32 noise = scramble(e.index + f.key);
        multi::round_average(e, p, kExpAvg, noise);
        multi::round_average(e, p, kExpAvgSq, noise >> 16);
      }
    }
  }
};

template <Mode mode>
__global__ void __launch_bounds__(Rule<mode>::kThreads, Rule<mode>::kMinBlocks)
    adam_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<mode>> launch) {
  multi::run(launch);
}

}  // namespace flexops::adam
