// The norms' kernel for rows that registers hold whole.
#pragma once

#include "common/async.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// kPerVector<T> parameters, of T or of float32.
template <typename T>
FLEXOPS_DEVICE void load_parameters(float (&out)[kPerVector<T>], const void* from, i64 index,
                                    ElementType type) {
  if (kIsFloat<T> || type != ElementType::f32) {
    load_floats<T, Cache::constant>(out, from, index);
  } else {
    load_floats<float, Cache::constant>(out, from, index);
  }
}

/// kScaled: there is a weight, of T, as is the bias, if there is one: no branches keep them from
/// being read ahead.
template <typename T, bool kMayCenter, bool kScaled>
FLEXOPS_DEVICE void write_result(const Forward& p, const Packed& raw, i64 row, int at, float mean,
                                 float rstd) {
  constexpr int V = kPerVector<T>;
  float v[V], w[V], b[V];
  widen<T>(v, raw);
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * rstd;
  if constexpr (kScaled) {
    Packed bias = {};
    if (kMayCenter && p.bias) bias = read<T, Cache::constant>(p.bias, at * V);
    widen<T>(w, read<T, Cache::constant>(p.weight, at * V));
    widen<T>(b, bias);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float gain = w[i] + p.offset;
      v[i] = kMayCenter ? v[i] * gain + b[i] : v[i] * gain;
    }
  } else {
    if (p.weight) {
      load_parameters<T>(w, p.weight, at * V, p.weight_type);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] *= w[i] + p.offset;
    }
    if (p.bias) {
      load_parameters<T>(b, p.bias, at * V, p.weight_type);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] += b[i];
    }
  }
  write<T>(static_cast<T*>(p.y) + row * p.columns, at * V, packed<T>(v));
}

/// How many blocks a multiprocessor has at least: few registers let many rows be on their way.
template <int kHeld>
inline constexpr int kHeldBlocks = kHeld == kFewItems ? 4 : 2;

/// For rows that registers hold whole, where everything is of T but the parameters, which are of T
/// or of float32. kAdding: with a residual. kFewItems: only with a weight of T, and a bias only if
/// kMayCenter.
template <typename T, bool kAdding, bool kMayCenter, int kHeld>
__global__ void __launch_bounds__(kHeldThreads, kHeldBlocks<kHeld>)
    forward_held(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kPerVector<T>;
  __shared__ Partial<float, 1> shared[2];
  if (p.early) wait_for_previous(), let_next_start();
  const Group g(p.lanes, true);
  const L2Policy policy(p.keep_in_l2);
  const i64 row = i64(blockIdx.x) * g.count + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  // Load the row into registers, with the residual added.
  Packed raw[kHeld];
  read_row<T>(raw, p.x, row * p.x_stride, g.lane, g.lanes, count, policy);
  if constexpr (kAdding) add_residual<T>(raw, p, g.lane, g.lanes, row, count, policy);

  // Reduce to the mean, then to the mean square of what is left.
  const bool centered = kMayCenter && p.centered;
  float mean = 0.0f, total[1] = {0.0f};
  if (centered) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float v[V];
      widen<T>(v, raw[k]);
      total[0] += sum_of(v);
    }
    forget<T>(raw, p.nothing);
    group_reduce<true>(total, Sum{}, g, shared[0]);
    mean = total[0] * p.inverse;
    total[0] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float v[V];
    widen<T>(v, raw[k]);
    if (g.lane + k * g.lanes < count) {
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * (v[i] - mean);
      total[0] += sum_of(v);
    }
  }
  forget<T>(raw, p.nothing);
  group_reduce<true>(total, Sum{}, g, shared[1]);
  // Write the statistics.
  const float rstd = reciprocal_root(total[0] * p.inverse + p.eps);
  if (g.lane == 0 && row < p.rows) {
    if (p.mean) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }

  // The code is not written out for each of many vectors: a few at a time are the first, and the
  // others move up.
  constexpr int kOnce = kHeld == kManyItems ? 4 : 2;
#pragma unroll 1
  for (int begin = 0; begin < kHeld; begin += kOnce) {
#pragma unroll
    for (int k = 0; k < kOnce; ++k) {
      const int at = g.lane + (begin + k) * g.lanes;
      if (at < count)
        write_result<T, kMayCenter, kHeld == kFewItems>(p, raw[k], row, at, mean, rstd);
    }
    if (g.lane + (begin + kOnce) * g.lanes >= count) break;
#pragma unroll
    for (int k = kOnce; k < kHeld; ++k) raw[k - kOnce] = raw[k];
  }
}

}  // namespace flexops::norm
