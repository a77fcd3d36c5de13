// The arithmetic of group-wise quantization: extremes, scale and minimum, codes, and back.
// Formulas: flexops/ops/quant.py, which this reproduces bit for bit: so every float operation that
// decides a result is an explicit, unfused one.
#pragma once

#include "quant/quant.cuh"

namespace flexops::quant {

/// What all groups of a launch share.
struct Coding {
  float top;    // the largest code
  float round;  // kRound, plus half the range if symmetric with 4 bits: nibbles stay positive until
                // they are packed
  u32 flip;     // what that half is taken back with, for eight nibbles
  float most;   // the largest scale
  bool symmetric;
};

FLEXOPS_DEVICE Coding make_coding(const Params& p, ElementType type) {
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

  FLEXOPS_DEVICE void clear(ElementType) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].clear();
  }
  FLEXOPS_DEVICE void add(const Vector<kBytes>& in, ElementType type) {
    float value[N];
    widen(value, in, type);
#pragma unroll
    for (int i = 0; i < N; ++i) e[kEachColumn ? i : 0].add(value[i]);
  }
  FLEXOPS_DEVICE void settle(ElementType) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].settle();
  }
  FLEXOPS_DEVICE void merge(const Span& other, ElementType) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) e[i].merge(other.e[i]);
  }
  FLEXOPS_DEVICE Span from(int mask) const {
    Span out;
#pragma unroll
    for (int i = 0; i < kSets; ++i) out.e[i] = e[i].from(mask);
    return out;
  }
  FLEXOPS_DEVICE float lowest(int set, ElementType) const { return e[set].lowest; }
  FLEXOPS_DEVICE float highest(int set, ElementType) const { return e[set].highest; }
};

#if FLEXOPS_HAS_MIN2
/// The same for 16-bit numbers, two at a time and without widening them: half the instructions,
/// which is what decides here. NaN wins every comparison; an infinity makes the span infinite.
template <bool kEachColumn>
struct Span<2, kEachColumn> {
  static constexpr int kWords = kEachColumn ? 4 : 1;
  u32 word[2][kWords];  // each column: the lowest; the highest, negated. Else: both in the halves
                        // of word[0][0]

  FLEXOPS_DEVICE void clear(ElementType type) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      word[0][i] = word[1][i] =
          type == ElementType::bf16 ? 0x7f807f80u : 0x7c007c00u;  // infinities
  }
  FLEXOPS_DEVICE void add(const Vector<2>& in, ElementType type) {
    const auto words = bit_cast<Vec<u32, 4>>(in);
    if (type == ElementType::bf16) {  // outside the loops, to stay a branch
      add_as<bf16>(words);
    } else {
      add_as<f16>(words);
    }
  }
  FLEXOPS_DEVICE void settle(ElementType) {}
  FLEXOPS_DEVICE void merge(const Span& other, ElementType type) {
#pragma unroll
    for (int k = 0; k < (kEachColumn ? 2 : 1); ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        word[k][i] = type == ElementType::bf16 ? min2<bf16>(word[k][i], other.word[k][i])
                                               : min2<f16>(word[k][i], other.word[k][i]);
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
  FLEXOPS_DEVICE float lowest(int set, ElementType type) const {
    return half(word[0][set / 2], set % 2, type);
  }
  FLEXOPS_DEVICE float highest(int set, ElementType type) const {
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
      // One after the other: NVRTC 12.6 crashes on min2(word, min2(both)) of bf16 for sm_90.
      word[0][0] = min2<T>(word[0][0], (low & 0xffffu) | high << 16);
      word[0][0] = min2<T>(word[0][0], low >> 16 | (high & 0xffff0000u));
    }
  }
  static FLEXOPS_DEVICE float half(u32 in, int which, ElementType type) {
    const u16 bits = static_cast<u16>(in >> (which * 16));
    return type == ElementType::bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
  }
};
#endif

/// A group's parameters. NaN if the group is broken: its codes must then be set to 0. Codes are
/// made with a scale that its dtype can hold.
struct Group {
  float minimum, scale;

  FLEXOPS_DEVICE Group(float minimum_, float scale_) : minimum(minimum_), scale(scale_) {}
  FLEXOPS_DEVICE Group(float lowest, float highest, const Coding& c) {
    minimum = c.symmetric ? 0.0f : __fadd_rn(lowest, 0.0f);
    const float span =
        c.symmetric ? fmaxf(fabsf(lowest), fabsf(highest)) : __fsub_rn(highest, minimum);
    scale = span == 0.0f ? 1.0f : fminf(__fmul_rn(__frcp_rn(span), c.top), c.most);
    if (!(span <= kFloatMax)) minimum = scale = not_a_number();
  }

  FLEXOPS_DEVICE bool is_broken() const { return scale != scale; }

  /// The code in the low bits, above it rubbish that packing removes.
  FLEXOPS_DEVICE u32 code(float value, float top, float round) const {
    return bit_cast<u32>(__fadd_rn(fminf(__fmul_rn(__fsub_rn(value, minimum), scale), top), round));
  }
  /// The same for 4 bits, where nothing can round to more than the top: a scale that was rounded to
  /// bf16 is at most 1/256 too large.
  FLEXOPS_DEVICE u32 code4(float value, float round) const {
    return bit_cast<u32>(__fadd_rn(__fmul_rn(__fsub_rn(value, minimum), scale), round));
  }
};

/// Eight codes to eight nibbles, the even one of a byte in its high half. Each shifted-in code
/// brings its rubbish, whose sum is a constant.
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

/// A group's pair from another lane.
FLEXOPS_DEVICE Vec<u16, 2> hand(const Vec<u16, 2>& pair, int lane) {
  return bit_cast<Vec<u16, 2>>(shuffle(bit_cast<u32>(pair), lane, kNarrowWarp));
}
FLEXOPS_DEVICE Vec<u32, 2> hand(const Vec<u32, 2>& pair, int lane) {
  return {shuffle(pair.at[0], lane, kNarrowWarp), shuffle(pair.at[1], lane, kNarrowWarp)};
}

/// The codes of the nibbles of words.at[0], a byte each. Of a byte's nibbles the high one comes
/// first.
FLEXOPS_DEVICE Vec<u32, 2> split(const Vec<u32, 2>& words, u32 flip) {
  const u32 even = (words.at[0] >> 4 ^ flip) & 0x0f0f0f0fu,
            odd = (words.at[0] ^ flip) & 0x0f0f0f0fu;
#if FLEXOPS_HIP
  return {(even & 255u) | (odd & 255u) << 8 | (even & 0xff00u) << 8 | (odd & 0xff00u) << 16,
          (even >> 16 & 255u) | (odd >> 16 & 255u) << 8 | (even >> 8 & 0xff0000u) |
              (odd & 0xff000000u)};
#else
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
#endif
}
FLEXOPS_DEVICE Vec<u32, 1> split(const Vec<u32, 1>& words, u32 flip) {
  return {split(Vec<u32, 2>{words.at[0], 0u}, flip).at[0]};
}

/// The value of the code in a byte of a word. No conversion: below the exponent of 2^23, the code
/// is the float 2^23 + code. Symmetric codes come with the sign bit turned over by p.flip, which
/// made them larger by half their range; p.base is 2^23 and that.
FLEXOPS_DEVICE float decode(u32 word, int byte, float step, float minimum, const Params& p) {
#if FLEXOPS_HIP
  const u32 bits = (word >> (8 * byte) & 255u) | 0x4b000000u;
#else
  const u32 bits = __byte_perm(word, 0x4b000000u, 0x7440 + byte);
#endif
  return __fadd_rn(__fmul_rn(bit_cast<float>(bits) - p.base, step), minimum);
}

}  // namespace flexops::quant
