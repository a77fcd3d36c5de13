// Layer norm's kernel for 16-bit rows that registers hold whole.
#pragma once

#include "norm/norm_forward.cuh"

namespace flexops::norm {

static_assert(kHeldThreads / kNarrowWarp <= kNarrowWarp / 2,
              "half a warp's lanes put together what a group's warps have");

/// Of two numbers at once, for all of `lanes` neighbouring threads, a power of two.
FLEXOPS_DEVICE void add_up(float (&value)[2], int lanes) {
#pragma unroll
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) {
    if (mask >= lanes) continue;
    value[0] += shuffle_xor(value[0], mask, kNarrowWarp),
        value[1] += shuffle_xor(value[1], mask, kNarrowWarp);
  }
}

/// The sum of squares of what elements are off their mean, from the sum of squares of what they are
/// off another number, and from the sum of that and its mean. Infinity where squares are beyond
/// what a float can tell.
FLEXOPS_DEVICE float squares_off_mean(float squares, float sum, float mean) {
  return squares < infinity() ? squares - sum * mean : squares;
}

/// Layer norm of 16-bit rows, with a weight of T, a row for each group of threads. Here arithmetic
/// decides as much as memory does: there is one pass and one barrier for both moments. A warp sums
/// up what its elements, and their squares, are off the mean of its first vector: as far as that is
/// from the row's mean, it is part of the row's variance, so what is lost does not show in 16 bits.
/// What warps have is put together in the same way, off the first warp's mean.
template <typename T, int kHeld>
__global__ void __launch_bounds__(kHeldThreads, 3)
    forward_layer(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kPerVector<T>;
  __shared__ float shared[3][kNarrowWarp];
  const Group g(p.lanes, true);
  const L2Policy policy(p.keep_in_l2);
  const i64 row = i64(blockIdx.x) * g.count + g.index;
  // Load the row into registers.
  Packed raw[kHeld];
  read_row<T>(raw, p.x, row * p.x_stride, g.lane, g.lanes, row < p.rows ? p.vectors : 0, policy);

  // Reduce within the warp, to sums of what differs from the first vector's mean.
  float v[V], shift = 0.0f, sums[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
  const int neighbours = g.wide ? kNarrowWarp : g.lanes;
  widen<T>(v, raw[0]);
#pragma unroll
  for (int i = 0; i < V; ++i) shift = fmaf(v[i], 1.0f / V, shift);
  shift = shuffle(shift, 0, neighbours);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (g.lane + k * g.lanes >= p.vectors) continue;
    widen<T>(v, raw[k]);
#pragma unroll
    for (int i = 0; i < V; ++i)
      v[i] -= shift, sums[i % 2] += v[i], squares[i % 2] = fmaf(v[i], v[i], squares[i % 2]);
  }
  float total[2] = {sums[0] + sums[1], squares[0] + squares[1]};
  forget<T>(raw, p.nothing);
  add_up(total, neighbours);
  // Reduce over the warps, whose means differ.
  if (g.wide) {
    const int warp = g.lane / kNarrowWarp, warps = g.lanes / kNarrowWarp;
    if (g.lane % kNarrowWarp == 0)
      shared[0][warp] = shift, shared[1][warp] = total[0], shared[2][warp] = total[1];
    __syncthreads();
    const int lane = g.lane % (kNarrowWarp / 2);  // both halves do the same
    float count = 0.0f, mean = 0.0f, off_mean = 0.0f;
    if (lane < warps) {
      int vectors = 0;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int left = p.vectors - (lane * kNarrowWarp + k * g.lanes);
        vectors += left < 0 ? 0 : left < kNarrowWarp ? left : kNarrowWarp;
      }
      count = static_cast<float>(vectors * V);
      const float sum = shared[1][lane], off = __fdividef(sum, count);
      mean = shared[0][lane] + off, off_mean = squares_off_mean(shared[2][lane], sum, off);
    }
    shift = shuffle(mean, 0, kNarrowWarp);
    total[0] = count * (mean - shift), total[1] = off_mean + total[0] * (mean - shift);
    add_up(total, kNarrowWarp / 2);  // a group has at most so many warps
  }
  // Write the statistics.
  const float off = total[0] * p.inverse, mean = shift + off;
  const float rstd = reciprocal_root(squares_off_mean(total[1], total[0], off) * p.inverse + p.eps);
  if (g.lane == 0 && row < p.rows) {
    if (p.mean) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }
  // Scale, shift and write.
  if (row >= p.rows) return;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int at = g.lane + k * g.lanes;
    if (at >= p.vectors) continue;
    float w[V], b[V];
    Packed bias = {};
    if (p.bias) bias = read<T, Cache::constant>(p.bias, at * V);
    widen<T>(w, read<T, Cache::constant>(p.weight, at * V));
    widen<T>(b, bias);
    widen<T>(v, raw[k]);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = fmaf(fmaf(v[i], rstd, -mean * rstd), w[i], b[i]);
    write<T>(static_cast<T*>(p.y) + row * p.columns, at * V, packed<T>(v));
  }
}

}  // namespace flexops::norm
