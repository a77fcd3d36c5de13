// The kernels of act(gate) * up.
#pragma once

#include "activation/activation.cuh"

namespace flexops::activation {

/// GatedActivation as kernels take it.
struct Gated {
  const void *gate, *up, *grad;
  void *out, *gate_grad, *up_grad;
  u32 rows, columns;
  u32 gate_stride, up_stride, grad_stride, out_stride;
  Divisor vectors;  // of a row
  u32 take;         // rows of a thread
  bool flat;        // see Walk
  Function function;
};

/// Gates and ups of W columns, N elements in an access: apart, ...
template <typename T, bool kPairs, int N>
struct Inputs {
  static constexpr int W = N;
  Vec<T, W> gate, up;

  FLEXOPS_DEVICE void load(const Gated& p, u32 row, u32 column) {
    gate = flexops::load<T, W, kLoad>(p.gate, place(row, p.gate_stride, column));
    up = flexops::load<T, W, kLoad>(p.up, place(row, p.up_stride, column));
  }
  FLEXOPS_DEVICE void widen_to(float (&gates)[W], float (&ups)[W]) const {
    widen(gates, gate);
    widen(ups, up);
  }
  static FLEXOPS_DEVICE void store(const Gated& p, u32 row, u32 column, const float (&gates)[W],
                                   const float (&ups)[W]) {
    flexops::store<T, kStore>(p.gate_grad, place(row, p.out_stride, column), gates);
    flexops::store<T, kStore>(p.up_grad, place(row, p.out_stride, column), ups);
  }
};
/// ... or alternating. A single pair is read as two elements, which need not be aligned together.
template <typename T, int N>
struct Inputs<T, true, N> {
  static constexpr int W = N == 1 ? 1 : N / 2, kAccess = N == 1 ? 1 : N;
  Vec<T, kAccess> both[2 * W / kAccess];

  FLEXOPS_DEVICE void load(const Gated& p, u32 row, u32 column) {
#pragma unroll
    for (int i = 0; i < 2 * W / kAccess; ++i)
      both[i] = flexops::load<T, kAccess, kLoad>(p.gate, place(row, p.gate_stride, 2 * column) + i);
  }
  FLEXOPS_DEVICE void widen_to(float (&gates)[W], float (&ups)[W]) const {
    float value[2 * W];
    if constexpr (W == 1) {
      value[0] = to_float(both[0].at[0]), value[1] = to_float(both[1].at[0]);
    } else {
      widen(value, both[0]);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) gates[i] = value[2 * i], ups[i] = value[2 * i + 1];
  }
  static FLEXOPS_DEVICE void store(const Gated& p, u32 row, u32 column, const float (&gates)[W],
                                   const float (&ups)[W]) {
    const i64 at = place(row, p.out_stride, 2 * column);
    if constexpr (W == 1) {
      flexops::store<T, kStore>(p.gate_grad, at, gates);
      flexops::store<T, kStore>(p.gate_grad, at + 1, ups);
    } else {
      float value[2 * W];
#pragma unroll
      for (int i = 0; i < W; ++i) value[2 * i] = gates[i], value[2 * i + 1] = ups[i];
      flexops::store<T, kStore>(p.gate_grad, at, value);
    }
  }
};

template <typename T, bool kPairs, int N = kPerVector<T>>
__global__ void __launch_bounds__(kThreads) gated(const FLEXOPS_GRID_CONSTANT Gated p) {
  using In = Inputs<T, kPairs, N>;
  constexpr int W = In::W, kCount = kPairs ? 2 * kGatedRows : kGatedRows;
  const Walk w = walk_of<W>(p);
  In in[kCount];
  // Load all rows, so that their reads overlap.
  // Activate, multiply and write them one by one.
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u < p.take && w.row(u) < p.rows) in[u].load(p, w.row(u), w.column);
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u >= p.take || w.row(u) >= p.rows) return;
    float gates[W], ups[W];
    in[u].widen_to(gates, ups);
    activate_all<kIsAccurate<T>>(gates, p.function);
#pragma unroll
    for (int i = 0; i < W; ++i) gates[i] *= ups[i];
    store<T, kStore>(p.out, place(w.row(u), p.columns, w.column), gates);
  }
}

template <typename T, bool kPairs, int N = kPerVector<T>>
__global__ void __launch_bounds__(kThreads) gated_backward(const FLEXOPS_GRID_CONSTANT Gated p) {
  using In = Inputs<T, kPairs, N>;
  constexpr int W = In::W, kCount = kPairs ? 2 * kGatedBackwardRows : kGatedBackwardRows;
  const Walk w = walk_of<W>(p);
  In in[kCount];
  Vec<T, W> grad[kCount];
  // Load gates, ups and gradients of all rows.
  // Of each row: the derivative, the product if it is wanted again, both gradients.
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u < p.take && w.row(u) < p.rows) {
      in[u].load(p, w.row(u), w.column);
      grad[u] = load<T, W, kLoad>(p.grad, place(w.row(u), p.grad_stride, w.column));
    }
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u >= p.take || w.row(u) >= p.rows) return;
    float gates[W], ups[W], outer[W], values[W];
    in[u].widen_to(gates, ups);
    differentiate_all<kIsAccurate<T>>(gates, p.function, values);
    widen(outer, grad[u]);
#pragma unroll
    for (int i = 0; i < W; ++i) gates[i] *= outer[i] * ups[i];
    if (p.out) {
      float result[W];
#pragma unroll
      for (int i = 0; i < W; ++i) result[i] = values[i] * ups[i];
      store<T, kStore>(p.out, place(w.row(u), p.columns, w.column), result);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) ups[i] = outer[i] * values[i];
    In::store(p, w.row(u), w.column, gates, ups);
  }
}

}  // namespace flexops::activation
