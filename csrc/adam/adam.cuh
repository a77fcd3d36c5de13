// Adam's kernels: the formula, on the memory access of common/multi_tensor.cuh. fp32 reads 16 and writes 12 bytes an element.
#pragma once

#include "adam/adam_numbers.cuh"
#include "common/multi_tensor.cuh"
#include "common/stochastic.h"

namespace flexops::adam {

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_ADAM_THREADS)
#define FLEXOPS_ADAM_THREADS 128
#endif
#if !defined(FLEXOPS_ADAM_UNROLL)
#define FLEXOPS_ADAM_UNROLL 2
#endif
#if !defined(FLEXOPS_ADAM_ITERATIONS)
#define FLEXOPS_ADAM_ITERATIONS 1
#endif
#if !defined(FLEXOPS_ADAM_APART)
#define FLEXOPS_ADAM_APART 2
#endif
#if !defined(FLEXOPS_ADAM_BLOCKS)
#define FLEXOPS_ADAM_BLOCKS 8
#endif
#if !defined(FLEXOPS_ADAM_LOAD)
#define FLEXOPS_ADAM_LOAD normal
#endif
#if !defined(FLEXOPS_ADAM_STORE)
#define FLEXOPS_ADAM_STORE normal
#endif

/// A plain launch has fp32 parameters, gradients and states only, and neither amsgrad nor copies: fewer registers, fewer parameters, and
/// what most people run. A general one has all but states of 16 bits, which narrow ones have, too. One of bf16 is a plain one with nothing
/// but bf16: asking for each element's type cost a narrow one three times what its memory does (1.24e9 elements on an
/// H200: 15.3 ms, and 4.2 like this).
enum class Mode { plain, general, bf16, narrow };

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
struct Rule {
  static constexpr bool general = mode == Mode::general || mode == Mode::narrow, random = mode == Mode::bf16 || mode == Mode::narrow;
  enum { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kCopy };
  enum { kStep };  // the extra input: how many steps were made, this one included
  static constexpr bool kGeneral = general;
  static constexpr int kThreads = FLEXOPS_ADAM_THREADS, kIterations = FLEXOPS_ADAM_ITERATIONS;
  static constexpr int kUnroll = FLEXOPS_ADAM_UNROLL + (mode == Mode::bf16 ? 1 : 0);  // half as many bytes a vector
  static constexpr int kMinBlocks = mode == Mode::plain ? FLEXOPS_ADAM_BLOCKS : FLEXOPS_ADAM_BLOCKS * 3 / 4;
  static constexpr int kArrays = general ? 6 : 4, kApart = FLEXOPS_ADAM_APART, kExtras = 1, kSums = 0, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b011111, kWrites = 0b111101, kTyped = random ? 0b111111 : 0b100011, kOptional = 0b110000;
  static constexpr bool kReverse = false;
  static constexpr Cache kLoad = Cache::FLEXOPS_ADAM_LOAD, kStore = Cache::FLEXOPS_ADAM_STORE;

  using Shared = Numbers;
  using Factors = typename FactorsOf<random>::type;

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Rule>& launch, int tensor) {
    Factors f;
    const float step = *launch.row[tensor].extra[kStep];
    f.find(s, step);
    if constexpr (random) f.key = scramble(static_cast<u32>(step));
    return f;
  }

  /// The formula, as in torch's fused Adam.
  static FLEXOPS_DEVICE void update(multi::Element<Rule>& e, const Shared& s, const Factors& f, const multi::Pointers<Rule>& p, float*,
                                    bool) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &exp_avg = e.at[kExpAvg], &exp_avg_sq = e.at[kExpAvgSq];
    if (s.grad_scale) grad /= f.grad_scale;
    float g = grad * f.sign;
    if (f.l2 != 0.0f) g += param * f.l2;
    if (f.decay != 0.0f) param -= param * f.decay;
    exp_avg = exp_avg * s.beta1 + g * s.one_minus_beta1;
    exp_avg_sq = exp_avg_sq * s.beta2 + g * g * s.one_minus_beta2;
    float largest = exp_avg_sq;
    if constexpr (general) {
      if (p.array[kMaxExpAvgSq]) {
        float& seen = e.at[kMaxExpAvgSq];
        largest = seen = largest <= seen ? seen : largest;  // NaN wins
      }
    }
    param -= f.step_size * exp_avg / (sqrtf(largest) * f.inverse_bias2 + s.eps);
    if constexpr (general) e.at[kCopy] = param;
    if constexpr (random) {
      if (s.stochastic) {  // what is left to put() to round is exact then; other types of state are not touched
        const u32 noise = scramble(e.index + f.key);
        if (p.is_bf16(kExpAvg)) exp_avg = bit_cast<float>(round_to_bf16(bit_cast<u32>(exp_avg), noise & 0xffffu));
        if (p.is_bf16(kExpAvgSq)) exp_avg_sq = bit_cast<float>(round_to_bf16(bit_cast<u32>(exp_avg_sq), noise >> 16));
      }
    }
  }
};

}  // namespace flexops::adam

template <>
inline constexpr bool flexops::multi::kAllBf16<flexops::adam::Rule<flexops::adam::Mode::bf16>> = true;

namespace flexops::adam {

template <Mode mode>
__global__ void __launch_bounds__(Rule<mode>::kThreads, Rule<mode>::kMinBlocks)
    adam_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<mode>> launch) {
  multi::run(launch);
}

}  // namespace flexops::adam
