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
  ElementType type;
};

/// Gates and ups of W columns: apart, ...
template <typename T, bool kPairs>
struct Inputs {
  static constexpr int W = kPerVector<T>;
  Elements<T, W> gate, up;

  FLEXOPS_DEVICE void load(const Gated& p, u32 row, u32 column) {
    gate = fetch<T, W, kLoad>(p.gate, place(row, p.gate_stride, column), p.type);
    up = fetch<T, W, kLoad>(p.up, place(row, p.up_stride, column), p.type);
  }
  FLEXOPS_DEVICE void widen_to(float (&gates)[W], float (&ups)[W], ElementType type) const {
    to_floats(gates, gate, type);
    to_floats(ups, up, type);
  }
  static FLEXOPS_DEVICE void store(const Gated& p, u32 row, u32 column, const float (&gates)[W], const float (&ups)[W]) {
    put_floats<T>(p.gate_grad, place(row, p.out_stride, column), gates, p.type);
    put_floats<T>(p.up_grad, place(row, p.out_stride, column), ups, p.type);
  }
};
/// ... or alternating.
template <typename T>
struct Inputs<T, true> {
  static constexpr int N = kPerVector<T> == 1 ? 2 : kPerVector<T>, W = N / 2;
  Elements<T, N> both;

  FLEXOPS_DEVICE void load(const Gated& p, u32 row, u32 column) {
    both = fetch<T, N, kLoad>(p.gate, place(row, p.gate_stride, 2 * column), p.type);
  }
  FLEXOPS_DEVICE void widen_to(float (&gates)[W], float (&ups)[W], ElementType type) const {
    float value[N];
    to_floats(value, both, type);
#pragma unroll
    for (int i = 0; i < W; ++i) gates[i] = value[2 * i], ups[i] = value[2 * i + 1];
  }
  static FLEXOPS_DEVICE void store(const Gated& p, u32 row, u32 column, const float (&gates)[W], const float (&ups)[W]) {
    float value[N];
#pragma unroll
    for (int i = 0; i < W; ++i) value[2 * i] = gates[i], value[2 * i + 1] = ups[i];
    put_floats<T>(p.gate_grad, place(row, p.out_stride, 2 * column), value, p.type);
  }
};

template <typename T, bool kPairs>
__global__ void __launch_bounds__(kThreads) gated(const FLEXOPS_GRID_CONSTANT Gated p) {
  using In = Inputs<T, kPairs>;
  constexpr int W = In::W, kCount = kPairs ? 2 * kGatedRows : kGatedRows;
  const Walk w = walk_of<W>(p);
  In in[kCount];
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u < p.take && w.row(u) < p.rows) in[u].load(p, w.row(u), w.column);
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u >= p.take || w.row(u) >= p.rows) return;
    float gates[W], ups[W];
    in[u].widen_to(gates, ups, p.type);
    activate_all<kIsAccurate<T>>(gates, p.function);
#pragma unroll
    for (int i = 0; i < W; ++i) gates[i] *= ups[i];
    put_floats<T>(p.out, place(w.row(u), p.columns, w.column), gates, p.type);
  }
}

template <typename T, bool kPairs>
__global__ void __launch_bounds__(kThreads) gated_backward(const FLEXOPS_GRID_CONSTANT Gated p) {
  using In = Inputs<T, kPairs>;
  constexpr int W = In::W, kCount = kPairs ? 2 * kGatedBackwardRows : kGatedBackwardRows;
  const Walk w = walk_of<W>(p);
  In in[kCount];
  Elements<T, W> grad[kCount];
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u < p.take && w.row(u) < p.rows) {
      in[u].load(p, w.row(u), w.column);
      grad[u] = fetch<T, W, kLoad>(p.grad, place(w.row(u), p.grad_stride, w.column), p.type);
    }
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u >= p.take || w.row(u) >= p.rows) return;
    float gates[W], ups[W], outer[W], values[W];
    in[u].widen_to(gates, ups, p.type);
    differentiate_all<kIsAccurate<T>>(gates, p.function, values);
    to_floats(outer, grad[u], p.type);
#pragma unroll
    for (int i = 0; i < W; ++i) gates[i] *= outer[i] * ups[i], ups[i] = outer[i] * values[i];
    In::store(p, w.row(u), w.column, gates, ups);
  }
}

}  // namespace flexops::activation
