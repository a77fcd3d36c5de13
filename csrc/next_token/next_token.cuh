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

}  // namespace flexops::next_token
