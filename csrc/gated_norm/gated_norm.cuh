// The kernels of the gated RMS norm. What they compute: flexops/ops/gated_norm.py.
//
// Memory bandwidth bounds them. A team of threads has a row, which is a group of a token's columns.
// A thread's first vectors are all loaded before the reduction and stay in registers, as they are
// in memory; what a row has besides is read again after it, from cache.
#pragma once

#include "common/elements.cuh"
#include "common/rows.cuh"

namespace flexops::gated_norm {

// Vectors of a thread that stay in registers, in the forward and in the backward pass.
inline constexpr int kHeld = 2, kHeldBackward = 1;
inline constexpr int kPartRows = 16;  // tokens whose part of the weight's gradient is added up

/// Threads of a block: a team, or several.
template <int Lanes>
inline constexpr int kThreads = Lanes <= 32 ? 128 : Lanes;

struct Shape {
  i64 tokens;
  int width, groups;  // columns of a group; groups of a token
  float eps;
  int norm_first;
};

FLEXOPS_DEVICE float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + quick_exp2(-1.44269504088896341f * x));
}

/// N elements of a row, which are all in it; zeros if `there` is false.
template <typename T, int N>
struct Part {
  static constexpr int M = N * sizeof(T) <= 16 ? N : 16 / sizeof(T);  // of an access
  Vec<T, M> raw[N / M] = {};

  FLEXOPS_DEVICE Part() {}
  FLEXOPS_DEVICE Part(const T* row, int at, bool there) {
#pragma unroll
    for (int k = 0; k < N / M; ++k) {
      if (there) raw[k] = load<Cache::normal>(reinterpret_cast<const Vec<T, M>*>(row + at) + k);
    }
  }
  FLEXOPS_DEVICE float operator[](int i) const { return to_float(raw[i / M].at[i % M]); }
};

template <int N, typename T>
FLEXOPS_DEVICE void write(T* row, int at, const float (&values)[N]) {
  Vec<T, N> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.at[i] = from_float<T>(values[i]);
  store<Cache::normal>(reinterpret_cast<Vec<T, N>*>(row + at), raw);
}

/// Vectors have N elements: 16 bytes of T, or 1 where rows do not allow that.
template <typename T, typename W, int Lanes, int N>
__global__ void __launch_bounds__(kThreads<Lanes>)
    gated_norm_forward(const T* x, const T* gate, const W* weight, T* out,
                       const FLEXOPS_GRID_CONSTANT Shape s) {
  constexpr int kStep = Lanes * N;
  __shared__ float shared[32];
  // The team's row. Teams behind the last row compute it again, and store nothing.
  const i64 rows = s.tokens * s.groups;
  const i64 team = static_cast<i64>(blockIdx.x) * (kThreads<Lanes> / Lanes) + threadIdx.x / Lanes;
  const i64 row = team < rows ? team : rows - 1;
  const int first = static_cast<int>(threadIdx.x) % Lanes * N;
  x += row * s.width, gate += row * s.width, out += row * s.width;
  if (weight) weight += row % s.groups * s.width;
  // First, load what the thread holds, and reduce.
  Part<T, N> a[kHeld], g[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int at = first + k * kStep;
    a[k] = Part<T, N>(x, at, at < s.width), g[k] = Part<T, N>(gate, at, at < s.width);
  }
  float sum = 0.0f;
  const auto square = [&](const Part<T, N>& values, const Part<T, N>& gates) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float u = s.norm_first ? values[i] : values[i] * gates[i] * sigmoid(gates[i]);
      sum = __fmaf_rn(u, u, sum);
    }
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) square(a[k], g[k]);
  for (int at = first + kHeld * kStep; at < s.width; at += kStep)
    square({x, at, true}, {gate, at, true});
  sum = rows::group_reduce(sum, Sum{}, 0.0f, Lanes, shared);
  const float scale = rsqrtf(sum / static_cast<float>(s.width) + s.eps);
  if (team >= rows) return;
  // Then, scale and store.
  const auto finish = [&](int at, const Part<T, N>& values, const Part<T, N>& gates) {
    const Part<W, N> w(weight, at, weight != nullptr);
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float n = values[i] * scale * (weight ? w[i] : 1.0f);
      y[i] = n * (gates[i] * sigmoid(gates[i]));
    }
    write(out, at, y);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (first + k * kStep < s.width) finish(first + k * kStep, a[k], g[k]);
  }
  for (int at = first + kHeld * kStep; at < s.width; at += kStep)
    finish(at, {x, at, true}, {gate, at, true});
}

/// Where the rows of one token begin.
template <typename T, int N>
struct Inputs {
  const T *grad, *x, *gate;
  Part<T, N> d[kHeldBackward], a[kHeldBackward], g[kHeldBackward];

  FLEXOPS_DEVICE Inputs(const T* grads, const T* xs, const T* gates, i64 offset, int first,
                        int step, int width)
      : grad(grads + offset), x(xs + offset), gate(gates + offset) {
#pragma unroll
    for (int k = 0; k < kHeldBackward; ++k) {
      const int at = first + k * step;
      d[k] = Part<T, N>(grad, at, at < width), a[k] = Part<T, N>(x, at, at < width),
      g[k] = Part<T, N>(gate, at, at < width);
    }
  }
};

/// A team has a group of columns of kPartRows tokens: their gradients, and their part of the
/// weight's.
template <typename T, typename W, int Lanes, int N>
__global__ void __launch_bounds__(kThreads<Lanes>)
    gated_norm_backward(const T* grad, const T* x, const T* gate, const W* weight, float* partial,
                        T* x_grad, T* gate_grad, const FLEXOPS_GRID_CONSTANT Shape s) {
  constexpr int kStep = Lanes * N;
  __shared__ float shared[2][32];
  const i64 teams = (s.tokens / kPartRows + 1) * s.groups;
  const i64 index = static_cast<i64>(blockIdx.x) * (kThreads<Lanes> / Lanes) + threadIdx.x / Lanes;
  const i64 team = index < teams ? index : teams - 1;
  const int first = static_cast<int>(threadIdx.x) % Lanes * N;
  const i64 begin = team / s.groups * kPartRows, group = team % s.groups;
  if (weight) weight += group * s.width;
  partial += team * s.width;
  float sums[kHeldBackward][N] = {};
  const auto offset_of = [&](int r) {  // of a token's row; behind the last, of that
    return ((begin + r < s.tokens ? begin + r : s.tokens - 1) * s.groups + group) * s.width;
  };
  Inputs<T, N> next(grad, x, gate, offset_of(0), first, kStep, s.width);
  for (int r = 0; r < kPartRows; ++r) {
    // The next token's loads are issued before this one's reduction. All teams of a warp take part
    // in all reductions; those without a token store nothing.
    const Inputs<T, N> in = next;
    const bool live = index < teams && begin + r < s.tokens;
    const i64 offset = offset_of(r);
    if (Lanes > 32 && begin + r >= s.tokens) break;
    if (r + 1 < kPartRows)
      next = Inputs<T, N>(grad, x, gate, offset_of(r + 1), first, kStep, s.width);
    // First, the sums of u * u and of u * (its normalized form's gradient).
    float squares = 0.0f, products = 0.0f;
    const auto add = [&](int at, const Part<T, N>& upstream, const Part<T, N>& values,
                         const Part<T, N>& gates) {
      const Part<W, N> w(weight, at, weight != nullptr);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float silu = gates[i] * sigmoid(gates[i]);
        const float u = s.norm_first ? values[i] : values[i] * silu;
        const float of_norm = upstream[i] * (weight ? w[i] : 1.0f) * (s.norm_first ? silu : 1.0f);
        squares = __fmaf_rn(u, u, squares), products = __fmaf_rn(u, of_norm, products);
      }
    };
#pragma unroll
    for (int k = 0; k < kHeldBackward; ++k) {
      if (first + k * kStep < s.width) add(first + k * kStep, in.d[k], in.a[k], in.g[k]);
    }
    for (int at = first + kHeldBackward * kStep; at < s.width; at += kStep)
      add(at, {in.grad, at, true}, {in.x, at, true}, {in.gate, at, true});
    // Two arrays take turns, so that no write overtakes a read.
    squares = rows::group_reduce(squares, Sum{}, 0.0f, Lanes, shared[0]);
    products = rows::group_reduce(products, Sum{}, 0.0f, Lanes, shared[1]);
    const float width = static_cast<float>(s.width);
    const float scale = rsqrtf(squares / width + s.eps);
    const float mean = products * scale * scale / width;
    // Then, the gradients; the weight's is added to `part`.
    const auto finish = [&](int at, const Part<T, N>& upstream, const Part<T, N>& values,
                            const Part<T, N>& gates, float (&part)[N]) {
      const Part<W, N> w(weight, at, weight != nullptr);
      float of_x[N], of_gate[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float half = sigmoid(gates[i]), silu = gates[i] * half;
        const float slope = half * (1.0f + gates[i] * (1.0f - half));
        const float u = s.norm_first ? values[i] : values[i] * silu;
        const float weighted = upstream[i] * (weight ? w[i] : 1.0f);
        const float of_u = scale * (weighted * (s.norm_first ? silu : 1.0f) - u * mean);
        of_x[i] = s.norm_first ? of_u : of_u * silu;
        of_gate[i] = slope * (s.norm_first ? weighted * (u * scale) : of_u * values[i]);
        part[i] += live ? upstream[i] * u * scale * (s.norm_first ? silu : 1.0f) : 0.0f;
      }
      if (!live) return;
      write(x_grad + offset, at, of_x), write(gate_grad + offset, at, of_gate);
    };
#pragma unroll
    for (int k = 0; k < kHeldBackward; ++k) {
      if (first + k * kStep < s.width)
        finish(first + k * kStep, in.d[k], in.a[k], in.g[k], sums[k]);
    }
    for (int at = first + kHeldBackward * kStep; at < s.width; at += kStep) {
      float part[N];
#pragma unroll
      for (int i = 0; i < N; ++i) part[i] = r > 0 ? partial[at + i] : 0.0f;
      finish(at, {in.grad, at, true}, {in.x, at, true}, {in.gate, at, true}, part);
      if (index < teams) {
#pragma unroll
        for (int i = 0; i < N; ++i) partial[at + i] = part[i];
      }
    }
  }
  if (index >= teams) return;
#pragma unroll
  for (int k = 0; k < kHeldBackward; ++k) {
    const int at = first + k * kStep;
    if (at >= s.width) break;
#pragma unroll
    for (int i = 0; i < N; ++i) partial[at + i] = sums[k][i];
  }
  // A part without tokens.
  if (Lanes > 32 && begin >= s.tokens) {
    for (int at = first + kHeldBackward * kStep; at < s.width; at += kStep) {
#pragma unroll
      for (int i = 0; i < N; ++i) partial[at + i] = 0.0f;
    }
  }
}

}  // namespace flexops::gated_norm
