// The norms' backward kernels.
#pragma once

#include "common/hopper.cuh"
#include "common/sum_parts.cuh"
#include "norm/norm.cuh"

namespace flexops::norm {

/// NormBackward as kernels take it.
struct Backward {
  const void *x, *grad, *grad_residual, *weight;
  const float *mean, *rstd;
  void* grad_x;
  float *partial_weight, *partial_bias;
  i64 rows, x_stride, grad_stride, grad_residual_stride;
  i64 rows_per_block;          // backward_parameters: that a block sums up
  int block_step, group_step;  // backward_walk: rows from a block's first one to the next block's,
                               // and from one group's to the next group's
  int columns, vectors;
  int lanes;   // that share a row
  int blocks;  // of a cluster that shares a row
  float inverse;
  float offset;  // added to the weight
  ElementType type, weight_type;
  bool centered;
  bool wide_weight;  // backward_walk: see Weight
  bool keep_in_l2;   // the second-level cache is asked to keep what is read
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
FLEXOPS_DEVICE void fetch16(void* shared, const void* global, bool valid, const L2Policy& policy) {
#if FLEXOPS_HAS_CACHE_POLICY
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :
               : "r"(to), "l"(global), "r"(valid ? 16 : 0), "l"(policy.bits)
               : "memory");
#else
  (void)policy;
  async_copy16(shared, global, valid);
#endif
}

using Floats = Vec<float, 4>;
FLEXOPS_DEVICE Floats four_of(const float* v) { return {v[0], v[1], v[2], v[3]}; }

/// A thread's parts of the weight, in slots of shared memory a warp's width apart: as they are if
/// they are of T and have no offset, else as float32; ones if there is no weight. Needs no barrier,
/// because a thread has slots of its own, but the caller waits for the copies.
template <typename T>
struct Weight {
  static constexpr int V = kPerVector<T>, kWords = V / 4;  // slots of V floats
  uint4* first;
  bool wide;

  FLEXOPS_DEVICE Weight(uint4* slot, const Backward& p, const Group& g)
      : first(slot), wide(p.wide_weight) {
#pragma unroll 1
    for (int i = 0; i < slots(); ++i) {
      const int words = slots() / kParts,
                at = (g.lane + i / words * g.lanes) * words + i % words;  // in slots
      const bool valid = at < p.vectors * words;
      uint4* const to = first + i * kNarrowWarp;
      if (p.weight == nullptr) {
        float ones[V];
#pragma unroll
        for (int e = 0; e < V; ++e) ones[e] = 1.0f;
        *to = bit_cast<uint4>(packed<T>(ones));
      } else if (!wide || (p.weight_type == ElementType::f32 && p.offset == 0.0f)) {
        async_copy<16>(to, static_cast<const uint4*>(p.weight) + at, valid ? 16 : 0);
      } else {
        Floats four = {};
        if (valid) load_floats<Cache::constant>(four.at, p.weight, at * 4, p.weight_type);
#pragma unroll
        for (int e = 0; e < 4; ++e) four.at[e] += p.offset;
        *to = bit_cast<uint4>(four);
      }
    }
  }
  FLEXOPS_DEVICE int slots() const { return kParts * (wide ? kWords : 1); }

  /// v times part k.
  FLEXOPS_DEVICE void scale(float (&v)[V], int k) const {
    float w[V];
    if (!wide) {
      widen<T>(w, bit_cast<Packed>(first[k * kNarrowWarp]));
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        rows::widen<float>(w + 4 * i, bit_cast<Packed>(first[(k * kWords + i) * kNarrowWarp]));
    }
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] *= w[i];
  }
};

/// kCentered is needed for layer norm, and does for RMS norm. Groups of threads walk over rows.
/// Each thread fetches its vectors into slots of its own, so that it waits for no other thread,
/// while it works on the row before; both passes read them there, and registers are left for the
/// sums. A slot is filled again as soon as it has been read the second time.
template <typename T, bool kCentered, bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 1)
    backward_walk(const FLEXOPS_GRID_CONSTANT Backward p) {
  constexpr int V = kPerVector<T>, kColumns = kParts * V, kSums = kCentered ? 2 : 1;
  extern __shared__ uint4 slots[];
  __shared__ Partial<float, kSums> shared[kStages];
  __shared__ hopper::ClusterExchange<float2, 2>
      exchange;  // of a row, received before the next one's is sent
  Group g(p.lanes, kClustered);
  if constexpr (kClustered) {
    g.lane += hopper::cluster_rank() * kParts * g.lanes;
    if (threadIdx.x == 0) exchange.init();
  }
  const L2Policy policy(p.keep_in_l2);
  const int streams = p.grad_residual ? 3 : 2, threads = static_cast<int>(blockDim.x);
  // A warp's slots lie together, the weight's first, so that most of their distances are constants.
  const int warp = static_cast<int>(threadIdx.x) / kNarrowWarp,
            lane = static_cast<int>(threadIdx.x) % kNarrowWarp;
  const int weight_slots = p.wide_weight ? kParts * (V / 4) : kParts;
  uint4* const own =
      slots + warp * ((weight_slots + kStages * streams * kParts) * kNarrowWarp) + lane;
  // Start the copies of the weight.
  const Weight<T> weight(own, p, g);
  const auto slot = [&](int stage, int stream, int k) {
    return own + (weight_slots + stage * streams * kParts) * kNarrowWarp +
           (stream * kParts + k) * kNarrowWarp;
  };

  // The block's sums of the parameters' gradients stay in registers.
  float sum_weight[kParts][V], sum_bias[kCentered ? kParts : 1][V];
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum_weight[k][i] = 0.0f, sum_bias[kCentered ? k : 0][i] = 0.0f;
  }
  const auto fetch = [&](i64 row, int stage, int k) {
    const int at = g.lane + k * g.lanes;
    const bool valid = row < p.rows && at < p.vectors;
    fetch16(slot(stage, 0, k), static_cast<const T*>(p.x) + row * p.x_stride + at * V, valid,
            policy);
    fetch16(slot(stage, 1, k), static_cast<const T*>(p.grad) + row * p.grad_stride + at * V, valid,
            policy);
    if (streams == 3)
      fetch16(slot(stage, 2, k),
              static_cast<const T*>(p.grad_residual) + row * p.grad_residual_stride + at * V, valid,
              policy);
  };
  const auto fetch_row = [&](i64 row, int stage) {
#pragma unroll  // of a loop ptxas 13.0 makes wrong code: it counts in the register that holds the
                // cache's policy
    for (int k = 0; k < kParts; ++k) fetch(row, stage, k);
    async_commit();
  };

  // Start the copies of the first rows.
  const int together = g.count;
  const u32 walkers = kClustered ? gridDim.x / static_cast<u32>(p.blocks)
                                 : gridDim.x;  // blocks, or clusters of them
  const u32 walker = kClustered ? blockIdx.x / static_cast<u32>(p.blocks) : blockIdx.x;
  const i64 step = i64(walkers) * together;
  i64 first =
      i64(walker) *
      p.block_step;  // of the block's rows: the same for all threads, so that warps stay together
#pragma unroll 1
  for (int ahead = 0; ahead < kStages; ++ahead)
    fetch_row(first + i64(g.index) * p.group_step + ahead * step, ahead);
  Statistics next = load_statistics(p, first + i64(g.index) * p.group_step);
  int stage = 0;
  u32 turn = 0;
  if constexpr (kClustered) exchange.open();
  // For each row: the sums over it, their reduction, its gradient, the copies of a row to come.
  for (; first < p.rows; first += step) {
    const i64 row = first + i64(g.index) * p.group_step;
    const Statistics s = next;
    next = load_statistics(p, row + step);
    async_wait(1);
    const float shift = -s.mean * s.rstd;
    float sums[kSums] = {};
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      float x[V], grad[V];
      widen<T>(x, bit_cast<Packed>(*slot(stage, 0, k)));
      widen<T>(grad, bit_cast<Packed>(*slot(stage, 1, k)));
      weight.scale(grad, k);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        sums[0] += grad[i] * (x[i] * s.rstd + shift);
        if (kCentered) sums[kSums - 1] += grad[i];
      }
    }
    if constexpr (kClustered) {
      const int warps = g.lanes / kNarrowWarp;
      exchange.send(turn,
                    float2{warp_reduce<kNarrowWarp>(sums[0], Sum{}),
                           warp_reduce<kNarrowWarp>(sums[kSums - 1], Sum{})},
                    p.blocks, warps);
      const float2* const sent = exchange.receive(turn++);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
      for (int i = lane; i < p.blocks * warps; i += kNarrowWarp) {
        sums[0] += sent[i].x;
        if (kCentered) sums[kSums - 1] += sent[i].y;
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = warp_reduce<kNarrowWarp>(sums[i], Sum{});
    } else {
      group_reduce<false>(sums, Sum{}, g, shared[stage]);
    }
    const float slope = -s.rstd * sums[0] * p.inverse,
                level = kCentered && p.centered ? -s.rstd * sums[kSums - 1] * p.inverse : 0.0f;
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      float x[V], grad[V], out[V];
      widen<T>(x, bit_cast<Packed>(*slot(stage, 0, k)));
      widen<T>(grad, bit_cast<Packed>(*slot(stage, 1, k)));
      uint4 also;
      if (streams == 3) also = *slot(stage, 2, k);
      fetch(row + 2 * step, stage, k);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        x[i] = kCentered ? (x[i] - s.mean) * s.rstd : x[i] * s.rstd + shift;
        sum_weight[k][i] += grad[i] * x[i];
        if (kCentered) sum_bias[kCentered ? k : 0][i] += grad[i];
      }
      weight.scale(grad, k);
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = grad[i] * s.rstd + (x[i] * slope + level);
      if (streams == 3) {
        widen<T>(x, bit_cast<Packed>(also));
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] += x[i];
      }
      const int at = g.lane + k * g.lanes;
      if (p.grad_x && row < p.rows && at < p.vectors)
        write<T, Cache::streaming>(p.grad_x, row * p.columns + i64(at) * V, packed<T>(out));
    }
    async_commit();
    stage ^= 1;
  }
  async_wait(0);

  // The block's sums. Those of several rows at a time are added up in order.
  const i64 to = i64(walker) * p.columns;
  if (kClustered || together == 1) {
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const int at = (g.lane + k * g.lanes) * V;
      if (at >= p.columns) continue;
      if (p.partial_weight) store_floats<float>(sum_weight[k], p.partial_weight, to + at);
      if (kCentered && p.partial_bias)
        store_floats<float>(sum_bias[kCentered ? k : 0], p.partial_bias, to + at);
    }
    return;
  }
  auto* const lines = reinterpret_cast<Floats*>(slots);
  const int width = g.lanes * (kColumns / 4), fours = p.columns / 4;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    Floats* const line = lines + g.index * width + (g.lane + k * g.lanes) * (V / 4);
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      line[i] = four_of(sum_weight[k] + 4 * i);
      if (kCentered) line[together * width + i] = four_of(sum_bias[kCentered ? k : 0] + 4 * i);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kSums * fours; i += threads) {
    const bool second = i >= fours;
    float* const partial = second ? p.partial_bias : p.partial_weight;
    if (partial == nullptr) continue;
    const int at = second ? i - fours : i;
    const Floats* const line = lines + (second ? together * width : 0) + at;
    float total[4] = {};
#pragma unroll 4
    for (int row = 0; row < together; ++row) {
      const Floats sum = line[row * width];
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] += sum.at[e];
    }
    store_floats<float>(total, partial, to + at * 4);
  }
}

/// The gradient of x alone, for rows that backward_walk does not take: each is read twice, V
/// elements at a time.
template <typename T, int V = kPerVector<T>>
__global__ void __launch_bounds__(kMostThreads)
    backward_input(const FLEXOPS_GRID_CONSTANT Backward p) {
  constexpr int kAtOnce = V == 4 ? 2 : 1;
  __shared__ Partial<float, 2> shared;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count + g.index;
  const int count = row < p.rows ? p.vectors : 0;
  const Statistics s = load_statistics(p, row);
  const auto get = [&](int i, float (&unit)[V], float (&scaled)[V]) {
    float weight[V];
    widen(unit, load<T, V>(p.x, row * p.x_stride + i64(i) * V));
    widen(scaled, load<T, V>(p.grad, row * p.grad_stride + i64(i) * V));
    if (p.weight) {
      load_floats<Cache::constant>(weight, p.weight, i64(i) * V, p.weight_type);
#pragma unroll
      for (int e = 0; e < V; ++e) scaled[e] *= weight[e] + p.offset;
    }
#pragma unroll
    for (int e = 0; e < V; ++e) unit[e] = (unit[e] - s.mean) * s.rstd;
  };
  // First pass: the sums over the row.
  float sums[2] = {};
#pragma unroll kAtOnce
  for (int i = g.lane; i < count; i += g.lanes) {
    float unit[V], scaled[V], product[V];
    get(i, unit, scaled);
#pragma unroll
    for (int e = 0; e < V; ++e) product[e] = unit[e] * scaled[e];
    sums[0] += sum_of(product);
    sums[1] += sum_of(scaled);
  }
  group_reduce<true>(sums, Sum{}, g, shared);
  // Second pass: the gradient.
  const float slope = sums[0] * p.inverse, level = p.centered ? sums[1] * p.inverse : 0.0f;
#pragma unroll kAtOnce
  for (int i = g.lane; i < count; i += g.lanes) {
    float unit[V], scaled[V], out[V] = {};
    get(i, unit, scaled);
    if (p.grad_residual)
      widen(out, load<T, V, Cache::streaming>(p.grad_residual,
                                              row * p.grad_residual_stride + i64(i) * V));
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] += s.rstd * (scaled[e] - level - unit[e] * slope);
    store<T, Cache::streaming>(p.grad_x, row * p.columns + i64(i) * V, out);
  }
}

/// The parameters' gradients alone: a thread has V columns, a block some rows of them.
template <typename T, int V = kPerVector<T>>
__global__ void __launch_bounds__(kShortThreads)
    backward_parameters(const FLEXOPS_GRID_CONSTANT Backward p) {
  const int i = static_cast<int>(blockIdx.x) * kShortThreads + static_cast<int>(threadIdx.x);
  if (i >= p.vectors) return;
  const i64 first = i64(blockIdx.y) * p.rows_per_block,
            last = first + p.rows_per_block < p.rows ? first + p.rows_per_block : p.rows;
  // Add up the rows.
  float sum_weight[V] = {}, sum_bias[V] = {};
#pragma unroll 2
  for (i64 row = first; row < last; ++row) {
    float x[V], grad[V];
    widen(x, load<T, V, Cache::streaming>(p.x, row * p.x_stride + i64(i) * V));
    widen(grad, load<T, V, Cache::streaming>(p.grad, row * p.grad_stride + i64(i) * V));
    const Statistics s = load_statistics(p, row);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      sum_weight[e] += grad[e] * ((x[e] - s.mean) * s.rstd);
      sum_bias[e] += grad[e];
    }
  }
  // Write the block's sums for sum_parts.
  const i64 to = i64(blockIdx.y) * p.columns + i64(i) * V;
  if (p.partial_weight) store<float, Cache::streaming>(p.partial_weight, to, sum_weight);
  if (p.partial_bias) store<float, Cache::streaming>(p.partial_bias, to, sum_bias);
}

}  // namespace flexops::norm
