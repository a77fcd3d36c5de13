// Softmax's kernels. What they compute: flexops/ops/softmax.py.
//
// Memory decides, but only if enough rows are under way and little is done for an element: every element is read once, 16 bytes at a time,
// and a thread's loads (its mask's too) are all under way before it looks at one. Rows without a mask, causal or with a boolean one stay in
// registers as they were read; their powers are computed twice, for the sum and for the results, because 32 floats in registers instead
// would halve the rows under way. Masks that add make floats of scores, which are kept. 1 to 32 neighbouring lanes share a short row; a
// block holds one of 20480 elements or more; longer ones are read twice. Masks, their dtype and broadcasting are uniform over the
// grid and told at run time.
#pragma once

#include "common/divisor.cuh"
#include "common/rows.cuh"

namespace flexops::softmax {

using namespace flexops::rows;

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_SOFTMAX_THREADS)
#define FLEXOPS_SOFTMAX_THREADS 64
#endif
#if !defined(FLEXOPS_SOFTMAX_LOAD)  // not streaming: such lines find little room in caches that other kernels filled with ordinary ones
#define FLEXOPS_SOFTMAX_LOAD Cache::normal
#endif
#if !defined(FLEXOPS_SOFTMAX_STORE)
#define FLEXOPS_SOFTMAX_STORE Cache::streaming
#endif

constexpr int kThreads = FLEXOPS_SOFTMAX_THREADS;  // a block's, where a warp or less holds a row
constexpr Cache kRead = FLEXOPS_SOFTMAX_LOAD, kWrite = FLEXOPS_SOFTMAX_STORE;
constexpr int kMaskDims = 8;

// Vectors of a row that a thread can hold, and the threads of the largest block. Two blocks of 640 leave a thread 48 registers, of 768 40.
template <Type type, bool kMasked>
constexpr int kHeld = type != kF32 ? 4 : 8;
constexpr int kMostThreads = 1024;
template <Type type, bool kMasked>
constexpr int kMostOfRows = type == kF32 ? kMostThreads
                            : kMasked    ? 640
                                         : 768;
template <Type type, bool kMasked>
constexpr int kBlocksOfRows = (kMostOfRows<type, kMasked>) < kMostThreads ? 2 : 1;
template <Type type>
constexpr int kGeneralHeld = type == kF32 ? 8 : 4;
constexpr int kLongHeld = 4, kBackwardHeld = 4;

enum Mask : u8 { kNoMask, kBoolean, kAddF32, kAddF16, kAddBf16 };  // SoftmaxMask's values

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
  int length;
  int mask_dims, mask_step;
  Mask mask_kind;
  int lanes, log_lanes;  // threads that share a row: a power of two up to 32; or the block
  float scale;
  u32 flip;    // forward: signs to change before scaling
  int chunks;  // backward: of a row, each as much as its threads hold
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

FLEXOPS_DEVICE i64 mask_offset(const Params& p, i64 row) {
  i64 offset = 0;
#pragma unroll 1
  for (int d = 0; d + 1 < p.mask_dims; ++d) {
    i64 rest;
    row = split(row, p.mask_sizes[d], rest);
    offset += rest * p.mask_strides[d];
  }
  return offset + row * p.mask_strides[p.mask_dims - 1];
}

/// group_reduce() with less to do where a row has a warp or two of its own, as most have.
template <typename Op>
FLEXOPS_DEVICE float reduce_row(float value, Op op, float neutral, int lanes, float* shared) {
  if (lanes < kNarrowWarp) return group_reduce(value, op, neutral, lanes, shared);
#pragma unroll
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask, kNarrowWarp));
  if (lanes == kNarrowWarp) return value;
  const int lane = threadIdx.x % kNarrowWarp, groups = lanes / kNarrowWarp;
  if (lane == 0) shared[threadIdx.x / kNarrowWarp] = value;
  __syncthreads();
  if (groups == 2) return op(shared[0], shared[1]);
  value = lane < groups ? shared[lane] : neutral;
#pragma unroll
  for (int mask = kNarrowWarp / 2; mask > 0; mask /= 2) value = op(value, shuffle_xor(value, mask, kNarrowWarp));
  return value;
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

/// -inf, of a row without anything, becomes 0: its elements' powers are 0 then, and not NaN.
FLEXOPS_DEVICE float settle(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

/// value / sum; in float32, where `inverse` is its reciprocal, to the last bit.
template <Type type>
FLEXOPS_DEVICE float divide(float value, float sum, float inverse) {
  const float quotient = value * inverse;
  if constexpr (type != kF32) return quotient;
  return __fmaf_rn(__fmaf_rn(-quotient, sum, value), inverse, quotient);
}

/// A word of -inf.
template <Type type>
constexpr u32 kLowest = type == kF32   ? 0xff800000u
                        : type == kF16 ? 0xfc00fc00u
                                       : 0xff80ff80u;

FLEXOPS_DEVICE u32 choose(u32 keep, u32 value, u32 other) { return (value & keep) | (other & ~keep); }

/// Whether all of the elements [at, at + kVector) are in a row of `length`, or none of them behind its begin is.
template <Type type>
FLEXOPS_DEVICE bool is_whole(int at, int length) {
  return (at >= 0 && at + kVector<type> <= length) || at >= length;
}

FLEXOPS_DEVICE bool is_inside(int at, int length) { return static_cast<u32>(at) < static_cast<u32>(length); }

/// Where a row begins or ends within the elements [at, at + kVector), those outside of it become `other`'s.
template <Type type>
FLEXOPS_DEVICE void limit(Packed& values, int at, int length, u32 other) {
  constexpr int N = kVector<type>;
  if (is_whole<type>(at, length)) return;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    u32 keep = 0;
#pragma unroll
    for (int i = w * N / 4; i < (w + 1) * N / 4; ++i)
      if (is_inside(at + i, length)) keep |= type == kF32 ? ~0u : 0xffffu << (i % 2 * 16);
    values.at[w] = choose(keep, values.at[w], other);
  }
}

/// The greatest element of V vectors; NaN may count or not.
template <Type type, int V>
FLEXOPS_DEVICE float highest_of(const Packed (&values)[V]) {
  constexpr int N = kVector<type>;
#if FLEXOPS_HAS_MIN2
  if constexpr (type != kF32) {  // two at a time
    float s[N];
    Packed most = values[0];
#pragma unroll
    for (int i = 4; i < V * 4; ++i) most.at[i % 4] = max2<Element<type>>(most.at[i % 4], values[i / 4].at[i % 4]);
    widen<type>(s, most);
    return max_tree<N>(s);
  } else
#endif
  {
    float s[V * N];
#pragma unroll
    for (int k = 0; k < V; ++k) widen<type>(s + k * N, values[k]);
    return max_tree<V * N>(s);
  }
}

// ---- forward, boolean masks or none ----------------------------------------------------------------------------------

/// Bytes of a boolean mask, four to a word, for V vectors of a thread, `step` elements apart. What is outside of the row comes as anything.
template <int N, int V>
FLEXOPS_DEVICE void read_boolean(u32 (&words)[V][N / 4], const char* row, int from, int step, int length) {
  if (is_aligned(row + from, N)) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (from + k * step >= length) continue;
      const auto bytes = load<Cache::normal>(reinterpret_cast<const Vec<u32, N / 4>*>(row + from + k * step));
#pragma unroll
      for (int w = 0; w < N / 4; ++w) words[k][w] = bytes.at[w];
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + k * step + i;
      u32 byte = static_cast<u8>(row[at < 0 ? 0 : at < length ? at : length - 1]);
#pragma unroll
      for (int w = N / 4 - 1; w >= 0; --w) {  // it enters at the end, and the first leaves
        const u32 word = words[k][w];
        words[k][w] = word >> 8 | byte << 24;
        byte = word;
      }
    }
  }
}

/// Elements for which the mask has false become -inf.
template <Type type>
FLEXOPS_DEVICE void apply_boolean(Packed& values, const u32* words) {
  constexpr int N = kVector<type>;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const u32 bytes = (words[w * N / 16] & 0x01010101u) * 0xffu;
    const u32 keep = __byte_perm(bytes, 0, type == kF32 ? 0x1111u * w : 0x1100u + 0x2222u * (w % 2));
    values.at[w] = choose(keep, values.at[w], kLowest<type>);
  }
}

template <Type type>
FLEXOPS_DEVICE void make_powers(float* powers, const Packed& scores, float scale, float base) {
  widen<type>(powers, scores);
#pragma unroll
  for (int i = 0; i < kVector<type>; ++i) powers[i] = power<type>(__fmaf_rn(powers[i], scale, -base));
}

/// Rows of up to lanes * kHeld vectors; for a positive scale.
template <Type type, bool kMasked>
__global__ void __launch_bounds__((kMostOfRows<type, kMasked>), (kBlocksOfRows<type, kMasked>))
    softmax_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kHeld<type, kMasked>;
  using T = Element<type>;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* x = static_cast<const T*>(p.x) + place.row * p.stride;
  const int first = place.lane * N - head_of<type>(x), step = p.lanes * N;
  int length = visible(p, place.row);
  const u32 lowest = kLowest<type> ^ p.flip;
  Packed scores[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    scores[k] = {{lowest, lowest, lowest, lowest}};
    if (first + k * step < length) scores[k] = load_vector<type, kRead>(x, first + k * step);
  }
  u32 words[V][N / 4];
  bool bytewise = false;
  if constexpr (kMasked) {
    const char* mask = static_cast<const char*>(p.mask) + mask_offset(p, place.row);
    if (p.mask_step == 0) {
      if (*mask == 0) length = 0;
    } else {
      read_boolean<N, V>(words, mask, first, step, length);
      bytewise = true;
    }
  }
  if (p.flip != 0) {
#pragma unroll
    for (int i = 0; i < V * 4; ++i) scores[i / 4].at[i % 4] ^= p.flip;
  }
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (kMasked && bytewise && at < length) apply_boolean<type>(scores[k], words[k]);
    limit<type>(scores[k], at, length, kLowest<type>);
  }
  const float maximum = settle(reduce_row(highest_of<type>(scores), Max{}, -infinity(), p.lanes, maxima));
  // x * scale - maximum * scale, rounded once. A product that overflows is +inf, which makes its row NaN.
  const float scale = p.scale * kUnit<type>;
  float base = maximum * scale < infinity() ? maximum * scale : not_a_number(), sum = 0.0f, powers[N];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    if (first + k * step >= length) continue;
    make_powers<type>(powers, scores[k], scale, base);
    sum += sum_tree<N>(powers);
    if constexpr (type == kF32) scores[k] = narrow<type>(powers);
  }
  sum = reduce_row(sum, Sum{}, 0.0f, p.lanes, sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (!place.exists) return;
#if !FLEXOPS_HIP
  asm volatile("" : "+f"(base));  // what it was is nobody's business: the compiler would keep the powers
#endif
  T* out = static_cast<T*>(p.out) + place.row * p.length;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int at = first + k * step;
    if (at >= p.length) break;
    Packed results = {{0, 0, 0, 0}};
    if (at < length) {
      if constexpr (type == kF32) {
        widen<type>(powers, scores[k]);
      } else {  // again, which is cheaper than the registers to keep them: rows under way are what hides memory's latency
        make_powers<type>(powers, scores[k], scale, base);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) powers[i] = divide<type>(powers[i], sum, inverse);
      results = narrow<type>(powers);
      limit<type>(results, at, length, 0);
    }
    store_vector<type, kWrite>(out, at, p.length, results);
  }
}

// ---- forward, masks that add, any scale ------------------------------------------------------------------------------

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

/// W words of a row of `size` bytes, from its byte `from` on. What is outside of the row comes as anything; `inside` tells that nothing is.
template <int W>
FLEXOPS_DEVICE void load_words(u32 (&out)[W], const char* row, i64 from, i64 size, bool inside) {
  constexpr int kAccess = W < 4 ? W : 4;
  if (inside && is_aligned(row + from, kAccess * 4)) {
#pragma unroll
    for (int i = 0; i < W; i += kAccess) {
      const auto words = load<Cache::normal>(reinterpret_cast<const Vec<u32, kAccess>*>(row + from + i * 4));
#pragma unroll
      for (int j = 0; j < kAccess; ++j) out[i + j] = words.at[j];
    }
    return;
  }
  const int lead = static_cast<int>(reinterpret_cast<u64>(row) & 3), shift = static_cast<int>((from + lead) & 3) * 8;
  const u32* words = reinterpret_cast<const u32*>(row - lead);
  const int first = static_cast<int>((from + lead) >> 2), last = static_cast<int>((size + lead - 1) >> 2);
  u32 before = 0;
#pragma unroll
  for (int i = 0; i <= W; ++i) {
    const int at = first + i;
    const u32 word = words[at < 0 ? 0 : at < last ? at : last];
    if (i > 0) out[i - 1] = static_cast<u32>((static_cast<u64>(word) << 32 | before) >> shift);
    before = word;
  }
}

/// Lets the mask act on elements [at, at + kVector) of a row of `length`, one of which is in it.
template <Type type>
FLEXOPS_DEVICE void apply_mask(float* s, const MaskRow& m, int at, int length) {
  constexpr int N = kVector<type>;
  const bool inside = at >= 0 && at + N <= length;
  const i64 from = at, size = length;
  if (m.kind == kBoolean) {
    u32 words[N / 4];
    load_words(words, m.row, from, size, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = words[i / 4] >> (i % 4 * 8) & 1 ? s[i] : -infinity();
  } else if (m.kind == kAddF32) {
    u32 words[N];
    load_words(words, m.row, from * 4, size * 4, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(bit_cast<float>(words[i]), kUnit<type>, s[i]);
  } else {
    u32 words[N / 2];
    load_words(words, m.row, from * 2, size * 2, inside);
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(half_to_float(words[i / 2] >> (i % 2 * 16) & 0xffffu, m.kind), kUnit<type>, s[i]);
  }
}

/// Elements [at, at + kVector) as exponents: scaled, masked, -inf where they take no part.
template <Type type>
FLEXOPS_DEVICE void make_exponents(float* s, const Packed& raw, float scale, const MaskRow& m, int at, int length) {
  constexpr int N = kVector<type>;
  widen<type>(s, raw);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = __fmaf_rn(s[i], scale, m.bias);
  if (m.row != nullptr && at < length) apply_mask<type>(s, m, at, length);
  if (at < 0 || at + N > length) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = is_inside(at + i, length) ? s[i] : -infinity();
  }
}

/// Writes powers / sum, and zeros beyond `length`.
template <Type type>
FLEXOPS_DEVICE void store_results(Element<type>* out, float* powers, float sum, float inverse, int at, int length, int end) {
  Packed results = {{0, 0, 0, 0}};
  if (at < length) {
#pragma unroll
    for (int i = 0; i < kVector<type>; ++i) powers[i] = divide<type>(powers[i], sum, inverse);
    results = narrow<type>(powers);
    limit<type>(results, at, length, 0);
  }
  store_vector<type, kWrite>(out, at, end, results);
}

/// Rows as above.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) softmax_general(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kGeneralHeld<type>;
  using T = Element<type>;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* x = static_cast<const T*>(p.x) + place.row * p.stride;
  int length = visible(p, place.row);
  Packed raw[V];
  const int first = place.lane * N - head_of<type>(x), step = p.lanes * N;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    raw[k] = {{0, 0, 0, 0}};
    if (first + k * step < length) raw[k] = load_vector<type, kRead>(x, first + k * step);
  }
  const MaskRow mask = find_mask<type>(p, place.row, length);
  float s[V * N];
  const float scale = p.scale * kUnit<type>;
#pragma unroll
  for (int k = 0; k < V; ++k) make_exponents<type>(s + k * N, raw[k], scale, mask, first + k * step, length);
  const float maximum = settle(reduce_row(max_tree<V * N>(s), Max{}, -infinity(), p.lanes, maxima));
#pragma unroll
  for (int i = 0; i < V * N; ++i) s[i] = power<type>(s[i] - maximum);
  const float sum = reduce_row(sum_tree<V * N>(s), Sum{}, 0.0f, p.lanes, sums);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (!place.exists) return;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (first + k * step < p.length) store_results<type>(out, s + k * N, sum, inverse, first + k * step, length, p.length);
}

/// Rows of any length, a block each: read once for maximum and sum together, and again for the results.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) softmax_long(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kLongHeld;
  using T = Element<type>;
  __shared__ float maxima[kMostThreads / kNarrowWarp], sums[kMostThreads / kNarrowWarp];
  const i64 row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.stride;
  T* out = static_cast<T*>(p.out) + row * p.length;
  int length = visible(p, row);
  const MaskRow mask = find_mask<type>(p, row, length);
  const int first = static_cast<int>(threadIdx.x) * N - head_of<type>(x), step = p.lanes * N;
  const float scale = p.scale * kUnit<type>;
  float maximum = -infinity(), sum = 0.0f, inverse = 0.0f, s[N];
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
#pragma unroll 1
    for (int from = first; from < (turn == 0 ? length : p.length); from += V * step) {
      Packed raw[V];
#pragma unroll
      for (int k = 0; k < V; ++k) {
        raw[k] = {{0, 0, 0, 0}};
        if (from + k * step < length) raw[k] = load_vector<type, Cache::normal>(x, from + k * step);
      }
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int at = from + k * step;
        if (at >= p.length) break;
        make_exponents<type>(s, raw[k], scale, mask, at, length);
        const float highest = turn == 0 ? fmaxf(maximum, max_tree<N>(s)) : maximum, base = settle(highest);
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = power<type>(s[i] - base);
        if (turn == 0) {
          sum = sum * power<type>(maximum - base) + sum_tree<N>(s);
          maximum = highest;
        } else {
          store_results<type>(out, s, sum, inverse, at, length, p.length);
        }
      }
    }
    if (turn == 1) break;
    const float base = settle(reduce_row(maximum, Max{}, -infinity(), p.lanes, maxima));
    sum = reduce_row(sum * power<type>(maximum - base), Sum{}, 0.0f, p.lanes, sums);
    maximum = base, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

/// out = scale * y * (grad - sum(grad * y)). A row is one chunk, which stays in registers; or several, which are read twice.
template <Type type>
__global__ void __launch_bounds__(kMostThreads) softmax_backward_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<type>, V = kBackwardHeld;
  using T = Element<type>;
  __shared__ float sums[kMostThreads / kNarrowWarp];
  const Place place = find_place(p);
  const T* y = static_cast<const T*>(p.x) + place.row * p.stride;
  const T* grad = static_cast<const T*>(p.grad) + place.row * p.grad_stride;
  T* out = static_cast<T*>(p.out) + place.row * p.length;
  const int first = place.lane * N - head_of<type>(y), step = p.lanes * N, length = visible(p, place.row);
  Packed ys[V], grads[V];
  float sum = 0.0f, a[N], b[N];
#pragma unroll 1
  for (int turn = 0, from = first; turn < 2 * p.chunks; ++turn, from += V * step) {
    const bool writes = turn >= p.chunks;
    if (turn == p.chunks) {
      sum = reduce_row(sum, Sum{}, 0.0f, p.lanes, sums);
      if (!place.exists) return;
      from = first;
    }
    if (turn == 0 || p.chunks > 1) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        ys[k] = grads[k] = {{0, 0, 0, 0}};
        if (from + k * step < length) {
          ys[k] = load_vector<type, kRead>(y, from + k * step);
          grads[k] = load_vector<type, kRead>(grad, from + k * step);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = from + k * step;
      if (at >= (writes ? p.length : length)) break;
      Packed results = {{0, 0, 0, 0}};
      if (at < length) {
        limit<type>(ys[k], at, length, 0);
        limit<type>(grads[k], at, length, 0);
        widen<type>(a, ys[k]);
        widen<type>(b, grads[k]);
#pragma unroll
        for (int i = 0; i < N; ++i) a[i] = writes ? p.scale * a[i] * (b[i] - sum) : a[i] * b[i];
        if (writes) {
          results = narrow<type>(a);
          limit<type>(results, at, length, 0);
        } else {
          sum += sum_tree<N>(a);
        }
      }
      if (writes) store_vector<type, kWrite>(out, at, p.length, results);
    }
  }
}

}  // namespace flexops::softmax
