// The word with the largest score of each row, and what a decode step does with it: one launch for
// what takes torch eight. A block looks at a part of a row; the last one of all that ends writes
// the results.
#pragma once

#include "common/async.cuh"
#include "common/dtypes.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace flexops::next_token {

inline constexpr int kThreads = 512;

struct Params {
  const void* scores;
  const i64* words;  // of each score; null: their numbers
  i64 *tokens, *last, *at;
  bool* finished;
  const i64* ends;
  u64* workspace;  // of each row the best so far, then how many blocks have ended; zeros
  i64 stride, columns, pad;
  int rows, width, ends_count;
};

/// Larger for a larger score, as torch's argmax has it (a NaN is the largest), and of equal ones
/// for the first; never 0.
FLEXOPS_DEVICE u64 rank(float score, int place) {
  const u32 bits = bit_cast<u32>(score == 0.0f ? 0.0f : score);
  const u32 order = score != score ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
  return static_cast<u64>(order) << 32 | ~static_cast<u32>(place);
}

template <class T>
__global__ void __launch_bounds__(kThreads) choose(const Params p) {
  constexpr int kEach = 16 / sizeof(T);
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ u64 of_warps[kWarps + 1];  // and how many blocks had ended before
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.y);
  wait_for_previous();
  let_next_start();
  const T* const scores = static_cast<const T*>(p.scores) + row * p.stride;
  const bool aligned = reinterpret_cast<u64>(scores) % 16 == 0;
  u64 best = 0;
  const auto look = [&](T score, int place) {
    const u64 found = rank(to_float(score), place);
    best = found > best ? found : best;
  };
  const int all = static_cast<int>(gridDim.x) * kThreads;
  for (i64 i = kEach * (static_cast<i64>(blockIdx.x) * kThreads + thread); i < p.width;
       i += kEach * all) {
    const int at = static_cast<int>(i);
    if (aligned && i + kEach <= p.width) {
      const auto found = load<Cache::normal>(reinterpret_cast<const Vec<T, kEach>*>(scores + at));
#pragma unroll
      for (int j = 0; j < kEach; ++j) look(found.at[j], at + j);
    } else {
      for (int j = 0; j < kEach && i + j < p.width; ++j) look(scores[at + j], at + j);
    }
  }
  best = block_reduce<kThreads>(best, Max(), of_warps);
  u64* const ended = p.workspace + p.rows;
  if (thread == 0) {
    atomicMax(p.workspace + row, best);
    __threadfence();
    of_warps[kWarps] = atomicAdd(ended, u64{1});
  }
  __syncthreads();
  if (of_warps[kWarps] + 1 < u64{gridDim.x} * gridDim.y) return;
  __threadfence();
  const i64 at = *p.at;
  __syncthreads();  // before it is written
  for (int i = thread; i < p.rows; i += kThreads) {
    const i64 place = static_cast<i64>(~static_cast<u32>(atomicMax(p.workspace + i, u64{0})));
    i64 chosen = p.words ? p.words[i * static_cast<i64>(p.width) + place] : place;
    if (p.ends_count > 0) {
      if (p.finished[i]) chosen = p.pad;
      for (int j = 0; j < p.ends_count; ++j) {
        if (p.ends[j] == chosen) p.finished[i] = true;
      }
    }
    p.last[i] = chosen;
    if (at >= 0 && at < p.columns) p.tokens[i * p.columns + at] = chosen;
    p.workspace[i] = 0;
  }
  if (thread == 0) *p.at = at + 1, *ended = 0;
}

// ---- several tokens of a row ----

inline constexpr int kMostTried = 32, kAlike = 3;

struct KeepParams {
  const i64 *chosen, *limit, *ends;
  i64 *tokens, *known, *tried;
  bool* finished;
  int* lengths;
  i64 columns;
  int width, ends_count;
};

/// A row's part of keep_tokens_: how many of the chosen tokens it keeps. By one thread, of tokens
/// in shared memory.
FLEXOPS_DEVICE void keep_row(const KeepParams& p, int row, const i64* chosen, const i64* tried) {
  const i64 known = p.known[row], limit = *p.limit;
  i64* const to = p.tokens + row * p.columns;
  bool ended = p.finished[row];
  i64 count = 0;
  for (int i = 0; i < p.width && !ended && known + i < limit; ++i) {
    if (i > 0 && tried[i] != chosen[i - 1]) break;
    if (known + i < p.columns) to[known + i] = chosen[i];
    for (int j = 0; j < p.ends_count; ++j) ended = ended || p.ends[j] == chosen[i];
    count = i + 1;
  }
  p.known[row] = known + count, p.lengths[row] = static_cast<int>(known + count) - 1;
  p.finished[row] = ended || known + count >= limit;
}

/// A block for each row.
__global__ void __launch_bounds__(kThreads) keep(const KeepParams p) {
  __shared__ u64 of_warps[kThreads / kWarpSize];
  __shared__ i64 chosen[kMostTried], tried[kMostTried];
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x);
  wait_for_previous();
  let_next_start();
  if (thread < p.width) {
    chosen[thread] = p.chosen[row * p.width + thread];
    tried[thread] = p.tried[row * p.width + thread];
  }
  __syncthreads();
  if (thread == 0) keep_row(p, row, chosen, tried);
  __syncthreads();
  // The latest of the longest copies of the last words: how many are alike, then where.
  const i64* const tokens = p.tokens + row * p.columns;
  const i64 last = p.known[row] - 1;
  u64 best = 0;
  for (i64 at = thread; at < last; at += kThreads) {
    int alike = 0;
    while (alike < kAlike && alike <= at && tokens[at - alike] == tokens[last - alike]) ++alike;
    const u64 found = static_cast<u64>(alike) << 32 | static_cast<u64>(at);
    if (alike > 0 && found > best) best = found;
  }
  best = block_reduce<kThreads>(best, Max(), of_warps);
  const i64 copy = best > 0 ? static_cast<i64>(best & 0xffffffff) : last;
  if (thread < p.width) {
    const i64 at = copy + thread;  // the first is the last token itself, of which that is a copy
    p.tried[row * p.width + thread] = tokens[at < last ? at : last];
  }
}

}  // namespace flexops::next_token
