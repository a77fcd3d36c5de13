// Group-wise quantization's kernels. Formulas and format: flexops/ops/quant.py, which they reproduce bit for bit: so every float operation
// that decides a result is an explicit, unfused one.
//
// Memory decides: bf16 to 4 bits in groups of 64 reads 2 and writes 0.56 bytes an element. So each element is read once, 16 bytes at a
// time, its group stays in registers, a thread has several loads in flight, and nothing is marked for keeping in the caches. Three ways:
//   rows      groups along contiguous memory: 1 to 32 neighbouring lanes hold a group's 16-byte vectors;
//   columns   groups across contiguous rows (FlexGen's weights along dim 0): a lane holds 16 bytes of up to 8 rows;
//   any       the rest: 1 to 32 lanes or a whole block go over a group twice.
// Kernels are instantiated for each type of elements. Bits, symmetry and the dtype of scales are uniform over the grid and told at run
// time: that costs next to nothing, and instantiations cost build time.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/vec.cuh"

namespace flexops::quant {

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_QUANT_THREADS)
#define FLEXOPS_QUANT_THREADS 128
#endif
#if !defined(FLEXOPS_QUANT_LOG_VECTORS)
#define FLEXOPS_QUANT_LOG_VECTORS 2
#endif
#if !defined(FLEXOPS_QUANT_COLUMN_THREADS)
#define FLEXOPS_QUANT_COLUMN_THREADS 64
#endif
#if !defined(FLEXOPS_QUANT_COLUMN_ROWS)
#define FLEXOPS_QUANT_COLUMN_ROWS 16
#endif

constexpr int kRowThreads = FLEXOPS_QUANT_THREADS;
constexpr int kLogVectors = FLEXOPS_QUANT_LOG_VECTORS;
constexpr int kVectors = 1 << kLogVectors;  // rows: vectors of a lane
constexpr int kColumnThreads = FLEXOPS_QUANT_COLUMN_THREADS;
constexpr int kColumnRows = FLEXOPS_QUANT_COLUMN_ROWS;  // columns: rows of a group that one lane holds
constexpr int kColumnSlots = 128 / kColumnRows;         // columns: lanes that share a column's group, at most
constexpr int kAnyThreads = 256;
constexpr int kNarrowWarp = 32;  // lanes that share a group; a wavefront of 64 holds two such

enum Type : u8 { kF32 = 0, kF16 = 1, kBf16 = 2 };  // QuantType's values

/// QuantLayout as kernels take it, with what the launcher has worked out.
struct Params {
  const void* x;  // quantize: the input; dequantize: the codes
  void* out;      // quantize: the codes; dequantize: the result
  void* scales;   // read or written
  i64 outer, length, inner;
  i64 outer_stride, length_stride, inner_stride;
  i64 groups, group_size, group_bytes;
  i64 total;             // vectors (rows), column chunks (columns), groups or elements (any)
  i64 chunks;            // columns: vectors in `inner`
  int lanes, log_lanes;  // rows: vectors a group; columns: lanes that share a group; any: threads that share a group
  int bits;
  int pair;  // entries a group in scales: 2, or 1 if symmetric
  Type type, scale_type;
  bool flat;  // rows: vector v is at 16 * v: no gaps and no short groups. Else `total` fits 32 bits, for quick divisions
};

// ---- numbers --------------------------------------------------------------------------------------------------------

constexpr float kFloatMax = 3.40282347e38f;
// Adding 1.5 * 2^23 rounds to an integer, half to even, whose low bits are the sum's low bits.
constexpr float kRound = 12582912.0f;
constexpr u32 kRoundBits = 0x4b400000u;

FLEXOPS_DEVICE float infinity() { return bit_cast<float>(0x7f800000u); }
FLEXOPS_DEVICE float not_a_number() { return bit_cast<float>(0x7fc00000u); }

FLEXOPS_DEVICE float largest_of(Type type) {
  return bit_cast<float>(type == kF16 ? 0x477fe000u : type == kBf16 ? 0x7f7f0000u : 0x7f7fffffu);
}

/// An element's bits. Only the 16-bit ones have to look at the type.
template <int kBytes>
using Bits = typename detail::Word<kBytes>::type;

template <Type kType>
constexpr int kSize = kType == kF32 ? 4 : 2;

template <int kBytes>
constexpr int kVector = 16 / kBytes;

template <int kBytes>
using Vector = Vec<Bits<kBytes>, kVector<kBytes>>;

template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<u32, N>& in, Type) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = bit_cast<float>(in.at[i]);
}
template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<u16, N>& in, Type type) {
  const auto words = bit_cast<Vec<u32, N / 2>>(in);
  if (type == kBf16) {  // outside the loop, to stay a branch
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = bit_cast<float>(i % 2 ? words.at[i / 2] & 0xffff0000u : words.at[i / 2] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(f16{static_cast<u16>(words.at[i / 2] >> (i % 2 * 16))});
  }
}

template <int N>
FLEXOPS_DEVICE Vec<u32, N> narrow(const float (&in)[N], Type, u32) {
  Vec<u32, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.at[i] = bit_cast<u32>(in[i]);
  return out;
}
template <int N>
FLEXOPS_DEVICE Vec<u16, N> narrow(const float (&in)[N], Type type, u16) {
  Vec<u32, N / 2> words;
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    words.at[i] = type == kBf16 ? pack2<bf16>(in[2 * i], in[2 * i + 1]) : pack2<f16>(in[2 * i], in[2 * i + 1]);
  return bit_cast<Vec<u16, N>>(words);
}

FLEXOPS_DEVICE float load_any(const void* from, i64 index, Type type) {
  if (type == kBf16) return to_float(static_cast<const bf16*>(from)[index]);
  if (type == kF16) return to_float(static_cast<const f16*>(from)[index]);
  return static_cast<const float*>(from)[index];
}

FLEXOPS_DEVICE void store_any(void* to, i64 index, float value, Type type) {
  if (type == kBf16) {
    static_cast<bf16*>(to)[index] = from_float<bf16>(value);
  } else if (type == kF16) {
    static_cast<f16*>(to)[index] = from_float<f16>(value);
  } else {
    static_cast<float*>(to)[index] = value;
  }
}

/// The nearest number of that type.
FLEXOPS_DEVICE float round_to(float value, Type type) {
  if (type == kBf16) return to_float(from_float<bf16>(value));
  if (type == kF16) return to_float(from_float<f16>(value));
  return value;
}

/// Quotient and remainder; 32-bit division is several times faster.
FLEXOPS_DEVICE i64 divide(i64 value, i64 by, i64& remainder) {
  if (((value | by) >> 32) == 0) {
    const u32 quotient = static_cast<u32>(value) / static_cast<u32>(by);
    remainder = static_cast<u32>(value) - quotient * static_cast<u32>(by);
    return quotient;
  }
  const i64 quotient = value / by;
  remainder = value - quotient * by;
  return quotient;
}

/// What all groups of a launch share.
struct Coding {
  float top;    // the largest code
  float round;  // kRound, plus half the range if symmetric with 4 bits: nibbles stay positive until they are packed
  u32 flip;     // what that half is taken back with, for eight nibbles
  float most;   // the largest scale
  bool symmetric;
};

FLEXOPS_DEVICE Coding make_coding(const Params& p, Type type) {
  Coding c;
  c.symmetric = p.pair == 1;
  c.top = p.bits == 4 ? (c.symmetric ? 7.0f : 15.0f) : (c.symmetric ? 127.0f : 255.0f);
  c.round = p.bits == 4 && c.symmetric ? kRound + 8.0f : kRound;
  c.flip = c.symmetric ? 0x88888888u : 0u;
  c.most = largest_of(type);
  return c;
}

/// Extremes of a set of elements. NaN is kept apart, since min and max skip it.
struct Extremes {
  float lowest, highest, poison;

  FLEXOPS_DEVICE void clear() { lowest = infinity(), highest = -infinity(), poison = 0.0f; }
  FLEXOPS_DEVICE void add(float value) {
    lowest = fminf(lowest, value);
    highest = fmaxf(highest, value);
    poison = __fmaf_rn(value, 0.0f, poison);  // NaN if the value is NaN or infinite
  }
  /// NaN makes the span infinite, which survives min and max.
  FLEXOPS_DEVICE void settle() {
    if (poison != poison) highest = infinity();
  }
  FLEXOPS_DEVICE void merge(float other_lowest, float other_highest) {
    lowest = fminf(lowest, other_lowest);
    highest = fmaxf(highest, other_highest);
  }
  FLEXOPS_DEVICE void merge(const Extremes& other) { merge(other.lowest, other.highest); }
  /// Those of the lane `lane ^ mask`, of 32; settled.
  FLEXOPS_DEVICE Extremes from(int mask) const {
    return {shuffle_xor(lowest, mask, kNarrowWarp), shuffle_xor(highest, mask, kNarrowWarp), 0.0f};
  }
};

/// Extremes of whole vectors, of all their elements together or of each column.
template <int kBytes, bool kEachColumn>
struct Span {
  static constexpr int N = kVector<kBytes>, kSets = kEachColumn ? N : 1;
  Extremes e[kSets];

  FLEXOPS_DEVICE void clear(Type) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].clear();
  }
  FLEXOPS_DEVICE void add(const Vector<kBytes>& in, Type type) {
    float value[N];
    widen(value, in, type);
#pragma unroll
    for (int i = 0; i < N; ++i) e[kEachColumn ? i : 0].add(value[i]);
  }
  FLEXOPS_DEVICE void settle(Type) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].settle();
  }
  FLEXOPS_DEVICE void merge(const Span& other, Type) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].merge(other.e[i]);
  }
  FLEXOPS_DEVICE Span from(int mask) const {
    Span out;
#pragma unroll
    for (int i = 0; i < kSets; ++i) out.e[i] = e[i].from(mask);
    return out;
  }
  FLEXOPS_DEVICE float lowest(int set, Type) const { return e[set].lowest; }
  FLEXOPS_DEVICE float highest(int set, Type) const { return e[set].highest; }
};

#if FLEXOPS_HAS_MIN2
/// The same for 16-bit numbers, two at a time and without widening them: half the instructions, which is what decides here. NaN wins every
/// comparison; an infinity makes the span infinite.
template <bool kEachColumn>
struct Span<2, kEachColumn> {
  static constexpr int kWords = kEachColumn ? 4 : 1;
  u32 word[2][kWords];  // each column: the lowest; the highest, negated. Else: both in the halves of word[0][0]

  FLEXOPS_DEVICE void clear(Type type) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[0][i] = word[1][i] = type == kBf16 ? 0x7f807f80u : 0x7c007c00u;  // infinities
  }
  FLEXOPS_DEVICE void add(const Vector<2>& in, Type type) {
    const auto words = bit_cast<Vec<u32, 4>>(in);
    if (type == kBf16) {  // outside the loops, to stay a branch
      add_as<bf16>(words);
    } else {
      add_as<f16>(words);
    }
  }
  FLEXOPS_DEVICE void settle(Type) {}
  FLEXOPS_DEVICE void merge(const Span& other, Type type) {
#pragma unroll
    for (int k = 0; k < (kEachColumn ? 2 : 1); ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        word[k][i] = type == kBf16 ? min2<bf16>(word[k][i], other.word[k][i]) : min2<f16>(word[k][i], other.word[k][i]);
    }
  }
  FLEXOPS_DEVICE Span from(int mask) const {
    Span out;
#pragma unroll
    for (int k = 0; k < (kEachColumn ? 2 : 1); ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) out.word[k][i] = shuffle_xor(word[k][i], mask, kNarrowWarp);
    }
    return out;
  }
  FLEXOPS_DEVICE float lowest(int set, Type type) const { return half(word[0][set / 2], set % 2, type); }
  FLEXOPS_DEVICE float highest(int set, Type type) const {
    return kEachColumn ? -half(word[1][set / 2], set % 2, type) : -half(word[0][0], 1, type);
  }

 private:
  template <typename T>
  FLEXOPS_DEVICE void add_as(const Vec<u32, 4>& in) {
    constexpr u32 kSigns = 0x80008000u;
    if constexpr (kEachColumn) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[0][i] = min2<T>(word[0][i], in.at[i]);
        word[1][i] = min2<T>(word[1][i], in.at[i] ^ kSigns);
      }
    } else {
      const u32 low = min2<T>(min2<T>(in.at[0], in.at[1]), min2<T>(in.at[2], in.at[3]));
      const u32 high = max2<T>(max2<T>(in.at[0], in.at[1]), max2<T>(in.at[2], in.at[3])) ^ kSigns;
      const u32 both = min2<T>((low & 0xffffu) | high << 16, low >> 16 | (high & 0xffff0000u));
      word[0][0] = min2<T>(word[0][0], both);
    }
  }
  static FLEXOPS_DEVICE float half(u32 in, int which, Type type) {
    const u16 bits = static_cast<u16>(in >> (which * 16));
    return type == kBf16 ? to_float(bf16{bits}) : to_float(f16{bits});
  }
};
#endif

/// A group's parameters. NaN if the group is broken: its codes must then be set to 0. Codes are made with a scale that its dtype can hold.
struct Group {
  float minimum, scale;

  FLEXOPS_DEVICE Group(float minimum_, float scale_) : minimum(minimum_), scale(scale_) {}
  FLEXOPS_DEVICE Group(float lowest, float highest, const Coding& c) {
    minimum = c.symmetric ? 0.0f : __fadd_rn(lowest, 0.0f);
    const float span = c.symmetric ? fmaxf(fabsf(lowest), fabsf(highest)) : __fsub_rn(highest, minimum);
    scale = span == 0.0f ? 1.0f : fminf(__fmul_rn(__frcp_rn(span), c.top), c.most);
    if (!(span <= kFloatMax)) minimum = scale = not_a_number();
  }

  FLEXOPS_DEVICE bool is_broken() const { return scale != scale; }

  /// The code in the low bits, above it rubbish that packing removes.
  FLEXOPS_DEVICE u32 code(float value, float top, float round) const {
    return bit_cast<u32>(__fadd_rn(fminf(__fmul_rn(__fsub_rn(value, minimum), scale), top), round));
  }
  /// The same for 4 bits, where nothing can round to more than the top: a scale that was rounded to bf16 is at most 1/256 too large.
  FLEXOPS_DEVICE u32 code4(float value, float round) const {
    return bit_cast<u32>(__fadd_rn(__fmul_rn(__fsub_rn(value, minimum), scale), round));
  }
};

/// Eight codes to eight nibbles, the even one of a byte in its high half. Each shifted-in code brings its rubbish, whose sum is a constant.
FLEXOPS_DEVICE u32 pack_nibbles(const u32 (&code)[8], u32 flip) {
  u32 sum = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    sum = sum * 16u + code[2 * i];
    sum = sum * 16u + code[2 * i + 1];
  }
  return (sum - kRoundBits * 0x11111111u) ^ flip;
}
FLEXOPS_DEVICE u32 pack_nibbles(const u32 (&code)[4], u32 flip) {
  const u32 sum = ((code[2] * 16u + code[3]) * 16u + code[0]) * 16u + code[1];
  return (sum - kRoundBits * 0x1111u) ^ flip;
}

/// The low bytes of four words.
FLEXOPS_DEVICE u32 pack_bytes(u32 a, u32 b, u32 c, u32 d) {
#if FLEXOPS_HIP
  return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | d << 24;
#else
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#endif
}

/// A group's pair from another lane.
FLEXOPS_DEVICE Vec<u16, 2> hand(const Vec<u16, 2>& pair, int lane) {
  return bit_cast<Vec<u16, 2>>(shuffle(bit_cast<u32>(pair), lane, kNarrowWarp));
}
FLEXOPS_DEVICE Vec<u32, 2> hand(const Vec<u32, 2>& pair, int lane) {
  return {shuffle(pair.at[0], lane, kNarrowWarp), shuffle(pair.at[1], lane, kNarrowWarp)};
}

/// What turns codes back into values.
struct Decoding {
  u32 flip;    // symmetric codes: the bit that makes them positive ...
  float bias;  // ... and what that added
  bool symmetric;
};

FLEXOPS_DEVICE Decoding make_decoding(const Params& p) {
  Decoding d;
  d.symmetric = p.pair == 1;
  d.flip = !d.symmetric ? 0u : p.bits == 4 ? 0x88888888u : 0x80808080u;
  d.bias = !d.symmetric ? 0.0f : p.bits == 4 ? 8.0f : 128.0f;
  return d;
}

FLEXOPS_DEVICE float apply(float code, float step, float minimum) { return __fadd_rn(__fmul_rn(code, step), minimum); }

/// (word & mask) | base as one instruction: of the plain expression ptxas makes two.
FLEXOPS_DEVICE u32 pick(u32 word, u32 mask, u32 base) {
#if FLEXOPS_HIP
  return (word & mask) | base;
#else
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(base));
  return out;
#endif
}

/// The code of `bits` bits at bit `shift` of a word, both known when compiling. No conversion and, up to bit 23, no shift: with 2^(23 -
/// shift)'s exponent above them, the bits where they stand are the float 2^(23 - shift) + code.
FLEXOPS_DEVICE float decode_at(u32 word, int bits, int shift, float step, float minimum, const Decoding& d) {
  const bool far = shift + bits > 23;
  const int at = far ? shift - 16 : shift;
  const u32 mask = ((1u << bits) - 1u) << at;
  const float base = 8388608.0f / static_cast<float>(1 << at);
  return apply(bit_cast<float>(pick(far ? word >> 16 : word, mask, (150u - at) << 23)) - (base + d.bias), step, minimum);
}

// ---- rows -----------------------------------------------------------------------------------------------------------
// A warp works on 32 * kVectors neighbouring vectors, 32 at each access: so every access is to whole cache lines. All lanes of a group
// would work out the same scale; instead groups are dealt out: few lanes work out each, and hand it to the others by a shuffle.

/// Where a vector lies. One beyond a row's end pads the row's last group and stands for the group's first; one beyond everything stands for
/// the very first: reading there changes no group, and nobody has to ask before.
struct Place {
  i64 element;
  bool inside;
};

template <int N, int kCount>
FLEXOPS_DEVICE void find_places(Place (&out)[kCount], const Params& p, i64 first) {
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const i64 vector = first + u * kNarrowWarp;
    out[u].inside = vector < p.total;
    out[u].element = out[u].inside ? vector * N : 0;
  }
  if (p.flat) return;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const u32 vector = static_cast<u32>(out[u].element / N), group = vector >> p.log_lanes, groups = static_cast<u32>(p.groups),
              row = group / groups;
    const i64 start = static_cast<i64>(group - row * groups) * p.group_size, column = start + (vector & (p.lanes - 1)) * N;
    if (column >= p.length) out[u].inside = false;
    out[u].element = row * p.outer_stride + (column < p.length ? column : start);
  }
}

/// A lane's first vector; the next are 32 further on each.
FLEXOPS_DEVICE i64 first_vector() {
  const i64 thread = static_cast<i64>(blockIdx.x) * kRowThreads + threadIdx.x;
  const int lane = threadIdx.x % kNarrowWarp;
  return (thread - lane) * kVectors + lane;
}

/// A group's scale and minimum as they are stored.
template <Type kType>
FLEXOPS_DEVICE Vec<Bits<kSize<kType>>, 2> make_pair(float lowest, float highest, const Coding& c) {
  const Group g(lowest, highest, c);
  const float pair[2] = {g.scale, g.minimum};
  return narrow(pair, kType, Bits<kSize<kType>>{});
}

/// Codes a vector with its group's pair.
template <Type kType>
FLEXOPS_DEVICE void store_codes(const Params& p, i64 vector, const Vector<kSize<kType>>& data, const Vec<Bits<kSize<kType>>, 2>& pair,
                                const Coding& c, bool blank) {
  constexpr int N = kVector<kSize<kType>>;
  float numbers[2], value[N];
  widen(numbers, pair, kType);
  widen(value, data, kType);
  const Group g(numbers[1], numbers[0]);
  blank |= g.is_broken();
  u32 code[N];
  if (p.bits == 4) {
    using Word = Bits<N / 2>;
#pragma unroll
    for (int i = 0; i < N; ++i) code[i] = g.code4(value[i], c.round);
    const u32 word = blank ? 0u : pack_nibbles(code, c.flip);
    store<Cache::streaming>(static_cast<Word*>(p.out) + vector, static_cast<Word>(word));
  } else {
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N; ++i) code[i] = g.code(value[i], c.top, c.round);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) words.at[i] = blank ? 0u : pack_bytes(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]);
    store<Cache::streaming>(static_cast<Vec<u32, N / 4>*>(p.out) + vector, words);
  }
}

/// Merges each vector's extremes over the lanes that share its group, at least kVectors. At each step a lane gives half of what it has for
/// the other half of its partner's, until span[0] is all it has: that of vector (lane % lanes) / (lanes / kVectors).
template <typename S>
FLEXOPS_DEVICE void deal(S (&span)[kVectors], int lanes, Type type) {
  int mask = lanes / 2;
#pragma unroll
  for (int half = kVectors / 2; half > 0; half /= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      S given = span[i + half];
      if (upper) {
        given = span[i];
        span[i] = span[i + half];
      }
      span[i].merge(given.from(mask), type);
    }
    mask /= 2;
  }
  for (; mask > 0; mask /= 2) span[0].merge(span[0].from(mask), type);
}

template <int kBytes>
FLEXOPS_DEVICE Vector<kBytes> load_vector(const Params& p, const Place& place) {
  return load<Cache::streaming>(reinterpret_cast<const Vector<kBytes>*>(static_cast<const Bits<kBytes>*>(p.x) + place.element));
}

template <typename Element>
FLEXOPS_DEVICE void store_pair(const Params& p, i64 group, const Vec<Element, 2>& pair) {
  if (p.pair == 1) {
    static_cast<Element*>(p.scales)[group] = pair.at[0];
  } else {
    store<Cache::streaming>(static_cast<Vec<Element, 2>*>(p.scales) + group, pair);
  }
}

/// Groups of fewer than kVectors vectors: each lane works out its vectors' groups, one after the other.
template <Type kType>
FLEXOPS_DEVICE void quantize_small_groups(const Params& p, i64 first, const Coding& c) {
  constexpr int kBytes = kSize<kType>;
#pragma unroll 1
  for (int u = 0; u < kVectors; ++u) {
    const i64 vector = first + u * kNarrowWarp;
    Place place[1];
    find_places<kVector<kBytes>>(place, p, vector);
    const auto data = load_vector<kBytes>(p, place[0]);
    Span<kBytes, false> span;
    span.clear(kType);
    span.add(data, kType);
    span.settle(kType);
    for (int mask = p.lanes / 2; mask > 0; mask /= 2) span.merge(span.from(mask), kType);
    if (vector >= p.total) continue;
    const auto pair = make_pair<kType>(span.lowest(0, kType), span.highest(0, kType), c);
    if ((threadIdx.x & (p.lanes - 1)) == 0) store_pair(p, vector >> p.log_lanes, pair);
    store_codes<kType>(p, vector, data, pair, c, !place[0].inside);
  }
}

template <Type kType>
__global__ void __launch_bounds__(kRowThreads) quantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>;
  const i64 first = first_vector();
  const Coding c = make_coding(p, kType);
  if (p.lanes < kVectors) return quantize_small_groups<kType>(p, first, c);
  Place place[kVectors];
  find_places<kVector<kBytes>>(place, p, first);
  Vector<kBytes> data[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) data[u] = load_vector<kBytes>(p, place[u]);
  Span<kBytes, false> span[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    span[u].clear(kType);
    span[u].add(data[u], kType);
    span[u].settle(kType);
  }
  deal(span, p.lanes, kType);
  const auto pair = make_pair<kType>(span[0].lowest(0, kType), span[0].highest(0, kType), c);
  const int share = p.lanes >> kLogVectors;  // lanes that work out the same group
  const int lane = threadIdx.x % kNarrowWarp, start = lane & -p.lanes;
  const i64 mine = first + ((lane - start) >> (p.log_lanes - kLogVectors)) * kNarrowWarp;
  if (mine < p.total && (lane & (share - 1)) == 0) store_pair(p, mine >> p.log_lanes, pair);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const auto its = hand(pair, start + u * share);
    const i64 vector = first + u * kNarrowWarp;
    if (vector < p.total) store_codes<kType>(p, vector, data[u], its, c, !place[u].inside);
  }
}

/// N codes' low bytes; `whole` (by column) and `keep` (by nibble) have ones where they count.
template <int N>
FLEXOPS_DEVICE void store_bytes(u8* out, const u32 (&code)[N], u32 flip, const u32 (&whole)[N / 4], u32 keep) {
  Vec<u32, N / 4> words;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    words.at[i] = (pack_bytes(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]) ^ flip) & whole[i] & keep;
  }
  store<Cache::streaming>(reinterpret_cast<Vec<u32, N / 4>*>(out), words);
}

/// N codes of neighbouring elements as loaded: with 4 bits in the low half of the bytes.
template <int N>
FLEXOPS_DEVICE Vec<u32, N / 4> load_codes(const void* packed, i64 vector, int bits) {
  if (bits == 8) return load<Cache::streaming>(static_cast<const Vec<u32, N / 4>*>(packed) + vector);
  Vec<u32, N / 4> words = {};
  words.at[0] = load<Cache::streaming>(static_cast<const Bits<N / 2>*>(packed) + vector);
  return words;
}

/// A group's scale and minimum, in one access.
FLEXOPS_DEVICE void load_pair(float& scale, float& minimum, const Params& p, i64 group) {
  float pair[2] = {0.0f, 0.0f};
  if (p.pair == 1) {
    pair[0] = load_any(p.scales, group, p.scale_type);
  } else if (p.scale_type == kF32) {
    widen(pair, load<Cache::normal>(static_cast<const Vec<u32, 2>*>(p.scales) + group), p.scale_type);
  } else {
    widen(pair, load<Cache::normal>(static_cast<const Vec<u16, 2>*>(p.scales) + group), p.scale_type);
  }
  scale = pair[0], minimum = pair[1];
}

/// Decodes a vector and stores it.
template <Type kType>
FLEXOPS_DEVICE void store_values(const Params& p, const Place& place, const Vec<u32, kVector<kSize<kType>> / 4>& words, float step,
                                 float minimum, const Decoding& d) {
  constexpr int kBytes = kSize<kType>, N = kVector<kBytes>;
  if (!place.inside) return;
  float value[N];
  if (p.bits == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = decode_at(words.at[0] ^ d.flip, 4, 4 * (i ^ 1), step, minimum, d);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = decode_at(words.at[i / 4] ^ d.flip, 8, 8 * (i % 4), step, minimum, d);
  }
  auto* out = reinterpret_cast<Vector<kBytes>*>(static_cast<Bits<kBytes>*>(p.out) + place.element);
  store<Cache::streaming>(out, narrow(value, kType, Bits<kBytes>{}));
}

template <Type kType>
__global__ void __launch_bounds__(kRowThreads) dequantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<kSize<kType>>;
  const i64 first = first_vector();
  const Decoding d = make_decoding(p);
  float scale, minimum;
  if (p.lanes < kVectors) {  // more groups than lanes
#pragma unroll 1
    for (i64 vector = first; vector < first + kVectors * kNarrowWarp && vector < p.total; vector += kNarrowWarp) {
      Place place[1];
      find_places<N>(place, p, vector);
      const auto words = load_codes<N>(p.x, vector, p.bits);
      load_pair(scale, minimum, p, vector >> p.log_lanes);
      store_values<kType>(p, place[0], words, __frcp_rn(scale), minimum, d);
    }
    return;
  }
  Place place[kVectors];
  find_places<N>(place, p, first);
  Vec<u32, N / 4> words[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const i64 vector = first + u * kNarrowWarp;
    words[u] = load_codes<N>(p.x, vector < p.total ? vector : 0, p.bits);
  }
  // Lane i reads the warp's i-th group; lanes beyond its last one read the first.
  const int lane = threadIdx.x % kNarrowWarp;
  const i64 group = ((first - lane) >> p.log_lanes) + (lane < kVectors * kNarrowWarp >> p.log_lanes ? lane : 0),
            last = (p.total - 1) >> p.log_lanes;
  load_pair(scale, minimum, p, group < last ? group : last);
  const float step = __frcp_rn(scale);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int owner = (u * kNarrowWarp + lane) >> p.log_lanes;
    store_values<kType>(p, place[u], words[u], shuffle(step, owner, kNarrowWarp), shuffle(minimum, owner, kNarrowWarp), d);
  }
}

// ---- columns --------------------------------------------------------------------------------------------------------
// A warp is `lanes` slots of 32 / lanes neighbouring chunks of 16 bytes. Slot s holds the row pairs s, s + lanes, s + 2 * lanes, ...

struct Tile {
  i64 outer, line, column;  // line: outer * groups + group; column: the chunk's first
  i64 first_row;            // in `length`
  i64 rows;                 // of the group, not counting what pads a short one
  int slot;
  bool inside;  // if not, it is the first chunk's place, for loads that need no check
};

template <int N>
FLEXOPS_DEVICE Tile tile_of(const Params& p) {
  Tile t;
  const int lane = threadIdx.x % kNarrowWarp;
  const int log_columns = 5 - p.log_lanes;
  const i64 warp = (static_cast<i64>(blockIdx.x) * kColumnThreads + threadIdx.x) / kNarrowWarp;
  const i64 chunk = (warp << log_columns) + (lane & ((1 << log_columns) - 1));
  t.slot = lane >> log_columns;
  t.inside = chunk < p.total;
  const u32 index = t.inside ? static_cast<u32>(chunk) : 0u, chunks = static_cast<u32>(p.chunks), groups = static_cast<u32>(p.groups);
  const u32 line = index / chunks, outer = line / groups;
  t.line = line;
  t.outer = outer;
  t.column = static_cast<i64>(index - line * chunks) * N;
  t.first_row = static_cast<i64>(line - outer * groups) * p.group_size;
  const i64 left = p.length - t.first_row;
  t.rows = left < p.group_size ? left : p.group_size;
  return t;
}

template <Type kType>
__global__ void __launch_bounds__(kColumnThreads) quantize_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>, N = kVector<kBytes>;
  const Tile t = tile_of<N>(p);
  const Coding c = make_coding(p, kType);
  const auto* x = static_cast<const Bits<kBytes>*>(p.x) + t.outer * p.outer_stride + t.first_row * p.length_stride + t.column;
  const auto row_of = [&](int k) { return 2 * (t.slot + (k / 2) * p.lanes) + k % 2; };
  const int rows = static_cast<int>(t.rows), group_size = static_cast<int>(p.group_size);
  Vector<kBytes> data[kColumnRows];
#pragma unroll
  for (int k = 0; k < kColumnRows; ++k) {  // instead of a row that is not there, the last one: it does not change the extremes
    const int row = row_of(k) < rows ? row_of(k) : rows - 1;
    data[k] = load<Cache::streaming>(reinterpret_cast<const Vector<kBytes>*>(x + row * p.length_stride));
  }
  Span<kBytes, true> span;
  span.clear(kType);
#pragma unroll
  for (int k = 0; k < kColumnRows; ++k) span.add(data[k], kType);
  span.settle(kType);
  for (int mask = kNarrowWarp / 2; mask >= kNarrowWarp / p.lanes; mask >>= 1) span.merge(span.from(mask), kType);
  if (!t.inside) return;
  float minimum[N], scale[N];
  u32 whole[N / 4] = {};  // ones in the bytes of columns whose group is not broken: the others' codes are 0
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Group g(span.lowest(i, kType), span.highest(i, kType), c);
    minimum[i] = g.minimum, scale[i] = g.scale;
    if (!g.is_broken()) whole[i / 4] |= 255u << (8 * (i % 4));
  }
  const Vector<kBytes> scale_bits = narrow(scale, kType, Bits<kBytes>{});
  widen(scale, scale_bits, kType);
  if (t.slot == 0) {
    auto* scales = static_cast<Bits<kBytes>*>(p.scales) + t.line * p.pair * p.inner + t.column;
    store<Cache::streaming>(reinterpret_cast<Vector<kBytes>*>(scales), scale_bits);
    if (!c.symmetric) store<Cache::streaming>(reinterpret_cast<Vector<kBytes>*>(scales + p.inner), narrow(minimum, kType, Bits<kBytes>{}));
  }
  u8* out = static_cast<u8*>(p.out) + t.line * p.group_bytes * p.inner + t.column;
#pragma unroll
  for (int k = 0; k < kColumnRows; k += 2) {
    if (row_of(k) >= group_size) break;
    float value[2][N];
    u32 code[2][N];
    widen(value[0], data[k], kType);
    widen(value[1], data[k + 1], kType);
    const bool even = row_of(k) < rows, odd = row_of(k + 1) < rows;
    if (p.bits == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Group g(minimum[i], scale[i]);
        code[0][i] = g.code4(value[0][i], c.round) * 16u + g.code4(value[1][i], c.round);
      }
      store_bytes(out + row_of(k) / 2 * p.inner, code[0], c.flip, whole, (even ? 0xf0f0f0f0u : 0u) | (odd ? 0x0f0f0f0fu : 0u));
    } else {
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) code[i / N][i % N] = Group(minimum[i % N], scale[i % N]).code(value[i / N][i % N], c.top, c.round);
      store_bytes(out + row_of(k) * p.inner, code[0], 0u, whole, even ? ~0u : 0u);
      if (row_of(k + 1) < group_size) store_bytes(out + row_of(k + 1) * p.inner, code[1], 0u, whole, odd ? ~0u : 0u);
    }
  }
}

/// The scales and minima of neighbouring columns; both are on their way before either is waited for.
template <int N>
FLEXOPS_DEVICE void load_pairs(float (&scale)[N], float (&minimum)[N], const Params& p, i64 index) {
  const i64 other = p.pair == 1 ? index : index + p.inner;
  if (p.scale_type == kF32) {
    const auto* from = static_cast<const float*>(p.scales);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const auto scales = load<Cache::normal>(reinterpret_cast<const Vec<float, 4>*>(from + index + i));
      const auto minima = load<Cache::normal>(reinterpret_cast<const Vec<float, 4>*>(from + other + i));
#pragma unroll
      for (int k = 0; k < 4; ++k) scale[i + k] = scales.at[k], minimum[i + k] = minima.at[k];
    }
  } else {
    const auto* from = static_cast<const u16*>(p.scales);
    const auto scales = load<Cache::normal>(reinterpret_cast<const Vec<u16, N>*>(from + index));
    const auto minima = load<Cache::normal>(reinterpret_cast<const Vec<u16, N>*>(from + other));
    widen(scale, scales, p.scale_type);
    widen(minimum, minima, p.scale_type);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) minimum[i] = p.pair == 1 ? 0.0f : minimum[i];
}

template <Type kType>
__global__ void __launch_bounds__(kColumnThreads, 1) dequantize_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kBytes = kSize<kType>, N = kVector<kBytes>;
  constexpr int kLines = kColumnRows / 2;  // rows of bytes in flight
  const Tile t = tile_of<N>(p);
  if (!t.inside) return;
  const bool halves = p.bits == 4;
  const u8* packed = static_cast<const u8*>(p.x) + t.line * p.group_bytes * p.inner + t.column;
  auto* out = static_cast<Bits<kBytes>*>(p.out) + (t.outer * p.length + t.first_row) * p.inner + t.column;
  const int rows = static_cast<int>(t.rows), lines = halves ? (rows + 1) / 2 : rows;
  Vec<u32, N / 4> words[kLines];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int line = first + k * p.lanes;
      if (line < lines) words[k] = load<Cache::streaming>(reinterpret_cast<const Vec<u32, N / 4>*>(packed + line * p.inner));
    }
  };
  fetch(t.slot);
  const Decoding d = make_decoding(p);
  float step[N], minimum[N];
  load_pairs(step, minimum, p, t.line * p.pair * p.inner + t.column);
#pragma unroll
  for (int i = 0; i < N; ++i) step[i] = __frcp_rn(step[i]);
  for (int first = t.slot; first < lines; fetch(first)) {
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int line = first + k * p.lanes;
      if (line >= lines) break;
      const auto write = [&](int row, int bits, int shift) {
        float value[N];
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = decode_at(words[k].at[i / 4] ^ d.flip, bits, 8 * (i % 4) + shift, step[i], minimum[i], d);
        store<Cache::streaming>(reinterpret_cast<Vector<kBytes>*>(out + row * p.inner), narrow(value, kType, Bits<kBytes>{}));
      };
      if (halves) {
        write(2 * line, 4, 4);
        if (2 * line + 1 < rows) write(2 * line + 1, 4, 0);
      } else {
        write(line, 8, 0);
      }
    }
    first += kLines * p.lanes;
  }
}

// ---- any ------------------------------------------------------------------------------------------------------------

/// Over the `lanes` threads that share a group: a power of two up to 32, or the block.
FLEXOPS_DEVICE void merge_all(Extremes& e, int lanes, float (*shared)[2]) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask >>= 1) e.merge(e.from(mask));
  if (lanes <= kNarrowWarp) return;
  if (threadIdx.x % kNarrowWarp == 0) {
    shared[threadIdx.x / kNarrowWarp][0] = e.lowest;
    shared[threadIdx.x / kNarrowWarp][1] = e.highest;
  }
  __syncthreads();
  for (int i = 0; i < kAnyThreads / kNarrowWarp; ++i) e.merge(shared[i][0], shared[i][1]);
}

__global__ void __launch_bounds__(kAnyThreads) quantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  __shared__ float shared[kAnyThreads / kNarrowWarp][2];
  const Coding c = make_coding(p, p.type);
  i64 lane, column, group;
  const i64 index = divide(static_cast<i64>(blockIdx.x) * kAnyThreads + threadIdx.x, p.lanes, lane);
  const i64 line = divide(index < p.total ? index : 0, p.inner, column);
  const i64 outer = divide(line, p.groups, group);
  const i64 left = p.length - group * p.group_size;
  const i64 rows = left < p.group_size ? left : p.group_size;
  const i64 from = outer * p.outer_stride + group * p.group_size * p.length_stride + column * p.inner_stride;
  Extremes e;
  e.clear();
  for (i64 row = lane; row < rows; row += p.lanes) e.add(load_any(p.x, from + row * p.length_stride, p.type));
  e.settle();
  merge_all(e, p.lanes, shared);
  if (index >= p.total) return;
  Group g(e.lowest, e.highest, c);
  g.scale = round_to(g.scale, p.type);
  if (lane == 0) {
    const i64 entry = line * p.pair * p.inner + column;
    store_any(p.scales, entry, g.scale, p.type);
    if (!c.symmetric) store_any(p.scales, entry + p.inner, g.minimum, p.type);
  }
  u8* out = static_cast<u8*>(p.out) + line * p.group_bytes * p.inner + column;
  const auto code = [&](i64 row) {
    const bool blank = row >= rows || g.is_broken();
    return blank ? bit_cast<u32>(c.round) : g.code(load_any(p.x, from + row * p.length_stride, p.type), c.top, c.round);
  };
#pragma unroll 1
  for (i64 byte = lane; byte < p.group_bytes; byte += p.lanes) {
    u32 bits = code(p.bits == 4 ? 2 * byte : byte);
    if (p.bits == 4) bits = (bits * 16u + code(2 * byte + 1)) ^ c.flip;
    out[byte * p.inner] = static_cast<u8>(bits);
  }
}

__global__ void __launch_bounds__(kAnyThreads) dequantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  const i64 index = static_cast<i64>(blockIdx.x) * kAnyThreads + threadIdx.x;
  if (index >= p.total) return;
  const Decoding d = make_decoding(p);
  i64 column, position, within;
  const i64 row = divide(index, p.inner, column);
  const i64 outer = divide(row, p.length, position);
  const i64 line = outer * p.groups + divide(position, p.group_size, within);
  const i64 byte = p.bits == 4 ? within / 2 : within;
  const u32 codes = static_cast<const u8*>(p.x)[(line * p.group_bytes + byte) * p.inner + column] ^ (d.flip & 255u);
  const u32 code = p.bits == 8 ? codes : within % 2 ? codes & 15u : codes >> 4;
  const i64 entry = line * p.pair * p.inner + column;
  const float minimum = d.symmetric ? 0.0f : load_any(p.scales, entry + p.inner, p.scale_type);
  store_any(p.out, index, apply(static_cast<float>(code) - d.bias, __frcp_rn(load_any(p.scales, entry, p.scale_type)), minimum), p.type);
}

}  // namespace flexops::quant
