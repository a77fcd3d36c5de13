// The kernels of the gated RMS norm. What they compute: flexops/ops/gated_norm.py.
//
// Memory bandwidth bounds them. A team of threads has a row, which is a group of a token's columns.
// A thread's first vectors are all loaded before the reduction and stay in registers, as they are
// in memory; what a row has besides is read again after it, from cache.
#pragma once

#include "common/elements.cuh"
#include "common/rows.cuh"

namespace flexops::gated_norm {

inline constexpr int kResident = 512;  // threads that a multiprocessor is to have, at least
inline constexpr int kHeld = 2;        // vectors of a thread in registers in the forward pass
inline constexpr int kPartRows = 16;   // tokens whose part of the weight's gradient is added up
/// Threads of a block: a team, or several.
template <int Lanes>
inline constexpr int kThreads = Lanes <= 32 ? 128 : Lanes;

/// Whether a row may have more than a team holds.
template <int Lanes, int N>
inline constexpr bool kWide = Lanes == 512 || N == 1;

struct Shape {
  i64 tokens;
  int width, groups;  // columns of a group; groups of a token
  float eps;
  int norm_first;
  int sigmoid;  // of the gate, not silu
};

FLEXOPS_DEVICE float sigmoid(float x) {
  return quick_reciprocal(1.0f + quick_exp2(-1.44269504088896341f * x));
}

/// What the gate's sigmoid is multiplied with.
FLEXOPS_DEVICE float factor(float gate, const Shape& s) { return s.sigmoid ? 1.0f : gate; }

/// N elements of a row, which are all in it; zeros if `there` is false.
template <typename T, int N>
struct Part : Raw<T, N> {
  FLEXOPS_DEVICE Part() {}
  FLEXOPS_DEVICE Part(const T* row, int at, bool there) {
    if (there) this->read(row + at);
  }
};

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
      const float u =
          s.norm_first ? values[i] : values[i] * factor(gates[i], s) * sigmoid(gates[i]);
      sum = __fmaf_rn(u, u, sum);
    }
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) square(a[k], g[k]);
  for (int at = first + kHeld * kStep; kWide<Lanes, N> && at < s.width; at += kStep)
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
      y[i] = n * (factor(gates[i], s) * sigmoid(gates[i]));
    }
    store<T>(out, at, y);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (first + k * kStep < s.width) finish(first + k * kStep, a[k], g[k]);
  }
  for (int at = first + kHeld * kStep; kWide<Lanes, N> && at < s.width; at += kStep)
    finish(at, {x, at, true}, {gate, at, true});
}

/// What the backward pass computes of one element. Multiplications and additions are not
/// contracted, so fused ones are written.
template <bool NormFirst>
struct Element {
  float grad, x, gate, half, act, u, weighted, of_norm;  // of_norm: of u's normalized form

  FLEXOPS_DEVICE Element(float grad, float x, float gate, float half, float weight, const Shape& s)
      : grad(grad),
        x(x),
        gate(s.sigmoid ? 0.0f : gate),
        half(half),
        act(factor(gate, s) * half),
        u(NormFirst ? x : x * act),
        weighted(grad * weight),
        of_norm(NormFirst ? weighted * act : weighted) {}
  FLEXOPS_DEVICE void gradients(float scale, float mean, float& of_x, float& of_gate,
                                float& of_weight) const {
    const float n = u * scale, of_u = __fmaf_rn(-n, mean, of_norm * scale);
    const float slope = __fmaf_rn(half, gate - act, half);
    of_x = NormFirst ? of_u : of_u * act;
    of_gate = slope * (NormFirst ? weighted * n : of_u * x);
    of_weight = __fmaf_rn(NormFirst ? grad * act : grad, n, of_weight);
  }
};

/// A team has a group of columns of kPartRows tokens: their gradients, and their part of the
/// weight's.
template <bool NormFirst, typename T, typename W, int Lanes, int N>
FLEXOPS_DEVICE void backward_of(const T* grad, const T* x, const T* gate, const W* weight,
                                float* partial, T* x_grad, T* gate_grad, const Shape& s,
                                float (*shared)[32]) {
  constexpr int kStep = Lanes * N;
  const i64 teams = (s.tokens / kPartRows + 1) * s.groups;
  const i64 index = static_cast<i64>(blockIdx.x) * (kThreads<Lanes> / Lanes) + threadIdx.x / Lanes;
  const i64 team = index < teams ? index : teams - 1;
  const int first = static_cast<int>(threadIdx.x) % Lanes * N;
  const i64 begin = team / s.groups * kPartRows, group = team % s.groups, last = s.tokens - 1;
  const i64 apart = static_cast<i64>(s.groups) * s.width;
  if (weight) weight += group * s.width;
  partial += team * s.width;
  // A thread's first vectors stay in registers. The next token's are loaded before this one's
  // reduction. All teams of a warp take part in all reductions; those without a token compute the
  // last one again, and store nothing.
  const bool mine = first < s.width;
  float sums[N] = {};
  const Part<W, N> weights(weight, first, weight && mine);
  i64 offset = (begin < last ? begin : last) * apart + group * s.width;
  Part<T, N> next[3];
  const auto read = [&](i64 at, Part<T, N>(&in)[3]) {
    in[0].read(grad + at), in[1].read(x + at), in[2].read(gate + at);
  };
  if (mine) read(offset + first, next);
  const float part_of_width = 1.0f / static_cast<float>(s.width);
  for (int r = 0; r < kPartRows; ++r) {
    if (Lanes > 32 && begin + r > last) break;
    const bool live = index < teams && begin + r <= last;
    const i64 here = offset;
    Part<T, N> held[3] = {next[0], next[1], next[2]};
    offset += begin + r < last ? apart : 0;
    if (mine && r + 1 < kPartRows) read(offset + first, next);
    // First, the sums of u * u and of u * (its normalized form's gradient).
    float squares = 0.0f, products = 0.0f;
    const auto add = [&](const Part<T, N>(&in)[3], const Part<W, N>& w, float (&half)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        half[i] = sigmoid(in[2][i]);
        const Element<NormFirst> one(in[0][i], in[1][i], in[2][i], half[i], weight ? w[i] : 1.0f,
                                     s);
        squares = __fmaf_rn(one.u, one.u, squares);
        products = __fmaf_rn(one.u, one.of_norm, products);
      }
    };
    float halves[N];
    add(held, weights, halves);
    for (int at = first + kStep; kWide<Lanes, N> && at < s.width; at += kStep) {
      Part<T, N> in[3];
      float half[N];
      read(here + at, in);
      add(in, {weight, at, weight != nullptr}, half);
    }
    // Two arrays take turns, so that no write overtakes a read.
    squares = rows::group_reduce(squares, Sum{}, 0.0f, Lanes, shared[0]);
    products = rows::group_reduce(products, Sum{}, 0.0f, Lanes, shared[1]);
    if (!live) continue;
    const float scale = rsqrtf(squares * part_of_width + s.eps);
    const float mean = products * scale * scale * part_of_width;
    // Then, the gradients; the weight's is added to `part`.
    const auto finish = [&](int at, const Part<T, N>(&in)[3], const Part<W, N>& w,
                            const float (&half)[N], float (&part)[N]) {
      float of_x[N], of_gate[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Element<NormFirst> one(in[0][i], in[1][i], in[2][i], half[i], weight ? w[i] : 1.0f,
                                     s);
        one.gradients(scale, mean, of_x[i], of_gate[i], part[i]);
      }
      store<T>(x_grad, here + at, of_x), store<T>(gate_grad, here + at, of_gate);
    };
    if (mine) finish(first, held, weights, halves, sums);
    for (int at = first + kStep; kWide<Lanes, N> && at < s.width; at += kStep) {
      Part<T, N> in[3];
      float part[N], half[N];
      read(here + at, in);
#pragma unroll
      for (int i = 0; i < N; ++i)
        part[i] = r > 0 ? partial[at + i] : 0.0f, half[i] = sigmoid(in[2][i]);
      finish(at, in, {weight, at, weight != nullptr}, half, part);
      store<float>(partial, at, part);
    }
  }
  if (index >= teams) return;
  if (mine) store<float>(partial, first, sums);
  // A part without tokens.
  for (int at = first + kStep; kWide<Lanes, N> && begin > last && at < s.width; at += kStep) {
#pragma unroll
    for (int i = 0; i < N; ++i) partial[at + i] = 0.0f;
  }
}

template <typename T, typename W, int Lanes, int N>
__global__ void __launch_bounds__(kThreads<Lanes>, kResident / kThreads<Lanes>)
    gated_norm_backward(const T* grad, const T* x, const T* gate, const W* weight, float* partial,
                        T* x_grad, T* gate_grad, const FLEXOPS_GRID_CONSTANT Shape s) {
  __shared__ float shared[2][32];
  if (s.norm_first)
    return backward_of<true, T, W, Lanes, N>(grad, x, gate, weight, partial, x_grad, gate_grad, s,
                                             shared);
  backward_of<false, T, W, Lanes, N>(grad, x, gate, weight, partial, x_grad, gate_grad, s, shared);
}

}  // namespace flexops::gated_norm
