// The norms' kernel for rows of a few elements, of any types.
#pragma once

#include "norm/norm_codes.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// Four elements of S, `step` apart, zeros beyond the row's end.
template <typename S>
FLEXOPS_DEVICE void load_apart(float (&out)[kItems], const void* from, i64 first, int step,
                               int left) {
  S raw[kItems];
#pragma unroll
  for (int e = 0; e < kItems; ++e)
    raw[e] = e * step < left ? static_cast<const S*>(from)[first + e * step] : S{};
#pragma unroll
  for (int e = 0; e < kItems; ++e) out[e] = to_float(raw[e]);
}

/// A thread's part of a row of at most kItems * kNarrowWarp elements, in registers.
template <typename T>
__global__ void __launch_bounds__(kShortThreads)
    forward_short(const FLEXOPS_GRID_CONSTANT Forward p) {
  const ElementType type = type_of<T>(p.type), row_type = type_of<T>(p.row_type),
                    weight_type = type_of<T>(p.weight_type);
  __shared__ Partial<float, 1> shared[2];
  __shared__ Partial<u32, 1> shared_codes;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count + g.index;
  const int left = row < p.rows ? p.columns - g.lane : 0;
  const i64 to = row * p.columns + g.lane;
  const auto load = [&](float (&out)[kItems], const void* from, i64 begin, ElementType type) {
    if (type == ElementType::bf16) {
      load_apart<bf16>(out, from, begin + g.lane, g.lanes, left);
    } else if (type == ElementType::f16) {
      load_apart<f16>(out, from, begin + g.lane, g.lanes, left);
    } else {
      load_apart<float>(out, from, begin + g.lane, g.lanes, left);
    }
  };
  // Load the row, with the residual added.
  float v[kItems], other[kItems], mean = 0.0f, total[1] = {0.0f};
  load(v, p.x, row * p.x_stride, type);
  if (p.residual) {
    load(other, p.residual, row * p.residual_stride, row_type);
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      v[e] = round_any(v[e] + other[e], row_type);
      if (e * g.lanes < left) store_any(p.new_residual, to + e * g.lanes, v[e], row_type);
    }
  }
  // Reduce to the mean, then to the mean square of what is left.
  if (p.centered) {
    total[0] = sum_of(v);
    group_reduce<true>(total, Sum{}, g, shared[0]);
    mean = total[0] * p.inverse;
    total[0] = 0.0f;
  }
#pragma unroll
  for (int e = 0; e < kItems; ++e) {
    v[e] -= mean;
    if (e * g.lanes < left) total[0] += v[e] * v[e];
  }
  group_reduce<true>(total, Sum{}, g, shared[1]);
  const float rstd = reciprocal_root(total[0] * p.inverse + p.eps);
  // Write the statistics.
  const bool publishes = g.lane == 0 && row < p.rows;
  if (publishes && p.mean) p.mean[row] = mean;
  if (publishes && p.rstd) p.rstd[row] = rstd;
  // Scale and shift.
#pragma unroll
  for (int e = 0; e < kItems; ++e) v[e] *= rstd;
  if (p.weight) {
    load(other, p.weight, 0, weight_type);
#pragma unroll
    for (int e = 0; e < kItems; ++e) v[e] *= other[e] + p.offset;
  }
  if (p.bias) {
    load(other, p.bias, 0, weight_type);
#pragma unroll
    for (int e = 0; e < kItems; ++e) v[e] += other[e];
  }
  // The scale of the codes, from the largest result.
  Coding coding(0, p.codes);
  if (p.codes != Dtype::none) {
    u32 largest[1] = {0};
    find_largest(largest[0], v);
    group_reduce<true>(largest, MaxBits{}, g, shared_codes);
    coding = Coding(largest[0], p.codes);
    if (publishes) p.scales[row] = coding.scale;
  }
  // Write.
#pragma unroll
  for (int e = 0; e < kItems; ++e) {
    if (e * g.lanes >= left) continue;
    float one[1] = {v[e]};
    if (p.codes == Dtype::none) {
      store_any(p.y, to + e * g.lanes, one[0], type);
    } else {
      coding.write(one, static_cast<u8*>(p.y) + to + e * g.lanes, p.codes);
    }
  }
}

}  // namespace flexops::norm
