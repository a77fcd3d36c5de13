// The gradients' norm in two stages, so that the order of additions is always the same: each block
// reduces a chunk, then one block reduces what they found. And clipping by a norm that is on the
// device.
#pragma once

#include "common/multi_tensor.cuh"

namespace flexops::grad_norm {

using multi::Data;

// Tuned on one H200.

/// The larger; NaN if either is one.
struct NanMax {
  FLEXOPS_DEVICE float operator()(float a, float b) const {
    return !(a <= b) ? (b != b ? b : a) : b;
  }
};

/// Two's norm, or (kTwo = false) any other: the p-th powers' sum or, if it is infinite, the largest
/// magnitude.
template <bool two>
struct NormRule : multi::RuleDefaults {
  static constexpr Data kData = Data::mixed;
  // Powers are much code, and do best with many threads. Chunks are equally long: the launchers
  // count them by one of both rules.
  static constexpr int kUnroll = two ? 8 : 1;
  static constexpr int kIterations = 32 / kUnroll;
  static constexpr int kMinBlocks = 10;
  static constexpr int kArrays = 1, kExtras = 1, kSums = 1;
  static constexpr u32 kReads = 1, kWrites = 0, kTyped = 1;

  struct Shared {
    const float *grad_scale, *found_inf;
    float power;
    bool infinite;
  };
  struct Factors {};

  /// Adds, or takes the larger.
  struct Combine {
    bool infinite;
    FLEXOPS_DEVICE float operator()(float a, float b) const {
      return !two && infinite ? NanMax{}(a, b) : a + b;
    }
  };
  static FLEXOPS_DEVICE Combine combiner(const Shared& s) { return {s.infinite}; }

  static FLEXOPS_DEVICE Factors prepare(const Shared&, const multi::Launch<NormRule>&, int) {
    return {};
  }

  static FLEXOPS_DEVICE void update(multi::Element<NormRule>& e, const Shared& s, const Factors&,
                                    const multi::Pointers<NormRule>&, float* sums, bool valid) {
    const float magnitude = fabsf(e.at[0]);
    if (!valid) return;
    if constexpr (two) {
      sums[0] += magnitude * magnitude;
    } else if (s.infinite) {
      sums[0] = NanMax{}(sums[0], magnitude);
    } else {
      sums[0] += s.power == 1.0f ? magnitude : powf(magnitude, s.power);
    }
  }
};

struct Clip {
  const float *grad_scale, *found_inf;
  const float* total_norm;
  float max_norm;

  /// As torch computes it: NaN for a NaN norm, 0 for an infinite one.
  FLEXOPS_DEVICE float factor() const {
    const float raw = max_norm / (*total_norm + 1e-6f);
    return raw > 1.0f ? 1.0f : raw;
  }
};

/// Gradients of 16 bits need more vectors in flight.
template <Data data>
struct ClipRule : multi::RuleDefaults {
  static constexpr Data kData = data;
  static constexpr int kUnroll = data == Data::f32 ? 2 : 4, kMinBlocks = 12;
  static constexpr int kArrays = 1, kExtras = 0;
  static constexpr u32 kReads = 1, kWrites = 1, kTyped = 1;
  static constexpr bool kReverse = true;  // what the norm read last is still in the cache
  using Shared = Clip;

  struct Factors {
    float factor;
  };

  static FLEXOPS_DEVICE Factors prepare(const Shared& s, const multi::Launch<ClipRule>&, int) {
    return {s.factor()};
  }

  static FLEXOPS_DEVICE void update(multi::Element<ClipRule>& e, const Shared&, const Factors& f,
                                    const multi::Pointers<ClipRule>&, float*, bool) {
    e.at[0] *= f.factor;
  }
};

template <bool two>
__global__ void __launch_bounds__(NormRule<two>::kThreads, NormRule<two>::kMinBlocks)
    norm_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<NormRule<two>> launch) {
  multi::run(launch);
}

template <Data data>
__global__ void __launch_bounds__(ClipRule<data>::kThreads, ClipRule<data>::kMinBlocks)
    clip_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<ClipRule<data>> launch) {
  if (launch.shared.factor() == 1.0f) return;
  multi::run(launch);
}

/// The last stage's parameters.
struct Final {
  static constexpr int kThreads = 1024;
  const float* partials;
  i64 count;
  float* norm;
  float power;
  int kind;  // 0: two, 1: infinity, 2: other
};

/// One block.
__global__ void __launch_bounds__(Final::kThreads)
    final_kernel(const FLEXOPS_GRID_CONSTANT Final f) {
  constexpr int kUnroll = 8;
  const NormRule<false>::Combine combine{f.kind == 1};
  // Combine the partial results, a part in each thread.
  float value = 0.0f;
  for (i64 at = threadIdx.x; at < f.count; at += Final::kThreads * kUnroll) {
    float read[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      read[u] = at + u * Final::kThreads < f.count ? f.partials[at + u * Final::kThreads] : 0.0f;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) value = combine(value, read[u]);
  }
  // Reduce over the block, and write the norm.
  __shared__ float shared[Final::kThreads / kWarpSize];
  value = block_reduce<Final::kThreads>(value, combine, shared);
  if (threadIdx.x != 0) return;
  *f.norm = f.kind == 0                      ? sqrtf(value)
            : f.kind == 1 || f.power == 1.0f ? value
                                             : powf(value, 1.0f / f.power);
}

}  // namespace flexops::grad_norm
