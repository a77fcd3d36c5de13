// The norms' kernel for long rows, for sm_90 and newer: rows streamed through the shared memory of
// clusters of blocks.
#pragma once

#include "common/hopper.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// As many clusters as the GPU holds at once go from row to row; a block has the same columns of
/// each, and its weights stay in registers. A row is read from shared memory twice, for its sums
/// and for its results; in between come the next row's sums, so that neither memory nor the blocks
/// wait while a row's sums go round. Each warp takes the squares off its own mean, for which the
/// row's is put in later. Everything is of T. kCentered is needed for layer norm, and does for RMS
/// norm.
template <typename T, bool kCentered, class Shape>
__global__ void __launch_bounds__(Shape::kThreads + kNarrowWarp, Shape::kBlocks)
    forward_ring(const FLEXOPS_GRID_CONSTANT Forward p) {
  constexpr int V = kPerVector<T>, N = Shape::kHeld, kRingThreads = Shape::kThreads,
                kRingWarps = kRingThreads / kNarrowWarp, kBatch = kCentered || N < 4 ? 2 : 4;
  using RowRing = hopper::Ring<Shape::kStages>;
  extern __shared__ uint4 storage[];
  __shared__ u64 barriers[RowRing::kBarriers];
  __shared__ hopper::ClusterExchange<float2, 4> exchange;
  __shared__ float
      counts[hopper::kMostClusterBlocks * kRingWarps];  // of the elements that each warp has
  const RowRing ring = {hopper::shared_address(barriers)};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kNarrowWarp,
            warp = thread / kNarrowWarp;
  const int begin = hopper::cluster_rank() * p.held, left = p.vectors - begin,
            count = left < 0        ? 0
                    : left < p.held ? left
                                    : p.held;
  const int streams = p.residual ? 2 : 1, pairs = p.blocks * kRingWarps;
  const i64 step = gridDim.x / static_cast<u32>(p.blocks),
            start = blockIdx.x / static_cast<u32>(p.blocks);
  const auto part = [&](u32 turn, int stream) {
    return reinterpret_cast<Packed*>(storage) +
           (static_cast<int>(turn % Shape::kStages) * streams + stream) * p.held;
  };
  if (thread == 0) ring.init(kRingWarps), exchange.init();
  // Count the elements that each warp of the cluster has.
  if (kCentered && thread < pairs) {
    const int others = p.vectors - thread / kRingWarps * p.held,
              its = others < p.held ? others : p.held;
    int vectors = 0;
    for (int k = 0; k < N; ++k) {
      const int more = its - k * kRingThreads - thread % kRingWarps * kNarrowWarp;
      vectors += more < 0 ? 0 : more < kNarrowWarp ? more : kNarrowWarp;
    }
    counts[thread] = static_cast<float>(vectors * V);
  }
  exchange.open();

  // The producer: bulk copies of the rows to come.
  if (thread >= kRingThreads) {
    if (lane != 0) return;
    const L2Policy policy(p.keep_in_l2);
    u32 turn = 0;
    for (i64 row = start; row < p.rows; row += step, ++turn) {
      const u32 full = ring.fill(RowRing::State::after(turn), count * streams * 16);
      if (count == 0) continue;
      hopper::load_bytes(hopper::shared_address(part(turn, 0)),
                         static_cast<const T*>(p.x) + row * p.x_stride + i64(begin) * V, count * 16,
                         full, policy);
      if (streams == 2)
        hopper::load_bytes(
            hopper::shared_address(part(turn, 1)),
            static_cast<const T*>(p.residual) + row * p.residual_stride + i64(begin) * V,
            count * 16, full, policy);
    }
    return;
  }

  // The consumers: load the weights once.
  Packed weight[N], bias[kCentered ? N : 1];
#pragma unroll
  for (int k = 0; k < N; ++k) {
    float ones[V];
#pragma unroll
    for (int i = 0; i < V; ++i) ones[i] = 1.0f;
    const int at = thread + k * kRingThreads;
    weight[k] = packed<T>(ones);
    if (p.weight && at < count) weight[k] = read<T, Cache::constant>(p.weight, i64(begin + at) * V);
    if constexpr (kCentered) {
      bias[k] = Packed{};
      if (p.bias && at < count) bias[k] = read<T, Cache::constant>(p.bias, i64(begin + at) * V);
    }
  }

  // Some of the thread's vectors, zeros beyond the part's end.
  const auto get = [&](Packed(&raw)[kBatch], u32 turn, int from) {
    const Packed* const own = part(turn, 0) + thread + from * kRingThreads;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      raw[k] = Packed{};
      if (thread + (from + k) * kRingThreads < count) raw[k] = own[k * kRingThreads];
    }
  };
  // Sums of a row's part, with the residual added, sent to all blocks.
  const auto sum_up = [&](u32 turn, i64 row) {
    ring.wait(RowRing::State::after(turn));
    if (streams == 2) {
      Packed* const own = part(turn, 0) + thread;
      const Packed* const added = part(turn, 1) + thread;
      T* const to = static_cast<T*>(p.new_residual) + row * p.columns + i64(begin) * V;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int at = thread + k * kRingThreads;
        if (at >= count) break;
        float x[V], r[V];
        widen<T>(x, own[k * kRingThreads]);
        widen<T>(r, added[k * kRingThreads]);
#pragma unroll
        for (int i = 0; i < V; ++i) x[i] += r[i];
        own[k * kRingThreads] = packed<T>(x);
        write<T, Cache::streaming>(to, i64(at) * V, own[k * kRingThreads]);
      }
    }
    float2 pair = {0.0f, 0.0f};
    float mean = 0.0f, v[V];
    if (kCentered && p.centered) {
      float sums[4] = {};
#pragma unroll
      for (int from = 0; from < N; from += kBatch) {
        Packed raw[kBatch];
        get(raw, turn, from);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          widen<T>(v, raw[k]);
#pragma unroll
          for (int i = 0; i < V; ++i) sums[i % 4] += v[i];
        }
      }
      pair.x = warp_reduce<kNarrowWarp>(sum_of(sums), Sum{});
      const float elements = counts[hopper::cluster_rank() * kRingWarps + warp];
      mean = elements > 0.0f ? __fdividef(pair.x, elements) : 0.0f;
    }
    float squares[4] = {};
#pragma unroll
    for (int from = 0; from < N; from += kBatch) {
      Packed raw[kBatch];
      get(raw, turn, from);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (kCentered && thread + (from + k) * kRingThreads >= count) continue;
        widen<T>(v, raw[k]);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float off = kCentered ? v[i] - mean : v[i];
          squares[i % 4] = fmaf(off, off, squares[i % 4]);
        }
      }
    }
    pair.y = warp_reduce<kNarrowWarp>(sum_of(squares), Sum{});
    exchange.send(turn, pair, p.blocks, kRingWarps);
  };
  // Statistics from all blocks' sums, then the results.
  const auto finish = [&](u32 turn, i64 row) {
    const float2* const sent = exchange.receive(turn);
    float mean = 0.0f, total = 0.0f;
    if (kCentered && p.centered) {
      for (int i = lane; i < pairs; i += kNarrowWarp) mean += sent[i].x;
      mean = warp_reduce<kNarrowWarp>(mean, Sum{}) * p.inverse;
    }
    for (int i = lane; i < pairs; i += kNarrowWarp) {
      total += sent[i].y;
      if (kCentered && p.centered && counts[i] > 0.0f) {
        const float off = __fdividef(sent[i].x, counts[i]) - mean;
        total = fmaf(off * off, counts[i], total);
      }
    }
    total = warp_reduce<kNarrowWarp>(total, Sum{});
    const float rstd = reciprocal_root(total * p.inverse + p.eps);
    if (begin + thread == 0) {
      if (p.mean) p.mean[row] = mean;
      if (p.rstd) p.rstd[row] = rstd;
    }
    T* const to = static_cast<T*>(p.y) + row * p.columns + i64(begin) * V;
#pragma unroll
    for (int from = 0; from < N; from += kBatch) {
      Packed raw[kBatch];
      get(raw, turn, from);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int at = thread + (from + k) * kRingThreads;
        if (at >= count) continue;
        float v[V], w[V], b[V];
        widen<T>(v, raw[k]);
        widen<T>(w, weight[from + k]);
        if constexpr (kCentered) widen<T>(b, bias[from + k]);
#pragma unroll
        for (int i = 0; i < V; ++i)
          v[i] = kCentered ? fmaf((v[i] - mean) * rstd, w[i], b[i]) : v[i] * rstd * w[i];
        write<T, Cache::streaming>(to, i64(at) * V, packed<T>(v));
      }
    }
    ring.release(RowRing::State::after(turn));
  };
  // Each row's sums are sent before the row before it is finished.
  u32 turn = 0;
#pragma unroll 1
  for (i64 row = start; row < p.rows + step; row += step, ++turn) {
    if (row < p.rows) sum_up(turn, row);
    forget<T>(weight, p.nothing);  // their floats
    if constexpr (kCentered) forget<T>(bias, p.nothing);
    if (turn > 0) finish(turn - 1, row - step);
  }
}

}  // namespace flexops::norm
