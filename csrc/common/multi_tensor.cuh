// Element-wise kernels over lists of tensors: many tensors per launch, their addresses in the
// kernel's parameters, one block per chunk of one tensor. An op brings a Rule; this brings memory,
// which is what decides: every access is 16 bytes wide for fp32 (8 for 16-bit data), a thread has
// all loads of kUnroll vectors in flight before the first use, and blocks are small.
//
//   template <Data data> struct Rule : RuleDefaults {
//     static constexpr Data kData = data;  // what the typed arrays hold
//     static constexpr int kThreads, kUnroll, kIterations, kMinBlocks;
//     static constexpr int kApart;  // as kUnroll, for tensors that are not aligned
//     static constexpr int kArrays;
//     static constexpr int kExtras;  // small inputs for each tensor, by pointer
//     static constexpr int kSums;    // numbers reduced over the tensor
//     // Which arrays, as bits; those that are not typed hold fp32.
//     static constexpr u32 kReads, kWrites, kTyped, kOptional;
//     static constexpr int kUnscaled;  // the array also written with shared.grad_scale, or -1
//     static constexpr bool kReverse;  // last chunk first: the pass before left it in the cache
//     struct Shared { const float *grad_scale, *found_inf; ... };  // of all tensors; null: unused
//     struct Factors { ... };                                      // of all elements of a tensor
//     static Factors prepare(const Shared&, const Launch<Rule>&, int tensor);
//     static void update(Element<Rule>& x, const Shared&, const Factors&, const Pointers<Rule>&,
//                        float* sums, bool valid);
//   };
#pragma once

#include "common/device.cuh"
#include "common/elements.cuh"
#include "common/reduce.cuh"

namespace flexops::multi {

inline constexpr int kVector = 4;  // elements per access

/// What a rule's typed arrays hold: all of them fp32, or bf16, and no optional one is there; or
/// each what its tensor's flags say.
enum class Data { f32, bf16, mixed };

/// What most rules have alike.
struct RuleDefaults {
  static constexpr int kThreads = 128, kIterations = 1, kApart = 1, kSums = 0, kUnscaled = -1;
  static constexpr u32 kOptional = 0;
  static constexpr bool kReverse = false;
};

/// The numbers of every optimizer's step; pointers null where not used.
struct StepNumbers {
  const float *grad_scale, *found_inf, *lr_tensor;
  float lr, weight_decay;
  bool maximize;

  FLEXOPS_DEVICE float rate() const { return lr_tensor ? *lr_tensor : lr; }
  FLEXOPS_DEVICE float sign() const { return maximize ? -1.0f : 1.0f; }
  FLEXOPS_DEVICE float scale() const { return grad_scale ? *grad_scale : 1.0f; }
};

/// Of steps by moving averages.
struct AverageNumbers : StepNumbers {
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  bool stochastic;  // averages in bf16 are rounded stochastically
};

template <class Rule>
inline constexpr int kStride = Rule::kThreads * kVector;  // elements between a thread's vectors
template <class Rule>
inline constexpr int kChunk =
    kStride<Rule> * Rule::kUnroll * Rule::kIterations;  // elements per block

/// A tensor's flags: two bits for each typed array, in order, and whether vector accesses are
/// possible.
inline constexpr u16 kFloat = 1, kBf16 = 2, kAligned = 0x8000;

template <class Rule>
__host__ __device__ constexpr bool is_typed(int k) {
  return (Rule::kTyped >> k & 1) != 0;
}
/// The place of array k's bits among the flags.
template <class Rule>
__host__ __device__ constexpr int type_shift(int k) {
  int shift = 0;
  for (int i = 0; i < k; ++i) shift += is_typed<Rule>(i) ? 2 : 0;
  return shift;
}

/// The tensors of one launch. Tensor t owns the blocks first_chunk[t] up to first_chunk[t + 1].
/// Blocks are short, so that what each does first counts: what it reads of its tensor lies
/// together, because constant memory is cached by lines, and hints spare it most of the search for
/// the tensor. (AdamW with 8-bit states on an H200: 9 % for 1000 tensors of 2^18 elements, 15 % for
/// 2000 of 40000.)
template <class Rule>
struct Launch {
  using Shared = typename Rule::Shared;
  struct Row {
    void* array[Rule::kArrays];
    const float* extra[Rule::kExtras > 0 ? Rule::kExtras : 1];
    u64 numel_and_flags;  // flags in the low 16 bits
  };
  static constexpr int kHints = FLEXOPS_KERNEL_PARAMETER_BYTES / 128;
  static constexpr int kTensorBytes = static_cast<int>(sizeof(Row)) + 4;
  static constexpr int kCapacity =
      (FLEXOPS_KERNEL_PARAMETER_BYTES - static_cast<int>(sizeof(Shared)) - 2 * kHints - 32) /
      kTensorBytes;
  Shared shared;
  int count;
  int hint_shift;        // a hint for every 2^hint_shift blocks:
  u16 hint[kHints + 1];  // the tensor that owns the first of them
  u32 first_chunk[kCapacity + 1];
  Row row[kCapacity];
};

/// The step counts that one launch increments, before the launches that read them.
struct Steps {
  static constexpr int kThreads = 128;
  static constexpr int kCapacity = (FLEXOPS_KERNEL_PARAMETER_BYTES - 24) / 8;
  const float* found_inf;
  int count;
  float* step[kCapacity];
};

__global__ void __launch_bounds__(Steps::kThreads)
    step_kernel(const FLEXOPS_GRID_CONSTANT Steps steps) {
  const int i = blockIdx.x * Steps::kThreads + threadIdx.x;
  if (i >= steps.count || (steps.found_inf && *steps.found_inf != 0.0f)) return;
  *steps.step[i] += 1.0f;
}

/// The tensor that owns a block.
template <class Rule>
FLEXOPS_DEVICE int find_tensor(const Launch<Rule>& launch, u32 block) {
  if (launch.count == 1) return 0;
  const u32 slot = block >> launch.hint_shift;
  int low = launch.hint[slot], high = launch.hint[slot + 1] + 1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (launch.first_chunk[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Where one tensor lies.
template <class Rule>
struct Pointers {
  char* array[Rule::kArrays];
  i64 numel;
  u16 flags;

  FLEXOPS_DEVICE explicit Pointers(const typename Launch<Rule>::Row& row)
      : numel(static_cast<i64>(row.numel_and_flags >> 16)),
        flags(static_cast<u16>(row.numel_and_flags)) {
#pragma unroll
    for (int k = 0; k < Rule::kArrays; ++k) array[k] = static_cast<char*>(row.array[k]);
  }

  FLEXOPS_DEVICE bool has(int k) const {
    return (Rule::kOptional >> k & 1) == 0 || (Rule::kData == Data::mixed && array[k]);
  }
  FLEXOPS_DEVICE bool is_float(int k) const {
    return !is_typed<Rule>(k) || Rule::kData == Data::f32 ||
           (Rule::kData == Data::mixed && is_flagged(k, kFloat));
  }
  FLEXOPS_DEVICE bool is_bf16(int k) const {
    return is_typed<Rule>(k) &&
           (Rule::kData == Data::bf16 || (Rule::kData == Data::mixed && is_flagged(k, kBf16)));
  }

 private:
  FLEXOPS_DEVICE bool is_flagged(int k, u16 flag) const {
    return (flags >> type_shift<Rule>(k) & flag) != 0;
  }
};

/// One element of every array, as the rule sees it.
template <class Rule>
struct Element {
  float at[Rule::kArrays];
  u32 index;  // in its tensor, modulo 2^32
};

/// kVector elements of every array on their way from memory and back: neighbours (step 1), or
/// `step` apart for tensors that are not aligned, where they are read one by one but each access of
/// the warp is still of neighbours.
template <class Rule, int kStep>
struct Elements {
  static constexpr bool kPacked = kStep == 1;
  float x[Rule::kArrays][kVector];

  /// 16-bit elements stay as they are, two in a word if packed, until widen(): converting them here
  /// would wait for each load before the next one is sent.
  FLEXOPS_DEVICE void fetch(const Pointers<Rule>& from, i64 at, i64 end) {
#pragma unroll
    for (int k = 0; k < Rule::kArrays; ++k) {
      if ((Rule::kReads >> k & 1) == 0 || !from.has(k)) continue;
      const char* base = from.array[k];
      if constexpr (kPacked) {
        if (from.is_float(k)) {
          const auto v = load<float, kVector, Cache::normal>(base, at);
#pragma unroll
          for (int i = 0; i < kVector; ++i) x[k][i] = v.at[i];
        } else {
          const auto v =
              bit_cast<Vec<float, kVector / 2>>(load<bf16, kVector, Cache::normal>(base, at));
#pragma unroll
          for (int i = 0; i < kVector / 2; ++i) x[k][i] = v.at[i];
        }
      } else if (from.is_float(k)) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (at + i * kStep < end)
            x[k][i] = load<Cache::normal>(reinterpret_cast<const float*>(base) + at + i * kStep);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (at + i * kStep < end) {
            x[k][i] = bit_cast<float>(static_cast<u32>(
                load<Cache::normal>(reinterpret_cast<const u16*>(base) + at + i * kStep)));
          }
        }
      }
    }
  }

  FLEXOPS_DEVICE void widen(const Pointers<Rule>& from) {
#pragma unroll
    for (int k = 0; k < Rule::kArrays; ++k) {
      if ((Rule::kReads >> k & 1) == 0 || from.is_float(k)) continue;
      if (from.is_bf16(k)) {
        widen_halves<bf16>(x[k]);
      } else {
        widen_halves<f16>(x[k]);
      }
    }
  }

  FLEXOPS_DEVICE void update(const typename Rule::Shared& s, const typename Rule::Factors& f,
                             const Pointers<Rule>& p, float* sums, i64 at, i64 end) {
    widen(p);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      Element<Rule> e;
      e.index = static_cast<u32>(at + i * kStep);
#pragma unroll
      for (int k = 0; k < Rule::kArrays; ++k) e.at[k] = x[k][i];
      Rule::update(e, s, f, p, sums, at + i * kStep < end);
#pragma unroll
      for (int k = 0; k < Rule::kArrays; ++k) x[k][i] = e.at[k];
    }
  }

  FLEXOPS_DEVICE void put(const Pointers<Rule>& to, i64 at, i64 end, bool unscaled) const {
#pragma unroll
    for (int k = 0; k < Rule::kArrays; ++k) {
      const bool written = (Rule::kWrites >> k & 1) != 0 || (k == Rule::kUnscaled && unscaled);
      if (!written || !to.has(k)) continue;
      char* base = to.array[k];
      if (to.is_float(k)) {
        put_as<float>(base, x[k], at, end);
      } else if (to.is_bf16(k)) {
        put_as<bf16>(base, x[k], at, end);
      } else {
        put_as<f16>(base, x[k], at, end);
      }
    }
  }

 private:
  template <typename T>
  static FLEXOPS_DEVICE void widen_halves(float (&values)[kVector]) {
#pragma unroll
    for (int i = kVector - 1; i >= 0; --i)
      values[i] = kPacked ? half_of<T>(bit_cast<u32>(values[i / 2]), i % 2)
                          : half_of<T>(bit_cast<u32>(values[i]), 0);
  }
  template <typename T>
  static FLEXOPS_DEVICE void put_as(char* base, const float (&values)[kVector], i64 at, i64 end) {
    if constexpr (kPacked) {
      store<T, Cache::normal>(base, at, values);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (at + i * kStep < end)
          store<Cache::normal>(reinterpret_cast<Vec<T, 1>*>(base) + at + i * kStep,
                               {from_float<T>(values[i])});
      }
    }
  }
};

/// Elements [begin, end) of one tensor.
template <class Rule>
FLEXOPS_DEVICE void run_chunk(const Launch<Rule>& launch, int tensor, const Pointers<Rule>& p,
                              i64 begin, i64 end, float* sums) {
  constexpr int kUnroll = Rule::kUnroll, kStep = kStride<Rule>;
  const auto& s = launch.shared;
  const i64 whole =
      p.flags & kAligned ? end & ~static_cast<i64>(kVector - 1) : begin;  // up to here in vectors
  Elements<Rule, 1> e[kUnroll];
  i64 at = begin + threadIdx.x * kVector;
  const auto fetch = [&] {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kStep < whole) e[u].fetch(p, at + u * kStep, whole);
    }
  };
  fetch();
  const auto f =
      Rule::prepare(s, launch, tensor);  // here, so that it does not delay the first loads
  while (at < whole) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) e[u].update(s, f, p, sums, at + u * kStep, whole);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kStep < whole) e[u].put(p, at + u * kStep, whole, s.grad_scale);
    }
    at += kStep * kUnroll;
    fetch();
  }
  constexpr int kApart = Rule::kApart;
  for (at = whole + threadIdx.x; at < end; at += kStep * kApart) {
    Elements<Rule, Rule::kThreads> a[kApart];
#pragma unroll
    for (int u = 0; u < kApart; ++u) a[u].fetch(p, at + u * kStep, end);
#pragma unroll
    for (int u = 0; u < kApart; ++u) a[u].update(s, f, p, sums, at + u * kStep, end);
#pragma unroll
    for (int u = 0; u < kApart; ++u) a[u].put(p, at + u * kStep, end, s.grad_scale);
  }
}

/// What a kernel of the rule does. The sums of a chunk go to where the tensor's last extra points,
/// kSums of them for each chunk.
template <class Rule>
FLEXOPS_DEVICE void run(const Launch<Rule>& launch) {
  if (launch.shared.found_inf && *launch.shared.found_inf != 0.0f) return;
  const u32 block = Rule::kReverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int t = find_tensor(launch, block);
  const Pointers<Rule> p(launch.row[t]);
  const i64 chunk = block - launch.first_chunk[t], begin = chunk * kChunk<Rule>;
  float sums[Rule::kSums > 0 ? Rule::kSums : 1] = {};
  run_chunk(launch, t, p, begin, p.numel - begin > kChunk<Rule> ? begin + kChunk<Rule> : p.numel,
            sums);
  if constexpr (Rule::kSums > 0) {
    __shared__ float shared[Rule::kSums][Rule::kThreads / kWarpSize];
#pragma unroll
    for (int j = 0; j < Rule::kSums; ++j) {
      const float sum =
          block_reduce<Rule::kThreads>(sums[j], Rule::combiner(launch.shared), shared[j]);
      if (threadIdx.x == 0)
        const_cast<float*>(launch.row[t].extra[Rule::kExtras - 1])[chunk * Rule::kSums + j] = sum;
    }
  }
}

}  // namespace flexops::multi
