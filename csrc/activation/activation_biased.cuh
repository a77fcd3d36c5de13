// The kernels of act(x + bias).
#pragma once

#include "activation/activation.cuh"

namespace flexops::activation {

/// BiasedActivation as kernels take it.
struct Biased {
  const void *x, *bias, *grad;
  void* out;
  u32 rows, columns;
  u32 x_stride, grad_stride;
  Divisor vectors;  // of a row
  u32 take;         // rows of a thread, at most kRows
  bool flat;        // see Walk
  Function function;
  ElementType bias_type;
};

template <int N>
struct Bias {
  Broadcast<N> raw;

  FLEXOPS_DEVICE void load(const void* bias, i64 column, ElementType type) {
    if (bias) raw.load(bias, column, type);
  }
  FLEXOPS_DEVICE void widen_to(float (&out)[N], const void* bias, ElementType type) const {
    if (bias) {
      raw.widen_to(out, type);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = -0.0f;  // which changes no number
    }
  }
};

/// The activation. A kernel for each shape of it: one with both is 5 % slower for gelu(erf).
template <typename T, bool kErf, int N = kPerVector<T>>
__global__ void __launch_bounds__(kThreads) biased(const FLEXOPS_GRID_CONSTANT Biased p) {
  const Walk w = walk_of<N>(p);
  Vec<T, N> x[kRows];
  // Load the rows and the columns' bias.
  // Add, activate and write.
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u < p.take && w.row(u) < p.rows)
      x[u] = load<T, N, kLoad>(p.x, place(w.row(u), p.x_stride, w.column));
  }
  Bias<N> raw;
  raw.load(p.bias, w.column, p.bias_type);
  float bias[N];
  raw.widen_to(bias, p.bias, p.bias_type);
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u >= p.take || w.row(u) >= p.rows) return;
    float value[N];
    widen(value, x[u]);
#pragma unroll
    for (int i = 0; i < N; ++i)
      value[i] = activate_any<kErf, kIsAccurate<T>>(value[i] + bias[i], p.function);
    store<T, kStore>(p.out, place(w.row(u), p.columns, w.column), value);
  }
}

/// The gradient of x.
template <typename T, int N = kPerVector<T>>
__global__ void __launch_bounds__(kThreads) biased_backward(const FLEXOPS_GRID_CONSTANT Biased p) {
  const Walk w = walk_of<N>(p);
  Vec<T, N> x[kBackwardRows], grad[kBackwardRows];
  // Load the rows, their gradients and the bias.
  // Derivative times gradient, and write.
#pragma unroll
  for (int u = 0; u < kBackwardRows; ++u) {
    if (u < p.take && w.row(u) < p.rows) {
      x[u] = load<T, N, kLoad>(p.x, place(w.row(u), p.x_stride, w.column));
      grad[u] = load<T, N, kLoad>(p.grad, place(w.row(u), p.grad_stride, w.column));
    }
  }
  Bias<N> raw;
  raw.load(p.bias, w.column, p.bias_type);
  float bias[N];
  raw.widen_to(bias, p.bias, p.bias_type);
#pragma unroll
  for (int u = 0; u < kBackwardRows; ++u) {
    if (u >= p.take || w.row(u) >= p.rows) return;
    float value[N], outer[N], unused[N];
    widen(value, x[u]);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += bias[i];
    differentiate_all<kIsAccurate<T>>(value, p.function, unused);
    widen(outer, grad[u]);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] *= outer[i];
    store<T, kStore>(p.out, place(w.row(u), p.columns, w.column), value);
  }
}

/// What a bias's gradient takes.
struct Summed {
  const void *x, *bias, *grad;
  void* out;
  void* bias_grad;  // of bias_type, if slices is 1
  float* sums;      // [slices, columns], else
  i64 rows, columns, x_stride, grad_stride;
  i64 vectors;  // of a row
  i64 slices;
  int chunk;   // vectors of a block
  int chunks;  // blocks a row
  int lanes;   // rows of a block
  Function function;
  ElementType bias_type;
};

/// The gradients of x and bias. A block has `chunk` vectors of `lanes` rows, and goes down the
/// rows; all blocks together are on neighbouring rows. What a thread adds up stays in registers;
/// the block's lanes are added in order, its sums are row `slice` of p.sums.
template <typename T, bool kErf, int N = kPerVector<T>>
__global__ void __launch_bounds__(kSumThreads) biased_sums(const FLEXOPS_GRID_CONSTANT Summed p) {
  __shared__ float shared[kSumThreads * N];
  const int slice = static_cast<int>(blockIdx.x) / p.chunks,
            chunk = static_cast<int>(blockIdx.x) - slice * p.chunks;
  const int lane = static_cast<int>(threadIdx.x) / p.chunk,
            within = static_cast<int>(threadIdx.x) - lane * p.chunk;
  const i64 vector = static_cast<i64>(chunk) * p.chunk + within, column = vector * N,
            step = p.slices * p.lanes;
  const bool inside = lane < p.lanes && vector < p.vectors;
  // The slice's rows: write the gradient of x, and add it up by columns.
  float sum[N] = {};
  if (inside) {
    Bias<N> raw;
    raw.load(p.bias, column, p.bias_type);
    float bias[N];
    raw.widen_to(bias, p.bias, p.bias_type);
#pragma unroll 1
    for (i64 row = static_cast<i64>(slice) * p.lanes + lane; row < p.rows; row += step * kSumRows) {
      Vec<T, N> x[kSumRows], grad[kSumRows];
#pragma unroll
      for (int u = 0; u < kSumRows; ++u) {
        const i64 here = row + u * step;
        if (here < p.rows) {
          x[u] = load<T, N, kLoad>(p.x, here * p.x_stride + column);
          grad[u] = load<T, N, kLoad>(p.grad, here * p.grad_stride + column);
        }
      }
#pragma unroll
      for (int u = 0; u < kSumRows; ++u) {
        const i64 here = row + u * step;
        if (here < p.rows) {
          float value[N], outer[N];
          widen(value, x[u]);
          widen(outer, grad[u]);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            float unused;
            value[i] = outer[i] * differentiate_any<kErf, kIsAccurate<T>>(value[i] + bias[i],
                                                                          p.function, unused);
            sum[i] += value[i];
          }
          store<T, kStore>(p.out, here * p.columns + column, value);
        }
      }
    }
  }
  // Add up the lanes that share the columns.
  if (p.lanes > 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) shared[i * kSumThreads + threadIdx.x] = sum[i];
    __syncthreads();
    if (inside && lane == 0) {
      for (int other = 1; other < p.lanes; ++other) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += shared[i * kSumThreads + other * p.chunk + within];
      }
    }
  }
  // Write the bias's gradient, or the slice's sums for bias_gradient.
  if (!inside || lane != 0) return;
  if (p.bias_grad) {
#pragma unroll
    for (int i = 0; i < N; ++i) store_any(p.bias_grad, column + i, sum[i], p.bias_type);
  } else {
    store<float>(p.sums, slice * p.columns + column, sum);
  }
}

/// Adds up p.sums, a block for 32 columns.
__global__ void __launch_bounds__(kTotalThreads)
    bias_gradient(const FLEXOPS_GRID_CONSTANT Summed p) {
  constexpr int kLanes = kTotalThreads / kTotalColumns;
  __shared__ float shared[kLanes][kTotalColumns];
  const int within = threadIdx.x % kTotalColumns, lane = threadIdx.x / kTotalColumns;
  const i64 column = static_cast<i64>(blockIdx.x) * kTotalColumns + within;
  // Add up the slices of a column, a part in each lane.
  float sum = 0.0f;
  if (column < p.columns) {
#pragma unroll 8
    for (i64 row = lane; row < p.slices; row += kLanes) sum += p.sums[row * p.columns + column];
  }
  shared[lane][within] = sum;
  __syncthreads();
  // Add up the lanes, and write.
  if (lane != 0 || column >= p.columns) return;
#pragma unroll
  for (int other = 1; other < kLanes; ++other) sum += shared[other][within];
  store_any(p.bias_grad, column, sum, p.bias_type);
}

}  // namespace flexops::activation
