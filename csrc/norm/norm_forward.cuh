// What the norms' forward kernels share.
#pragma once

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
  int held;              // vectors or pieces of a thread that shared memory holds
  int blocks;            // of a cluster, which has a row
  float eps, inverse;    // 1 / columns
  float offset;          // added to the weight
  ElementType type, row_type, weight_type;
  Dtype codes;
  bool centered;
  bool early;       // few rows: the kernel starts before the one ahead has ended
  bool keep_in_l2;  // the second-level cache is asked to keep what is read
  u32 nothing;      // 0: see forget()
};

inline constexpr int kFewItems = 2, kItems = 4,
                     kManyItems = 8;  // vectors of a row that a thread holds

/// Vectors first, first + step, ... of a row; zeros beyond its end.
template <typename T, int N>
FLEXOPS_DEVICE void read_row(Packed (&raw)[N], const void* from, i64 begin, int first, int step,
                             int count, const L2Policy& policy) {
  const auto* vectors = reinterpret_cast<const Packed*>(static_cast<const T*>(from) + begin);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    raw[k] = Packed{};
    if (first + k * step < count) raw[k] = load_with(vectors + (first + k * step), policy);
  }
}

/// Adds the residual to a thread's vectors of a row, rounds, and writes the sums. A few at a time,
/// because registers are dear.
template <typename T, int N>
FLEXOPS_DEVICE void add_residual(Packed (&raw)[N], const Forward& p, int first, int step, i64 row,
                                 int count, const L2Policy& policy) {
  constexpr int V = kPerVector<T>, kBatch = N == kManyItems ? 2 : 4;
  T* to = static_cast<T*>(p.new_residual) + row * p.columns;
#pragma unroll
  for (int begin = 0; begin < N; begin += kBatch) {
    Packed residual[kBatch];
    read_row<T>(residual, p.residual, row * p.residual_stride, first + begin * step, step, count,
                policy);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      float x[V], r[V];
      widen<T>(x, raw[begin + k]);
      widen<T>(r, residual[k]);
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] += r[i];
      raw[begin + k] = packed<T>(x);
      const int at = first + (begin + k) * step;
      if (at < count) write<T>(to, at * V, raw[begin + k]);
    }
  }
}

/// What elements are off the mean, or the squares of that.
struct Deviations {
  float mean;
  bool squared;
  template <int N>
  FLEXOPS_DEVICE void operator()(float (&v)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = (v[i] - mean) * (squared ? v[i] - mean : 1.0f);
  }
};
/// A row's mean, 0 if it is not centered, and the reciprocal of its deviation.
struct Moments {
  float mean, rstd;
};
/// For kernels that read a row as often as they need it; `sum_up(deviations)` gives a thread's sum
/// of them. Writes the statistics.
template <typename SumUp>
FLEXOPS_DEVICE Moments find_moments(const Forward& p, const Group& g, i64 row,
                                    Partial<float, 1> (&shared)[2], const SumUp& sum_up) {
  // The sum of what elements are off the mean, which is not known yet, then of its squares.
  float mean = 0.0f, total[1];
#pragma unroll 1
  for (int pass = p.centered ? 0 : 1; pass < 2; ++pass) {
    total[0] = sum_up(Deviations{mean, pass == 1});
    group_reduce<true>(total, Sum{}, g, shared[pass]);
    if (pass == 0) mean = total[0] * p.inverse;
  }
  const float rstd = reciprocal_root(total[0] * p.inverse + p.eps);
  if (g.lane == 0 && row < p.rows) {
    if (p.mean) p.mean[row] = mean;
    if (p.rstd) p.rstd[row] = rstd;
  }
  return {mean, rstd};
}

}  // namespace flexops::norm
