// Cross entropy's kernels. What they compute: flexops/ops/cross_entropy.py.
//
// Memory decides, so a row is read from it once, if at all possible, though its maximum and sum are needed before its gradient can be
// written. A thread holds 128 bytes of it in registers, a block of 1024 threads 128 KiB; it goes over longer rows in chunks: the last one
// is still held when the gradient's turn comes, and the others are read again, backwards, from the second-level cache. On sm_90 float32
// rows, which have less to compute for each byte, are streamed through the shared memory of a cluster of up to 8 blocks instead, rows
// ahead, and read once; its blocks tell each other their part's maximum and sum through distributed shared memory. (16-bit rows gain
// nothing there.)
#pragma once

#include "common/rows.cuh"

namespace flexops::cross_entropy {

using namespace flexops::rows;

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_CE_THREADS)  // of a block that writes gradients, at most; twice as many for rows of more than two chunks of theirs
#define FLEXOPS_CE_THREADS 512
#endif
#if !defined(FLEXOPS_CE_FORWARD_THREADS)  // of one that does not
#define FLEXOPS_CE_FORWARD_THREADS 256
#endif
#if !defined(FLEXOPS_CE_VECTORS)  // that a thread holds
#define FLEXOPS_CE_VECTORS 8
#endif
#if !defined(FLEXOPS_CE_CLUSTER)  // blocks, at most
#define FLEXOPS_CE_CLUSTER 8
#endif
#if !defined(FLEXOPS_CE_GRADIENT_THREADS)
#define FLEXOPS_CE_GRADIENT_THREADS 128
#endif
#if !defined(FLEXOPS_CE_CACHE)
#define FLEXOPS_CE_CACHE Cache::streaming
#endif

#if !defined(FLEXOPS_CE_STORE)
#define FLEXOPS_CE_STORE Cache::streaming
#endif
#if !defined(FLEXOPS_CE_RING_LEAST)  // vectors of a row that is streamed
#define FLEXOPS_CE_RING_LEAST 2048
#endif
#if !defined(FLEXOPS_CE_RING_THREADS)
#define FLEXOPS_CE_RING_THREADS 512
#endif
#if !defined(FLEXOPS_CE_RING_VECTORS)  // of a chunk that a thread takes
#define FLEXOPS_CE_RING_VECTORS 4
#endif
#if !defined(FLEXOPS_CE_RING_CHUNKS)  // that a ring holds
#define FLEXOPS_CE_RING_CHUNKS 6
#endif
#if !defined(FLEXOPS_CE_RING_SHARE)  // of a row, in chunks, that a block takes at most: two rows' must fit the ring
#define FLEXOPS_CE_RING_SHARE 3
#endif

constexpr int kMostThreads = 1024;
constexpr int kRingThreads = FLEXOPS_CE_RING_THREADS, kRingVectors = FLEXOPS_CE_RING_VECTORS, kRingChunks = FLEXOPS_CE_RING_CHUNKS;
constexpr int kRingChunk = kRingThreads * kRingVectors;  // vectors
constexpr int kRingWarps = kRingThreads / kNarrowWarp;
constexpr int kRowThreads = FLEXOPS_CE_THREADS, kForwardThreads = FLEXOPS_CE_FORWARD_THREADS, kVectors = FLEXOPS_CE_VECTORS,
              kMostBlocks = FLEXOPS_CE_CLUSTER;
constexpr int kShortThreads = 128;  // of a block, where a warp or less holds a row
constexpr int kGradientThreads = FLEXOPS_CE_GRADIENT_THREADS;
constexpr int kScaleThreads = 256;
constexpr int kWarps = kMostThreads / kNarrowWarp;
constexpr Cache kRead = FLEXOPS_CE_CACHE, kWrite = FLEXOPS_CE_STORE;

constexpr float kLog2e = 1.44269504088896341f;

struct Params {
  void* logits;
  void* out;  // of the gradient, or null; may be the logits
  const i64* target;
  float* losses;          // null: maxima and sums are read, not written, and only the gradient is made
  float *maxima, *sums;   // of each row: its greatest logit, and the sum of the powers of the distances to it
  float* weight;          // of a row in the mean; null: 1
  const float* upstream;  // factors of the gradient, or null
  i64 rows, stride, out_stride, ignore_index;
  int length;
  int each_row;          // 1: upstream has one factor for each row
  int lanes, log_lanes;  // threads that share a row: a power of two up to 32, or the block
  int blocks;            // that share a row, if blocks do
  int part;              // vectors of a block
  int count;             // whether that is 1 / (rows that are not ignored), which blocks find by themselves
  float smoothing, z_loss;
};

// ---- clusters -------------------------------------------------------------------------------------------------------

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLEXOPS_HAS_CLUSTERS 1
FLEXOPS_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
FLEXOPS_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Barriers in shared memory, by their address there. Each use of one is a phase, even or odd.
FLEXOPS_DEVICE u32 shared_address(const void* pointer) {
  u32 out;
  asm("{\n.reg .u64 wide;\ncvta.to.shared.u64 wide, %1;\ncvt.u32.u64 %0, wide;\n}" : "=r"(out) : "l"(pointer));
  return out;
}
FLEXOPS_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
FLEXOPS_DEVICE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
FLEXOPS_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
FLEXOPS_DEVICE void barrier_wait(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  } while (done == 0);
}
/// 16 bytes or a multiple from global to shared memory; `barrier` is told when they are there.
FLEXOPS_DEVICE void copy_async(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(reinterpret_cast<u64>(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Writes to the place that `to` is in block `rank` of the cluster, and tells its `barrier`.
FLEXOPS_DEVICE void send(u32 to, u32 barrier, int rank, float4 value) {
  asm volatile(
      "{\n.reg .u32 there, bell;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 bell, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [bell];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(bit_cast<u32>(value.x)), "r"(bit_cast<u32>(value.y)), "r"(bit_cast<u32>(value.z)),
      "r"(bit_cast<u32>(value.w))
      : "memory");
}
#else
#define FLEXOPS_HAS_CLUSTERS 0
#endif

// ---- numbers --------------------------------------------------------------------------------------------------------

// 16-bit logits take powers of 2, with a factor folded into their exponents; float32 ones have e's own, to the last bits.
template <Type type>
constexpr float kUnit = type == kF32 ? 1.0f : kLog2e;

/// e to the power of (value - base / kUnit).
template <Type type>
FLEXOPS_DEVICE float power(float value, float base) {
  if constexpr (type == kF32) return expf(value - base);
  return quick_exp2(__fmaf_rn(value, kLog2e, -base));
}

/// e to the power of a distance between maxima.
FLEXOPS_DEVICE float rescale(float distance) { return quick_exp2(distance * kLog2e); }

/// What a set of logits contributes: their maximum, the sum of the powers of their distances to it, and their sum.
struct State {
  float maximum, sum, total;
};

FLEXOPS_DEVICE float settle(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

/// Over neighbouring lanes.
FLEXOPS_DEVICE State reduce_lanes(State s, int lanes, bool with_total) {
  float maximum = s.maximum;
  for (int mask = lanes / 2; mask > 0; mask /= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, mask, kNarrowWarp));
  s.sum *= rescale(s.maximum - settle(maximum));
  s.maximum = maximum;
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    s.sum += shuffle_xor(s.sum, mask, kNarrowWarp);
    if (with_total) s.total += shuffle_xor(s.total, mask, kNarrowWarp);
  }
  return s;
}

/// Of several warps' states; for every lane of every warp, in the same order.
FLEXOPS_DEVICE State merge(const float4* states, int count, bool with_total) {
  State s = {-infinity(), 0.0f, 0.0f};
  for (int i = threadIdx.x % kNarrowWarp; i < count; i += kNarrowWarp) {
    const float4 other = states[i];
    const float maximum = fmaxf(s.maximum, other.x), base = settle(maximum);
    s.sum = s.sum * rescale(s.maximum - base) + other.y * rescale(other.x - base);
    s.total += other.z;
    s.maximum = maximum;
  }
  return reduce_lanes(s, kNarrowWarp, with_total);
}

/// Over all the threads that share a row.
FLEXOPS_DEVICE State reduce_row(const Params& p, State s, float4* shared) {
  s = reduce_lanes(s, p.lanes < kNarrowWarp ? p.lanes : kNarrowWarp, p.smoothing != 0.0f);
  if (p.lanes <= kNarrowWarp) return s;
  if (threadIdx.x % kNarrowWarp == 0) shared[threadIdx.x / kNarrowWarp] = {s.maximum, s.sum, s.total, 0.0f};
  __syncthreads();
  return merge(shared, static_cast<int>(blockDim.x) / kNarrowWarp, p.smoothing != 0.0f);
}

/// A row's gradient is slope * power(logit, base) - shift, and less `drop` at the target.
struct Gradient {
  float base, slope, shift, drop;
};

/// From the row's (settled) maximum and sum, not from their logarithm, which a float32 row would feel the rounding of.
template <Type type>
FLEXOPS_DEVICE Gradient make_gradient(const Params& p, float maximum, float sum, float weight) {
  const float slope = p.z_loss == 0.0f ? weight : weight * (1.0f + 2.0f * p.z_loss * (maximum + logf(sum)));
  return {maximum * kUnit<type>, slope / sum, weight * p.smoothing / static_cast<float>(p.length), weight * (1.0f - p.smoothing)};
}

// ---- a row ----------------------------------------------------------------------------------------------------------

/// -inf, twice in 16 bits.
template <Type type>
constexpr u32 kNothing = type == kF32   ? 0xff800000u
                         : type == kF16 ? 0xfc00fc00u
                                        : 0xff80ff80u;

/// Elements [at, at + kVector) of a row, -inf for those outside of [0, length).
template <Type type>
FLEXOPS_DEVICE Packed clip(Packed raw, int at, int length) {
  constexpr int N = kVector<type>, kPerWord = N / 4;
  if (at >= 0 && at + N <= length) return raw;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const u32 mask = type == kF32 ? 0xffffffffu : 0xffffu << (i % kPerWord * 16);
    if (at + i < 0 || at + i >= length) raw.at[i / kPerWord] = (raw.at[i / kPerWord] & ~mask) | (kNothing<type> & mask);
  }
  return raw;
}

#if FLEXOPS_HAS_MIN2
/// The greatest of each half of N words: a tree, as in rows.cuh.
template <typename T, int N>
FLEXOPS_DEVICE u32 max2_tree(const u32* words) {
  if constexpr (N == 1) return words[0];
  if constexpr (N > 1) return max2<T>(max2_tree<T, N / 2>(words), max2_tree<T, N - N / 2>(words + N / 2));
}
#endif

/// The greatest element.
template <Type type>
FLEXOPS_DEVICE float largest(const Packed& raw) {
#if FLEXOPS_HAS_MIN2
  if constexpr (type != kF32) {  // NaN wins here, where it must not, but makes the row's sum NaN all the same
    const u32 out = max2_tree<Element<type>, 4>(raw.at);
    const Element<type> low = {static_cast<u16>(out)}, high = {static_cast<u16>(out >> 16)};
    return fmaxf(to_float(low), to_float(high));
  }
#endif
  float x[kVector<type>];
  widen<type>(x, raw);
  return max_tree<kVector<type>>(x);
}

/// Sum of those of the elements [at, at + kVector) that are in [0, end).
template <Type type>
FLEXOPS_DEVICE float sum_inside(const float* x, int at, int end) {
  constexpr int N = kVector<type>;
  if (at >= 0 && at + N <= end) return sum_tree<N>(x);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += at + i >= 0 && at + i < end ? x[i] : 0.0f;
  return sum;
}

/// Adds vectors of which elements outside of the row are -inf; the first of vector k is at + k * step.
template <Type type, int V>
FLEXOPS_DEVICE void add_vectors(State& s, const Params& p, const Packed (&raw)[V], int at, int step, int end) {
  constexpr int N = kVector<type>;
  float highest = s.maximum, x[N];
#pragma unroll
  for (int k = 0; k < V; ++k) highest = fmaxf(highest, largest<type>(raw[k]));
  const float base = settle(highest), scaled = base * kUnit<type>;
  s.sum *= rescale(s.maximum - base);
  s.maximum = highest;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    widen<type>(x, raw[k]);
    if (p.smoothing != 0.0f) s.total += sum_inside<type>(x, at + k * step, end);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = power<type>(x[i], scaled);
    s.sum += sum_tree<N>(x);
  }
}

template <Type type>
FLEXOPS_DEVICE void write_vector(const Params& p, Element<type>* out, const Packed& raw, int at, const Gradient& g, int target) {
  constexpr int N = kVector<type>;
  float x[N];
  widen<type>(x, raw);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __fmaf_rn(power<type>(x[i], g.base), g.slope, -g.shift);
  if (static_cast<u32>(target - at) < static_cast<u32>(N)) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] -= at + i == target ? g.drop : 0.0f;
  }
  store_vector<type, kWrite>(out, at, p.length, narrow<type>(x));
}

/// Rows that are not ignored. Every thread of the block takes part.
FLEXOPS_DEVICE float count_targets(const Params& p, float* shared) {
  float count = 0.0f;  // exact: this is asked for a few rows only
  for (i64 i = threadIdx.x; i < p.rows; i += blockDim.x) count += p.target[i] != p.ignore_index ? 1.0f : 0.0f;
  return group_reduce(count, Sum{}, 0.0f, static_cast<int>(blockDim.x), shared);
}

FLEXOPS_DEVICE float loss_of(const Params& p, float maximum, float sum, float at_target, float total) {
  const float lse = maximum + logf(sum);
  const float loss = lse - (1.0f - p.smoothing) * at_target + p.z_loss * lse * lse;
  return p.smoothing == 0.0f ? loss : loss - p.smoothing * (total / static_cast<float>(p.length));
}

/// Zeros over this block's part of a row that is ignored.
template <Type type>
FLEXOPS_DEVICE void clear_part(const Params& p, Element<type>* out, int first, int step, int end) {
  for (int at = first; at < end; at += step) store_vector<type, kWrite>(out, at, p.length, Packed{{0, 0, 0, 0}});
}

/// Losses, maxima, sums and gradients, or gradients from maxima and sums: as Params tells.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kVectors;
  using T = Element<type>;
  __shared__ float4 shared[kWarps];
  __shared__ float counts[kWarps];
  i64 row = blockIdx.x;
  int lane = static_cast<int>(threadIdx.x), rank = 0;
  bool exists = true;
  if (p.lanes <= kNarrowWarp) {
    row = (row * blockDim.x + threadIdx.x) >> p.log_lanes;
    lane &= p.lanes - 1;
    exists = row < p.rows;
    row = exists ? row : p.rows - 1;
  } else if (p.blocks > 1) {
    rank = static_cast<int>(blockIdx.x % static_cast<u32>(p.blocks));
    row = blockIdx.x / static_cast<u32>(p.blocks);
  }
  const i64 wanted = p.target[row];
  const bool valid = wanted >= 0 && wanted < p.length, used = wanted != p.ignore_index;
  const T* x = static_cast<const T*>(p.logits) + row * p.stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;

  // This block's vectors are [rank * part, (rank + 1) * part), which it takes in chunks.
  const int begin = rank * p.part * N - head_of<type>(x), step = p.lanes * N, chunk = step * V;
  const int rest = p.length - begin, reach = p.part * N, end = begin + (rest < reach ? rest : reach);
  const int first = begin + lane * N;
  if (!used && p.lanes > kNarrowWarp) {  // the same for all that share the row
    if (p.losses && lane == 0 && rank == 0) p.losses[row] = p.maxima[row] = p.sums[row] = 0.0f;
    if (p.out) clear_part<type>(p, out, first, step, end);
    return;
  }
  const int target = valid ? static_cast<int>(wanted) : -N;
  float at_target = 0.0f;
  if (p.losses && valid) at_target = to_float(x[target]);

  int last = 0;  // where the last chunk begins, from `first`
  if (end - begin > chunk) last = (end - begin - 1) / chunk * chunk;
  Packed raw[V];
  State s = {-infinity(), 0.0f, 0.0f};
  for (int from = p.losses ? 0 : last; from <= last; from += chunk) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = first + from + k * step;
      raw[k] = {{kNothing<type>, kNothing<type>, kNothing<type>, kNothing<type>}};
      if (at >= end) continue;
      // What is read again should still be in the cache then.
      raw[k] = clip<type>(from < last ? load_vector<type, Cache::normal>(x, at) : load_vector<type, kRead>(x, at), at, p.length);
    }
    if (p.losses == nullptr) break;
    add_vectors<type, V>(s, p, raw, first + from, step, end);
  }

  float maximum, sum, weight = p.weight ? *p.weight : 1.0f;
  if (p.losses) {
    if (p.count) weight = 1.0f / count_targets(p, counts);
    s = reduce_row(p, s, shared);
    maximum = settle(s.maximum), sum = s.sum;
    if (lane == 0 && rank == 0 && exists) {
      p.losses[row] = !used ? 0.0f : valid ? loss_of(p, maximum, sum, at_target, s.total) : not_a_number();
      p.maxima[row] = used ? maximum : 0.0f, p.sums[row] = used ? sum : 0.0f;
    }
  } else {
    maximum = p.maxima[row], sum = p.sums[row];
  }
  if (p.out == nullptr || !exists) return;
  if (!used) return clear_part<type>(p, out, first, step, end);
  if (p.upstream) weight *= p.upstream[p.each_row ? row : 0];
  const Gradient g = make_gradient<type>(p, maximum, sum, valid ? weight : not_a_number());
  for (int from = last; from >= 0; from -= chunk) {
    if (from != last) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int at = first + from + k * step;
        if (at < end) raw[k] = load_vector<type, kRead>(x, at);
      }
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = first + from + k * step;
      if (at >= end) break;
      write_vector<type>(p, out, raw[k], at, g, target);
    }
  }
}

// ---- rows streamed through shared memory ----------------------------------------------------------------------------

#if FLEXOPS_HAS_CLUSTERS

/// A place in the ring, and the phase of its barriers.
struct Slot {
  int index;
  u32 phase;

  FLEXOPS_DEVICE void advance() {
    if (++index == kRingChunks) index = 0, phase ^= 1;
  }
};

/// The part of a row that a block has: elements [begin, end), the first of which is at a multiple of 16 bytes and may be before the row.
struct Part {
  i64 row;
  int begin, end, target;
  bool valid;

  template <Type type>
  FLEXOPS_DEVICE static Part of(const Params& p, i64 row, i64 wanted, int rank) {
    constexpr int N = kVector<type>;
    Part out;
    out.row = row;
    out.valid = wanted >= 0 && wanted < p.length;
    out.target = out.valid ? static_cast<int>(wanted) : -N;
    out.begin = rank * p.part * N - head_of<type>(static_cast<const Element<type>*>(p.logits) + row * p.stride);
    const int rest = p.length - out.begin, reach = p.part * N;
    out.end = out.begin + (rest < reach ? rest : reach);
    return out;
  }
};

/// The ring and its barriers, by their addresses in shared memory.
struct Ring {
  const Packed* data;
  u32 full, empty, told;

  FLEXOPS_DEVICE u32 full_at(const Slot& slot) const { return full + 8 * slot.index; }
  FLEXOPS_DEVICE u32 empty_at(const Slot& slot) const { return empty + 8 * slot.index; }
  FLEXOPS_DEVICE const Packed* chunk(const Slot& slot) const { return data + slot.index * kRingChunk; }
};

/// Copies the block's parts of its rows into the ring. For one thread.
template <Type type>
FLEXOPS_DEVICE void fill_ring(const Params& p, const Ring& ring, int rank, i64 row, i64 step) {
  constexpr int N = kVector<type>;
  Slot slot = {0, 0};
  for (; row < p.rows; row += step) {
    const i64 wanted = p.target[row];
    if (wanted == p.ignore_index) continue;
    const Element<type>* x = static_cast<const Element<type>*>(p.logits) + row * p.stride;
    const Part part = Part::of<type>(p, row, wanted, rank);
    for (int at = part.begin; at < part.end; at += kRingChunk * N) {
      const int vectors = (part.end - at + N - 1) / N;
      const u32 bytes = static_cast<u32>(vectors < kRingChunk ? vectors : kRingChunk) * 16;
      barrier_wait(ring.empty_at(slot), slot.phase ^ 1);  // passes at once for the first chunks
      barrier_expect(ring.full_at(slot), bytes);
      copy_async(shared_address(ring.chunk(slot)), x + at, bytes, ring.full_at(slot));
      slot.advance();
    }
  }
}

/// What this thread's logits of the part contribute.
template <Type type>
FLEXOPS_DEVICE State add_part(const Params& p, const Ring& ring, const Part& part, Slot& slot) {
  constexpr int N = kVector<type>, V = kRingVectors;
  const int thread = static_cast<int>(threadIdx.x);
  State s = {-infinity(), 0.0f, 0.0f};
  for (int from = part.begin; from < part.end; from += kRingChunk * N) {
    const Packed* chunk = ring.chunk(slot) + thread;
    barrier_wait(ring.full_at(slot), slot.phase);
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (thread + k * kRingThreads) * N;
      raw[k] = {{kNothing<type>, kNothing<type>, kNothing<type>, kNothing<type>}};
      if (at < part.end) raw[k] = clip<type>(chunk[k * kRingThreads], at, p.length);
    }
    add_vectors<type, V>(s, p, raw, from + thread * N, kRingThreads * N, part.end);
    slot.advance();
  }
  return s;
}

/// Writes the part's gradient, and gives its chunks back.
template <Type type>
FLEXOPS_DEVICE void write_part(const Params& p, const Ring& ring, const Part& part, Slot& slot, const Gradient& g) {
  constexpr int N = kVector<type>, V = kRingVectors;
  const int thread = static_cast<int>(threadIdx.x);
  Element<type>* out = static_cast<Element<type>*>(p.out) + part.row * p.out_stride;
  for (int from = part.begin; from < part.end; from += kRingChunk * N) {
    const Packed* chunk = ring.chunk(slot) + thread;
    Packed raw[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (from + (thread + k * kRingThreads) * N < part.end) raw[k] = chunk[k * kRingThreads];
    }
    __syncwarp();
    if (thread % kNarrowWarp == 0) barrier_arrive(ring.empty_at(slot));
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + (thread + k * kRingThreads) * N;
      if (at >= part.end) break;
      write_vector<type>(p, out, raw[k], at, g, part.target);
    }
    slot.advance();
  }
}

#endif

/// Losses, maxima, sums and gradients, for sm_90: as many clusters as the GPU holds at once, each of which goes over every so-manyth row. A
/// warp of each block does nothing but to copy its part of these rows, chunk by chunk, into a ring in shared memory. The other warps read a
/// chunk twice: for the row's maximum and sum, which they tell the other blocks, and for the gradient; in between they find maximum and sum
/// of the next row. So neither memory nor they wait while word goes round. Two parts of rows fit the ring.
template <Type type>
__global__ void __launch_bounds__(kRingThreads + kNarrowWarp) cross_entropy_ring(const FLEXOPS_GRID_CONSTANT Params p) {
#if FLEXOPS_HAS_CLUSTERS
  // A block tells of row i + 2 once it has all that was told of row i, which the others did after they had finished row i - 2. So row i + 2
  // may take row i - 2's place, but no later one's.
  constexpr u32 kSides = 4;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) float4 states[kSides][kMostBlocks * kRingWarps];
  __shared__ __align__(8) u64 barriers[2 * kRingChunks + kSides];
  __shared__ float counts[kWarps];
  const int thread = static_cast<int>(threadIdx.x), rank = static_cast<int>(blockIdx.x % static_cast<u32>(p.blocks));
  const i64 step = gridDim.x / static_cast<u32>(p.blocks), first = blockIdx.x / static_cast<u32>(p.blocks);
  const u32 address = shared_address(barriers);
  const Ring ring = {reinterpret_cast<const Packed*>(memory), address, address + 8 * kRingChunks, address + 16 * kRingChunks};
  if (thread == 0) {
    for (int i = 0; i < kRingChunks; ++i) barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, kRingWarps);
    for (u32 i = 0; i < kSides; ++i) barrier_init(ring.told + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  float weight = p.weight ? *p.weight : 1.0f;
  if (p.count) weight = 1.0f / count_targets(p, counts);
  cluster_arrive();
  cluster_wait();
  if (thread >= kRingThreads) {
    if (thread == kRingThreads) fill_ring<type>(p, ring, rank, first, step);
    return;
  }

  const int lane = thread % kNarrowWarp, warp = thread / kNarrowWarp, count = p.blocks * kRingWarps;
  Slot read = {0, 0}, written = {0, 0};
  u32 turn = 0;                       // rows that were told of
  Part before = {0, 0, 0, 0, false};  // the last of them, whose gradient is not written yet
  const auto finish = [&](u32 its_turn) {
    const float4* told = states[its_turn % kSides];
    barrier_wait(ring.told + 8 * (its_turn % kSides), its_turn / kSides & 1);
    const State s = merge(told, count, p.smoothing != 0.0f);
    const float maximum = settle(s.maximum);
    if (thread == 0 && rank == 0) {
      p.losses[before.row] = before.valid ? loss_of(p, maximum, s.sum, told[0].w, s.total) : not_a_number();
      p.maxima[before.row] = maximum, p.sums[before.row] = s.sum;
    }
    const float factor = p.upstream ? weight * p.upstream[p.each_row ? before.row : 0] : weight;
    write_part<type>(p, ring, before, written, make_gradient<type>(p, maximum, s.sum, before.valid ? factor : not_a_number()));
  };
  for (i64 row = first; row < p.rows; row += step) {
    const i64 wanted = p.target[row];
    const Part part = Part::of<type>(p, row, wanted, rank);
    if (wanted == p.ignore_index) {
      if (thread == 0 && rank == 0) p.losses[row] = p.maxima[row] = p.sums[row] = 0.0f;
      clear_part<type>(p, static_cast<Element<type>*>(p.out) + row * p.out_stride, part.begin + thread * kVector<type>,
                       kRingThreads * kVector<type>, part.end);
      continue;
    }
    float chosen = 0.0f;
    if (warp == 0 && rank == 0 && part.valid) {
      chosen = to_float(static_cast<const Element<type>*>(p.logits)[row * p.stride + part.target]);
    }
    const State s = reduce_lanes(add_part<type>(p, ring, part, read), kNarrowWarp, p.smoothing != 0.0f);
    const u32 side = turn % kSides, bell = ring.told + 8 * side;
    if (thread == 0) barrier_expect(bell, static_cast<u32>(count) * 16);
    if (lane < p.blocks) send(shared_address(&states[side][rank * kRingWarps + warp]), bell, lane, {s.maximum, s.sum, s.total, chosen});
    if (turn > 0) finish(turn - 1);
    before = part;
    ++turn;
  }
  if (turn > 0) finish(turn - 1);
#else
  (void)p;
#endif
}

// ---- the whole ------------------------------------------------------------------------------------------------------

/// One block. The weight of a row goes to `weight`, and the reduced losses to `loss`, if that is not null.
template <bool kMean>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_finish(const i64* target, const float* losses, float* weight, float* loss, i64 rows, i64 ignore_index) {
  __shared__ float sums[kWarps];
  __shared__ i64 counts[kWarps];
  float sum = 0.0f;
  i64 count = 0;
#pragma unroll 4
  for (i64 i = threadIdx.x; i < rows; i += kMostThreads) {
    if (loss) sum += losses[i];
    if (kMean) count += target[i] != ignore_index ? 1 : 0;
  }
  sum = group_reduce(sum, Sum{}, 0.0f, kMostThreads, sums);
  if (kMean) count = group_reduce(count, Sum{}, i64{0}, kMostThreads, counts);
  if (threadIdx.x != 0) return;
  *weight = kMean ? 1.0f / static_cast<float>(count) : 1.0f;
  if (loss) *loss = kMean ? sum / static_cast<float>(count) : sum;
}

/// values[r, :] *= factors[r] (or factors[0]), skipping rows whose factor is 1.
template <Type type>
__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(Element<type>* values, const float* factors, i64 rows, i64 length, int each_row) {
  constexpr int N = kVector<type>;
  if (!each_row) length *= rows, rows = 1;
  for (i64 row = each_row ? blockIdx.y : 0; row < rows; row += each_row ? gridDim.y : 1) {
    const float factor = factors[row];
    if (factor == 1.0f) continue;
    Element<type>* data = values + row * length;
    for (i64 at = (static_cast<i64>(blockIdx.x) * kScaleThreads + threadIdx.x) * N - head_of<type>(data); at < length;
         at += static_cast<i64>(gridDim.x) * kScaleThreads * N) {
      float x[N];
      widen<type>(x, load<Cache::streaming>(reinterpret_cast<const Packed*>(data + at)));
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= factor;
      const i64 skipped = at < 0 ? -at : 0, rest = length - at;
      store_vector<type, kWrite>(data + at + skipped, -static_cast<int>(skipped), static_cast<int>((rest < N ? rest : N) - skipped),
                                 narrow<type>(x));
    }
  }
}

}  // namespace flexops::cross_entropy
