// The norms' kernel for all that the others do not take.
#pragma once

#include "norm/norm_codes.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// A thread's part of one row, and what has been found of it.
template <typename T>
struct Row {
  static constexpr int V = kVector<T>, kHeld = kRowsItems<T>;
  const Forward& p;
  const Group& g;
  i64 row;
  int count;  // vectors: none if the row is beyond the last
  Raw<T> held[kHeld];
  float mean, rstd;

  FLEXOPS_DEVICE int at(int k) const { return g.lane + k * g.lanes; }
  FLEXOPS_DEVICE bool inside(int k) const { return at(k) < count; }

  /// x + residual, rounded; also written.
  FLEXOPS_DEVICE Raw<T> add(int i) const {
    float sum[V], other[V];
    load_floats<Cache::streaming>(sum, p.x, row * p.x_stride + i64(i) * V, p.type);
    widen<T>(other, read<T, Cache::streaming>(p.residual, row * p.residual_stride + i64(i) * V, p.row_type), p.row_type);
#pragma unroll
    for (int e = 0; e < V; ++e) sum[e] += other[e];
    const Raw<T> out = narrow<T>(sum, p.row_type);
    write<T>(p.new_residual, row * p.columns + i64(i) * V, out, p.row_type);
    return out;
  }

  /// The vectors in registers. Loads of the parts that do not exist give zeros.
  FLEXOPS_DEVICE void fill() {
    const i64 from = row * p.x_stride;
    if (p.residual == nullptr) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        held[k] = Raw<T>{};
        if (inside(k)) held[k] = read<T, Cache::streaming>(p.x, from + i64(at(k)) * V, p.type);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      held[k] = Raw<T>{};
      if (inside(k)) held[k] = add(at(k));
    }
  }
  /// Calls f(vector, elements) for every vector of the row that this thread has: the held ones, then the others, from memory.
  template <typename F>
  FLEXOPS_DEVICE void for_each(const F& f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float v[V];
      widen<T>(v, held[k], p.row_type);
      if (inside(k)) f(at(k), v);
    }
    for_the_rest(f);
  }
  template <typename F>
  FLEXOPS_DEVICE void for_the_rest(const F& f) const {
    const void* from = p.residual ? p.new_residual : p.x;
    const i64 begin = row * (p.residual ? p.columns : p.x_stride);
    for (int i = at(kHeld); i < count; i += g.lanes) {
      float v[V];
      widen<T>(v, read<T, Cache::normal>(from, begin + i64(i) * V, p.row_type), p.row_type);
      f(i, v);
    }
  }

  FLEXOPS_DEVICE void find_statistics(Partial<float, 1> (&shared)[2]) {
    if (p.residual) {
      for (int i = at(kHeld); i < count; i += g.lanes) add(i);
    }
    mean = 0.0f;
    float total[1] = {0.0f};
    if (p.centered) {
      for_each([&](int, const float (&v)[V]) { total[0] += sum_of(v); });
      forget<T>(held, p.nothing);
      group_reduce<true>(total, Sum{}, g, shared[0]);
      mean = total[0] * p.inverse;
      total[0] = 0.0f;
    }
    for_each([&](int, const float (&v)[V]) {
      float squares[V];
#pragma unroll
      for (int i = 0; i < V; ++i) squares[i] = (v[i] - mean) * (v[i] - mean);
      total[0] += sum_of(squares);
    });
    forget<T>(held, p.nothing);
    group_reduce<true>(total, Sum{}, g, shared[1]);
    rstd = reciprocal_root(total[0] * p.inverse + p.eps);
    if (g.lane == 0 && row < p.rows) {
      if (p.mean) p.mean[row] = mean;
      if (p.rstd) p.rstd[row] = rstd;
    }
  }

  /// v becomes the result.
  FLEXOPS_DEVICE void apply(float (&v)[V], const float (&w)[V], const float (&b)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * rstd;
    if (p.weight) {
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] *= w[i];
    }
    if (p.bias) {
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] += b[i];
    }
  }
  FLEXOPS_DEVICE void apply(float (&v)[V], int i) const {
    float w[V], b[V];
    if (p.weight) load_floats<Cache::constant>(w, p.weight, i64(i) * V, p.weight_type);
    if (p.bias) load_floats<Cache::constant>(b, p.bias, i64(i) * V, p.weight_type);
    apply(v, w, b);
  }

  /// Calls f(vector, result) for every vector of this thread.
  template <typename F>
  FLEXOPS_DEVICE void for_each_result(const F& f) const {
    for_each([&](int i, float (&v)[V]) {
      apply(v, i);
      f(i, v);
    });
  }

  FLEXOPS_DEVICE void finish() const {
    const i64 to = row * p.columns;
    for_each_result([&](int i, const float (&v)[V]) { store_floats(v, p.y, to + i64(i) * V, p.type); });
  }

  FLEXOPS_DEVICE void finish_codes(Partial<u32, 1>& shared) {
    u32 largest[1] = {0};
    for_each_result([&](int, const float (&v)[V]) { find_largest(largest[0], v); });
    forget<T>(held, p.nothing);
    group_reduce<true>(largest, MaxBits{}, g, shared);
    const Coding coding(largest[0], p.codes);
    if (g.lane == 0 && row < p.rows) p.scales[row] = coding.scale;
    for_each_result([&](int i, float (&v)[V]) { coding.write(v, static_cast<u8*>(p.y) + row * p.columns + i64(i) * V, p.codes); });
  }
};

/// A row for each group of threads, held in registers as far as these go.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) forward_rows(const FLEXOPS_GRID_CONSTANT Forward p) {
  __shared__ Partial<float, 1> shared[2];
  __shared__ Partial<u32, 1> shared_codes;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count() + g.index;
  Row<T> r{p, g, row, row < p.rows ? p.vectors : 0, {}, 0.0f, 0.0f};
  r.fill();
  r.find_statistics(shared);
  if (p.codes == kNoCodes) {
    r.finish();
  } else {
    r.finish_codes(shared_codes);
  }
}

}  // namespace flexops::norm
