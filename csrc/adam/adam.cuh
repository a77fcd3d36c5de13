// Adam's kernels: many tensors per launch, their addresses in the kernel's parameters, one block per chunk of one tensor.
//
// Memory decides: fp32 reads 16 and writes 12 bytes an element. So every access is 16 bytes wide for fp32 (8 for 16-bit data), a thread has
// all loads of kUnroll vectors in flight before the first use, and everything is marked as touched once.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/vec.cuh"

namespace flexops::adam {

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_ADAM_THREADS)
#define FLEXOPS_ADAM_THREADS 128
#endif
#if !defined(FLEXOPS_ADAM_UNROLL)
#define FLEXOPS_ADAM_UNROLL 2
#endif
#if !defined(FLEXOPS_ADAM_ITERATIONS)
#define FLEXOPS_ADAM_ITERATIONS 2
#endif
#if !defined(FLEXOPS_ADAM_BLOCKS)
#define FLEXOPS_ADAM_BLOCKS 8
#endif
#if !defined(FLEXOPS_ADAM_LOAD)
#define FLEXOPS_ADAM_LOAD streaming
#endif
#if !defined(FLEXOPS_ADAM_STORE)
#define FLEXOPS_ADAM_STORE streaming
#endif

constexpr int kThreads = FLEXOPS_ADAM_THREADS;
constexpr int kVector = 4;                                           // elements per access
constexpr int kUnroll = FLEXOPS_ADAM_UNROLL;                         // vectors that a thread works on at once
constexpr int kMinBlocks = FLEXOPS_ADAM_BLOCKS;                      // per multiprocessor: bounds the registers
constexpr int kStride = kThreads * kVector;                          // elements between a thread's vectors
constexpr int kChunk = kStride * kUnroll * FLEXOPS_ADAM_ITERATIONS;  // elements per block

/// A tensor's flags.
enum : u8 { kParamFloat = 1, kParamBf16 = 2, kGradFloat = 4, kGradBf16 = 8, kCopyFloat = 16, kCopyBf16 = 32, kAligned = 64 };

/// What all tensors of a launch share. Pointers are null where the feature is not used.
struct Shared {
  const float* lr_tensor;
  const float* grad_scale;
  const float* found_inf;
  float lr;
  float log_beta1, log_beta2;  // for 1 - beta^step = -expm1(step * log(beta)): exact to a rounding, without double arithmetic
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float eps;
  float weight_decay;
  bool decoupled, maximize;
};

/// The tensors of one launch. Tensor t owns the blocks first_chunk[t] up to first_chunk[t + 1]. A launch that is not general has fp32
/// parameters and gradients only, and neither amsgrad nor copies: fewer registers, fewer parameters, and what most people run.
template <bool kGeneral>
struct Launch {
  static constexpr int kTensorBytes = (kGeneral ? 7 : 5) * 8 + 8 + 4 + 1;
  static constexpr int kCapacity = (FLEXOPS_KERNEL_PARAMETER_BYTES - static_cast<int>(sizeof(Shared)) - 32) / kTensorBytes;
  Shared shared;
  int count;
  u32 first_chunk[kCapacity + 1];
  i64 numel[kCapacity];
  void* param[kCapacity];
  void* grad[kCapacity];
  float* exp_avg[kCapacity];
  float* exp_avg_sq[kCapacity];
  const float* step[kCapacity];
  float* max_exp_avg_sq[kGeneral ? kCapacity : 1];
  void* copy[kGeneral ? kCapacity : 1];
  u8 flags[kCapacity];
};
static_assert(sizeof(Launch<false>) <= FLEXOPS_KERNEL_PARAMETER_BYTES && sizeof(Launch<true>) <= FLEXOPS_KERNEL_PARAMETER_BYTES);

/// The steps that one launch increments.
struct Steps {
  static constexpr int kCapacity = (FLEXOPS_KERNEL_PARAMETER_BYTES - 24) / 8;
  const float* found_inf;
  int count;
  float* step[kCapacity];
};

/// Runs before `adam_kernel`, whose blocks all read the steps.
__global__ void __launch_bounds__(128) step_kernel(const FLEXOPS_GRID_CONSTANT Steps steps) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= steps.count || (steps.found_inf && *steps.found_inf != 0.0f)) return;
  *steps.step[i] += 1.0f;
}

/// The tensor that owns this block.
template <bool kGeneral>
FLEXOPS_DEVICE int find_tensor(const Launch<kGeneral>& launch) {
  int low = 0, high = launch.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (launch.first_chunk[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// What every element of a tensor shares in this step.
struct Factors {
  float step_size, inverse_bias2;
  float l2, decay;
  float sign, grad_scale;
};

FLEXOPS_DEVICE Factors make_factors(const Shared& s, const float* step_pointer) {
  const float step = *step_pointer;
  const float lr = s.lr_tensor ? *s.lr_tensor : s.lr;
  Factors f;
  f.step_size = lr / -expm1f(step * s.log_beta1);
  f.inverse_bias2 = 1.0f / sqrtf(-expm1f(step * s.log_beta2));
  f.l2 = s.decoupled ? 0.0f : s.weight_decay;
  f.decay = s.decoupled ? lr * s.weight_decay : 0.0f;
  f.sign = s.maximize ? -1.0f : 1.0f;
  f.grad_scale = s.grad_scale ? *s.grad_scale : 1.0f;
  return f;
}

/// Where one tensor lies.
struct Pointers {
  char* param;
  char* grad;
  char* exp_avg;
  char* exp_avg_sq;
  char* max_exp_avg_sq;
  char* copy;
  u8 flags;
};

template <int N>
FLEXOPS_DEVICE void read_floats(float (&out)[N], const char* base, i64 at) {
  const auto v = load<Cache::FLEXOPS_ADAM_LOAD>(reinterpret_cast<const Vec<float, N>*>(base + at * 4));
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = v.at[i];
}

template <int N>
FLEXOPS_DEVICE void write_floats(char* base, i64 at, const float (&in)[N]) {
  Vec<float, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.at[i] = in[i];
  store<Cache::FLEXOPS_ADAM_STORE>(reinterpret_cast<Vec<float, N>*>(base + at * 4), v);
}

/// fp32, bf16 or fp16, told by flags that all threads of the block share. 16-bit elements stay packed in the first half of `out` until
/// widen(), because converting them here would wait for each load before the next one is sent.
template <int N>
FLEXOPS_DEVICE void read_any(float (&out)[N], const char* base, i64 at, bool is_float) {
  if (is_float) return read_floats(out, base, at);
  const auto v = load<Cache::FLEXOPS_ADAM_LOAD>(reinterpret_cast<const Vec<u16, N>*>(base + at * 2));
  if constexpr (N == 1) {
    out[0] = bit_cast<float>(static_cast<u32>(v.at[0]));
  } else {
    const auto words = bit_cast<Vec<u32, N / 2>>(v);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) out[i] = bit_cast<float>(words.at[i]);
  }
}

template <int N>
FLEXOPS_DEVICE void widen(float (&inout)[N], bool is_float, bool is_bf16) {
  if (is_float) return;
#pragma unroll
  for (int i = N - 1; i >= 0; --i) {
    const u16 bits = static_cast<u16>(bit_cast<u32>(inout[i / 2]) >> (i % 2 * 16));
    inout[i] = is_bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
  }
}

template <int N>
FLEXOPS_DEVICE void write_any(char* base, i64 at, const float (&in)[N], bool is_float, bool is_bf16) {
  if (is_float) return write_floats(base, at, in);
  Vec<u16, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v.at[i] = is_bf16 ? from_float<bf16>(in[i]).bits : from_float<f16>(in[i]).bits;
  store<Cache::FLEXOPS_ADAM_STORE>(reinterpret_cast<Vec<u16, N>*>(base + at * 2), v);
}

/// N neighbouring elements on their way from memory and back.
template <bool kGeneral, int N>
struct Elements {
  float param[N], grad[N], exp_avg[N], exp_avg_sq[N], max_exp_avg_sq[kGeneral ? N : 1];

  FLEXOPS_DEVICE void fetch(const Pointers& from, i64 at) {
    read_any(param, from.param, at, !kGeneral || from.flags & kParamFloat);
    read_any(grad, from.grad, at, !kGeneral || from.flags & kGradFloat);
    read_floats(exp_avg, from.exp_avg, at);
    read_floats(exp_avg_sq, from.exp_avg_sq, at);
    if constexpr (kGeneral) {
      if (from.max_exp_avg_sq) read_floats(max_exp_avg_sq, from.max_exp_avg_sq, at);
    }
  }

  /// The formula, as in torch's fused Adam.
  FLEXOPS_DEVICE void update(const Shared& s, const Factors& f, u8 flags, bool amsgrad) {
    widen(param, !kGeneral || flags & kParamFloat, flags & kParamBf16);
    widen(grad, !kGeneral || flags & kGradFloat, flags & kGradBf16);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (s.grad_scale) grad[i] /= f.grad_scale;
      float g = grad[i] * f.sign;
      if (f.l2 != 0.0f) g += param[i] * f.l2;
      if (f.decay != 0.0f) param[i] -= param[i] * f.decay;
      exp_avg[i] = exp_avg[i] * s.beta1 + g * s.one_minus_beta1;
      exp_avg_sq[i] = exp_avg_sq[i] * s.beta2 + g * g * s.one_minus_beta2;
      float largest = exp_avg_sq[i];
      if constexpr (kGeneral) {
        if (amsgrad) largest = max_exp_avg_sq[i] = largest <= max_exp_avg_sq[i] ? max_exp_avg_sq[i] : largest;  // NaN wins
      }
      param[i] -= f.step_size * exp_avg[i] / (sqrtf(largest) * f.inverse_bias2 + s.eps);
    }
  }

  FLEXOPS_DEVICE void put(const Pointers& to, i64 at, bool unscaled) const {
    write_any(to.param, at, param, !kGeneral || to.flags & kParamFloat, to.flags & kParamBf16);
    if (unscaled) write_any(to.grad, at, grad, !kGeneral || to.flags & kGradFloat, to.flags & kGradBf16);
    write_floats(to.exp_avg, at, exp_avg);
    write_floats(to.exp_avg_sq, at, exp_avg_sq);
    if constexpr (kGeneral) {
      if (to.max_exp_avg_sq) write_floats(to.max_exp_avg_sq, at, max_exp_avg_sq);
      if (to.copy) write_any(to.copy, at, param, to.flags & kCopyFloat, to.flags & kCopyBf16);
    }
  }
};

/// Elements [begin, end) of one tensor.
template <bool kGeneral>
FLEXOPS_DEVICE void step_chunk(const Shared& s, const Pointers& p, const float* step, i64 begin, i64 end) {
  const i64 whole = p.flags & kAligned ? end & ~static_cast<i64>(kVector - 1) : begin;  // up to here in vectors
  Elements<kGeneral, kVector> e[kUnroll];
  i64 at = begin + threadIdx.x * kVector;
  const auto fetch = [&] {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kStride < whole) e[u].fetch(p, at + u * kStride);
    }
  };
  fetch();
  const Factors f = make_factors(s, step);  // here, so that it does not delay the first loads
  while (at < whole) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) e[u].update(s, f, p.flags, p.max_exp_avg_sq);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * kStride < whole) e[u].put(p, at + u * kStride, s.grad_scale);
    }
    at += kStride * kUnroll;
    fetch();
  }
  for (at = whole + threadIdx.x; at < end; at += kThreads) {
    Elements<kGeneral, 1> one;
    one.fetch(p, at);
    one.update(s, f, p.flags, p.max_exp_avg_sq);
    one.put(p, at, s.grad_scale);
  }
}

template <bool kGeneral>
__global__ void __launch_bounds__(kThreads, kGeneral ? kMinBlocks * 3 / 4 : kMinBlocks)
    adam_kernel(const FLEXOPS_GRID_CONSTANT Launch<kGeneral> launch) {
  if (launch.shared.found_inf && *launch.shared.found_inf != 0.0f) return;
  const int t = find_tensor(launch);
  const auto bytes = [](void* pointer) { return static_cast<char*>(pointer); };
  const Pointers p{bytes(launch.param[t]),
                   bytes(launch.grad[t]),
                   bytes(launch.exp_avg[t]),
                   bytes(launch.exp_avg_sq[t]),
                   kGeneral ? bytes(launch.max_exp_avg_sq[kGeneral ? t : 0]) : nullptr,
                   kGeneral ? bytes(launch.copy[kGeneral ? t : 0]) : nullptr,
                   launch.flags[t]};
  const i64 begin = static_cast<i64>(blockIdx.x - launch.first_chunk[t]) * kChunk;
  const i64 numel = launch.numel[t];
  step_chunk<kGeneral>(launch.shared, p, launch.step[t], begin, numel - begin > kChunk ? begin + kChunk : numel);
}

}  // namespace flexops::adam
