// The norms' kernel for all that the others do not take.
#pragma once

#include "norm/norm_codes.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// N elements of S, `step` apart, of which `left` / step are there.
template <typename S, int N>
FLEXOPS_DEVICE void load_apart(float (&out)[N], const void* from, i64 first, int step, int left) {
  S raw[N];
#pragma unroll
  for (int e = 0; e < N; ++e) raw[e] = e * step < left ? static_cast<const S*>(from)[first + e * step] : S{};
#pragma unroll
  for (int e = 0; e < N; ++e) out[e] = to_float(raw[e]);
}

/// A thread's part of one row, a vector at a time, or where there are none kApart elements that lie `lanes` apart. The first of these it
/// holds in shared memory, in slots of its own; the others are read again.
template <typename T>
struct Row {
  static constexpr bool kApart = kVector<T> == 1;
  static constexpr int V = kVector<T>, kSlots = kApart ? 4 : 1, N = kApart ? kSlots : V;
  Raw<T>* slots;
  int lane, lanes, count, held;  // count: vectors of the row, none if it is beyond the last

  FLEXOPS_DEVICE Raw<T>& slot(int k) const { return slots[k * static_cast<int>(blockDim.x)]; }

  template <Cache cache>
  FLEXOPS_DEVICE void load(float (&out)[N], const void* from, i64 begin, int i, Type type) const {
    if constexpr (!kApart) {
      load_floats<cache>(out, from, begin + i64(i) * V, type);
    } else if (type == kBf16) {
      load_apart<bf16>(out, from, begin + i, lanes, count - i);
    } else if (type == kF16) {
      load_apart<f16>(out, from, begin + i, lanes, count - i);
    } else {
      load_apart<float>(out, from, begin + i, lanes, count - i);
    }
  }
  FLEXOPS_DEVICE void store(const float (&in)[N], void* to, i64 begin, int i, Type type) const {
    if constexpr (!kApart) {
      store_floats(in, to, begin + i64(i) * V, type);
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if (i + e * lanes < count) store_one(to, begin + i + e * lanes, in[e], type);
      }
    }
  }
  FLEXOPS_DEVICE void round(float (&v)[N], Type type) const {
    if constexpr (kApart) {
#pragma unroll
      for (int e = 0; e < N; ++e) v[e] = round_to(v[e], type);
    }
  }
  FLEXOPS_DEVICE void keep(const float (&v)[N], int k, Type type) const {
    if constexpr (kApart) {
#pragma unroll
      for (int e = 0; e < N; ++e) slot(k + e) = v[e];
    } else {
      slot(k) = narrow<T>(v, type);
    }
  }

  /// Calls f(first vector or element, slot) for each step.
  template <typename F>
  FLEXOPS_DEVICE void for_each(const F& f) const {
    int k = 0;
#pragma unroll 1
    for (int i = lane; i < count; i += kSlots * lanes, k += kSlots) f(i, k);
  }
  /// What is held, or else read again.
  FLEXOPS_DEVICE void get(float (&v)[N], const void* from, i64 begin, int i, int k, Type type) const {
    if constexpr (kApart) {
      if (k < held) {
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] = slot(k + e);
      } else {
        load<Cache::normal>(v, from, begin, i, type);
      }
    } else {
      widen<T>(v, k < held ? slot(k) : read<T, Cache::normal>(from, begin + i64(i) * V, type), type);
    }
  }
};

/// A row for each group of threads.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) forward_rows(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kVector<T>, N = Row<T>::N;
  extern __shared__ uint4 storage[];
  __shared__ Partial<float, 1> shared[2];
  __shared__ Partial<u32, 1> shared_codes;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count() + g.index, to = row * p.columns;
  const Row<T> r{reinterpret_cast<Raw<T>*>(storage) + threadIdx.x, g.lane, g.lanes, row < p.rows ? p.vectors : 0, p.held};
  const void* from = p.x;
  i64 begin = row * p.x_stride;
  if (p.residual == nullptr) {
    if constexpr (V == 1) {
      r.for_each([&](int i, int k) {
        float v[N];
        if (k >= p.held) return;
        r.template load<Cache::streaming>(v, from, begin, i, p.row_type);
        r.keep(v, k, p.row_type);
      });
    } else {
      r.for_each([&](int i, int k) {
        if (k < p.held) async_copy16(&r.slot(k), static_cast<const T*>(from) + begin + i64(i) * V, true);
      });
      async_commit();
      async_wait(0);
    }
  } else {
    r.for_each([&](int i, int k) {
      float x[N], residual[N];
      if constexpr (V == 1) {
        r.template load<Cache::streaming>(residual, p.residual, row * p.residual_stride, i, p.row_type);
        r.template load<Cache::streaming>(x, p.x, begin, i, p.type);
      } else {
        const Raw<T> raw = read<T, Cache::streaming>(p.residual, row * p.residual_stride + i64(i) * V, p.row_type);
        r.template load<Cache::streaming>(x, p.x, begin, i, p.type);
        widen<T>(residual, raw, p.row_type);
      }
#pragma unroll
      for (int e = 0; e < N; ++e) x[e] += residual[e];
      r.round(x, p.row_type);
      if (k < p.held) r.keep(x, k, p.row_type);
      if constexpr (V == 1) {
        r.store(x, p.new_residual, to, i, p.row_type);
      } else {
        write<T>(p.new_residual, to + i64(i) * V, narrow<T>(x, p.row_type), p.row_type);
      }
    });
    from = p.new_residual, begin = to;
  }

  // The sum of what elements are off the mean, which is not known yet, then of its squares.
  float mean = 0.0f, total[1];
#pragma unroll 1
  for (int pass = p.centered ? 0 : 1; pass < 2; ++pass) {
    total[0] = 0.0f;
    r.for_each([&](int i, int k) {
      float v[N];
      r.get(v, from, begin, i, k, p.row_type);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        v[e] = (v[e] - mean) * (pass == 0 ? 1.0f : v[e] - mean);
        if (V == 1 && i + e * g.lanes >= r.count) v[e] = 0.0f;
      }
      total[0] += sum_of(v);
    });
    group_reduce<true>(total, Sum{}, g, shared[pass]);
    if (pass == 0) mean = total[0] * p.inverse;
  }
  const float rstd = reciprocal_root(total[0] * p.inverse + p.eps);
  const bool publishes = g.lane == 0 && row < p.rows;
  if (publishes && p.mean) p.mean[row] = mean;
  if (publishes && p.rstd) p.rstd[row] = rstd;

  // The results; before their codes, the largest of them.
  Coding coding(0, p.codes);
  u32 largest[1] = {0};
#pragma unroll 1
  for (int pass = p.codes == kNoCodes ? 1 : 0; pass < 2; ++pass) {
    r.for_each([&](int i, int k) {
      float v[N], parameter[N];
      r.get(v, from, begin, i, k, p.row_type);
#pragma unroll
      for (int e = 0; e < N; ++e) v[e] = (v[e] - mean) * rstd;
      if (p.weight) {
        r.template load<Cache::constant>(parameter, p.weight, 0, i, p.weight_type);
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] *= parameter[e];
      }
      if (p.bias) {
        r.template load<Cache::constant>(parameter, p.bias, 0, i, p.weight_type);
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] += parameter[e];
      }
      if (pass == 0) {
        find_largest(largest[0], v);
      } else if (p.codes == kNoCodes) {
        r.store(v, p.y, to, i, p.type);
      } else if constexpr (V == 1) {
#pragma unroll
        for (int e = 0; e < N; ++e) {
          float one[1] = {v[e]};
          if (i + e * g.lanes < r.count) coding.write(one, static_cast<u8*>(p.y) + to + i + e * g.lanes, p.codes);
        }
      } else {
        coding.write(v, static_cast<u8*>(p.y) + to + i64(i) * V, p.codes);
      }
    });
    if (pass == 1) continue;
    group_reduce<true>(largest, MaxBits{}, g, shared_codes);
    coding = Coding(largest[0], p.codes);
    if (publishes) p.scales[row] = coding.scale;
  }
}

}  // namespace flexops::norm
