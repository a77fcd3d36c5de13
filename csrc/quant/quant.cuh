// Group-wise quantization's kernels. Formulas and format: flexops/ops/quant.py, which they reproduce bit for bit: so every float operation that
// decides a result is an explicit, unfused one.
//
// Memory decides: bf16 to 4 bits in groups of 64 reads 2 and writes 0.56 bytes an element. So each element is read once, 16 bytes at a time, its
// group stays in registers, a thread has several loads in flight, and nothing is marked for keeping in the caches. Three ways:
//   rows      groups along contiguous memory: 1 to 32 neighbouring lanes hold a group's 16-byte vectors;
//   columns   groups across contiguous rows (FlexGen's weights along dim 0): a lane holds 16 bytes of up to 8 rows;
//   any       the rest: 1 to 32 lanes or a whole block go over a group twice.
// Kernels are instantiated for the width of an element only. bf16 or fp16, the dtype of scales, bits and symmetry are uniform over the grid and
// told at run time: that costs next to nothing, and instantiations cost build time.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/vec.cuh"

namespace flexops::quant {

// Tuned on one H200; a -D of the same name overrides them (scripts that search do so).
#if !defined(FLEXOPS_QUANT_THREADS)
#define FLEXOPS_QUANT_THREADS 256
#endif
#if !defined(FLEXOPS_QUANT_PAIRS)
#define FLEXOPS_QUANT_PAIRS 2
#endif
#if !defined(FLEXOPS_DEQUANT_STORE)
#define FLEXOPS_DEQUANT_STORE streaming
#endif
#if !defined(FLEXOPS_DEQUANT_UNROLL)
#define FLEXOPS_DEQUANT_UNROLL 2
#endif
#if !defined(FLEXOPS_QUANT_COLUMN_THREADS)
#define FLEXOPS_QUANT_COLUMN_THREADS 128
#endif
#if !defined(FLEXOPS_QUANT_COLUMN_ROWS)
#define FLEXOPS_QUANT_COLUMN_ROWS 8
#endif

constexpr int kThreads = FLEXOPS_QUANT_THREADS;
constexpr int kPairs = FLEXOPS_QUANT_PAIRS;             // rows: pairs of vectors a thread quantizes
constexpr int kDequantUnroll = FLEXOPS_DEQUANT_UNROLL;  // rows: vectors a thread dequantizes
constexpr int kColumnThreads = FLEXOPS_QUANT_COLUMN_THREADS;
constexpr int kColumnRows = FLEXOPS_QUANT_COLUMN_ROWS;  // columns: rows of a group that one lane holds
constexpr int kColumnSlots = 128 / kColumnRows;          // columns: lanes that share a column's group, at most
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
  int pair;              // entries a group in scales: 2, or 1 if symmetric
  Type type, scale_type;
  bool flat;             // rows: vector v is at 16 * v: no gaps and no short groups. Else `total` fits 32 bits, for quick divisions
};

// ---- numbers -----------------------------------------------------------------------------------------------------------------------------

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
  for (int i = 0; i < N / 2; ++i) words.at[i] = type == kBf16 ? pack2<bf16>(in[2 * i], in[2 * i + 1]) : pack2<f16>(in[2 * i], in[2 * i + 1]);
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

FLEXOPS_DEVICE Coding make_coding(const Params& p) {
  Coding c;
  c.symmetric = p.pair == 1;
  c.top = p.bits == 4 ? (c.symmetric ? 7.0f : 15.0f) : (c.symmetric ? 127.0f : 255.0f);
  c.round = p.bits == 4 && c.symmetric ? kRound + 8.0f : kRound;
  c.flip = c.symmetric ? 0x88888888u : 0u;
  c.most = largest_of(p.type);
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
  /// With the lane `lane ^ mask`, of 32.
  FLEXOPS_DEVICE void merge(int mask) { merge(shuffle_xor(lowest, mask, kNarrowWarp), shuffle_xor(highest, mask, kNarrowWarp)); }
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
    for (int i = 0; i < kSets; ++i) e[i].merge(other.e[i].lowest, other.e[i].highest);
  }
  FLEXOPS_DEVICE void merge(int mask, Type) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].merge(mask);
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
      for (int i = 0; i < kWords; ++i) word[k][i] = type == kBf16 ? min2<bf16>(word[k][i], other.word[k][i]) : min2<f16>(word[k][i], other.word[k][i]);
    }
  }
  FLEXOPS_DEVICE void merge(int mask, Type type) {
    Span other;
#pragma unroll
    for (int k = 0; k < (kEachColumn ? 2 : 1); ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) other.word[k][i] = shuffle_xor(word[k][i], mask, kNarrowWarp);
    }
    merge(other, type);
  }
  FLEXOPS_DEVICE float lowest(int set, Type type) const { return half(word[0][set / 2], set % 2, type); }
  FLEXOPS_DEVICE float highest(int set, Type type) const { return kEachColumn ? -half(word[1][set / 2], set % 2, type) : -half(word[0][0], 1, type); }

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

/// The code of `bits` bits at bit `shift` of a word, both known when compiling. No conversion and, up to bit 23, no shift: with 2^(23 - shift)'s
/// exponent above them, the bits where they stand are the float 2^(23 - shift) + code.
FLEXOPS_DEVICE float decode_at(u32 word, int bits, int shift, float step, float minimum, const Decoding& d) {
  const bool far = shift + bits > 23;
  const int at = far ? shift - 16 : shift;
  const u32 mask = ((1u << bits) - 1u) << at;
  const float base = 8388608.0f / static_cast<float>(1 << at);
  return apply(bit_cast<float>(((far ? word >> 16 : word) & mask) | (150u - at) << 23) - (base + d.bias), step, minimum);
}

// ---- rows --------------------------------------------------------------------------------------------------------------------------------

/// Where a vector of a row lies. A vector beyond a row's end pads the row's last group.
struct Place {
  i64 element;
  bool inside;
};

template <int N>
FLEXOPS_DEVICE Place place_of(const Params& p, i64 vector) {
  if (vector >= p.total) return {0, false};
  if (p.flat) return {vector * N, true};
  const u32 group = static_cast<u32>(vector >> p.log_lanes), groups = static_cast<u32>(p.groups), row = group / groups;
  const i64 column = static_cast<i64>(group - row * groups) * p.group_size + (vector & (p.lanes - 1)) * N;
  return {row * p.outer_stride + column, column < p.length};
}

template <int N>
FLEXOPS_DEVICE void store_codes(void* out, i64 vector, const u32 (&code)[N], const Params& p, const Coding& c, bool blank) {
  if (p.bits == 4) {
    using Word = Bits<N / 2>;
    const u32 word = blank ? 0u : pack_nibbles(code, c.flip);
    store<Cache::streaming>(static_cast<Word*>(out) + vector, static_cast<Word>(word));
  } else {
    Vec<u32, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) words.at[i] = blank ? 0u : pack_bytes(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]);
    store<Cache::streaming>(static_cast<Vec<u32, N / 4>*>(out) + vector, words);
  }
}

/// Rounds the scale to its dtype, and stores the pair if asked to.
template <int kBytes>
FLEXOPS_DEVICE void settle_pair(Group& g, void* scales, i64 group, const Params& p, bool write) {
  using Element = Bits<kBytes>;
  float pair[2] = {g.scale, g.minimum};
  const Vec<Element, 2> bits = narrow(pair, p.type, Element{});
  widen(pair, bits, p.type);
  g.scale = pair[0];
  if (!write) return;
  if (p.pair == 1) {
    static_cast<Element*>(scales)[group] = bits.at[0];
  } else {
    store<Cache::streaming>(static_cast<Vec<Element, 2>*>(scales) + group, bits);
  }
}

/// Where a thread's k-th pair of vectors lies. Both are of one group, where a group has several: then fewer lanes have to agree, and a group is
/// worked out less often.
struct Pair {
  i64 first;
  int stride, slot;
  bool shared;

  FLEXOPS_DEVICE Pair(const Params& p, int k) : shared(p.lanes > 1) {
    const i64 thread = (static_cast<i64>(blockIdx.x) * kPairs + k) * kThreads + threadIdx.x;
    stride = shared ? p.lanes / 2 : kThreads;
    slot = shared ? threadIdx.x & (stride - 1) : 0;
    first = shared ? 2 * thread - slot : 2 * thread - threadIdx.x;
  }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads) quantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<kBytes>;
  const Coding c = make_coding(p);
  Vector<kBytes> data[kPairs][2];
  bool inside[kPairs][2];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const Pair pair(p, k);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const Place at = place_of<N>(p, pair.first + u * pair.stride);
      inside[k][u] = at.inside;
      if (at.inside) data[k][u] = load<Cache::streaming>(reinterpret_cast<const Vector<kBytes>*>(static_cast<const Bits<kBytes>*>(p.x) + at.element));
    }
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const Pair pair(p, k);
    Span<kBytes, false> span[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      span[u].clear(p.type);
      if (inside[k][u]) span[u].add(data[k][u], p.type);
      span[u].settle(p.type);
    }
    if (pair.shared) {
      span[0].merge(span[1], p.type);
      for (int mask = pair.stride / 2; mask > 0; mask >>= 1) span[0].merge(mask, p.type);
    }
    Group g(0.0f, 0.0f);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const i64 vector = pair.first + u * pair.stride;
      if (vector >= p.total) continue;
      if (u == 0 || !pair.shared) {
        g = Group(span[u].lowest(0, p.type), span[u].highest(0, p.type), c);
        settle_pair<kBytes>(g, p.scales, vector >> p.log_lanes, p, pair.slot == 0);
      }
      float value[N];
      widen(value, data[k][u], p.type);
      u32 code[N];
      if (p.bits == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) code[i] = g.code4(value[i], c.round);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) code[i] = g.code(value[i], c.top, c.round);
      }
      store_codes(p.out, vector, code, p, c, g.is_broken() || !inside[k][u]);
    }
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

template <int kBytes>
__global__ void __launch_bounds__(kThreads) dequantize_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<kBytes>;
  const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kDequantUnroll) + threadIdx.x;
  const Decoding d = make_decoding(p);
  Vec<u32, N / 4> words[kDequantUnroll];
  float scale[kDequantUnroll], minimum[kDequantUnroll];
#pragma unroll
  for (int u = 0; u < kDequantUnroll; ++u) {
    const i64 vector = first + u * kThreads;
    if (vector >= p.total) break;
    words[u] = load_codes<N>(p.x, vector, p.bits);
    load_pair(scale[u], minimum[u], p, vector >> p.log_lanes);
  }
#pragma unroll
  for (int u = 0; u < kDequantUnroll; ++u) {
    const Place at = place_of<N>(p, first + u * kThreads);
    if (!at.inside) continue;
    const float step = __frcp_rn(scale[u]);
    float value[N];
    if (p.bits == 4) {
      const u32 word = words[u].at[0] ^ d.flip;
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = decode_at(word, 4, 4 * (i ^ 1), step, minimum[u], d);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = decode_at(words[u].at[i / 4] ^ d.flip, 8, 8 * (i % 4), step, minimum[u], d);
    }
    store<Cache::FLEXOPS_DEQUANT_STORE>(reinterpret_cast<Vector<kBytes>*>(static_cast<Bits<kBytes>*>(p.out) + at.element), narrow(value, p.type, Bits<kBytes>{}));
  }
}

// ---- columns -----------------------------------------------------------------------------------------------------------------------------
// A warp is `lanes` slots of 32 / lanes neighbouring chunks of 16 bytes. Slot s holds the row pairs s, s + lanes, s + 2 * lanes, ...

struct Tile {
  i64 outer, line, column;  // line: outer * groups + group; column: the chunk's first
  i64 first_row;            // in `length`
  i64 rows;                 // of the group, not counting what pads a short one
  int slot;
  bool inside;              // if not, it is the first chunk's place, for loads that need no check
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

template <int kBytes>
__global__ void __launch_bounds__(kColumnThreads) quantize_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<kBytes>;
  const Tile t = tile_of<N>(p);
  const Coding c = make_coding(p);
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
  span.clear(p.type);
#pragma unroll
  for (int k = 0; k < kColumnRows; ++k) span.add(data[k], p.type);
  span.settle(p.type);
  for (int mask = kNarrowWarp / 2; mask >= kNarrowWarp / p.lanes; mask >>= 1) span.merge(mask, p.type);
  if (!t.inside) return;
  float minimum[N], scale[N];
  u32 whole[N / 4] = {};  // ones in the bytes of columns whose group is not broken: the others' codes are 0
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Group g(span.lowest(i, p.type), span.highest(i, p.type), c);
    minimum[i] = g.minimum, scale[i] = g.scale;
    if (!g.is_broken()) whole[i / 4] |= 255u << (8 * (i % 4));
  }
  const Vector<kBytes> scale_bits = narrow(scale, p.type, Bits<kBytes>{});
  widen(scale, scale_bits, p.type);
  if (t.slot == 0) {
    auto* scales = static_cast<Bits<kBytes>*>(p.scales) + t.line * p.pair * p.inner + t.column;
    store<Cache::streaming>(reinterpret_cast<Vector<kBytes>*>(scales), scale_bits);
    if (!c.symmetric) store<Cache::streaming>(reinterpret_cast<Vector<kBytes>*>(scales + p.inner), narrow(minimum, p.type, Bits<kBytes>{}));
  }
  u8* out = static_cast<u8*>(p.out) + t.line * p.group_bytes * p.inner + t.column;
#pragma unroll
  for (int k = 0; k < kColumnRows; k += 2) {
    if (row_of(k) >= group_size) break;
    u32 code[2][N];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float value[N];
      widen(value, data[k + half], p.type);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Group g(minimum[i], scale[i]);
        code[half][i] = p.bits == 4 ? g.code4(value[i], c.round) : g.code(value[i], c.top, c.round);
      }
    }
    const bool even = row_of(k) < rows, odd = row_of(k + 1) < rows;
    if (p.bits == 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) code[0][i] = code[0][i] * 16u + code[1][i];
      store_bytes(out + row_of(k) / 2 * p.inner, code[0], c.flip, whole, (even ? 0xf0f0f0f0u : 0u) | (odd ? 0x0f0f0f0fu : 0u));
    } else {
      store_bytes(out + row_of(k) * p.inner, code[0], 0u, whole, even ? ~0u : 0u);
      if (row_of(k + 1) < group_size) store_bytes(out + row_of(k + 1) * p.inner, code[1], 0u, whole, odd ? ~0u : 0u);
    }
  }
}

template <int kBytes>
FLEXOPS_DEVICE void load_scales(float (&to)[kVector<kBytes>], const void* scales, i64 index, Type type) {
  constexpr int N = kVector<kBytes>;
  if (type == kF32) {
    const auto* from = reinterpret_cast<const Vec<float, 4>*>(static_cast<const float*>(scales) + index);
#pragma unroll
    for (int part = 0; part < N / 4; ++part) {
      const Vec<float, 4> four = load<Cache::normal>(from + part);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[4 * part + i] = four.at[i];
    }
  } else {
    widen(to, load<Cache::normal>(reinterpret_cast<const Vec<u16, N>*>(static_cast<const u16*>(scales) + index)), type);
  }
}

template <int kBytes>
__global__ void __launch_bounds__(kColumnThreads) dequantize_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int N = kVector<kBytes>;
  constexpr int kLines = kColumnRows / 2;  // rows of bytes in flight
  const Tile t = tile_of<N>(p);
  if (!t.inside) return;
  const Decoding d = make_decoding(p);
  const bool halves = p.bits == 4;
  const u8* packed = static_cast<const u8*>(p.x) + t.line * p.group_bytes * p.inner + t.column;
  auto* out = static_cast<Bits<kBytes>*>(p.out) + (t.outer * p.length + t.first_row) * p.inner + t.column;
  float step[N], minimum[N] = {};
  load_scales<kBytes>(step, p.scales, t.line * p.pair * p.inner + t.column, p.scale_type);
  if (!d.symmetric) load_scales<kBytes>(minimum, p.scales, (t.line * p.pair + 1) * p.inner + t.column, p.scale_type);
#pragma unroll
  for (int i = 0; i < N; ++i) step[i] = __frcp_rn(step[i]);
  const i64 lines = halves ? (t.rows + 1) / 2 : t.rows;
  for (i64 first = t.slot; first < lines; first += kLines * p.lanes) {
    Vec<u32, N / 4> words[kLines];
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const i64 line = first + k * p.lanes;
      if (line < lines) words[k] = load<Cache::streaming>(reinterpret_cast<const Vec<u32, N / 4>*>(packed + line * p.inner));
    }
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const i64 line = first + k * p.lanes;
      if (line >= lines) break;
      const auto write = [&](i64 row, int bits, int shift) {
        float value[N];
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = decode_at(words[k].at[i / 4] ^ d.flip, bits, 8 * (i % 4) + shift, step[i], minimum[i], d);
        store<Cache::FLEXOPS_DEQUANT_STORE>(reinterpret_cast<Vector<kBytes>*>(out + row * p.inner), narrow(value, p.type, Bits<kBytes>{}));
      };
      if (halves) {
        write(2 * line, 4, 4);
        if (2 * line + 1 < t.rows) write(2 * line + 1, 4, 0);
      } else {
        write(line, 8, 0);
      }
    }
  }
}

// ---- any ---------------------------------------------------------------------------------------------------------------------------------

/// Over the `lanes` threads that share a group: a power of two up to 32, or the block.
FLEXOPS_DEVICE void merge_all(Extremes& e, int lanes, float (*shared)[2]) {
  for (int mask = (lanes < kNarrowWarp ? lanes : kNarrowWarp) / 2; mask > 0; mask >>= 1) e.merge(mask);
  if (lanes <= kNarrowWarp) return;
  if (threadIdx.x % kNarrowWarp == 0) {
    shared[threadIdx.x / kNarrowWarp][0] = e.lowest;
    shared[threadIdx.x / kNarrowWarp][1] = e.highest;
  }
  __syncthreads();
  for (int i = 0; i < kThreads / kNarrowWarp; ++i) e.merge(shared[i][0], shared[i][1]);
}

__global__ void __launch_bounds__(kThreads) quantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  __shared__ float shared[kThreads / kNarrowWarp][2];
  const Coding c = make_coding(p);
  i64 lane, column, group;
  const i64 index = divide(static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x, p.lanes, lane);
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

__global__ void __launch_bounds__(kThreads) dequantize_any(const FLEXOPS_GRID_CONSTANT Params p) {
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
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
