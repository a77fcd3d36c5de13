// Forward, whatever the other kernels do not take: masks that add and lie otherwise than the scores
// or have one value for all of a row; any scale; masked rows of any length.
#pragma once

#include "softmax/softmax_mask.cuh"

namespace flexops::softmax {

inline constexpr int kGeneralHeld = 4, kMaskedLongHeld = 4;  // vectors of a row that a thread holds

FLEXOPS_DEVICE float half_to_float(u32 half, Dtype kind) {
  return kind == Dtype::bf16 ? bit_cast<float>(half << 16) : to_float(f16{static_cast<u16>(half)});
}

/// A row's mask.
struct MaskRow {
  const char* row;  // null: none, or one value for all of the row
  float bias;       // that value, if it is one that adds
  Dtype kind;
};

/// `length` becomes 0 if the mask leaves nothing.
FLEXOPS_DEVICE MaskRow find_mask(const Params& p, i64 row, int& length) {
  MaskRow m = {nullptr, 0.0f, p.mask_kind};
  if (p.mask_kind == Dtype::none) return m;
  const i64 offset = mask_offset(p, row);
  const char* start = static_cast<const char*>(p.mask) + offset * (p.mask_kind == Dtype::boolean ? 1
                                                                   : p.mask_kind == Dtype::f32   ? 4
                                                                                               : 2);
  if (p.mask_step != 0) {
    m.row = start;
  } else if (p.mask_kind == Dtype::boolean) {
    if (*start == 0) length = 0;
  } else if (p.mask_kind == Dtype::f32) {
    m.bias = *reinterpret_cast<const float*>(start);
  } else {
    m.bias = half_to_float(*reinterpret_cast<const u16*>(start), p.mask_kind);
  }
  return m;
}

/// W words of a row of `size` bytes, from its byte `from` on. What is outside of the row comes as
/// anything; `inside` tells that nothing is.
template <int W>
FLEXOPS_DEVICE void load_words(u32 (&out)[W], const char* row, i64 from, i64 size, bool inside) {
  constexpr int kAccess = W < 4 ? W : 4;
  if (inside && is_aligned(row + from, kAccess * 4)) {
#pragma unroll
    for (int i = 0; i < W; i += kAccess) {
      const auto words =
          load<Cache::normal>(reinterpret_cast<const Vec<u32, kAccess>*>(row + from + i * 4));
#pragma unroll
      for (int j = 0; j < kAccess; ++j) out[i + j] = words.at[j];
    }
    return;
  }
  const int lead = static_cast<int>(reinterpret_cast<u64>(row) & 3),
            shift = static_cast<int>((from + lead) & 3) * 8;
  const u32* words = reinterpret_cast<const u32*>(row - lead);
  const int first = static_cast<int>((from + lead) >> 2),
            last = static_cast<int>((size + lead - 1) >> 2);
  u32 before = 0;
#pragma unroll
  for (int i = 0; i <= W; ++i) {
    const int at = first + i;
    const u32 word = words[at < 0 ? 0 : at < last ? at : last];
    if (i > 0) out[i - 1] = static_cast<u32>((static_cast<u64>(word) << 32 | before) >> shift);
    before = word;
  }
}

/// Lets the mask act on elements [at, at + kPerVector) of a row of `length`, one of which is in it.
template <typename T>
FLEXOPS_DEVICE void apply_mask(float* s, const MaskRow& m, int at, int length) {
  constexpr int N = kPerVector<T>;
  const bool inside = at >= 0 && at + N <= length;
  const i64 from = at, size = length;
  if (m.kind == Dtype::boolean) {
    u32 words[N / 4];
    load_words(words, m.row, from, size, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = words[i / 4] >> (i % 4 * 8) & 1 ? s[i] : -infinity();
  } else if (m.kind == Dtype::f32) {
    u32 words[N];
    load_words(words, m.row, from * 4, size * 4, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] += bit_cast<float>(words[i]);
  } else {
    u32 words[N / 2];
    load_words(words, m.row, from * 2, size * 2, inside);
#pragma unroll
    for (int i = 0; i < N; ++i)
      s[i] += half_to_float(words[i / 2] >> (i % 2 * 16) & 0xffffu, m.kind);
  }
}

/// Elements [at, at + kPerVector) as exponents: scaled, masked, -inf where they take no part.
template <typename T>
FLEXOPS_DEVICE void make_exponents(float* s, const Packed& raw, bool is_f16, float scale,
                                   const MaskRow& m, int at, int length) {
  constexpr int N = kPerVector<T>;
  widen<T>(s, raw, is_f16);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(s[i], scale, m.bias);
  if (m.row != nullptr && at < length) apply_mask<T>(s, m, at, length);
  if (at < 0 || at + N > length) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = is_inside(at + i, length) ? s[i] : -infinity();
  }
}

/// Rows of up to lanes * kGeneralHeld vectors.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    softmax_general(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kGeneralHeld;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* x = static_cast<const T*>(p.x) + place.row * p.stride;
  // Load the row, and add the mask.
  int length = visible(p, place.row);
  Packed raw[V];
  const int first = place.lane * N - head_of<T>(x), step = p.lanes * N;
  load_row(raw, x, first, step, length);
  const MaskRow mask = find_mask(p, place.row, length);
  float s[V * N];
#pragma unroll
  for (int k = 0; k < V; ++k)
    make_exponents<T>(s + k * N, raw[k], p.is_f16, p.scale, mask, first + k * step, length);
  // Reduce to the maximum, then to the sum of powers.
  const float maximum = settle(reduce_row(max_tree<V * N>(s), Max{}, -infinity(), p.lanes, maxima));
#pragma unroll
  for (int i = 0; i < V * N; ++i) s[i] = power<T>((s[i] - maximum) * kUnit<T>);
  const float sum = reduce_row(sum_tree<V * N>(s), Sum{}, 0.0f, p.lanes, sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  // Write.
  if (!place.exists) return;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (first + k * step < p.length)
      store_results<T>(out, s + k * N, p.is_f16, sum, inverse, first + k * step, length, p.length);
}

/// Rows of any length, a block each; read twice if they are longer than its threads hold, as in
/// softmax_long.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    softmax_long_masked(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kPerVector<T>, V = kMaskedLongHeld;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const i64 row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.stride;
  T* out = static_cast<T*>(p.out) + row * p.length;
  int length = visible(p, row);
  const MaskRow mask = find_mask(p, row, length);
  const int first = static_cast<int>(threadIdx.x) * N - head_of<T>(x), step = p.lanes * N;
  float maximum = -infinity(), sum = 0.0f, inverse = 0.0f, s[N];
  Packed raw[V];
  // Chunks forwards for maximum and sum, then backwards to write.
#pragma unroll 1
  for (int turn = 0; turn < 2 * p.chunks; ++turn) {
    const bool writes = turn >= p.chunks;
    const int from = first + (writes ? 2 * p.chunks - 1 - turn : turn) * V * step;
    // Between the passes: reduce both over the block.
    if (turn == p.chunks) {
      const float top = settle(reduce_row(maximum, Max{}, -infinity(), p.lanes, maxima));
      sum = reduce_row(sum * power<T>((maximum - top) * kUnit<T>), Sum{}, 0.0f, p.lanes, sums);
      maximum = top, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    } else {
      load_row(raw, x, from, step, length);
    }
#pragma unroll 1
    for (int k = 0; k < V; ++k) {
      const Packed vector = next(raw);  // in turn, because code for each of them is much to compile
      const int at = from + k * step;
      if (at >= (writes ? p.length : length)) continue;
      make_exponents<T>(s, vector, p.is_f16, p.scale, mask, at, length);
      const float highest = writes ? maximum : fmaxf(maximum, max_tree<N>(s)),
                  base = settle(highest);
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = power<T>((s[i] - base) * kUnit<T>);
      if (writes) {
        store_results<T>(out, s, p.is_f16, sum, inverse, at, length, p.length);
      } else {
        sum = sum * power<T>((maximum - base) * kUnit<T>) + sum_tree<N>(s);
        maximum = highest;
      }
    }
  }
}

}  // namespace flexops::softmax
