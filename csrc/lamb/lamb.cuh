// LAMB's kernels: the formula, on the memory access of common/multi_tensor.cuh. fp32 moves 24 bytes
// an element in the first pass, 16 in the second; norms are reduced in two stages, so that the
// order of additions is always the same.
#pragma once

#include "adam/adam_numbers.cuh"
#include "common/multi_tensor_modes.cuh"

namespace flexops::lamb {

using multi::Mode;

// Tuned on one H200.

struct Shared : adam::Numbers {
  bool adapt;
};

struct Bias {
  float inverse1, inverse2;

  FLEXOPS_DEVICE Bias(const Shared& s, float step)
      : inverse1(1.0f / adam::bias(s.log_beta1, step)),
        inverse2(1.0f / sqrtf(adam::bias(s.log_beta2, step))) {}

  /// The update before the trust ratio.
  FLEXOPS_DEVICE float update(const Shared& s, float param, float exp_avg, float exp_avg_sq) const {
    return exp_avg * inverse1 / (sqrtf(exp_avg_sq) * inverse2 + s.eps) + s.weight_decay * param;
  }
};

/// First pass.
template <Mode mode>
struct Moments : multi::RuleDefaults {
  static constexpr bool random = multi::is_random(mode);
  enum { kParam, kGrad, kExpAvg, kExpAvgSq };
  enum { kStep, kPartials };
  static constexpr multi::Data kData = multi::data_of(mode);
  static constexpr int kUnroll = 2, kIterations = 4;
  static constexpr int kMinBlocks = mode == Mode::f32 ? 8 : 6;
  static constexpr int kArrays = 4, kExtras = 2, kSums = 2, kUnscaled = kGrad;
  static constexpr u32 kReads = 0b1111, kWrites = 0b1100,
                       kTyped = mode == Mode::bf16_average_f32 ? 0b0011 : 0b1111;
  using Shared = lamb::Shared;

  struct Factors {
    Bias bias;
    float sign, grad_scale;
    u32 key;  // of the step's random numbers
  };

  static FLEXOPS_DEVICE Sum combiner(const Shared&) { return {}; }

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Moments>& launch,
                                        int tensor) {
    const float* step = launch.row[tensor].extra[kStep];
    return {Bias(s, *step), s.sign(), s.scale(), random ? multi::key_of(step) : 0};
  }

  static FLEXOPS_DEVICE void update(multi::Element<Moments>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Moments>& p, float* sums, bool valid) {
    float &param = e.at[kParam], &grad = e.at[kGrad], &exp_avg = e.at[kExpAvg],
          &exp_avg_sq = e.at[kExpAvgSq];
    if (s.grad_scale) grad /= f.grad_scale;
    const float g = grad * f.sign;
    exp_avg = exp_avg * s.beta1 + g * s.one_minus_beta1;
    exp_avg_sq = exp_avg_sq * s.beta2 + g * g * s.one_minus_beta2;
    const float update = f.bias.update(s, param, exp_avg, exp_avg_sq);
    sums[0] += valid ? param * param : 0.0f;
    sums[1] += valid ? update * update : 0.0f;
    if constexpr (random) {
      if (s.stochastic) {
        const u32 noise = scramble(e.index + f.key);
        multi::round_average(e, p, kExpAvg, noise);
        multi::round_average(e, p, kExpAvgSq, noise >> 16);
      }
    }
  }
};

/// Second pass: backwards, because what the first wrote last is still in the cache.
template <Mode mode>
struct Apply : multi::RuleDefaults {
  enum { kParam, kExpAvg, kExpAvgSq };
  enum { kStep, kNorms };
  static constexpr multi::Data kData = multi::data_of(mode);
  static constexpr int kUnroll = 2, kMinBlocks = 8;
  static constexpr int kArrays = 3, kExtras = 2;
  static constexpr u32 kReads = 0b111, kWrites = 0b001,
                       kTyped = mode == Mode::bf16_average_f32 ? 0b001 : 0b111;
  static constexpr bool kReverse = true;
  using Shared = lamb::Shared;

  struct Factors {
    Bias bias;
    float rate;
  };

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<Apply>& launch,
                                        int tensor) {
    const float *norms = launch.row[tensor].extra[kNorms], param = sqrtf(norms[0]),
                update = sqrtf(norms[1]);
    const float lr = s.rate();
    return {Bias(s, *launch.row[tensor].extra[kStep]),
            s.adapt && param > 0.0f && update > 0.0f ? lr * (param / update) : lr};
  }

  static FLEXOPS_DEVICE void update(multi::Element<Apply>& e, const Shared& s, const Factors& f,
                                    const multi::Pointers<Apply>&, float*, bool) {
    e.at[kParam] -= f.rate * f.bias.update(s, e.at[kParam], e.at[kExpAvg], e.at[kExpAvgSq]);
  }
};

/// The tensors whose chunks' sums one launch adds up: tensor t owns the chunks first_chunk[t] up to
/// first_chunk[t + 1].
struct Segments {
  static constexpr int kThreads = 128;
  static constexpr int kCapacity = (FLEXOPS_KERNEL_PARAMETER_BYTES - 40) / 4;
  const float* partials;
  float* norms;
  const float* found_inf;
  int count;
  u32 first_chunk[kCapacity + 1];
};
static_assert(sizeof(Segments) <= FLEXOPS_KERNEL_PARAMETER_BYTES);

template <Mode mode>
__global__ void __launch_bounds__(Moments<mode>::kThreads, Moments<mode>::kMinBlocks)
    moments_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Moments<mode>> launch) {
  multi::run(launch);
}

/// One block for each tensor.
__global__ void __launch_bounds__(Segments::kThreads)
    norms_kernel(const FLEXOPS_GRID_CONSTANT Segments s) {
  const bool skip = s.found_inf && *s.found_inf != 0.0f;  // the first pass has left no sums
  const int t = blockIdx.x;
  const u32 end = skip ? 0 : s.first_chunk[t + 1];
  // Add up the tensor's chunks.
  float param = 0.0f, update = 0.0f;
  for (u32 chunk = s.first_chunk[t] + threadIdx.x; chunk < end; chunk += Segments::kThreads) {
    const auto pair =
        load<Cache::normal>(reinterpret_cast<const Vec<float, 2>*>(s.partials) + chunk);
    param += pair.at[0];
    update += pair.at[1];
  }
  // Reduce over the block, and write both norms.
  __shared__ float shared[2][Segments::kThreads / kWarpSize];
  param = block_reduce<Segments::kThreads>(param, Sum{}, shared[0]);
  update = block_reduce<Segments::kThreads>(update, Sum{}, shared[1]);
  if (threadIdx.x != 0) return;
  s.norms[2 * t] = param;
  s.norms[2 * t + 1] = update;
}

template <Mode mode>
__global__ void __launch_bounds__(Apply<mode>::kThreads, Apply<mode>::kMinBlocks)
    apply_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Apply<mode>> launch) {
  multi::run(launch);
}

}  // namespace flexops::lamb
