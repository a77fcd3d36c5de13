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
  bool same;     // there is a weight, and it and the bias are of the row's type
  bool lasting;  // the second-level cache is asked to keep what is read
  u32 nothing;   // 0: see forget()
};

constexpr int kFewItems = 2, kItems = 4, kManyItems = 8;  // vectors of a row that a thread holds
constexpr int kTogether = 2;                              // forward_layer: rows of a group
template <typename T>
constexpr int kRowsItems = kVector<T> == 1 ? 4 : 2;  // forward_rows: those that it holds

/// Neighbouring codes, in as few words as they fill, of numbers that lie within what C can tell.
template <typename C, int N>
FLEXOPS_DEVICE void store_codes(const float (&value)[N], float inverse, u8* to) {
  float v[N];
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = __fmul_rn(value[i], inverse);
  if constexpr (N == 1) {
    *to = bit_cast<u8>(from_float<C>(v[0]));
  } else {
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N; i += 4)
      words.at[i / 4] = sizeof(C) == 1 && kLargest<C> == 127.0f ? pack4_within(v[i], v[i + 1], v[i + 2], v[i + 3])
                                                                : pack4<C>(v[i], v[i + 1], v[i + 2], v[i + 3]);
    store<Cache::streaming>(reinterpret_cast<Vec<u32, N / 4>*>(to), words);
  }
}
/// The greater of a, which is not negative, and |b|; NaN if either is.
FLEXOPS_DEVICE float greater_magnitude(float a, float b) {
#if FLEXOPS_HAS_MIN2
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(fabsf(b)));
  return out;
#else
  const u32 left = bit_cast<u32>(a), right = bit_cast<u32>(b) & 0x7fffffffu;  // NaN is above infinity
  return bit_cast<float>(left < right ? right : left);
#endif
}

struct MaxBits {
  FLEXOPS_DEVICE u32 operator()(u32 a, u32 b) const { return a < b ? b : a; }
};
/// Of a float's bits in the low word, and what MaxBits takes in the high one.
struct SumAndLargest {
  FLEXOPS_DEVICE u64 operator()(u64 a, u64 b) const {
    const float sum = bit_cast<float>(static_cast<u32>(a)) + bit_cast<float>(static_cast<u32>(b));
    return u64(MaxBits{}(static_cast<u32>(a >> 32), static_cast<u32>(b >> 32))) << 32 | bit_cast<u32>(sum);
  }
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

/// Vectors first, first + step, ... of a row; zeros for those that it has not.
template <typename T, int N>
FLEXOPS_DEVICE void read_row(Raw<T> (&raw)[N], const void* from, i64 begin, int first, int step, int count, const Lasting& lasting) {
  const auto* vectors = reinterpret_cast<const Raw<T>*>(static_cast<const T*>(from) + begin);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    raw[k] = Raw<T>{};
    if (first + k * step < count) raw[k] = load_lasting(vectors + (first + k * step), lasting);
  }
}

/// Adds the residual to a thread's vectors of a row, rounds, and writes the sums. A few at a time, because registers are dear.
template <typename T, int N>
FLEXOPS_DEVICE void add_residual(Raw<T> (&raw)[N], const Forward& p, const Group& g, i64 row, int count, const Lasting& lasting) {
  constexpr int V = kVector<T>, kBatch = N == kManyItems ? 2 : 4;
  T* to = static_cast<T*>(p.new_residual) + row * p.columns;
#pragma unroll
  for (int begin = 0; begin < N; begin += kBatch) {
    Raw<T> residual[kBatch];
    read_row<T>(residual, p.residual, row * p.residual_stride, g.lane + begin * g.lanes, g.lanes, count, lasting);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      float x[V], r[V];
      widen<T>(x, raw[begin + k], p.type);
      widen<T>(r, residual[k], p.type);
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] += r[i];
      raw[begin + k] = narrow<T>(x, p.type);
      const int at = g.lane + (begin + k) * g.lanes;
      if (at < count) write<T>(to, at * V, raw[begin + k], p.type);
    }
  }
}

/// kSame: there is a weight, and it and the bias are of T: no branches keep them from being read ahead.
template <typename T, bool kMayCenter, bool kSame, int N>
FLEXOPS_DEVICE void write_results(const Forward& p, const Group& g, const Raw<T> (&raw)[N], i64 row, int count, float mean, float rstd) {
  constexpr int V = kVector<T>;
  T* to = static_cast<T*>(p.y) + row * p.columns;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int at = g.lane + k * g.lanes;
    if (at >= count) continue;
    float v[V], w[V], b[V];
    widen<T>(v, raw[k], p.type);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * rstd;
    if constexpr (kSame) {
      Raw<T> bias = {};
      if (kMayCenter && p.bias) bias = read<T, Cache::constant>(p.bias, at * V, p.type);
      widen<T>(w, read<T, Cache::constant>(p.weight, at * V, p.type), p.type);
      widen<T>(b, bias, p.type);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = kMayCenter ? v[i] * w[i] + b[i] : v[i] * w[i];
    } else {
      if (p.weight) {
        load_floats<Cache::constant>(w, p.weight, at * V, p.weight_type);
#pragma unroll
        for (int i = 0; i < V; ++i) v[i] *= w[i];
      }
      if (p.bias) {
        load_floats<Cache::constant>(b, p.bias, at * V, p.weight_type);
#pragma unroll
        for (int i = 0; i < V; ++i) v[i] += b[i];
      }
    }
    write<T>(to, at * V, narrow<T>(v, p.type), p.type);
  }
}

/// What is tuned: few registers let many rows be on their way.
template <typename T, bool kAdding, int kHeld>
struct Held {
  static constexpr int kBlocks = kHeld == kFewItems ? 4 : 2;
  static constexpr bool kMayCenter = kHeld != kFewItems || kVector<T> == 4;
};

/// The same as forward_rows, without codes, where everything but the parameters is of T and registers hold whole rows. kAdding: with a
/// residual. kFewItems: only with a weight of T, and no layer norm of 16-bit rows.
template <typename T, bool kAdding, int kHeld>
__global__ void __launch_bounds__(kHeldThreads, (Held<T, kAdding, kHeld>::kBlocks)) forward_held(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kVector<T>;
  __shared__ Partial<float, 1> shared[2];
  const Group g(p.lanes, true);
  const Lasting lasting(p.lasting);
  const i64 row = i64(blockIdx.x) * g.count() + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  Raw<T> raw[kHeld];
  read_row<T>(raw, p.x, row * p.x_stride, g.lane, g.lanes, count, lasting);
  if constexpr (kAdding) add_residual<T>(raw, p, g, row, count, lasting);

  constexpr bool kMayCenter = Held<T, kAdding, kHeld>::kMayCenter;
  const bool centered = kMayCenter && p.centered;
  float mean = 0.0f, total[1] = {0.0f};
  if (centered) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float v[V];
      widen<T>(v, raw[k], p.type);
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
    widen<T>(v, raw[k], p.type);
    if (g.lane + k * g.lanes < count) {
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = (v[i] - mean) * (v[i] - mean);
      total[0] += sum_of(v);
    }
  }
  forget<T>(raw, p.nothing);
  group_reduce<true>(total, Sum{}, g, shared[1]);
  const float rstd = reciprocal_root(total[0] * p.inverse + p.eps);
  if (g.lane == 0 && row < p.rows) {
    if (p.mean) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }

  if constexpr (kHeld == kFewItems) {
    write_results<T, kMayCenter, true>(p, g, raw, row, count, mean, rstd);
  } else if (!kAdding && p.same) {
    write_results<T, kMayCenter, true>(p, g, raw, row, count, mean, rstd);
  } else {
    write_results<T, kMayCenter, false>(p, g, raw, row, count, mean, rstd);
  }
}

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

/// Calls f(x, x * weight, vector) for each vector in registers. The weight is of T.
template <typename T, int N, typename F>
FLEXOPS_DEVICE void for_each_product(const Forward& p, const Group& g, Raw<T> (&raw)[N], int count, const F& f) {
  constexpr int V = kVector<T>;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int at = g.lane + k * g.lanes;
    if (at >= count) continue;
    float x[V], v[V];
    widen<T>(x, raw[k], p.type);
    widen<T>(v, read<T, Cache::constant>(p.weight, at * V, p.type), p.type);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] *= x[i];
    f(x, v, at);
  }
  forget<T>(raw, p.nothing);
}

/// Calls f(x * rstd * weight, vector) for each vector of a row, which is read again, to spare registers.
template <typename T, typename F>
FLEXOPS_DEVICE void for_each_result(const Forward& p, const Group& g, i64 row, int count, float rstd, const F& f) {
  constexpr int V = kVector<T>;
  const T* from = p.residual ? static_cast<const T*>(p.new_residual) + row * p.columns : static_cast<const T*>(p.x) + row * p.x_stride;
#pragma unroll 1
  for (int i = g.lane; i < count; i += g.lanes) {
    float v[V], w[V];
    widen<T>(v, read<T, Cache::normal>(from, i * V, p.type), p.type);
    widen<T>(w, read<T, Cache::constant>(p.weight, i * V, p.type), p.type);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = v[e] * rstd * w[e];
    f(v, i);
  }
}

/// RMS norm's codes, where all is of T, with a weight, and registers hold whole rows. The largest |x * weight| is found together with
/// the sum of squares, and rstd times that is the largest result; unless it came near the ends of what a float can tell, and is looked for
/// anew.
template <typename T>
__global__ void __launch_bounds__(kHeldThreads, 2) forward_codes(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kVector<T>, kHeld = kManyItems;
  constexpr u32 kLeastUsual = 0x1f800000u, kMostUsual = 0x5f800000u;  // 2^-64, 2^64
  __shared__ Partial<u64, 1> shared;
  __shared__ Partial<u32, 1> shared_largest;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count() + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  const Lasting lasting(false);  // keeping it does not pay where less is written than read
  Raw<T> raw[kHeld];
  read_row<T>(raw, p.x, row * p.x_stride, g.lane, g.lanes, count, lasting);
  if (p.residual) add_residual<T>(raw, p, g, row, count, lasting);

  float total = 0.0f, most = 0.0f;
  for_each_product<T>(p, g, raw, count, [&](float (&x)[V], const float (&v)[V], int) {
#pragma unroll
    for (int i = 0; i < V; ++i) most = greater_magnitude(most, v[i]), x[i] *= x[i];
    total += sum_of(x);
  });
  u32 largest[1] = {bit_cast<u32>(most)};
  u64 both[1] = {u64(largest[0]) << 32 | bit_cast<u32>(total)};
  group_reduce<true>(both, SumAndLargest{}, g, shared);
  const float rstd = reciprocal_root(bit_cast<float>(static_cast<u32>(both[0])) * p.inverse + p.eps);
  largest[0] = static_cast<u32>(both[0] >> 32);
  u8* to = static_cast<u8*>(p.y) + row * p.columns;
  const auto publish = [&](const Coding& coding) {
    if (g.lane == 0 && row < p.rows) p.scales[row] = coding.scale;
  };
  // All lanes of a warp take the same way, because they meet again in group_reduce.
  u32 unusual = largest[0] < kLeastUsual || largest[0] > kMostUsual;
  for (int mask = kNarrowWarp / 2; mask > 0 && !g.wide; mask /= 2) unusual |= shuffle_xor(unusual, mask, kNarrowWarp);
  if (!unusual) {
    const Coding coding(bit_cast<u32>(bit_cast<float>(largest[0]) * rstd), p.codes);
    publish(coding);
    const float factor = rstd * coding.inverse;
    if (p.codes == kInt8) {
      for_each_product<T>(p, g, raw, count,
                          [&](const float (&)[V], const float (&v)[V], int i) { store_codes<i8>(v, factor, to + i * V); });
    } else {
      for_each_product<T>(p, g, raw, count,
                          [&](const float (&)[V], const float (&v)[V], int i) { store_codes<e4m3>(v, factor, to + i * V); });
    }
    return;
  }
  largest[0] = 0;
  for_each_result<T>(p, g, row, count, rstd, [&](const float (&v)[V], int) { find_largest(largest[0], v); });
  group_reduce<true>(largest, MaxBits{}, g, shared_largest);
  const Coding coding(largest[0], p.codes);
  publish(coding);
  for_each_result<T>(p, g, row, count, rstd, [&](float (&v)[V], int i) { coding.write(v, to + i * V, p.codes); });
}

}  // namespace flexops::norm
