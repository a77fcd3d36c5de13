// Before and after attention's backward kernels: what they need of each query, and dQ from what
// they have added up.
//
//   before:  delta = rowsum(dO O) - dLSE;  exponent = log2(e) LSE;  zeros for the sums of dQ
//   after:   dQ = scale (sums of dQ), in its type and order
//   sums:    dK and dV of a key head, from those of the query heads that share it, where each had
//   blocks of its own
//
// Rows are padded: each sequence's begin at a multiple of kRowTile, so that tiles of queries do not
// straddle sequences, and missing rows have an exponent of +inf, which makes their
// weights zero.
#pragma once

#include "attention/attention_softmax.cuh"
#include "common/elements.cuh"
#include "common/vec.cuh"

namespace flexops::attention {

constexpr int kRowTile = 128;  // a multiple of every kM

/// Which rows of [heads_q, padded_rows] are a sequence's. The launcher: padded_rows = batch *
/// (length_q rounded up to kRowTile), or, if packed, (tokens + batch * kRowTile) rounded up to
/// kRowTile.
FLEXOPS_DEVICE i64 padded_row(const Problem& p, const Sequence& s) {
  const int row = p.cumulative_q ? (s.first_q + s.batch * kRowTile) / kRowTile
                                 : s.batch * ceil_div(p.length_q, kRowTile);
  return static_cast<i64>(row) * kRowTile;
}

struct BackwardRowsParams {
  Problem problem;
  Tensor o, d_o;             // "before" reads them
  const float *lse, *d_lse;  // d_lse: null if there is none
  i64 lse_batch, lse_head;   // of both
  float *exponent, *delta;   // [heads_q, padded_rows]
  float* dq_sums;  // [heads_q, padded_rows, kDim], within tiles of rows in the order of fragments;
                   // null if there are none
  Tensor dq;       // "after" writes it
  i64 padded_rows;
};

constexpr int kRowThreads = 256;

/// grid: (tiles of kRowTile rows, heads_q, batch).
template <class T, int kDim>
__global__ void __launch_bounds__(kRowThreads)
    backward_before(const FLEXOPS_GRID_CONSTANT BackwardRowsParams p) {
  constexpr int kLanes = 8;  // share a row
  const Sequence s(p.problem, blockIdx.z, blockIdx.y);
  const int first = blockIdx.x * kRowTile, lane = static_cast<int>(threadIdx.x) % kLanes;
  if (first >= s.length_q) return;
  const i64 padded = s.head * p.padded_rows + padded_row(p.problem, s) + first;
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < kRowTile;
       row += kRowThreads / kLanes) {
    const bool inside = first + row < s.length_q;
    const i64 at = s.first_q + first + row;
    // Reduce O dO over the row.
    float sum = 0;
    if (inside) {
      const T *o = s.rows_q<T>(p.o, first + row), *d_o = s.rows_q<T>(p.d_o, first + row);
      for (int column = 8 * lane; column < p.problem.head_dim_v; column += 8 * kLanes) {
        float a[8], b[8];
        widen(a, load<Cache::streaming>(reinterpret_cast<const Vec<T, 8>*>(o + column)));
        widen(b, load<Cache::normal>(reinterpret_cast<const Vec<T, 8>*>(d_o + column)));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
      }
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) sum += shuffle_xor(sum, mask);
    // Write the exponent and delta.
    if (lane == 0) {
      const i64 lse = s.coordinate * p.lse_batch + s.head * p.lse_head + at;
      const float log_sum_exp = inside ? p.lse[lse] : -infinity();
      p.exponent[padded + row] = log_sum_exp == -infinity() ? infinity() : log_sum_exp * kLog2E;
      p.delta[padded + row] = inside && p.d_lse ? sum - p.d_lse[lse] : sum;
    }
  }
  // Clear the sums that dQ is added to.
  if (!p.dq_sums) return;
  auto* zeros = reinterpret_cast<float4*>(p.dq_sums + padded * kDim);
  for (int i = threadIdx.x; i < kRowTile * kDim / 4; i += kRowThreads)
    zeros[i] = float4{0, 0, 0, 0};
}

/// grid: (tiles of 64 rows, heads_q, batch); half of the columns for 128 threads each.
template <class T, int kDim>
__global__ void __launch_bounds__(kRowThreads)
    backward_after(const FLEXOPS_GRID_CONSTANT BackwardRowsParams p) {
  constexpr int kColumns = kDim / 2;
  const Sequence s(p.problem, blockIdx.z, blockIdx.y);
  const int first = blockIdx.x * 64, half = static_cast<int>(threadIdx.x) / 128,
            thread = static_cast<int>(threadIdx.x) % 128;
  if (first >= s.length_q) return;
  const float* sums = p.dq_sums +
                      (s.head * p.padded_rows + padded_row(p.problem, s) + first) * kDim +
                      half * (64 * kColumns) + thread * 4;
  // Load the sums of dQ and scale them.
  float dq[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(sums + i * 512);
    dq[4 * i] = four.x * p.problem.scale, dq[4 * i + 1] = four.y * p.problem.scale;
    dq[4 * i + 2] = four.z * p.problem.scale, dq[4 * i + 3] = four.w * p.problem.scale;
  }
  // Write dQ in T.
  store_query_gradient<T>(p.dq, s, first + thread / 32 * 16 + lane_row(), dq, p.problem.head_dim,
                          half * kColumns);
}

struct HeadSumsParams {
  const void* parts[2];  // of dK and of dV: [batch, heads_q, rows, columns]
  Tensor to[2];
  int columns[2], rows, group;
};

/// grid: (rows, heads_k, batch).
template <class T>
__global__ void __launch_bounds__(64) backward_sums(const FLEXOPS_GRID_CONSTANT HeadSumsParams p) {
  const i64 row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const int columns = p.columns[which],
              column = 8 * static_cast<int>(threadIdx.x) - which * p.columns[0];
    if (column < 0 || column >= columns) continue;
    // Add up the heads of a group.
    float sum[8] = {};
    for (int i = 0; i < p.group; ++i) {
      const i64 from = ((batch * gridDim.y + head) * p.group + i) * p.rows + row;
      float part[8];
      widen(part, load<T, 8>(p.parts[which], from * columns + column));
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += part[k];
    }
    // Write.
    const Tensor& to = p.to[which];
    store<T>(to.data, batch * to.batch + row * to.row + head * to.head + column, sum);
  }
}

}  // namespace flexops::attention
