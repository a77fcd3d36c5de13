// The kernels of the gated RMS norm. What they compute: flexops/ops/gated_norm.py.
//
// Memory bandwidth bounds them. A team of threads has a row, which is a group of a token's columns.
// A thread's first vectors are all loaded before the reduction and stay in registers; what a row
// has besides is read again after it, from cache.
#pragma once

#include "common/map_elements.cuh"
#include "common/rows.cuh"

namespace flexops::gated_norm {

inline constexpr int kHeld = 2;       // vectors of a thread that stay in registers
inline constexpr int kPartRows = 16;  // tokens whose part of the weight's gradient is added up

/// Threads of a block: a team, or several.
template <int Lanes>
inline constexpr int kThreads = Lanes < 128 ? 128 : Lanes;

struct Shape {
  i64 tokens;
  int width, groups;  // columns of a group; groups of a token
  float eps;
  int norm_first;
};

FLEXOPS_DEVICE float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + quick_exp2(-1.44269504088896341f * x));
}

/// What is normalized.
FLEXOPS_DEVICE float normalized(float x, float gate, int norm_first) {
  return norm_first ? x : x * gate * sigmoid(gate);
}

template <int N, typename W>
FLEXOPS_DEVICE Vec<float, N> weights(const W* weight, int group, int at, int width) {
  if (weight) return load_up_to<N>(weight + static_cast<i64>(group) * width, at, width);
  Vec<float, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.at[i] = 1.0f;
  return out;
}

template <typename T, typename W, int Lanes>
__global__ void __launch_bounds__(kThreads<Lanes>)
    gated_norm_forward(const T* x, const T* gate, const W* weight, T* out,
                       const FLEXOPS_GRID_CONSTANT Shape s) {
  constexpr int N = kPerVector<T>, kStep = Lanes * N;
  __shared__ float shared[32];
  // The team's row. Teams behind the last row compute it again, and store nothing.
  const i64 rows = s.tokens * s.groups;
  const i64 team = static_cast<i64>(blockIdx.x) * (kThreads<Lanes> / Lanes) + threadIdx.x / Lanes;
  const i64 row = team < rows ? team : rows - 1;
  const int first = static_cast<int>(threadIdx.x) % Lanes * N;
  const int group = static_cast<int>(row % s.groups);
  x += row * s.width, gate += row * s.width, out += row * s.width;
  // First, load what the thread holds, and reduce.
  Vec<float, N> a[kHeld], g[kHeld];
  float sum = 0.0f;
  const auto square = [&](const Vec<float, N>& values, const Vec<float, N>& gates) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float u = normalized(values.at[i], gates.at[i], s.norm_first);
      sum = __fmaf_rn(u, u, sum);
    }
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    a[k] = load_up_to<N>(x, first + k * kStep, s.width);
    g[k] = load_up_to<N>(gate, first + k * kStep, s.width);
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) square(a[k], g[k]);
  for (int at = first + kHeld * kStep; at < s.width; at += kStep)
    square(load_up_to<N>(x, at, s.width), load_up_to<N>(gate, at, s.width));
  sum = rows::group_reduce(sum, Sum{}, 0.0f, Lanes, shared);
  const float scale = rsqrtf(sum / static_cast<float>(s.width) + s.eps);
  if (team >= rows) return;
  // Then, scale and store.
  const auto write = [&](int at, const Vec<float, N>& values, const Vec<float, N>& gates) {
    const Vec<float, N> w = weights<N>(weight, group, at, s.width);
    Vec<float, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i)
      y.at[i] = values.at[i] * scale * w.at[i] * (gates.at[i] * sigmoid(gates.at[i]));
    store_up_to(out, at, s.width, y);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (first + k * kStep < s.width) write(first + k * kStep, a[k], g[k]);
  }
  for (int at = first + kHeld * kStep; at < s.width; at += kStep)
    write(at, load_up_to<N>(x, at, s.width), load_up_to<N>(gate, at, s.width));
}

/// A team has a group of columns of kPartRows tokens: their gradients, and their part of the
/// weight's.
template <typename T, typename W, int Lanes>
__global__ void __launch_bounds__(kThreads<Lanes>)
    gated_norm_backward(const T* grad, const T* x, const T* gate, const W* weight, float* partial,
                        T* x_grad, T* gate_grad, const FLEXOPS_GRID_CONSTANT Shape s) {
  constexpr int N = kPerVector<T>, kStep = Lanes * N;
  __shared__ float shared[2][32];
  const i64 teams = (s.tokens / kPartRows + 1) * s.groups;
  const i64 index = static_cast<i64>(blockIdx.x) * (kThreads<Lanes> / Lanes) + threadIdx.x / Lanes;
  const i64 team = index < teams ? index : teams - 1;
  const int first = static_cast<int>(threadIdx.x) % Lanes * N;
  const int group = static_cast<int>(team % s.groups);
  const i64 begin = team / s.groups * kPartRows;
  partial += team * s.width;
  Vec<float, N> sums[kHeld] = {};
  for (int r = 0; r < kPartRows; ++r) {
    // All teams of a warp take part in all reductions; those without a token store nothing.
    const bool live = index < teams && begin + r < s.tokens;
    const i64 row = (begin + r < s.tokens ? begin + r : s.tokens - 1) * s.groups + group;
    const T *const d_row = grad + row * s.width, *const x_row = x + row * s.width,
                   *const g_row = gate + row * s.width;
    Vec<float, N> d[kHeld], a[kHeld], g[kHeld];
    // First, the sums of u * u and of u * (its normalized form's gradient).
    float squares = 0.0f, products = 0.0f;
    const auto add = [&](int at, const Vec<float, N>& upstream, const Vec<float, N>& values,
                         const Vec<float, N>& gates) {
      const Vec<float, N> w = weights<N>(weight, group, at, s.width);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float silu = gates.at[i] * sigmoid(gates.at[i]);
        const float u = s.norm_first ? values.at[i] : values.at[i] * silu;
        const float of_norm = upstream.at[i] * w.at[i] * (s.norm_first ? silu : 1.0f);
        squares = __fmaf_rn(u, u, squares), products = __fmaf_rn(u, of_norm, products);
      }
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      d[k] = load_up_to<N>(d_row, first + k * kStep, s.width);
      a[k] = load_up_to<N>(x_row, first + k * kStep, s.width);
      g[k] = load_up_to<N>(g_row, first + k * kStep, s.width);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (first + k * kStep < s.width) add(first + k * kStep, d[k], a[k], g[k]);
    }
    for (int at = first + kHeld * kStep; at < s.width; at += kStep)
      add(at, load_up_to<N>(d_row, at, s.width), load_up_to<N>(x_row, at, s.width),
          load_up_to<N>(g_row, at, s.width));
    // Two arrays take turns, so that no write overtakes a read.
    squares = rows::group_reduce(squares, Sum{}, 0.0f, Lanes, shared[0]);
    products = rows::group_reduce(products, Sum{}, 0.0f, Lanes, shared[1]);
    const float width = static_cast<float>(s.width);
    const float scale = rsqrtf(squares / width + s.eps);
    const float mean = products * scale * scale / width;
    // Then, the gradients; the weight's is added to `part`.
    const auto finish = [&](int at, const Vec<float, N>& upstream, const Vec<float, N>& values,
                            const Vec<float, N>& gates, Vec<float, N>& part) {
      const Vec<float, N> w = weights<N>(weight, group, at, s.width);
      Vec<float, N> of_x, of_gate;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float half = sigmoid(gates.at[i]), silu = gates.at[i] * half;
        const float slope = half * (1.0f + gates.at[i] * (1.0f - half));
        const float u = s.norm_first ? values.at[i] : values.at[i] * silu;
        const float of_norm = upstream.at[i] * w.at[i] * (s.norm_first ? silu : 1.0f);
        const float of_u = scale * (of_norm - u * mean);
        of_x.at[i] = s.norm_first ? of_u : of_u * silu;
        of_gate.at[i] =
            slope * (s.norm_first ? upstream.at[i] * w.at[i] * (u * scale) : of_u * values.at[i]);
        if (live) part.at[i] += upstream.at[i] * u * scale * (s.norm_first ? silu : 1.0f);
      }
      if (!live) return;
      store_up_to(x_grad + row * s.width, at, s.width, of_x);
      store_up_to(gate_grad + row * s.width, at, s.width, of_gate);
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (first + k * kStep < s.width) finish(first + k * kStep, d[k], a[k], g[k], sums[k]);
    }
    for (int at = first + kHeld * kStep; at < s.width; at += kStep) {
      Vec<float, N> part = {};
      if (r > 0) part = load_up_to<N>(partial, at, s.width);
      finish(at, load_up_to<N>(d_row, at, s.width), load_up_to<N>(x_row, at, s.width),
             load_up_to<N>(g_row, at, s.width), part);
      if (index < teams) store_up_to(partial, at, s.width, part);
    }
  }
  if (index >= teams) return;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) store_up_to(partial, first + k * kStep, s.width, sums[k]);
}

}  // namespace flexops::gated_norm
