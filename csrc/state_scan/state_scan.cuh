// The kernels of recurrences whose state is a matrix. What they compute: flexops/ops/state_scan.py.
//
// Columns of a state do not depend on each other. Eight lanes share a column: each has the rows 4i
// to 4i + 3 of every 32, of C columns, in registers. So a step is two products with what the lanes
// have, a sum over eight lanes, and an update. The result is that of the state before, decayed, and
// of the change: so both products are computed at once.
//
// Memory bandwidth bounds one step, and latency of one step after another a sequence: the next
// steps' q, k, v and gates are loaded to registers while the present ones, which are in shared
// memory as float32, are computed without a branch.
#pragma once

#include "common/async.cuh"
#include "common/elements.cuh"
#include "common/reduce.cuh"
#include "state_scan/state_scan_gates.cuh"

namespace flexops::state_scan {

inline constexpr int kThreads = 128, kLanes = 8;
inline constexpr int kSets =
    kThreads / kLanes;  // of columns, in a block; or of steps that it loads

struct Params {
  StateScan scan;
  int parts;   // blocks of a head's columns
  bool early;  // few blocks, of one step: the kernel starts before the one ahead has ended
};

/// What a step needs beside q, k and v.
struct Gates {
  float decay, rate, products;  // products: q k
};

FLEXOPS_DEVICE Gates read_gates(const StateScan& s, i64 batch, i64 step, i64 head) {
  const Gate gate = gate_of(s, batch, step, head);
  return {expf(gate.logarithm), gate.rate, 0.0f};
}

/// A thread's part of a state: rows 32 piece + 4 lane + 0 to 3 of `C` columns.
template <int Pieces, int C>
struct Part {
  float at[Pieces][4][C];

  /// Calls f(piece, row, rows of it that lie within the state).
  template <typename F>
  static FLEXOPS_DEVICE void for_pieces(int rows, int lane, const F& f) {
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
      const int row = 32 * piece + 4 * lane;
      if (row < rows) f(piece, row);
    }
  }

  FLEXOPS_DEVICE void read(const StateScan& s, const float* state, int lane) {
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int c = 0; c < C; ++c) at[piece][row][c] = 0.0f;
      }
    }
    for_pieces(s.rows, lane, [&](int piece, int row) {
      if (s.state_column == 1) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const auto read = load<float, C>(state, (row + r) * s.state_row);
#pragma unroll
          for (int c = 0; c < C; ++c) at[piece][r][c] = read.at[c];
        }
      } else {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const auto read = load<float, 4>(state, row + c * s.state_column);
#pragma unroll
          for (int r = 0; r < 4; ++r) at[piece][r][c] = read.at[r];
        }
      }
    });
  }

  FLEXOPS_DEVICE void write(const StateScan& s, float* state, int lane) const {
    for_pieces(s.rows, lane, [&](int piece, int row) {
      if (s.state_column == 1) {
#pragma unroll
        for (int r = 0; r < 4; ++r) store<float>(state, (row + r) * s.state_row, at[piece][r]);
      } else {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          float column[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) column[r] = at[piece][r][c];
          store<float>(state, row + c * s.state_column, column);
        }
      }
    });
  }
};

/// Of N sums of each lane, lane i gets the total of sum i % N over the eight lanes.
template <int N, int C>
FLEXOPS_DEVICE void scatter_sums(float (&sums)[N][C], int lane) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < (half < N ? half : N); ++i) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int other = half < N ? i + half : i;
        const float sent = upper ? sums[i][c] : sums[other][c];
        const float kept = upper ? sums[other][c] : sums[i][c];
        sums[i][c] = kept + shuffle_xor(sent, half, kLanes);
      }
    }
  }
}

/// The part of a head that a thread has.
template <typename T, int C>
struct Place {
  int lane, set;  // set: of columns, in its block
  u32 head, batch;
  int first, column;  // of the block; of the thread
  const T *q, *k, *v;
  T* out;

  FLEXOPS_DEVICE explicit Place(const Params& p)
      : lane(threadIdx.x % kLanes), set(threadIdx.x / kLanes) {
    const StateScan& s = p.scan;
    const u32 index = blockIdx.x / p.parts, shared = s.heads / s.groups;
    batch = index / s.heads, head = index % s.heads;
    first = static_cast<int>(blockIdx.x % p.parts) * kSets * C, column = first + set * C;
    const u32 group = head / shared;
    q = static_cast<const T*>(s.q) + batch * s.of_q.batch + group * s.of_q.head;
    k = static_cast<const T*>(s.k) + batch * s.of_k.batch + group * s.of_k.head;
    v = static_cast<const T*>(s.v) + batch * s.of_v.batch + head * s.of_v.head;
    out = static_cast<T*>(s.out) + (batch * s.length * s.heads + head) * s.columns + column;
  }
  FLEXOPS_DEVICE float* state(const StateScan& s) const {
    return s.state + batch * s.state_batch + head * s.state_head + column * s.state_column;
  }
};

/// One step. A block has kSets * C columns of a head. Pieces: of 32 rows.
template <typename T, int Pieces, int C, bool Delta>
__global__ void __launch_bounds__(kThreads) step(const FLEXOPS_GRID_CONSTANT Params p) {
  if (p.early) wait_for_previous(), let_next_start();
  const StateScan& s = p.scan;
  const Place<T, C> at(p);
  if (at.column >= s.columns) return;  // all lanes of a column
  Part<Pieces, C> state;
  Raw<T, 4> raw_q[Pieces], raw_k[Pieces];
  Raw<T, C> raw_v;
  state.read(s, at.state(s), at.lane);
  Part<Pieces, C>::for_pieces(s.rows, at.lane, [&](int piece, int row) {
    raw_q[piece].read(at.q + row);
    raw_k[piece].read(at.k + row);
  });
  raw_v.read(at.v + at.column);
  const Gates gates = read_gates(s, at.batch, 0, at.head);
  const float skip = s.skip.data ? read_gate(s.skip, 0, 0, at.head) : 0.0f;

  float of_q[Pieces][4], of_k[Pieces][4], values[C], squares_q = 0.0f, squares_k = 0.0f,
                                                     products = 0.0f, along[C] = {}, sums[C] = {};
  widen(values, raw_v);
#pragma unroll
  for (int piece = 0; piece < Pieces; ++piece) {
    widen(of_q[piece], raw_q[piece]);
    widen(of_k[piece], raw_k[piece]);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float q = of_q[piece][r], k = of_k[piece][r];
      squares_q = __fmaf_rn(q, q, squares_q);
      squares_k = __fmaf_rn(k, k, squares_k);
      products = __fmaf_rn(q, k, products);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        sums[c] = __fmaf_rn(q, state.at[piece][r][c], sums[c]);
        if (Delta) along[c] = __fmaf_rn(k, state.at[piece][r][c], along[c]);
      }
    }
  }
  float scale_q = s.scale, scale_k = 1.0f;
  if (s.normalize) {
    scale_q *= rsqrtf(warp_reduce<kLanes>(squares_q, Sum()) + kNormEpsilon);
    scale_k = rsqrtf(warp_reduce<kLanes>(squares_k, Sum()) + kNormEpsilon);
  }
  products = warp_reduce<kLanes>(products, Sum()) * scale_q * scale_k;
  float results[C];
#pragma unroll
  for (int c = 0; c < C; ++c) {
    float change = values[c];
    if (Delta) change -= gates.decay * scale_k * warp_reduce<kLanes>(along[c], Sum());
    change *= gates.rate;
    results[c] = __fmaf_rn(gates.decay * scale_q, warp_reduce<kLanes>(sums[c], Sum()),
                           __fmaf_rn(products, change, skip * values[c]));
    change *= scale_k;
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        state.at[piece][r][c] =
            __fmaf_rn(of_k[piece][r], change, gates.decay * state.at[piece][r][c]);
    }
  }
  if (at.lane == 0) store<T>(at.out, 0, results);
  state.write(s, at.state(s), at.lane);
}

/// A sequence, by blocks as above.
template <typename T, int Pieces, int C, bool Delta>
__global__ void __launch_bounds__(kThreads, 2) scan(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kSteps = Pieces > 4 ? 8 : 16;  // that are in shared memory at once
  constexpr int kWidth = kSets * C;
  constexpr int kTogether = C > 2 ? 4 : 8;  // steps whose sums over lanes are computed at once
  alignas(16) __shared__ float of_q[2][kSteps][32 * Pieces], of_k[2][kSteps][32 * Pieces];
  alignas(16) __shared__ float of_v[2][kSteps][kWidth];
  __shared__ Gates gates[2][kSteps];

  const StateScan& s = p.scan;
  const Place<T, C> at(p);
  const int lane = at.lane, set = at.set;
  const bool inside = at.column < s.columns;
  const i64 length = s.length;

  // What this thread loads of step `set` of the next ones; steps behind the last one change
  // nothing.
  Raw<T, 4> next_q[Pieces], next_k[Pieces];
  Raw<T, 2 * C> next_v;
  Gates next_gates;
  const auto fetch = [&](i64 from) {
    const i64 step = from + set;
    next_gates = {1.0f, 0.0f, 0.0f};
    if (set >= kSteps || step >= length) return;
    Part<Pieces, C>::for_pieces(s.rows, lane, [&](int piece, int row) {
      next_q[piece].read(at.q + step * s.of_q.step + row);
      next_k[piece].read(at.k + step * s.of_k.step + row);
    });
    const int column = at.first + lane * 2 * C;
    if (column < s.columns) next_v.read(at.v + step * s.of_v.step + column);
    next_gates = read_gates(s, at.batch, step, at.head);
  };
  const auto settle = [&](int buffer) {
    if (set >= kSteps) return;  // whole warps
    float wide_q[Pieces][4], wide_k[Pieces][4], squares_q = 0.0f, squares_k = 0.0f, products = 0.0f;
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
      widen(wide_q[piece], next_q[piece]);
      widen(wide_k[piece], next_k[piece]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        squares_q = __fmaf_rn(wide_q[piece][i], wide_q[piece][i], squares_q);
        squares_k = __fmaf_rn(wide_k[piece][i], wide_k[piece][i], squares_k);
        products = __fmaf_rn(wide_q[piece][i], wide_k[piece][i], products);
      }
    }
    float scale_q = s.scale, scale_k = 1.0f;
    if (s.normalize) {
      scale_q *= rsqrtf(warp_reduce<kLanes>(squares_q, Sum()) + kNormEpsilon);
      scale_k = rsqrtf(warp_reduce<kLanes>(squares_k, Sum()) + kNormEpsilon);
    }
    next_gates.products = warp_reduce<kLanes>(products, Sum()) * scale_q * scale_k;
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
#pragma unroll
      for (int i = 0; i < 4; ++i) wide_q[piece][i] *= scale_q, wide_k[piece][i] *= scale_k;
      store<float>(of_q[buffer][set], 32 * piece + 4 * lane, wide_q[piece]);
      store<float>(of_k[buffer][set], 32 * piece + 4 * lane, wide_k[piece]);
    }
    float wide_v[2 * C];
    widen(wide_v, next_v);
    store<float>(of_v[buffer][set], lane * 2 * C, wide_v);
    if (lane == 0) gates[buffer][set] = next_gates;
  };

  Part<Pieces, C> state;
  if (inside) state.read(s, at.state(s), lane);
  fetch(0);
  settle(0);
  __syncthreads();
  const float skip = s.skip.data ? read_gate(s.skip, 0, 0, at.head) : 0.0f;

  int buffer = 0;
  for (i64 from = 0; from < length; from += kSteps, buffer ^= 1) {
    if (from + kSteps < length) fetch(from + kSteps);
#pragma unroll 1
    for (int begin = 0; begin < kSteps && from + begin < length; begin += kTogether) {
      float sums[kTogether][C] = {}, own[C] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int step = begin + i;
        const Gates gate = gates[buffer][step];
        const auto values = load<float, C>(of_v[buffer][step], set * C);
        float along[C] = {};
        Vec<float, 4> now_k[Pieces];
#pragma unroll
        for (int piece = 0; piece < Pieces; ++piece) {
          const auto now_q = load<float, 4>(of_q[buffer][step], 32 * piece + 4 * lane);
          now_k[piece] = load<float, 4>(of_k[buffer][step], 32 * piece + 4 * lane);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
#pragma unroll
            for (int c = 0; c < C; ++c) {
              float& part = state.at[piece][r][c];
              part *= gate.decay;
              sums[i][c] = __fmaf_rn(now_q.at[r], part, sums[i][c]);
              if (Delta) along[c] = __fmaf_rn(now_k[piece].at[r], part, along[c]);
            }
          }
        }
#pragma unroll
        for (int c = 0; c < C; ++c) {
          float change = values.at[c];
          if (Delta) change -= warp_reduce<kLanes>(along[c], Sum());
          change *= gate.rate;
          if (lane == i) own[c] = __fmaf_rn(gate.products, change, skip * values.at[c]);
#pragma unroll
          for (int piece = 0; piece < Pieces; ++piece) {
#pragma unroll
            for (int r = 0; r < 4; ++r)
              state.at[piece][r][c] = __fmaf_rn(now_k[piece].at[r], change, state.at[piece][r][c]);
          }
        }
      }
      scatter_sums(sums, lane);
      const i64 step = from + begin + lane;
      if (inside && lane < kTogether && step < length) {
#pragma unroll
        for (int c = 0; c < C; ++c) sums[0][c] += own[c];
        store<T>(at.out, step * s.heads * s.columns, sums[0]);
      }
    }
    if (from + kSteps < length) settle(buffer ^ 1);
    __syncthreads();
  }
  if (inside) state.write(s, at.state(s), lane);
}

}  // namespace flexops::state_scan
