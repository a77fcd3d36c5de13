// Adagrad's kernel: the formula, on the memory access of common/multi_tensor.cuh. fp32 reads 12 and writes 8 bytes an element.
#pragma once

#include "common/multi_tensor.cuh"

namespace flexops::adagrad {

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_ADAGRAD_THREADS)
#define FLEXOPS_ADAGRAD_THREADS 128
#endif
#if !defined(FLEXOPS_ADAGRAD_UNROLL)
#define FLEXOPS_ADAGRAD_UNROLL 2
#endif
#if !defined(FLEXOPS_ADAGRAD_ITERATIONS)
#define FLEXOPS_ADAGRAD_ITERATIONS 1
#endif
#if !defined(FLEXOPS_ADAGRAD_LOAD)
#define FLEXOPS_ADAGRAD_LOAD normal
#endif
#if !defined(FLEXOPS_ADAGRAD_STORE)
#define FLEXOPS_ADAGRAD_STORE normal
#endif
#if !defined(FLEXOPS_ADAGRAD_APART)
#define FLEXOPS_ADAGRAD_APART 1
#endif
#if !defined(FLEXOPS_ADAGRAD_BLOCKS)
#define FLEXOPS_ADAGRAD_BLOCKS 10
#endif

/// A launch that is not general has fp32 parameters and gradients only.
template <bool general>
struct Rule {
  enum { kParam, kGrad, kSum };
  enum { kStep };  // the extra input: how many steps were made, this one included
  static constexpr bool kGeneral = general;
  static constexpr int kThreads = FLEXOPS_ADAGRAD_THREADS, kUnroll = FLEXOPS_ADAGRAD_UNROLL, kIterations = FLEXOPS_ADAGRAD_ITERATIONS;
  static constexpr int kMinBlocks = FLEXOPS_ADAGRAD_BLOCKS;
  static constexpr int kArrays = 3, kApart = FLEXOPS_ADAGRAD_APART, kExtras = 1, kSums = 0, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b111, kWrites = 0b101, kTyped = 0b011, kOptional = 0;
  static constexpr bool kReverse = false;
  static constexpr Cache kLoad = Cache::FLEXOPS_ADAGRAD_LOAD, kStore = Cache::FLEXOPS_ADAGRAD_STORE;

  struct Shared {
    const float *grad_scale, *found_inf;
    const float* lr_tensor;
    float lr, lr_decay;
    float weight_decay;
    float eps;
    bool maximize;
  };

  struct Factors {
    float lr, sign, grad_scale;
  };

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Rule>& launch, int tensor) {
    const float lr = s.lr_tensor ? *s.lr_tensor : s.lr;
    const float decayed = lr / (1.0f + (*launch.row[tensor].extra[kStep] - 1.0f) * s.lr_decay);
    return {decayed, s.maximize ? -1.0f : 1.0f, s.grad_scale ? *s.grad_scale : 1.0f};
  }

  /// The formula, as in torch's fused Adagrad.
  static FLEXOPS_DEVICE void update(multi::Element<Rule>& e, const Shared& s, const Factors& f, const multi::Pointers<Rule>&, float*,
                                    bool) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &sum = e.at[kSum];
    if (s.grad_scale) grad /= f.grad_scale;
    float g = grad * f.sign;
    if (s.weight_decay != 0.0f) g += param * s.weight_decay;
    sum += g * g;
    param -= f.lr * g / (sqrtf(sum) + s.eps);
  }
};

template <bool general>
__global__ void __launch_bounds__(Rule<general>::kThreads, Rule<general>::kMinBlocks)
    adagrad_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<general>> launch) {
  multi::run(launch);
}

}  // namespace flexops::adagrad
