// Backward.
#pragma once

#include "softmax/softmax.cuh"

namespace flexops::softmax {

// Vectors of a row, and as many of its gradient, that a thread holds.
inline constexpr int kBackwardHeld = 4;
inline constexpr int kWholeHeld = 2;
inline constexpr int kWholeThreads = 512;  // a block's, of several rows: memory does best if they
                                           // read together and then write together

/// out = scale * y * (grad - sum(grad * y)) for the most usual rows: of whole vectors, with nothing
/// left out, more than a warp's; blockDim.y of them in a block.
template <typename T>
__global__ void __launch_bounds__(kWholeThreads, 2)
    softmax_backward_whole(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kWholeHeld;
  __shared__ float sums[kWholeThreads / kNarrowWarp];
  const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  const T* y = static_cast<const T*>(p.x) + row * p.stride;
  const T* grad = static_cast<const T*>(p.grad) + row * p.grad_stride;
  T* out = static_cast<T*>(p.out) + row * p.length;
  const int first = threadIdx.x * N, step = p.lanes * N;
  // Load results and gradients.
  Packed ys[V], grads[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    ys[k] = grads[k] = {{0, 0, 0, 0}};
    if (first + k * step < p.length) {
      ys[k] = load_vector<T, kRead>(y, first + k * step);
      grads[k] = load_vector<T, kRead>(grad, first + k * step);
    }
  }
  // Reduce their products to the row's sum.
  float a[V * N], b[V * N], products[N], sum = 0.0f;
  // Write scale y (gradient - sum).
#pragma unroll
  for (int k = 0; k < V; ++k) {
    widen<T>(a + k * N, ys[k], p.is_f16);
    widen<T>(b + k * N, grads[k], p.is_f16);
#pragma unroll
    for (int i = 0; i < N; ++i) products[i] = a[k * N + i] * b[k * N + i];
    sum += sum_tree<N>(products);
  }
  sum = reduce_row<true>(sum, Sum{}, 0.0f, p.lanes, sums + threadIdx.y * (p.lanes / kNarrowWarp));
#pragma unroll
  for (int k = 0; k < V; ++k) {
    if (first + k * step >= p.length) break;
#pragma unroll
    for (int i = k * N; i < (k + 1) * N; ++i) a[i] = p.scale * a[i] * (b[i] - sum);
    store<kWrite>(reinterpret_cast<Packed*>(out + first + k * step),
                  narrow<T>(a + k * N, p.is_f16));
  }
}

/// The same for any rows. A row is one chunk, which stays in registers; or several, which are read
/// twice. A kernel for each type: one for both of 16 bits is 2 to 4 % slower.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    softmax_backward_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kBackwardHeld;
  __shared__ float sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* y = static_cast<const T*>(p.x) + place.row * p.stride;
  const T* grad = static_cast<const T*>(p.grad) + place.row * p.grad_stride;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
  const int first = place.lane * N - head_of<T>(y), step = p.lanes * N,
            length = visible(p, place.row);
  Packed ys[V], grads[V];
  float sum = 0.0f, a[N], b[N];
  // Chunks forwards for the sum of products, then backwards to write.
#pragma unroll 1
  for (int turn = 0; turn < 2 * p.chunks; ++turn) {
    const bool writes = turn >= p.chunks;
    const int from = first + (writes ? 2 * p.chunks - 1 - turn : turn) * V * step;
    // Between the passes: reduce the sum over the row's lanes.
    if (turn == p.chunks) {
      sum = reduce_row(sum, Sum{}, 0.0f, p.lanes, sums);
      if (!place.exists) return;
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        ys[k] = grads[k] = {{0, 0, 0, 0}};
        if (from + k * step < length) {
          ys[k] = load_vector<T, kRead>(y, from + k * step);
          grads[k] = load_vector<T, kRead>(grad, from + k * step);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + k * step;
      if (at >= (writes ? p.length : length)) break;
      Packed results = {{0, 0, 0, 0}};
      if (at < length) {
        limit<T>(ys[k], at, length, 0);
        limit<T>(grads[k], at, length, 0);
        widen<T>(a, ys[k]);
        widen<T>(b, grads[k]);
#pragma unroll
        for (int i = 0; i < N; ++i) a[i] = writes ? p.scale * a[i] * (b[i] - sum) : a[i] * b[i];
        if (writes) {
          results = narrow<T>(a);
          limit<T>(results, at, length, 0);
        } else {
          sum += sum_tree<N>(a);
        }
      }
      if (writes) store_vector<T, kWrite>(out, at, p.length, results);
    }
  }
}

}  // namespace flexops::softmax
