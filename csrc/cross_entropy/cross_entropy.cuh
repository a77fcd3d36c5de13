// Cross entropy's kernels. What they compute: flexops/ops/cross_entropy.py.
//
// Memory decides, so a row is read from it once, if at all possible, though its maximum and sum are
// needed before its gradient can be written. A thread holds 128 bytes of it in registers, a block
// of 1024 threads 128 KiB; it goes over longer rows in chunks: the last one is still held when the
// gradient's turn comes, and the others are read again, backwards, from the second-level cache. On
// sm_90 float32 rows, which have less to compute for each byte, are streamed through the shared
// memory of a cluster of up to 8 blocks instead, rows ahead, and read once; its blocks tell each
// other their part's maximum and sum through distributed shared memory. (16-bit rows gain nothing
// there.)
#pragma once

#include "cross_entropy/cross_entropy_row.cuh"

namespace flexops::cross_entropy {

// Tuned on one H200.
inline constexpr int kRowThreads = 512;  // of a block that writes gradients, at most; twice as many
                                         // for rows of more than two chunks of theirs
inline constexpr int kForwardThreads = 256;   // of one that does not
inline constexpr int kGradientThreads = 128;  // of one that writes nothing else
inline constexpr int kShortThreads = 128;     // of one in which a warp or less holds a row
inline constexpr int kScaleThreads = 256;
inline constexpr int kVectors = 8;         // that a thread holds
inline constexpr int kForwardVectors = 4;  // and where 16-bit ones get no gradient
inline constexpr int kResident = 1024;  // threads that run on a processor at once: each takes half
                                        // of the registers that it has for it

/// Asks for the row that will be taken where this one is done with, a block of threads to each, so
/// that memory need not wait while this one's gradient is worked out. Pays for rows of one chunk
/// only: of longer ones it drives out what is still to be read again.
template <typename T>
FLEXOPS_DEVICE void prefetch_next(const Params& p, i64 row) {
#if !FLEXOPS_HIP
  constexpr int kLine = 128 / sizeof(T);
  u32 processors;
  asm("mov.u32 %0, %%nsmid;" : "=r"(processors));
  row += processors * (kResident / blockDim.x);
  const int at = static_cast<int>(threadIdx.x) * kLine;
  if (row >= p.rows || at >= p.length) return;
  prefetch(static_cast<const T*>(p.logits) + row * p.stride + at);
#else
  (void)p, (void)row;
#endif
}

/// Losses, maxima and sums; if `gradient`, these and gradients, or gradients from maxima and sums,
/// as Params tells.
template <typename T, bool gradient = true>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = gradient ? kVectors : kForwardVectors;
  constexpr int kParts = kIsFloat<T> ? 2 : 1;  // accurate powers are much code: all of it at once
                                               // is too much for the instruction cache
  constexpr bool kMayForward = kIsFloat<T>;    // it has no kernel of its own for that
  __shared__ float4 shared[kWarps];
  __shared__ float counts[kWarps];
  i64 row = blockIdx.x;
  int lane = static_cast<int>(threadIdx.x), rank = 0;
  bool exists = true;
  // Find the row, and this block's place in it.
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

  // This block's vectors are [rank * part, (rank + 1) * part), which it takes in chunks.
  const int begin = rank * p.part * N - head_of<T>(x), step = p.lanes * N, chunk = step * V;
  const int rest = p.length - begin, reach = p.part * N,
            end = begin + (rest < reach ? rest : reach);
  const int first = begin + lane * N;
  if (!used && p.lanes > kNarrowWarp) {  // the same for all that share the row
    if (p.losses && lane == 0 && rank == 0) p.losses[row] = p.maxima[row] = p.sums[row] = 0.0f;
    if (gradient && (!kMayForward || p.out))
      clear_part<T>(p, static_cast<T*>(p.out) + row * p.out_stride, first, step, end);
    return;
  }
  const int target = valid ? static_cast<int>(wanted) : -N;

  // First pass: running maximum and sum of the chunks.
  int last = 0;  // where the last chunk begins, from `first`
  if (end - begin > chunk) last = (end - begin - 1) / chunk * chunk;
  Packed raw[V];
  State s = {-infinity(), 0.0f, 0.0f};
  for (int from = !gradient || p.losses ? 0 : last; from <= last; from += chunk) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = first + from + k * step;
      raw[k] = {{kNothing<T>, kNothing<T>, kNothing<T>, kNothing<T>}};
      if (at >= end) continue;
      // What is read again should still be in the cache then.
      raw[k] = from < last ? load_vector<T, Cache::normal>(x, at) : load_vector<T, kRead>(x, at);
    }
    limit_all<T>(raw, first + from, step, p.length, kNothing<T>);
    if (gradient && p.losses == nullptr) break;
    add_vectors<T, V, kParts>(s, p, raw, first + from, step, end);
  }

  // Reduce them over the row, and write loss, maximum and sum.
  float maximum, sum, divisor = p.divisor ? *p.divisor : 1.0f;
  // Second pass, backwards, since the last chunk is in registers still: the gradient.
  if (!gradient || p.losses) {
    const float at_target =
        valid && lane == 0 ? to_float(x[target]) : 0.0f;  // before others write over it
    if (gradient && (!kMayForward || p.out) && last == 0 && p.lanes > kNarrowWarp)
      prefetch_next<T>(p, row);
    if (p.count) divisor = count_targets(p, counts);
    s = reduce_row(p, s, shared);
    maximum = settle(s.maximum), sum = s.sum;
    if (lane == 0 && rank == 0 && exists) {
      p.losses[row] = !used   ? 0.0f
                      : valid ? loss_of(p, maximum, sum, at_target, s.total)
                              : not_a_number();
      p.maxima[row] = used ? maximum : 0.0f, p.sums[row] = used ? sum : 0.0f;
    }
  } else {
    maximum = p.maxima[row], sum = p.sums[row];
  }
  if (!gradient || (kMayForward && !p.out) || !exists) return;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;  // not before: registers are short
  if (!used) return clear_part<T>(p, out, first, step, end);
  const float weight = (p.upstream ? p.upstream[p.each_row ? row : 0] : 1.0f) / divisor;
  const Gradient g = make_gradient<T>(p, maximum, sum, valid ? weight : not_a_number());
  for (int from = last; from >= 0; from -= chunk) {
    if (from != last) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int at = first + from + k * step;
        if (at < end) raw[k] = load_vector<T, kRead>(x, at);
      }
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int k = 0; k < V / kParts; ++k) {
        const int at = first + from + (part * (V / kParts) + k) * step;
        if (at >= end) break;
        write_vector<T>(p, out, raw[k], at, g, target);
        if constexpr (kParts == 2) raw[k] = raw[k + V / 2];
      }
    }
  }
}

// ---- the whole ----

/// One block. What the sum of losses is divided by goes to `divisor`, and their sum or mean to
/// `loss`, if that is not null.
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_finish(const i64* target, const float* losses, float* divisor, float* loss,
                         i64 rows, i64 ignore_index, int mean) {
  // Add up losses and count targets.
  __shared__ float sums[kWarps];
  __shared__ i64 counts[kWarps];
  float sum = 0.0f;
  i64 count = 0;
#pragma unroll 4
  for (i64 i = threadIdx.x; i < rows; i += kMostThreads) {
    if (loss) sum += losses[i];
    if (mean) count += target[i] != ignore_index ? 1 : 0;
  }
  // Reduce over the block, and write.
  sum = group_reduce(sum, Sum{}, 0.0f, kMostThreads, sums);
  count = group_reduce(count, Sum{}, i64{0}, kMostThreads, counts);
  if (threadIdx.x != 0) return;
  *divisor = mean ? static_cast<float>(count) : 1.0f;
  if (loss) *loss = sum / *divisor;
}

/// values[r, :] *= factors[r] (or factors[0]), skipping rows whose factor is 1.
template <typename T>
__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(T* values, const float* factors, i64 rows, i64 length, int each_row) {
  constexpr int N = kPerVector<T>;
  if (!each_row) length *= rows, rows = 1;
  for (i64 row = each_row ? blockIdx.y : 0; row < rows; row += each_row ? gridDim.y : 1) {
    const float factor = factors[row];
    if (factor == 1.0f) continue;
    T* data = values + row * length;
    for (i64 at =
             (static_cast<i64>(blockIdx.x) * kScaleThreads + threadIdx.x) * N - head_of<T>(data);
         at < length; at += static_cast<i64>(gridDim.x) * kScaleThreads * N) {
      float x[N];
      widen<T>(x, load<Cache::streaming>(reinterpret_cast<const Packed*>(data + at)));
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= factor;
      const i64 skipped = at < 0 ? -at : 0, rest = length - at;
      store_vector<T, kWrite>(data + at + skipped, -static_cast<int>(skipped),
                              static_cast<int>((rest < N ? rest : N) - skipped), packed<T>(x));
    }
  }
}

}  // namespace flexops::cross_entropy
