// Layer norm's kernel for 16-bit rows.
#pragma once

#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// A part of a row: how many elements, their sum, and the sum of squares of what they are off their mean.
struct Spread {
  float count, sum, squares;
  FLEXOPS_DEVICE float mean() const { return count > 0.0f ? sum / count : 0.0f; }
  /// The squares, had they been taken off another mean.
  FLEXOPS_DEVICE float squares_off(float other) const {
    return count > 0.0f ? squares + count * (mean() - other) * (mean() - other) : 0.0f;
  }
};

template <int N>
FLEXOPS_DEVICE void warp_sum(float (&value)[N], int lanes) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += shuffle_xor(value[i], mask, kNarrowWarp);
  }
}

/// Layer norm of 16-bit rows, with a weight of T, two for each group of threads. Here arithmetic decides as much as memory does. A thread
/// takes the squares off its first element (as far as that may be from the mean, it is part of the row's variance, so little is lost),
/// warps and groups put together what their parts have: so there is one pass, one barrier, and one look at the parameters for both rows.
template <typename T>
__global__ void __launch_bounds__(kHeldThreads, 2) forward_layer(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kVector<T>, R = kTogether, kHeld = kItems;
  __shared__ float shared[R][2][kNarrowWarp];
  const Group g(p.lanes, true);
  const Lasting lasting(p.lasting);
  const i64 row = (i64(blockIdx.x) * g.count() + g.index) * R;
  Raw<T> raw[R][kHeld];
#pragma unroll
  for (int r = 0; r < R; ++r) read_row<T>(raw[r], p.x, (row + r) * p.x_stride, g.lane, g.lanes, row + r < p.rows ? p.vectors : 0, lasting);

  // Vectors that lanes [first, first + lanes) have of a row.
  const auto vectors_of = [&](int first, int lanes) {
    int vectors = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int left = p.vectors - (first + k * g.lanes);
      vectors += left < 0 ? 0 : left < lanes ? left : lanes;
    }
    return static_cast<float>(vectors * V);
  };
  Spread part[R];
  float sum[R], squares[R], mean[R], rstd[R];
  const float own = vectors_of(g.lane, 1);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float first = 0.0f, total = 0.0f, total_squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float v[V];
      widen<T>(v, raw[r][k], p.type);
      if (k == 0) first = v[0];
      if (g.lane + k * g.lanes < p.vectors) {
#pragma unroll
        for (int i = 0; i < V; ++i) v[i] -= first;
        total += sum_of(v);
#pragma unroll
        for (int i = 0; i < V; ++i) v[i] *= v[i];
        total_squares += sum_of(v);
      }
    }
    forget<T>(raw[r], p.nothing);
    const float off = own > 0.0f ? total / own : 0.0f;
    part[r] = {own, total + own * first, total_squares < infinity() ? total_squares - total * off : total_squares};
    sum[r] = part[r].sum;
  }
  const int warp = g.lane / kNarrowWarp, lane = g.lane % kNarrowWarp, warps = g.lanes / kNarrowWarp;
  const float shared_count = g.wide ? vectors_of(warp * kNarrowWarp, kNarrowWarp) : static_cast<float>(p.columns);
  warp_sum(sum, g.lanes);
#pragma unroll
  for (int r = 0; r < R; ++r) squares[r] = part[r].squares_off(Spread{shared_count, sum[r], 0.0f}.mean());
  warp_sum(squares, g.lanes);
  if (g.wide) {
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < R; ++r) shared[r][0][warp] = sum[r], shared[r][1][warp] = squares[r];
    }
    __syncthreads();
    const float count = lane < warps ? vectors_of(lane * kNarrowWarp, kNarrowWarp) : 0.0f;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      part[r] = {count, lane < warps ? shared[r][0][lane] : 0.0f, lane < warps ? shared[r][1][lane] : 0.0f};
      sum[r] = part[r].sum;
    }
    warp_sum(sum, kNarrowWarp);
#pragma unroll
    for (int r = 0; r < R; ++r) squares[r] = part[r].squares_off(sum[r] * p.inverse);
    warp_sum(squares, kNarrowWarp);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    mean[r] = sum[r] * p.inverse;
    rstd[r] = reciprocal_root(squares[r] * p.inverse + p.eps);
    if (g.lane == 0 && row + r < p.rows) {
      if (p.mean) p.mean[row + r] = mean[r];
      if (p.rstd) p.rstd[row + r] = rstd[r];
    }
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int at = g.lane + k * g.lanes;
    if (at >= p.vectors) continue;
    float w[V], b[V];
    Raw<T> bias = {};
    if (p.bias) bias = read<T, Cache::constant>(p.bias, at * V, p.type);
    widen<T>(w, read<T, Cache::constant>(p.weight, at * V, p.type), p.type);
    widen<T>(b, bias, p.type);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float v[V];
      widen<T>(v, raw[r][k], p.type);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = fmaf(fmaf(v[i], rstd[r], -mean[r] * rstd[r]), w[i], b[i]);
      if (row + r < p.rows) write<T>(static_cast<T*>(p.y) + (row + r) * p.columns, at * V, narrow<T>(v, p.type), p.type);
    }
  }
}

}  // namespace flexops::norm
