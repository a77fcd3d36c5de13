// Softmax's kernels. What they compute: flexops/ops/softmax.py.
//
// Memory decides: every element is read once, 16 bytes at a time, and stays in its thread's registers, as a float, until the row's maximum
// and sum are known. 1 to 32 neighbouring lanes share a short row; a block holds one of up to 32768 elements (fewer, in float32); longer
// ones are read twice. Masks, their dtype and broadcasting are uniform over the grid and told at run time.
#pragma once

#include "common/rows.cuh"

namespace flexops::softmax {

using namespace flexops::rows;

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_SOFTMAX_THREADS)
#define FLEXOPS_SOFTMAX_THREADS 64
#endif
#if !defined(FLEXOPS_SOFTMAX_FLOATS)
#define FLEXOPS_SOFTMAX_FLOATS 32
#endif
#if !defined(FLEXOPS_SOFTMAX_BACKWARD_FLOATS)
#define FLEXOPS_SOFTMAX_BACKWARD_FLOATS 16
#endif
#if !defined( \
    FLEXOPS_SOFTMAX_LOAD)  // not streaming: such lines find little room in caches that other kernels have filled with ordinary ones
#define FLEXOPS_SOFTMAX_LOAD Cache::normal
#endif
#if !defined(FLEXOPS_SOFTMAX_STORE)
#define FLEXOPS_SOFTMAX_STORE Cache::streaming
#endif
#if !defined(FLEXOPS_SOFTMAX_BATCH)
#define FLEXOPS_SOFTMAX_BATCH 4
#endif

constexpr int kThreads = FLEXOPS_SOFTMAX_THREADS;  // a block's, where a warp or less holds a row
constexpr int kFloats = FLEXOPS_SOFTMAX_FLOATS;    // of a row that a thread holds
constexpr int kBackwardFloats = FLEXOPS_SOFTMAX_BACKWARD_FLOATS;
constexpr Cache kRead = FLEXOPS_SOFTMAX_LOAD, kWrite = FLEXOPS_SOFTMAX_STORE;
constexpr int kMostThreads = 1024;
constexpr int kMaskDims = 8;
constexpr int kBatch = FLEXOPS_SOFTMAX_BATCH;  // vectors that a thread has in flight where rows are read twice

enum Mask : u8 { kNoMask, kBoolean, kAddF32, kAddF16, kAddBf16 };  // SoftmaxMask's values

struct Params {
  const void *x, *mask;
  void* out;
  const void* grad;  // backward; x is y then
  i64 rows, stride, grad_stride;
  i64 queries;  // 0: not causal
  i64 mask_sizes[kMaskDims], mask_strides[kMaskDims];
  int length;
  int mask_dims, mask_step;
  Mask mask_kind;
  int lanes, log_lanes;  // threads that share a row: a power of two up to 32; or the block
  float scale;
};

// ---- where a thread works -------------------------------------------------------------------------------------------

struct Place {
  i64 row;
  int lane;
  bool exists;
};

FLEXOPS_DEVICE Place find_place(const Params& p) {
  if (p.lanes > kNarrowWarp) return {static_cast<i64>(blockIdx.x), static_cast<int>(threadIdx.x), true};
  const i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) >> p.log_lanes;
  const bool exists = row < p.rows;
  return {exists ? row : p.rows - 1, static_cast<int>(threadIdx.x) & (p.lanes - 1), exists};
}

FLEXOPS_DEVICE i64 remainder(i64 value, i64 by) {
  if (((value | by) >> 32) == 0) return static_cast<u32>(value) % static_cast<u32>(by);
  return value % by;
}

/// How many of the row's first elements take part.
FLEXOPS_DEVICE int visible(const Params& p, i64 row) {
  if (p.queries == 0) return p.length;
  const i64 most = remainder(row, p.queries) + 1 + p.length - p.queries;
  return most < 0 ? 0 : static_cast<int>(most);
}

FLEXOPS_DEVICE i64 mask_offset(const Params& p, i64 row) {
  i64 offset = 0;
#pragma unroll 1
  for (int d = 0; d + 1 < p.mask_dims; ++d) {
    const i64 size = p.mask_sizes[d];
    const i64 quotient = ((row | size) >> 32) == 0 ? static_cast<u32>(row) / static_cast<u32>(size) : row / size;
    offset += (row - quotient * size) * p.mask_strides[d];
    row = quotient;
  }
  return offset + row * p.mask_strides[p.mask_dims - 1];
}

// ---- numbers --------------------------------------------------------------------------------------------------------

// 16-bit results take exponentials to base 2: a factor folded into the scale. float32 has e's own, to its last bits.
constexpr float kLog2e = 1.44269504088896341f;

template <Type type>
constexpr float kUnit = type == kF32 ? 1.0f : kLog2e;

template <Type type>
FLEXOPS_DEVICE float power(float value) {
  return type == kF32 ? expf(value) : quick_exp2(value);
}

FLEXOPS_DEVICE float half_to_float(u32 half, Mask kind) {
  return kind == kAddBf16 ? bit_cast<float>(half << 16) : to_float(f16{static_cast<u16>(half)});
}

/// A row's mask.
struct MaskRow {
  const char* row;  // null: none, or one value for all of the row
  float bias;       // that value, if it is one that adds
  Mask kind;
};

/// `length` becomes 0 if the mask leaves nothing.
template <Type type>
FLEXOPS_DEVICE MaskRow find_mask(const Params& p, i64 row, int& length) {
  MaskRow m = {nullptr, 0.0f, p.mask_kind};
  if (p.mask_kind == kNoMask) return m;
  const i64 offset = mask_offset(p, row);
  const char* start = static_cast<const char*>(p.mask) + offset * (p.mask_kind == kBoolean ? 1 : p.mask_kind == kAddF32 ? 4 : 2);
  if (p.mask_step != 0) {
    m.row = start;
  } else if (p.mask_kind == kBoolean) {
    if (*start == 0) length = 0;
  } else if (p.mask_kind == kAddF32) {
    m.bias = *reinterpret_cast<const float*>(start) * kUnit<type>;
  } else {
    m.bias = half_to_float(*reinterpret_cast<const u16*>(start), p.mask_kind) * kUnit<type>;
  }
  return m;
}

/// W words from any address on, at once where it allows that. What is outside of [begin, end) comes as anything; `inside` tells that
/// nothing is.
template <int W>
FLEXOPS_DEVICE void load_words(u32 (&out)[W], const char* from, const char* begin, const char* end, bool inside) {
  constexpr int kAccess = W < 4 ? W : 4;
  if (inside && is_aligned(from, kAccess * 4)) {
#pragma unroll
    for (int i = 0; i < W; i += kAccess) {
      const auto words = load<Cache::normal>(reinterpret_cast<const Vec<u32, kAccess>*>(from + i * 4));
#pragma unroll
      for (int j = 0; j < kAccess; ++j) out[i + j] = words.at[j];
    }
    return;
  }
  const u64 first = reinterpret_cast<u64>(begin) & ~u64{3}, last = (reinterpret_cast<u64>(end) - 1) & ~u64{3};
  const u64 start = reinterpret_cast<u64>(from) & ~u64{3};
  const int shift = static_cast<int>(reinterpret_cast<u64>(from) & 3) * 8;
  u32 before = 0;
#pragma unroll
  for (int i = 0; i <= W; ++i) {
    const u64 address = start + i * 4;
    const u32 word = *reinterpret_cast<const u32*>(address < first ? first : address > last ? last : address);
    if (i > 0) out[i - 1] = static_cast<u32>((static_cast<u64>(word) << 32 | before) >> shift);
    before = word;
  }
}

/// NaN for a byte of 1, and -inf for one of 0: the lesser of that and a number is the number or -inf, even if the number is NaN.
FLEXOPS_DEVICE float limit_of(u32 word, int byte) {
  const u32 thirds = (word & 0x01010101u) * 0x7fu + 0x80808080u;  // 0xff or 0x80: the third byte of NaN or -inf
  return bit_cast<float>(__byte_perm(thirds, 0xffu, 0x4055u | static_cast<u32>(byte) << 8));
}

/// Lets the mask act on elements [at, at + kVector) of a row of `length`, one of which is in it.
template <Type type>
FLEXOPS_DEVICE void apply_mask(float* s, const MaskRow& m, int at, int length) {
  constexpr int N = kVector<type>;
  const char *row = m.row, *end;
  const bool inside = at >= 0 && at + N <= length;
  const i64 start = at;
  if (m.kind == kBoolean) {
    u32 words[N / 4];
    end = row + length;
    load_words(words, row + start, row, end, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fminf(s[i], limit_of(words[i / 4], i % 4));
  } else if (m.kind == kAddF32) {
    u32 words[N];
    end = row + static_cast<i64>(length) * 4;
    load_words(words, row + start * 4, row, end, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(bit_cast<float>(words[i]), kUnit<type>, s[i]);
  } else {
    u32 words[N / 2];
    end = row + static_cast<i64>(length) * 2;
    load_words(words, row + start * 2, row, end, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(half_to_float(words[i / 2] >> (i % 2 * 16) & 0xffffu, m.kind), kUnit<type>, s[i]);
  }
}

/// Elements [at, at + kVector) as exponents: scaled, masked, -inf where they take no part.
template <Type type, bool kMasked>
FLEXOPS_DEVICE void make_exponents(float* s, const Packed& raw, float scale, const MaskRow& m, int at, int length) {
  constexpr int N = kVector<type>;
  widen<type>(s, raw);
  if constexpr (kMasked) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(s[i], scale, m.bias);
    if (m.row != nullptr && at < length) apply_mask<type>(s, m, at, length);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] *= scale;
  }
  if (at < 0 || at + N > length) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = at + i >= 0 && at + i < length ? s[i] : -infinity();
  }
}

/// -inf, of a row without anything, becomes 0: its elements' powers are 0 then, and not NaN.
FLEXOPS_DEVICE float settle(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

/// value / sum; in float32, where `inverse` is its reciprocal, to the last bit.
template <Type type>
FLEXOPS_DEVICE float divide(float value, float sum, float inverse) {
  const float quotient = value * inverse;
  if constexpr (type != kF32) return quotient;
  return __fmaf_rn(__fmaf_rn(-quotient, sum, value), inverse, quotient);
}

/// What is outside of [0, length) becomes 0.
template <Type type>
FLEXOPS_DEVICE void clear_outside(float* values, int at, int length) {
  constexpr int N = kVector<type>;
  if (at >= 0 && at + N <= length) return;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = at + i >= 0 && at + i < length ? values[i] : 0.0f;
}

// ---- forward --------------------------------------------------------------------------------------------------------

/// Rows of up to lanes * kFloats elements.
template <Type type, bool kMasked>
__global__ void __launch_bounds__(kMostThreads) softmax_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kFloats / N;
  using T = Element<type>;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* x = static_cast<const T*>(p.x) + place.row * p.stride;
  int length = visible(p, place.row);
  MaskRow mask;
  if constexpr (kMasked) mask = find_mask<type>(p, place.row, length);

  Packed raw[V];
  const int first = place.lane * N - head_of<type>(x), step = p.lanes * N;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    raw[k] = {{0, 0, 0, 0}};
    if (first + k * step < length) raw[k] = load_vector<type, kRead>(x, first + k * step);
  }
  float s[V * N];
  const float scale = p.scale * kUnit<type>;
#pragma unroll
  for (int k = 0; k < V; ++k) make_exponents<type, kMasked>(s + k * N, raw[k], scale, mask, first + k * step, length);
  const float maximum = settle(group_reduce(max_tree<V * N>(s), Max{}, -infinity(), p.lanes, maxima));
#pragma unroll
  for (int i = 0; i < V * N; ++i) s[i] = power<type>(s[i] - maximum);
  const float sum = group_reduce(sum_tree<V * N>(s), Sum{}, 0.0f, p.lanes, sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (!place.exists) return;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (at >= p.length) break;
#pragma unroll
    for (int i = 0; i < N; ++i) s[k * N + i] = divide<type>(s[k * N + i], sum, inverse);
    clear_outside<type>(s + k * N, at, length);
    store_vector<type, kWrite>(out, at, p.length, narrow<type>(s + k * N));
  }
}

/// Rows of any length, a block each: read once for maximum and sum together, and again for the results.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) softmax_long(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>;
  using T = Element<type>;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const i64 row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.stride;
  int length = visible(p, row);
  const MaskRow mask = find_mask<type>(p, row, length);
  const int first = static_cast<int>(threadIdx.x) * N - head_of<type>(x), step = static_cast<int>(blockDim.x) * N;
  const float scale = p.scale * kUnit<type>;
  float maximum = -infinity(), sum = 0.0f, s[N];
#pragma unroll 1
  for (int from = first; from < length; from += kBatch * step) {
    Packed raw[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      raw[k] = {{0, 0, 0, 0}};
      if (from + k * step < length) raw[k] = load_vector<type, Cache::normal>(x, from + k * step);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      make_exponents<type, true>(s, raw[k], scale, mask, from + k * step, length);
      const float highest = fmaxf(maximum, max_tree<N>(s));
      const float base = settle(highest);
      sum *= power<type>(maximum - base);
      maximum = highest;
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = power<type>(s[i] - base);
      sum += sum_tree<N>(s);
    }
  }
  const float base = settle(group_reduce(maximum, Max{}, -infinity(), static_cast<int>(blockDim.x), maxima));
  sum = group_reduce(sum * power<type>(maximum - base), Sum{}, 0.0f, static_cast<int>(blockDim.x), sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  T* out = static_cast<T*>(p.out) + row * p.length;
#pragma unroll 1
  for (int from = first; from < p.length; from += kBatch * step) {
    Packed raw[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      raw[k] = {{0, 0, 0, 0}};
      if (from + k * step < length) raw[k] = load_vector<type, Cache::streaming>(x, from + k * step);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int at = from + k * step;
      if (at >= p.length) break;
      make_exponents<type, true>(s, raw[k], scale, mask, at, length);
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = divide<type>(power<type>(s[i] - base), sum, inverse);
      clear_outside<type>(s, at, length);
      store_vector<type, kWrite>(out, at, p.length, narrow<type>(s));
    }
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

/// out = scale * y * (grad - sum(grad * y)), for rows of up to lanes * kBackwardFloats elements.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) softmax_backward_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kBackwardFloats / N;
  using T = Element<type>;
  __shared__ float sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* y = static_cast<const T*>(p.x) + place.row * p.stride;
  const T* grad = static_cast<const T*>(p.grad) + place.row * p.grad_stride;
  const int length = visible(p, place.row);
  Packed ys[V], grads[V];
  const int first = place.lane * N - head_of<type>(y), step = p.lanes * N;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    ys[k] = grads[k] = {{0, 0, 0, 0}};
    if (first + k * step < length) {
      ys[k] = load_vector<type, kRead>(y, first + k * step);
      grads[k] = load_vector<type, kRead>(grad, first + k * step);
    }
  }
  float sum = 0.0f, a[N], b[N];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    widen<type>(a, ys[k]);
    widen<type>(b, grads[k]);
    clear_outside<type>(a, first + k * step, length);
    clear_outside<type>(b, first + k * step, length);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] *= b[i];
    sum += sum_tree<N>(a);
  }
  sum = group_reduce(sum, Sum{}, 0.0f, p.lanes, sums);
  if (!place.exists) return;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (at >= p.length) break;
    widen<type>(a, ys[k]);
    widen<type>(b, grads[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = p.scale * a[i] * (b[i] - sum);
    clear_outside<type>(a, at, length);
    store_vector<type, kWrite>(out, at, p.length, narrow<type>(a));
  }
}

/// The same for rows of any length, a block each.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) softmax_backward_long(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>;
  using T = Element<type>;
  __shared__ float sums[kMostThreads / kNarrowWarp];
  const i64 row = blockIdx.x;
  const T* y = static_cast<const T*>(p.x) + row * p.stride;
  const T* grad = static_cast<const T*>(p.grad) + row * p.grad_stride;
  const int length = visible(p, row);
  const int first = static_cast<int>(threadIdx.x) * N - head_of<type>(y), step = static_cast<int>(blockDim.x) * N;
  float sum = 0.0f, a[N], b[N];
#pragma unroll 2
  for (int at = first; at < length; at += step) {
    widen<type>(a, load_vector<type, Cache::normal>(y, at));
    widen<type>(b, load_vector<type, Cache::normal>(grad, at));
    clear_outside<type>(a, at, length);
    clear_outside<type>(b, at, length);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] *= b[i];
    sum += sum_tree<N>(a);
  }
  sum = group_reduce(sum, Sum{}, 0.0f, static_cast<int>(blockDim.x), sums);
  T* out = static_cast<T*>(p.out) + row * p.length;
#pragma unroll 2
  for (int at = first; at < p.length; at += step) {
    Packed ys = {{0, 0, 0, 0}}, grads = ys;
    if (at < length) {
      ys = load_vector<type, Cache::streaming>(y, at);
      grads = load_vector<type, Cache::streaming>(grad, at);
    }
    widen<type>(a, ys);
    widen<type>(b, grads);
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = p.scale * a[i] * (b[i] - sum);
    clear_outside<type>(a, at, length);
    store_vector<type, kWrite>(out, at, p.length, narrow<type>(a));
  }
}

}  // namespace flexops::softmax
