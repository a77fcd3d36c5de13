// The norms' kernel for rows that registers cannot hold.
#pragma once

#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// A block for each row, which it holds in shared memory as far as that goes, and reads the rest
/// again: neither residual nor codes. Weight and bias are as long as the row, so the second-level
/// cache decides: a thread has U vectors of all three on their way.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    forward_long(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kPerVector<T>, U = 2;
  extern __shared__ uint4 storage[];
  __shared__ Partial<float, 1> shared[2];
  const Group g(p.lanes, true);
  auto* const slots = reinterpret_cast<Packed*>(storage) + g.lane;
  const i64 row = blockIdx.x;
  const T* const from = static_cast<const T*>(p.x) + row * p.x_stride;
  // Copy to shared memory what fits of the row.
#pragma unroll 1
  for (int i = g.lane, k = 0; i < p.vectors; i += U * g.lanes, k += U) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = i + u * g.lanes;
      if (k + u < p.held && at < p.vectors)
        async_copy16(slots + (k + u) * g.lanes, from + i64(at) * V, true);
    }
  }
  async_commit();
  async_wait(0);
  // U vectors, zeros beyond the row's end.
  const auto get = [&](Packed(&raw)[U], int i, int k) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = i + u * g.lanes;
      raw[u] = Packed{};
      if (at < p.vectors)
        raw[u] =
            k + u < p.held ? slots[(k + u) * g.lanes] : read<T, Cache::normal>(from, i64(at) * V);
    }
  };

  // Reduce to mean and deviation.
  const Moments moments = find_moments(p, g, row, shared, [&](const Deviations& deviations) {
    float total = 0.0f;
#pragma unroll 1
    for (int i = g.lane, k = 0; i < p.vectors; i += U * g.lanes, k += U) {
      Packed raw[U];
      get(raw, i, k);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float v[V];
        widen<T>(v, raw[u]);
        deviations(v);
        if (i + u * g.lanes < p.vectors) total += sum_of(v);
      }
    }
    return total;
  });
  const float mean = moments.mean, rstd = moments.rstd;
  // Scale, shift and write.
#pragma unroll 1
  for (int i = g.lane, k = 0; i < p.vectors; i += U * g.lanes, k += U) {
    float w[U][V], b[U][V];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = i + u * g.lanes;
      if (at >= p.vectors) continue;
      if (p.weight) load_floats<Cache::constant>(w[u], p.weight, i64(at) * V, p.weight_type);
      if (p.bias) load_floats<Cache::constant>(b[u], p.bias, i64(at) * V, p.weight_type);
    }
    Packed raw[U];
    get(raw, i, k);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = i + u * g.lanes;
      if (at >= p.vectors) continue;
      float v[V];
      widen<T>(v, raw[u]);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] = (v[e] - mean) * rstd;
      if (p.weight) {
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] *= w[u][e] + p.offset;
      }
      if (p.bias) {
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] += b[u][e];
      }
      write<T, Cache::streaming>(p.y, row * p.columns + i64(at) * V, packed<T>(v));
    }
  }
}

}  // namespace flexops::norm
