// Moving rows between tokens and experts. What is computed: flexops/ops/experts.py.
//
// Each of `tokens` tokens has k experts, its choices; choice number c is the (c % k)-th of token
// c / k. A choice's row has a slot, in the order of experts: choices of one expert keep their order
// (a stable counting sort), those whose expert does not exist come last.
//
//   order[slot] = choice    inverse[choice] = slot    offsets[expert] = where its slots end
//
// Rows are moved token by token, 16 bytes at a time: a token's row is read (or written) once.
#pragma once

#include "activation/activation.cuh"
#include "common/device.cuh"
#include "common/elements.cuh"
#include "common/reduce.cuh"

namespace flexops::experts {

// ---- the order ----

inline constexpr int kSortThreads = 256, kSortWarps = kSortThreads / 32, kSortRounds = 4;
inline constexpr int kSortChunk = kSortThreads * kSortRounds;  // choices of a block
inline constexpr int kScanThreads = 1024;

/// The number of a choice's expert; `experts` if there is no such expert, -1 behind the end.
template <class I>
FLEXOPS_DEVICE int bucket_of(const I* ids, int choice, int choices, int experts) {
  if (choice >= choices) return -1;
  const I id = ids[choice];
  return id >= 0 && id < experts ? static_cast<int>(id) : experts;
}

/// Calls body(choice, bucket, lanes with the same bucket) for the choices of this warp, in order.
template <class I, class Body>
FLEXOPS_DEVICE void each_choice(const I* ids, int choices, int experts, const Body& body) {
  const int first = static_cast<int>(blockIdx.x) * kSortChunk +
                    static_cast<int>(threadIdx.x / 32) * 32 * kSortRounds +
                    static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int round = 0; round < kSortRounds; ++round) {
    const int choice = first + 32 * round, bucket = bucket_of(ids, choice, choices, experts);
    body(choice, bucket, __match_any_sync(~0u, bucket));
  }
}

/// The lanes of the mask before this one.
FLEXOPS_DEVICE u32 before(u32 lanes) { return lanes & ((1u << threadIdx.x % 32) - 1); }

/// counts[bucket][block]: how many of a block's choices are in each of the `experts` + 1 buckets.
template <class I>
__global__ void __launch_bounds__(kSortThreads)
    count_choices(const I* ids, int choices, int experts, int* counts) {
  extern __shared__ int found[];
  for (int i = threadIdx.x; i <= experts; i += kSortThreads) found[i] = 0;
  __syncthreads();
  each_choice(ids, choices, experts, [&](int, int bucket, u32 lanes) {
    if (bucket >= 0 && before(lanes) == 0) atomicAdd(found + bucket, __popc(lanes));
  });
  __syncthreads();
  for (int i = threadIdx.x; i <= experts; i += kSortThreads)
    counts[i * static_cast<i64>(gridDim.x) + blockIdx.x] = found[i];
}

/// The sum of the values of this lane and those before it.
FLEXOPS_DEVICE int sum_up(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) value += other;
  }
  return value;
}

/// By one block. counts[bucket][block] becomes the number of choices in the same bucket of the
/// blocks before; begins[bucket] and offsets[expert] are set.
__global__ void __launch_bounds__(kScanThreads)
    scan_counts(int* counts, int blocks, int experts, int* begins, int* offsets) {
  extern __shared__ int totals[];
  const int lane = threadIdx.x % 32;
  // Along the blocks: a warp for each bucket.
  for (int bucket = threadIdx.x / 32; bucket <= experts; bucket += kScanThreads / 32) {
    int* const row = counts + static_cast<i64>(bucket) * blocks;
    int before = 0;
    for (int i = 0; i < blocks; i += 32) {
      const int count = i + lane < blocks ? row[i + lane] : 0, sum = sum_up(count);
      if (i + lane < blocks) row[i + lane] = before + sum - count;
      before += shuffle(sum, 31);
    }
    if (lane == 0) totals[bucket] = before;
  }
  __syncthreads();
  // Along the buckets.
  if (threadIdx.x >= 32) return;
  int before = 0;
  for (int i = 0; i <= experts; i += 32) {
    const int bucket = i + lane, count = bucket <= experts ? totals[bucket] : 0;
    const int sum = sum_up(count);
    if (bucket <= experts) begins[bucket] = before + sum - count;
    if (bucket < experts) offsets[bucket] = before + sum;
    before += shuffle(sum, 31);
  }
}

/// Sets order and inverse.
template <class I>
__global__ void __launch_bounds__(kSortThreads)
    place_choices(const I* ids, int choices, int experts, const int* counts, const int* begins,
                  int* order, int* inverse) {
  extern __shared__ int next[];  // [warp][bucket]: the slot of the warp's next choice
  const int buckets = experts + 1, warp = threadIdx.x / 32;
  int* const mine = next + warp * buckets;
  for (int i = threadIdx.x; i < kSortWarps * buckets; i += kSortThreads) next[i] = 0;
  __syncthreads();
  // How many choices each warp has.
  each_choice(ids, choices, experts, [&](int, int bucket, u32 lanes) {
    if (bucket >= 0 && before(lanes) == 0) mine[bucket] += __popc(lanes);
    __syncwarp();
  });
  __syncthreads();
  // Where each warp's choices begin.
  for (int bucket = threadIdx.x; bucket < buckets; bucket += kSortThreads) {
    int slot = begins[bucket] + counts[bucket * static_cast<i64>(gridDim.x) + blockIdx.x];
    for (int i = 0; i < kSortWarps; ++i) {
      const int count = next[i * buckets + bucket];
      next[i * buckets + bucket] = slot;
      slot += count;
    }
  }
  __syncthreads();
  // The slots.
  each_choice(ids, choices, experts, [&](int choice, int bucket, u32 lanes) {
    if (bucket >= 0) {
      const int slot = mine[bucket] + __popc(before(lanes));
      order[slot] = choice, inverse[choice] = slot;
    }
    __syncwarp();
    if (bucket >= 0 && before(lanes) == 0) mine[bucket] += __popc(lanes);
    __syncwarp();
  });
}

// ---- rows ----

inline constexpr int kMostChoices = 32;  // of a token, where each has a sum of its own
inline constexpr int kRowThreads = 256;

struct MoveParams {
  const void *rows, *grad;  // by slot; by token
  void* out;
  const int *inverse, *offsets;
  const float* weights;  // by choice; null: 1
  float* weight_grad;    // by choice
  int k, slots, experts;
  int vectors;  // 16 bytes each, of a row
};

/// Each token's row to the slots of its choices; zeros to those from *end on. By bytes, whatever
/// the type.
__global__ void __launch_bounds__(kRowThreads)
    spread_rows(const uint4* x, i64 stride, const int* inverse, const int* end, uint4* out, int k,
                int slots, int vectors) {
  const i64 token = blockIdx.x;
  const u32 used = static_cast<u32>(min(__ldg(end), slots));
  for (int i = threadIdx.x; i < vectors; i += kRowThreads) {
    const uint4 value = load<Cache::constant>(x + token * stride + i);
#pragma unroll 4
    for (int j = 0; j < k; ++j) {
      const u32 slot = static_cast<u32>(__ldg(inverse + token * k + j));
      if (slot < static_cast<u32>(slots))
        store<Cache::normal>(out + static_cast<i64>(slot) * vectors + i,
                             slot < used ? value : uint4{0, 0, 0, 0});
    }
  }
}

/// The sum of the rows of each token's choices, times their weights; in float32.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    combine_rows(const FLEXOPS_GRID_CONSTANT MoveParams p) {
  constexpr int N = kPerVector<T>;
  const i64 token = blockIdx.x;
  const u32 end = static_cast<u32>(min(__ldg(p.offsets + p.experts - 1), p.slots));
  for (int i = threadIdx.x; i < p.vectors; i += kRowThreads) {
    float sum[N] = {};
#pragma unroll 8
    for (int j = 0; j < p.k; ++j) {
      const int slot = __ldg(p.inverse + token * p.k + j);
      if (static_cast<u32>(slot) >= end) continue;
      const float weight = p.weights ? __ldg(p.weights + token * p.k + j) : 1.0f;
      float value[N];
      widen(value, load<T, N>(p.rows, (static_cast<i64>(slot) * p.vectors + i) * N));
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = fmaf(weight, value[n], sum[n]);
    }
    store<T>(p.out, (token * p.vectors + i) * N, sum);
  }
}

/// The gradients of combine_rows: of the rows, weight times grad, and of the weights, grad times
/// the row.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    combine_rows_backward(const FLEXOPS_GRID_CONSTANT MoveParams p) {
  constexpr int N = kPerVector<T>, kWarps = kRowThreads / kWarpSize;
  __shared__ float sums[kMostChoices][kWarps];
  const i64 token = blockIdx.x;
  const u32 end = static_cast<u32>(min(__ldg(p.offsets + p.experts - 1), p.slots));
  for (int j = 0; j < p.k; ++j) {
    const int slot = __ldg(p.inverse + token * p.k + j);
    const bool exists = static_cast<u32>(slot) < end;
    const float weight = exists ? __ldg(p.weights + token * p.k + j) : 0.0f;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < p.vectors; i += kRowThreads) {
      const i64 at = (static_cast<i64>(slot) * p.vectors + i) * N;
      float grad[N], value[N];
      widen(grad, load<T, N>(p.grad, (token * p.vectors + i) * N));
      if (exists) {
        widen(value, load<T, N>(p.rows, at));
#pragma unroll
        for (int n = 0; n < N; ++n) sum = fmaf(grad[n], value[n], sum);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) grad[n] = exists ? grad[n] * weight : 0.0f;
      if (static_cast<u32>(slot) < static_cast<u32>(p.slots)) store<T>(p.out, at, grad);
    }
    sum = warp_reduce(sum, Sum());
    if (threadIdx.x % kWarpSize == 0) sums[j][threadIdx.x / kWarpSize] = sum;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < p.k) {
    float sum = 0.0f;
    for (int i = 0; i < kWarps; ++i) sum += sums[threadIdx.x][i];
    p.weight_grad[token * p.k + threadIdx.x] = sum;
  }
}

// ---- the gate ----

struct GateParams {
  void* grad;          // [slots, columns]: of the product, without the weight; becomes weight times
                       // the product
  const void* packed;  // [slots, 2 columns]: gate and up
  void* packed_grad;
  const float* weights;  // by choice
  float* weight_grad;
  const int *order, *offsets;
  int slots, experts, columns;
  activation::Function function;
};

/// With h = act(gate) up, whose row is multiplied by the weight w of its choice: from dh, the
/// gradient of w h, those of gate, up and w; and w h. A warp for each slot.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    gate_backward(const FLEXOPS_GRID_CONSTANT GateParams p) {
  constexpr int N = kPerVector<T>, kWarps = kRowThreads / kWarpSize;
  constexpr bool kAccurate = activation::kIsAccurate<T>;
  const int slot =
      static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / kWarpSize);
  if (slot >= p.slots) return;
  const int choice = __ldg(p.order + slot);
  const bool exists = slot < __ldg(p.offsets + p.experts - 1);
  const float weight = exists ? __ldg(p.weights + choice) : 0.0f;
  float sum = 0.0f;
  for (int column = threadIdx.x % kWarpSize * N; column < p.columns; column += kWarpSize * N) {
    const i64 at = static_cast<i64>(slot) * p.columns + column,
              gate_at = at + static_cast<i64>(slot) * p.columns;
    float grad[N] = {}, up[N] = {}, slope[N] = {}, value[N];
    if (exists) {
      widen(grad, load<T, N>(p.grad, at));
      widen(slope, load<T, N>(p.packed, gate_at));
      widen(up, load<T, N>(p.packed, gate_at + p.columns));
    }
    activation::differentiate_all<kAccurate>(slope, p.function, value);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float product = value[n] * up[n], of_product = grad[n] * weight;
      sum = fmaf(grad[n], product, sum);
      grad[n] = product * weight;
      slope[n] *= of_product * up[n];
      up[n] = of_product * value[n];
    }
    store<T>(p.grad, at, grad);
    store<T>(p.packed_grad, gate_at, slope);
    store<T>(p.packed_grad, gate_at + p.columns, up);
  }
  sum = warp_reduce(sum, Sum());
  if (threadIdx.x % kWarpSize == 0) p.weight_grad[choice] = sum;
}

}  // namespace flexops::experts
