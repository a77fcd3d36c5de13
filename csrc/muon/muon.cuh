// Muon's passes over lists of matrices, which are rows of multi_tensor.cuh: their memory access is
// what decides.
//
//   Measure: the buffer becomes lerp(buffer, grad); the sums of the average's squares by chunks
//   factor:  from these sums scale / norm, a block for each matrix
//   Scale:   the average, times that factor
//   Apply:   param (1 - lr decay) - lr factor step
#pragma once

#include "common/multi_tensor.cuh"

namespace flexops::muon {

using multi::Data;

struct AverageOptions {
  const float *grad_scale, *found_inf;  // the second one is not used
  float one_minus_momentum;
  bool nesterov;

  FLEXOPS_DEVICE float average(float grad, float buffer) const {
    return nesterov ? buffer + (grad - buffer) * one_minus_momentum : buffer;
  }
};

template <class Rule_>
struct Average {
  // Tuned on one H200.
  static constexpr Data kData = Data::mixed;
  static constexpr int kThreads = 128, kUnroll = 3, kIterations = 4, kMinBlocks = 8;
  static constexpr int kApart = 1, kExtras = 1, kUnscaled = -1;
  static constexpr u32 kReads = 0b11, kOptional = 0;
  using Shared = AverageOptions;
  struct Factors {
    float inverse;  // of the gradients' scale
    float factor;
  };
  static FLEXOPS_DEVICE float inverse(const Shared& s) {
    return s.grad_scale ? 1.0f / *s.grad_scale : 1.0f;
  }
};

struct Measure : Average<Measure> {
  enum { kGrad, kBuffer };
  static constexpr int kArrays = 2, kSums = 1;
  static constexpr u32 kWrites = 0b10, kTyped = 0b11;
  static constexpr bool kReverse = false;
  struct Add {
    FLEXOPS_DEVICE float operator()(float a, float b) const { return a + b; }
  };
  static FLEXOPS_DEVICE Add combiner(const Shared&) { return {}; }
  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Measure>&, int) {
    return {inverse(s), 0.0f};
  }
  static FLEXOPS_DEVICE void update(multi::Element<Measure>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Measure>&, float* sums, bool valid) {
    const float grad = e.at[kGrad] * f.inverse;
    float& buffer = e.at[kBuffer];
    buffer += (grad - buffer) * s.one_minus_momentum;
    const float average = s.average(grad, buffer);
    if (valid) sums[0] += average * average;
  }
};

struct Scale : Average<Scale> {
  enum { kGrad, kBuffer, kAverage };
  static constexpr int kArrays = 3, kSums = 0;
  static constexpr u32 kWrites = 0b100, kTyped = 0b111;
  static constexpr bool kReverse = true;  // what was read last is still in the cache
  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Scale>& launch,
                                        int tensor) {
    return {inverse(s), *launch.row[tensor].extra[0]};
  }
  static FLEXOPS_DEVICE void update(multi::Element<Scale>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Scale>&, float*, bool) {
    e.at[kAverage] = s.average(e.at[kGrad] * f.inverse, e.at[kBuffer]) * f.factor;
  }
};

struct Apply {
  enum { kParam, kStep };
  // Tuned on one H200.
  static constexpr Data kData = Data::mixed;
  static constexpr int kThreads = 128, kUnroll = 3, kIterations = 2, kMinBlocks = 8;
  static constexpr int kArrays = 2, kApart = 1, kExtras = 0, kSums = 0, kUnscaled = -1;
  static constexpr u32 kReads = 0b11, kWrites = 0b01, kTyped = 0b11, kOptional = 0;
  static constexpr bool kReverse = false;
  struct Shared {
    const float *grad_scale, *found_inf;  // not used
    const float* lr_tensor;
    float lr, decay, factor;
  };
  struct Factors {
    float keep, rate;
  };
  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Apply>&, int) {
    const float lr = s.lr_tensor ? *s.lr_tensor : s.lr;
    return {1.0f - lr * s.decay, lr * s.factor};
  }
  static FLEXOPS_DEVICE void update(multi::Element<Apply>& e, const Shared&, const Factors& f,
                                    const multi::Pointers<Apply>&, float*, bool) {
    e.at[kParam] = e.at[kParam] * f.keep - f.rate * e.at[kStep];
  }
};

template <class Rule>
__global__ void __launch_bounds__(Rule::kThreads, Rule::kMinBlocks)
    pass(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule> launch) {
  multi::run(launch);
}

struct Norms {
  static constexpr int kThreads = 256;
  const float* partials;
  float* factors;
  i64 chunks;  // of each matrix
  float scale, eps;
};

__global__ void __launch_bounds__(Norms::kThreads) factor(const FLEXOPS_GRID_CONSTANT Norms p) {
  const float* const own = p.partials + blockIdx.x * p.chunks;
  float sum = 0.0f;
  for (i64 at = threadIdx.x; at < p.chunks; at += Norms::kThreads) sum += own[at];
  __shared__ float shared[Norms::kThreads / kWarpSize];
  sum = block_reduce<Norms::kThreads>(sum, Measure::Add{}, shared);
  // NaN stays.
  const float norm = sqrtf(sum);
  if (threadIdx.x == 0) p.factors[blockIdx.x] = p.scale / (norm < p.eps ? p.eps : norm);
}

}  // namespace flexops::muon
