// The norms' kernel for rows of vectors that the others do not take.
#pragma once

#include "norm/norm_codes.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// A thread's vectors of one row. The first of these it holds in shared memory, in slots of its
/// own; the others are read again.
template <typename T>
struct Row {
  static constexpr int V = kPerVector<T>;
  Packed* slots;
  int lane, lanes, count, held;  // count: vectors of the row, none if it is beyond the last

  FLEXOPS_DEVICE Packed& slot(int k) const { return slots[k * static_cast<int>(blockDim.x)]; }

  /// Calls f(vector, slot) for each.
  template <typename F>
  FLEXOPS_DEVICE void for_each(const F& f) const {
    int k = 0;
#pragma unroll 1
    for (int i = lane; i < count; i += lanes, ++k) f(i, k);
  }
  /// What is held, or else read again.
  FLEXOPS_DEVICE void get(float (&v)[V], const void* from, i64 begin, int i, int k) const {
    widen<T>(v, k < held ? slot(k) : read<T, Cache::normal>(from, begin + i64(i) * V));
  }
};

/// A row for each group of threads.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    forward_rows(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kPerVector<T>;
  extern __shared__ uint4 storage[];
  __shared__ Partial<float, 1> shared[2];
  __shared__ Partial<u32, 1> shared_codes;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count + g.index, to = row * p.columns;
  const Row<T> r{reinterpret_cast<Packed*>(storage) + threadIdx.x, g.lane, g.lanes,
                 row < p.rows ? p.vectors : 0, p.held};
  // Copy the row to shared memory, with the residual added.
  const void* from = p.x;
  i64 begin = row * p.x_stride;
  if (p.residual == nullptr) {
    r.for_each([&](int i, int k) {
      if (k < p.held)
        async_copy16(&r.slot(k), static_cast<const T*>(from) + begin + i64(i) * V, true);
    });
    async_commit();
    async_wait(0);
  } else {
    r.for_each([&](int i, int k) {
      float x[V], residual[V];
      const Packed raw =
          read<T, Cache::streaming>(p.residual, row * p.residual_stride + i64(i) * V);
      load_floats<Cache::streaming>(x, p.x, begin + i64(i) * V, p.type);
      widen<T>(residual, raw);
#pragma unroll
      for (int e = 0; e < V; ++e) x[e] += residual[e];
      const Packed sum = packed<T>(x);
      if (k < p.held) r.slot(k) = sum;
      write<T>(p.new_residual, to + i64(i) * V, sum);
    });
    from = p.new_residual, begin = to;
  }

  // Reduce to mean and deviation.
  const Moments moments = find_moments(p, g, row, shared, [&](const Deviations& deviations) {
    float total = 0.0f;
    r.for_each([&](int i, int k) {
      float v[V];
      r.get(v, from, begin, i, k);
      deviations(v);
      total += sum_of(v);
    });
    return total;
  });
  const float mean = moments.mean, rstd = moments.rstd;

  // The results; before their codes, the largest of them.
  Coding coding(0, p.codes);
  u32 largest[1] = {0};
#pragma unroll 1
  for (int pass = p.codes == Dtype::none ? 1 : 0; pass < 2; ++pass) {
    r.for_each([&](int i, int k) {
      float v[V], parameter[V];
      r.get(v, from, begin, i, k);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] = (v[e] - mean) * rstd;
      if (p.weight) {
        load_floats<Cache::constant>(parameter, p.weight, i64(i) * V, p.weight_type);
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] *= parameter[e] + p.offset;
      }
      if (p.bias) {
        load_floats<Cache::constant>(parameter, p.bias, i64(i) * V, p.weight_type);
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] += parameter[e];
      }
      if (pass == 0) {
        find_largest(largest[0], v);
      } else if (p.codes == Dtype::none) {
        store_floats(v, p.y, to + i64(i) * V, p.type);
      } else {
        coding.write(v, static_cast<u8*>(p.y) + to + i64(i) * V, p.codes);
      }
    });
    if (pass == 1) continue;
    group_reduce<true>(largest, MaxBits{}, g, shared_codes);
    coding = Coding(largest[0], p.codes);
    if (g.lane == 0 && row < p.rows) p.scales[row] = coding.scale;
  }
}

}  // namespace flexops::norm
