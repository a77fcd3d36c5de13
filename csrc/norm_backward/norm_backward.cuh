// The norms' backward kernels.
#pragma once

#include "norm/norm.cuh"

namespace flexops::norm {

/// NormBackward as kernels take it.
struct Backward {
  const void *x, *grad, *grad_residual, *weight;
  const float *mean, *rstd;
  void* grad_x;
  float *partial_weight, *partial_bias;
  i64 rows, x_stride, grad_stride, grad_residual_stride;
  i64 rows_per_block;  // backward_parameters: that a block sums up
  int columns, vectors;
  int lanes;  // that share a row
  float inverse;
  Type type, weight_type;
  bool centered;
  bool lasting;  // the second-level cache is asked to keep what is read
};

/// What both of a row's passes need.
struct Statistics {
  float mean, rstd;
};
FLEXOPS_DEVICE Statistics load_statistics(const Backward& p, i64 row) {
  if (row >= p.rows) return {0.0f, 0.0f};
  return {p.centered ? p.mean[row] : 0.0f, p.rstd[row]};
}

/// async_copy16 with a say on what the second-level cache keeps.
FLEXOPS_DEVICE void fetch16(void* shared, const void* global, bool valid, const Lasting& lasting) {
#if FLEXOPS_HAS_CACHE_POLICY
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :
               : "r"(to), "l"(global), "r"(valid ? 16 : 0), "l"(lasting.policy)
               : "memory");
#else
  (void)lasting;
  async_copy16(shared, global, valid);
#endif
}

/// kCentered is needed for layer norm, and does for RMS norm; kSame is for a weight of T, which takes fewer registers. Groups of threads
/// walk over rows. Each thread fetches its vectors into slots of its own, so that it waits for nobody, while it works on the row before;
/// both passes read them there, and registers are left for the sums. A slot is filled again as soon as it has been read the second time, or
/// before the next row.
template <typename T, bool kCentered, bool kSame = false>
__global__ void __launch_bounds__(kWalkThreads, 1) backward_walk(const FLEXOPS_GRID_CONSTANT Backward p) {
  constexpr int V = kVector<T>, kColumns = kParts * V, kSums = kCentered ? 2 : 1;
  constexpr bool kAtOnce = V == 4 || !kCentered || kSame;  // else registers are short
  extern __shared__ uint4 slots[];
  __shared__ Partial<float, kSums> shared[kStages];
  const Group g(p.lanes, false);
  const Lasting lasting(p.lasting);
  const int streams = p.grad_residual ? 3 : 2, threads = static_cast<int>(blockDim.x);
  // A warp's slots lie together, so that most of their distances are constants.
  const int warp = static_cast<int>(threadIdx.x) / kNarrowWarp, lane = static_cast<int>(threadIdx.x) % kNarrowWarp;
  uint4* const own = slots + warp * (kStages * streams * kParts * kNarrowWarp) + lane;
  const auto slot = [&](int stage, int stream, int k) {
    return own + stage * (streams * kParts * kNarrowWarp) + (stream * kParts + k) * kNarrowWarp;
  };

  const Parameters<T, kParts> weights(slots + kStages * streams * kParts * threads + threadIdx.x, p.weight, p.weight_type, g, p.vectors);
  float sum_weight[kParts][V], sum_bias[kCentered ? kParts : 1][V];
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum_weight[k][i] = 0.0f, sum_bias[kCentered ? k : 0][i] = 0.0f;
  }
  /// v times the weight.
  const auto scale = [&](float (&v)[V], int k) {
    float w[V];
    if (!kSame && p.weight == nullptr) return;
    weights.template get<kSame>(w, k);
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] *= w[i];
  };

  const auto fetch = [&](i64 row, int stage, int k) {
    const int at = g.lane + k * g.lanes;
    const bool valid = row < p.rows && at < p.vectors;
    fetch16(slot(stage, 0, k), static_cast<const T*>(p.x) + row * p.x_stride + at * V, valid, lasting);
    fetch16(slot(stage, 1, k), static_cast<const T*>(p.grad) + row * p.grad_stride + at * V, valid, lasting);
    if (streams == 3)
      fetch16(slot(stage, 2, k), static_cast<const T*>(p.grad_residual) + row * p.grad_residual_stride + at * V, valid, lasting);
  };
  const auto fetch_row = [&](i64 row, int stage) {
#pragma unroll
    for (int k = 0; k < kParts; ++k) fetch(row, stage, k);
    async_commit();
  };

  const int together = g.count;
  const i64 step = i64(gridDim.x) * together;
  i64 row = i64(blockIdx.x) * together + g.index;
  fetch_row(row, 0);
  if (kAtOnce) fetch_row(row + step, 1);
  Statistics next = load_statistics(p, row);
  int stage = 0;
  for (; row - g.index < p.rows; row += step) {  // all of the block's threads equally often
    if (!kAtOnce) fetch_row(row + step, stage ^ 1);
    const Statistics s = next;
    next = load_statistics(p, row + step);
    async_wait(1);
    const float shift = -s.mean * s.rstd;
    float sums[kSums] = {};
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      float x[V], grad[V];
      widen<T>(x, bit_cast<Raw<T>>(*slot(stage, 0, k)), p.type);
      widen<T>(grad, bit_cast<Raw<T>>(*slot(stage, 1, k)), p.type);
      scale(grad, k);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        sums[0] += grad[i] * (x[i] * s.rstd + shift);
        if (kCentered) sums[kSums - 1] += grad[i];
      }
    }
    group_reduce<false>(sums, Sum{}, g, shared[stage]);
    const float slope = -s.rstd * sums[0] * p.inverse, level = kCentered && p.centered ? -s.rstd * sums[kSums - 1] * p.inverse : 0.0f;
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      float x[V], grad[V], out[V];
      widen<T>(x, bit_cast<Raw<T>>(*slot(stage, 0, k)), p.type);
      widen<T>(grad, bit_cast<Raw<T>>(*slot(stage, 1, k)), p.type);
      uint4 also;
      if (streams == 3) also = *slot(stage, 2, k);
      if (kAtOnce) fetch(row + 2 * step, stage, k);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        x[i] = kCentered ? (x[i] - s.mean) * s.rstd : x[i] * s.rstd + shift;
        sum_weight[k][i] += grad[i] * x[i];
        if (kCentered) sum_bias[kCentered ? k : 0][i] += grad[i];
      }
      scale(grad, k);
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = grad[i] * s.rstd + (x[i] * slope + level);
      if (streams == 3) {
        widen<T>(x, bit_cast<Raw<T>>(also), p.type);
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] += x[i];
      }
      const int at = g.lane + k * g.lanes;
      if (p.grad_x && row < p.rows && at < p.vectors)
        write<T, Cache::streaming>(p.grad_x, row * p.columns + i64(at) * V, narrow<T>(out, p.type), p.type);
    }
    if (kAtOnce) async_commit();
    stage ^= 1;
  }
  async_wait(0);

  // The block's sums. Those of several rows at a time are added up in order.
  const auto publish = [&](const float (&sum)[kParts][V], float* partial) {
    if (partial == nullptr) return;
    partial += i64(blockIdx.x) * p.columns;
    if (together == 1) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const int at = g.lane + k * g.lanes;
        if (at < p.vectors) store_floats<float>(sum[k], partial, i64(at) * V);
      }
      return;
    }
    float* lines = reinterpret_cast<float*>(slots);
    const int width = g.lanes * kColumns;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
#pragma unroll
      for (int i = 0; i < V; ++i) lines[g.index * width + (g.lane + k * g.lanes) * V + i] = sum[k][i];
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < p.columns; column += threads) {
      float total = 0.0f;
      for (int i = 0; i < together; ++i) total += lines[i * width + column];
      partial[column] = total;
    }
  };
  publish(sum_weight, p.partial_weight);
  if constexpr (kCentered) publish(sum_bias, p.partial_bias);
}

/// The gradient of x alone, for rows that backward_walk does not take: each is read twice.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) backward_input(const FLEXOPS_GRID_CONSTANT Backward p) {
  constexpr int V = kVector<T>;
  __shared__ Partial<float, 2> shared;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  const Statistics s = load_statistics(p, row);
  const auto load = [&](int i, float (&unit)[V], float (&scaled)[V]) {
    float weight[V];
    widen<T>(unit, read<T, Cache::normal>(p.x, row * p.x_stride + i64(i) * V, p.type), p.type);
    widen<T>(scaled, read<T, Cache::normal>(p.grad, row * p.grad_stride + i64(i) * V, p.type), p.type);
    if (p.weight) {
      load_floats<Cache::constant>(weight, p.weight, i64(i) * V, p.weight_type);
#pragma unroll
      for (int e = 0; e < V; ++e) scaled[e] *= weight[e];
    }
#pragma unroll
    for (int e = 0; e < V; ++e) unit[e] = (unit[e] - s.mean) * s.rstd;
  };
  float sums[2] = {};
#pragma unroll 2
  for (int i = g.lane; i < count; i += g.lanes) {
    float unit[V], scaled[V], product[V];
    load(i, unit, scaled);
#pragma unroll
    for (int e = 0; e < V; ++e) product[e] = unit[e] * scaled[e];
    sums[0] += sum_of(product);
    sums[1] += sum_of(scaled);
  }
  group_reduce<true>(sums, Sum{}, g, shared);
  const float slope = sums[0] * p.inverse, level = p.centered ? sums[1] * p.inverse : 0.0f;
#pragma unroll 2
  for (int i = g.lane; i < count; i += g.lanes) {
    float unit[V], scaled[V], out[V] = {};
    load(i, unit, scaled);
    if (p.grad_residual)
      widen<T>(out, read<T, Cache::streaming>(p.grad_residual, row * p.grad_residual_stride + i64(i) * V, p.type), p.type);
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] += s.rstd * (scaled[e] - level - unit[e] * slope);
    write<T, Cache::streaming>(p.grad_x, row * p.columns + i64(i) * V, narrow<T>(out, p.type), p.type);
  }
}

/// The parameters' gradients alone: a thread has some columns, a block some rows of them.
template <typename T>
__global__ void __launch_bounds__(kShortThreads) backward_parameters(const FLEXOPS_GRID_CONSTANT Backward p) {
  constexpr int V = kVector<T>;
  const int i = static_cast<int>(blockIdx.x) * kShortThreads + static_cast<int>(threadIdx.x);
  if (i >= p.vectors) return;
  const i64 first = i64(blockIdx.y) * p.rows_per_block, last = first + p.rows_per_block < p.rows ? first + p.rows_per_block : p.rows;
  float sum_weight[V] = {}, sum_bias[V] = {};
#pragma unroll 4
  for (i64 row = first; row < last; ++row) {
    float x[V], grad[V];
    widen<T>(x, read<T, Cache::streaming>(p.x, row * p.x_stride + i64(i) * V, p.type), p.type);
    widen<T>(grad, read<T, Cache::streaming>(p.grad, row * p.grad_stride + i64(i) * V, p.type), p.type);
    const Statistics s = load_statistics(p, row);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      sum_weight[e] += grad[e] * ((x[e] - s.mean) * s.rstd);
      sum_bias[e] += grad[e];
    }
  }
  const i64 to = i64(blockIdx.y) * p.columns + i64(i) * V;
  if (p.partial_weight) store_floats(sum_weight, p.partial_weight, to, kF32);
  if (p.partial_bias) store_floats(sum_bias, p.partial_bias, to, kF32);
}

struct Reduce {
  const float* partial[2];  // [count, columns] each
  void* out[2];
  Type type[2];
  i64 count;
  int columns;
};

/// Adds up the blocks' sums, always in the same order.
__global__ void __launch_bounds__(kReduceThreads) reduce_partial(const FLEXOPS_GRID_CONSTANT Reduce p) {
  constexpr int kSlices = kReduceThreads / 32, kLines = 8;
  __shared__ float shared[kSlices][33];
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(threadIdx.x) / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane;
  // By halves, so that errors add up as the logarithm does.
  float sums[kLines] = {};
  if (column < p.columns) {
    const float* from = p.partial[blockIdx.y] + column;
    for (i64 i = slice; i < p.count; i += kLines * kSlices) {
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        const i64 line = i + k * kSlices;
        if (line < p.count) sums[k] += from[line * p.columns];
      }
    }
  }
  shared[slice][lane] = sum_of(sums);
#pragma unroll
  for (int half = kSlices / 2; half > 0; half /= 2) {
    __syncthreads();
    if (slice < half) shared[slice][lane] += shared[slice + half][lane];
  }
  if (slice == 0 && column < p.columns) {
    const float total = shared[0][lane];
    store_one(p.out[blockIdx.y], column, total, p.type[blockIdx.y]);
  }
}

}  // namespace flexops::norm
