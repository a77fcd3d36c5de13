// Softmax's kernels. What they compute: flexops/ops/softmax.py.
//
// Memory decides, but only if enough rows are under way and little is done for an element: every
// element is read once, 16 bytes at a time, and a thread's loads (its mask's too) are all under way
// before it looks at one. Rows without a mask, causal or with a boolean one stay in registers as
// they were read; their powers are computed twice, for the sum and for the results, because 32
// floats in registers instead would halve the rows under way. Masks that add make floats of scores,
// which are kept. 1 to 32 neighbouring lanes share a short row; a block holds one of thousands of
// elements; longer ones are read twice. Masks, their dtype and broadcasting are uniform over the
// grid and known at run time.
//
//   softmax_rows.cuh      forward without a mask, causal, or with a boolean one: rows that a block
//                         holds
//   softmax_added.cuh     masks that add
//   softmax_long.cuh      rows that no block holds, without a mask
//   softmax_general.cuh   everything else
//   softmax_backward.cuh  the gradient
//
// This file is what they share.
#pragma once

#include "common/divisor.cuh"
#include "common/held.cuh"
#include "common/rows.cuh"

namespace flexops::softmax {

using namespace flexops::rows;

// Tuned on one H200.
inline constexpr int kThreads = 64;  // a block's, where a warp or less holds a row
inline constexpr Cache kWrite = Cache::streaming;
// Not streaming: such lines find little room in caches that other kernels filled with ordinary
// ones.
inline constexpr Cache kRead = Cache::normal;
inline constexpr int kMaskDims = 8;

inline constexpr int kMostThreads = 1024;

/// A number to divide rows' indices by.
struct Size {
  i64 by;
  Divisor divisor;  // for indices below 2^31
};

struct Params {
  const void *x, *mask;
  void* out;
  const void* grad;  // backward; x is y then
  i64 rows, stride, grad_stride;
  Size queries;  // of 0: not causal
  Size mask_sizes[kMaskDims];
  i64 mask_strides[kMaskDims];
  i64 row_steps[3], mask_steps[3];  // if `gridded`: from one block to the next, by dimensions
  bool gridded;
  bool is_f16;  // of the types of 16 bits
  int length;
  int mask_dims, mask_step;
  Dtype mask_kind;
  int lanes, log_lanes;  // threads that share a row: a power of two up to 32; or the block
  float scale;
  u32 flip;         // forward: signs to change before scaling
  u32 lowest;       // a word of -inf
  int chunks;       // long rows and backward: of a row, each as much as its threads hold
  bool keep_in_l2;  // the second-level cache is asked to keep what is read: rows and long rows
};

// ---- where a thread works ----

struct Place {
  i64 row;
  int lane;
  bool exists;
};

FLEXOPS_DEVICE Place find_place(const Params& p) {
  if (p.lanes > kNarrowWarp)
    return {static_cast<i64>(blockIdx.x), static_cast<int>(threadIdx.x), true};
  const i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) >> p.log_lanes;
  const bool exists = row < p.rows;
  return {exists ? row : p.rows - 1, static_cast<int>(threadIdx.x) & (p.lanes - 1), exists};
}

/// Quotient and remainder.
FLEXOPS_DEVICE i64 split(i64 value, const Size& size, i64& rest) {
  if (value >> 31 == 0) {
    u32 remainder;
    const u32 quotient = divide(static_cast<u32>(value), size.divisor, remainder);
    rest = remainder;
    return quotient;
  }
  const i64 quotient = value / size.by;
  rest = value - quotient * size.by;
  return quotient;
}

/// How many of the row's first elements take part.
FLEXOPS_DEVICE int visible(const Params& p, i64 row) {
  if (p.queries.by == 0) return p.length;
  i64 query;
  split(row, p.queries, query);
  const i64 most = query + 1 + p.length - p.queries.by;
  return most < 0 ? 0 : static_cast<int>(most);
}

/// group_reduce() with less to do where a row has a warp or two (four) of its own, as most have.
template <bool kFour = false, typename Op>
FLEXOPS_DEVICE float reduce_row(float value, Op op, float neutral, int lanes, float* shared) {
  if (lanes < kNarrowWarp) return group_reduce(value, op, neutral, lanes, shared);
  value = warp_reduce<kNarrowWarp>(value, op);
  if (lanes == kNarrowWarp) return value;
  const int lane = threadIdx.x % kNarrowWarp, groups = lanes / kNarrowWarp;
  if (lane == 0) shared[threadIdx.x / kNarrowWarp] = value;
  __syncthreads();
  if (groups == 2) return op(shared[0], shared[1]);
  if (kFour && groups == 4) return op(op(shared[0], shared[1]), op(shared[2], shared[3]));
  return warp_reduce<kNarrowWarp>(lane < groups ? shared[lane] : neutral, op);
}

// ---- numbers ----

// Both types of 16 bits share a kernel, bf16's: `is_f16`, the same for the whole grid, tells which
// it is where it matters.

/// A vector's elements as floats.
template <typename T>
FLEXOPS_DEVICE void widen(float* out, const Packed& in, bool is_f16 = false) {
  if (!kIsFloat<T> && is_f16) {
    rows::widen<f16>(out, in);
  } else {
    rows::widen<T>(out, in);
  }
}
template <typename T>
FLEXOPS_DEVICE Packed narrow(const float* in, bool is_f16 = false) {
  return !kIsFloat<T> && is_f16 ? packed<f16>(in) : packed<T>(in);
}

// 16-bit results take exponentials to base 2, with this factor. float32 has e's own, to its last
// bits.
inline constexpr float kLog2e = 1.44269504088896341f;

template <typename T>
inline constexpr float kUnit = kIsFloat<T> ? 1.0f : kLog2e;

template <typename T>
FLEXOPS_DEVICE float power(float value) {
  return kIsFloat<T> ? expf(value) : quick_exp2(value);
}

/// A thread's vectors of a row, zeros beyond its end.
template <typename T, int V>
FLEXOPS_DEVICE void load_row(Packed (&raw)[V], const T* row, int first, int step, int length) {
#pragma unroll
  for (int k = 0; k < V; ++k) {
    raw[k] = {{0, 0, 0, 0}};
    if (first + k * step < length) raw[k] = load_vector<T, kRead>(row, first + k * step);
  }
}

/// -inf, of a row without anything, becomes 0: its elements' powers are 0 then, and not NaN.
FLEXOPS_DEVICE float settle(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

/// value / sum; in float32, where `inverse` is its reciprocal, to the last bit.
template <typename T>
FLEXOPS_DEVICE float divide(float value, float sum, float inverse) {
  const float quotient = value * inverse;
  if constexpr (!kIsFloat<T>) return quotient;
  return __fmaf_rn(__fmaf_rn(-quotient, sum, value), inverse, quotient);
}

/// What powers take off a row's scores: the greatest of these. Where its product with a positive
/// scale overflows, that is infinite: +inf makes the row NaN, and -inf leaves nothing of it.
FLEXOPS_DEVICE float find_top(float maximum, float scale) {
  const float product = maximum * scale;
  return product == -infinity() ? infinity() : product < infinity() ? maximum : not_a_number();
}

/// The difference comes first: the scale may be rounded off huge scores, which masks often are, but
/// not off what they differ by.
template <typename T>
FLEXOPS_DEVICE void make_powers(float* powers, const Packed& scores, bool is_f16, float scale,
                                float top) {
  widen<T>(powers, scores, is_f16);
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i) powers[i] = power<T>((powers[i] - top) * scale);
}

/// Keeps the compiler from knowing what a number was: it would keep what it computed from that.
FLEXOPS_DEVICE void forget(float& number) {
#if FLEXOPS_HIP
  (void)number;
#else
  asm volatile("" : "+f"(number));
#endif
}

/// Exponents outside of the row become -inf.
template <typename T>
FLEXOPS_DEVICE void limit_exponents(float* s, int at, int length) {
  if (at >= 0 && at + kPerVector<T> <= length) return;
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i) s[i] = is_inside(at + i, length) ? s[i] : -infinity();
}

/// Writes powers / sum, and zeros beyond `length`.
template <typename T>
FLEXOPS_DEVICE void store_results(T* out, float* powers, bool is_f16, float sum, float inverse,
                                  int at, int length, int end) {
  Packed results = {{0, 0, 0, 0}};
  if (at < length) {
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i) powers[i] = divide<T>(powers[i], sum, inverse);
    results = narrow<T>(powers, is_f16);
    limit_end<T>(results, at, length, 0);
  }
  store_vector<T, kWrite>(out, at, end, results);
}

/// The greatest element of V vectors; NaN may count or not.
template <typename T, int V>
FLEXOPS_DEVICE float highest_of(const Packed (&values)[V], bool is_f16) {
  constexpr int N = kPerVector<T>;
#if FLEXOPS_HAS_MIN2
  if constexpr (!kIsFloat<T>) {  // two at a time
    float s[N];
    Packed most = values[0];
    if (is_f16) {
#pragma unroll
      for (int i = 4; i < V * 4; ++i)
        most.at[i % 4] = max2<f16>(most.at[i % 4], values[i / 4].at[i % 4]);
    } else {
#pragma unroll
      for (int i = 4; i < V * 4; ++i)
        most.at[i % 4] = max2<bf16>(most.at[i % 4], values[i / 4].at[i % 4]);
    }
    widen<T>(s, most, is_f16);
    return max_tree<N>(s);
  } else
#endif
  {
    float s[V * N];
#pragma unroll
    for (int k = 0; k < V; ++k) widen<T>(s + k * N, values[k], is_f16);
    return max_tree<V * N>(s);
  }
}

}  // namespace flexops::softmax
