// The norms' forward kernel. A row stays in registers between its sums and its result.
#pragma once

#include "common/fp8.cuh"
#include "norm/norm.cuh"

namespace flexops::norm {

/// NormForward as kernels take it, with what the launcher has worked out.
struct Forward {
  const void *x, *residual, *weight, *bias;
  void *y, *new_residual;
  float *mean, *rstd, *scales;
  i64 rows, x_stride, residual_stride;
  int columns, vectors;  // of a row
  int lanes;             // that share a row
  float eps, inverse;    // 1 / columns
  Type type, row_type, weight_type;
  Codes codes;
  bool centered;
};

constexpr int kItems = 4, kManyItems = 8;  // forward_held: vectors of a row that a thread has
template <typename T>
constexpr int kRowsItems = kVector<T> == 1 ? 4 : FLEXOPS_NORM_ROWS_ITEMS;  // forward_rows: those that it holds

/// Neighbouring codes, in as few words as they fill.
template <typename C, int N>
FLEXOPS_DEVICE void store_codes(const float (&value)[N], float inverse, u8* to) {
  float scaled[N];
#pragma unroll
  for (int i = 0; i < N; ++i) scaled[i] = __fmul_rn(value[i], inverse);
  if constexpr (N == 1) {
    *to = bit_cast<u8>(from_float<C>(scaled[0]));
  } else {
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N; i += 4) words.at[i / 4] = pack4<C>(scaled[i], scaled[i + 1], scaled[i + 2], scaled[i + 3]);
    store<Cache::streaming>(reinterpret_cast<Vec<u32, N / 4>*>(to), words);
  }
}

struct MaxBits {
  FLEXOPS_DEVICE u32 operator()(u32 a, u32 b) const { return a < b ? b : a; }
};

/// A row's scale, found from the largest of its absolute values' bits, among which NaN is above infinity.
struct Coding {
  float scale, inverse;
  bool broken;

  FLEXOPS_DEVICE Coding(u32 largest, Codes codes) {
    const float most = bit_cast<float>(largest);
    broken = largest >= 0x7f800000u;
    scale = most == 0.0f ? 1.0f : fmaxf(most / (codes == kInt8 ? 127.0f : 448.0f), 1.17549435e-38f);
    inverse = 1.0f / scale;
    if (broken) scale = bit_cast<float>(0x7fc00000u), inverse = 0.0f;
  }
  template <int N>
  FLEXOPS_DEVICE void write(float (&value)[N], u8* to, Codes codes) const {
    if (broken) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = 0.0f;  // NaN is 0 neither times 0 nor as a code
    }
    codes == kInt8 ? store_codes<i8>(value, inverse, to) : store_codes<e4m3>(value, inverse, to);
  }
};

template <int N>
FLEXOPS_DEVICE void find_largest(u32& largest, const float (&value)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) largest = MaxBits{}(largest, bit_cast<u32>(value[i]) & 0x7fffffffu);
}

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
      forget(held);
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
    forget(held);
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
    forget(held);
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
  const Group g(p.lanes);
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

/// The same where everything but the parameters is of T and registers hold whole rows. kPlain is without a residual and codes: with fewer
/// registers, more rows are on their way.
template <typename T, bool kPlain, int kHeld>
__global__ void __launch_bounds__(kHeldThreads, kPlain ? FLEXOPS_NORM_PLAIN_BLOCKS : FLEXOPS_NORM_HELD_BLOCKS)
    forward_held(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kVector<T>;
  __shared__ Partial<float, 1> shared[2];
  const Group g(p.lanes);
  const i64 row = i64(blockIdx.x) * g.count() + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  const auto at = [&](int k) { return g.lane + k * g.lanes; };
  const auto fetch = [&](Raw<T>(&to)[kHeld], const void* from) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      to[k] = Raw<T>{};
      if (at(k) < count) to[k] = read<T, Cache::constant>(from, at(k) * V, p.type);
    }
  };
  Raw<T> raw[kHeld];
  {
    const T* from = static_cast<const T*>(p.x) + row * p.x_stride;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      raw[k] = Raw<T>{};
      if (at(k) < count) raw[k] = read<T, kLoad>(from, at(k) * V, p.type);
    }
  }
  if (!kPlain && p.residual) {
    const T* from = static_cast<const T*>(p.residual) + row * p.residual_stride;
    T* to = static_cast<T*>(p.new_residual) + row * p.columns;
    Raw<T> residual[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      residual[k] = Raw<T>{};
      if (at(k) < count) residual[k] = read<T, kLoad>(from, at(k) * V, p.type);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float x[V], r[V];
      widen<T>(x, raw[k], p.type);
      widen<T>(r, residual[k], p.type);
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] += r[i];
      raw[k] = narrow<T>(x, p.type);
      if (at(k) < count) write<T>(to, at(k) * V, raw[k], p.type);
    }
  }

  float mean = 0.0f, total[1] = {0.0f};
  if (p.centered) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float v[V];
      widen<T>(v, raw[k], p.type);
      total[0] += sum_of(v);
    }
    forget(raw);
    group_reduce<true>(total, Sum{}, g, shared[0]);
    mean = total[0] * p.inverse;
    total[0] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float v[V];
    widen<T>(v, raw[k], p.type);
    if (at(k) < count) {
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * (v[i] - mean);
      total[0] += sum_of(v);
    }
  }
  forget(raw);
  group_reduce<true>(total, Sum{}, g, shared[1]);
  const float rstd = reciprocal_root(total[0] * p.inverse + p.eps);
  if (g.lane == 0 && row < p.rows) {
    if (p.mean) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }

  // Weights of T, as they mostly are, are all fetched before the first is used.
  const bool same = kPlain && kHeld == kItems && p.weight_type == Traits<T>::kType;
  Raw<T> weight[kHeld];
  if (same && p.weight) fetch(weight, p.weight);
  const auto result = [&](float (&v)[V], int k) {
    float w[V], b[V];
    widen<T>(v, raw[k], p.type);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * rstd;
    if (p.weight) {
      if (same) {
        widen<T>(w, weight[k], p.type);
      } else {
        load_floats<Cache::constant>(w, p.weight, at(k) * V, p.weight_type);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] *= w[i];
    }
    if (p.bias) {
      if (same) {
        widen<T>(b, read<T, Cache::constant>(p.bias, at(k) * V, p.type), p.type);
      } else {
        load_floats<Cache::constant>(b, p.bias, at(k) * V, p.weight_type);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] += b[i];
    }
  };
  if (kPlain || p.codes == kNoCodes) {
    T* to = static_cast<T*>(p.y) + row * p.columns;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (at(k) < count) {
        float v[V];
        result(v, k);
        write<T>(to, at(k) * V, narrow<T>(v, p.type), p.type);
      }
    }
  } else if constexpr (!kPlain) {
    __shared__ Partial<u32, 1> shared_codes;
    float v[kHeld][V];
    u32 largest[1] = {0};
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (at(k) < count) {
        result(v[k], k);
        find_largest(largest[0], v[k]);
      }
    }
    group_reduce<true>(largest, MaxBits{}, g, shared_codes);
    const Coding coding(largest[0], p.codes);
    if (g.lane == 0 && row < p.rows) p.scales[row] = coding.scale;
    u8* to = static_cast<u8*>(p.y) + row * p.columns;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (at(k) < count) coding.write(v[k], to + at(k) * V, p.codes);
    }
  }
}

}  // namespace flexops::norm
