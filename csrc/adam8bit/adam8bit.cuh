// Adam with 8-bit states: a warp steps a block of 256 elements, whose averages share a scale each.
// 16 bytes an element move, half of Adam's, so that arithmetic counts, too: no conversions between
// integers and floats (a quarter of the speed of an addition), approximate roots and quotients
// (what they lack is far below what 8 bits lack), and random numbers by one hash for both averages.
//
// exp_avg = scale * sign(c) (c / 127)^2, exp_avg_sq = scale * (c / 255)^4, rounded up or down at
// random, so that it is right on average.
#pragma once

#include "adam/adam_numbers.cuh"
#include "common/multi_tensor.cuh"

namespace flexops::adam8bit {

using adam::approximate_inverse;
using adam::approximate_sqrt;
using multi::Data;

// Tuned on one H200.

inline constexpr int kBlock = 256;                                    // elements that share a scale
inline constexpr int kVectors = kBlock / kWarpSize / multi::kVector;  // of a lane
inline constexpr int kLaneElements = kVectors * multi::kVector;
inline constexpr float kMost1 = 127.0f * 127.0f, kMost2 = 255.0f * 255.0f * 255.0f * 255.0f;
inline constexpr float kLess =
    1.0f - 1.0f / (1 << 23);  // so that rounding never makes a power larger than the most

template <Data data>
struct Rule {
  enum { kParam, kGrad, kExpAvg, kExpAvgSq, kExpAvgScale, kExpAvgSqScale };
  enum { kStep };
  static constexpr Data kData = data;
  static constexpr int kThreads = 128, kUnroll = 2;
  static constexpr int kIterations = data == Data::f32 ? 1 : 2,
                       kMinBlocks = data == Data::bf16 ? 8 : 7;
  static constexpr int kArrays = 6, kExtras = 1, kSums = 0, kUnscaled = kGrad;
  static constexpr u32 kTyped = 0b11, kOptional = 0;
  static constexpr bool kReverse = false;

  using Shared = adam::Numbers;
};

/// A well-mixed word (Wellons, "Prospecting for Hash Functions", lowbias32).
FLEXOPS_DEVICE u32 hash(u32 x) {
  x = (x ^ x >> 16) * 0x21f0aaadu;
  x = (x ^ x >> 15) * 0x735a2d97u;
  return x ^ x >> 15;
}

/// The random word of an element: its place and the step's hash are mixed by half of that, which is
/// enough to tell neighbours apart.
FLEXOPS_DEVICE u32 random_word(u32 seed, u32 place) {
  const u32 x = (seed + place) * 0x21f0aaadu;
  return (x ^ x >> 16) * 0x735a2d97u;
}

/// What every element of a tensor shares in this step.
struct Factors : adam::Factors {
  bool ready = false;
  float eps, unscale;
  u32 seed;

  FLEXOPS_DEVICE void find(const adam::Numbers& n, float step) {
    adam::Factors::find(n, step);
    ready = true;
    eps = fmaxf(n.eps, 1e-30f);
    unscale = 1.0f / grad_scale;
    seed = hash(static_cast<u32>(step));
  }
};

inline constexpr float kMagic =
    12582912.0f;  // 1.5 * 2^23: x + kMagic has x, as an integer, in its low bits

/// Byte i of four, less `zero`, as a float.
template <int zero>
FLEXOPS_DEVICE float byte_to_float(u32 bytes, int i) {
  return bit_cast<float>(__byte_perm(bytes, 0x4b000000u, 0x7440 | i)) - (8388608.0f + zero);
}
/// The lower (0) or upper (1) half of a word as a float.
FLEXOPS_DEVICE float half_to_float(u32 word, int i) {
  return bit_cast<float>(__byte_perm(word, 0x4b000000u, i ? 0x7432 : 0x7410)) - 8388608.0f;
}

/// kMagic + floor(x), for x in [0, 2^22).
FLEXOPS_DEVICE float floor_with_magic(float x) {
#if FLEXOPS_HIP
  return floorf(x) + kMagic;
#else
  return __fadd_rd(x, kMagic);
#endif
}

// The codes of an element, in the low bytes of two words. factor: the largest power over the
// block's scale; random: of 16 bits. With c the lower of two codes, p(c) its power and r random in
// [0, 1), the code is the upper one if power - p(c) > r (p(c + 1) - p(c)).
inline constexpr float kBit = 1.0f / 65536.0f;

FLEXOPS_DEVICE u32 encode1(float exp_avg, float factor, float random) {
  const float power = fabsf(exp_avg) * factor,
              low = floor_with_magic(approximate_sqrt(power)) - kMagic;
  const float gap = low * (2.0f * kBit) + kBit,
              code = power - low * low > random * gap ? low + 1.0f : low;
  return bit_cast<u32>(copysignf(code, exp_avg) + kMagic);
}
FLEXOPS_DEVICE u32 encode2(float exp_avg_sq, float factor, float random) {
  const float power = fmaxf(exp_avg_sq * factor, 1.0f),
              magic = floor_with_magic(approximate_sqrt(approximate_sqrt(power)));
  const float low = magic - kMagic, low2 = low * low;
  const float gap = ((low * (4.0f * kBit) + 6.0f * kBit) * low + 4.0f * kBit) * low + kBit;
  return bit_cast<u32>(magic) + (power - low2 * low2 > random * gap ? 1 : 0);
}

/// A lane's fragment of a block: kVectors vectors that lie kVector * kWarpSize apart or, if the
/// block is not whole or not aligned, single elements that lie kWarpSize apart.
template <Data data, bool whole>
struct Fragment {
  using R = Rule<data>;
  float param[kLaneElements], grad[kLaneElements];
  u32 codes1[kVectors], codes2[kVectors];

  static FLEXOPS_DEVICE int place(int i) {
    const int lane = threadIdx.x % kWarpSize;
    return whole ? (i / multi::kVector * kWarpSize + lane) * multi::kVector + i % multi::kVector
                 : i * kWarpSize + lane;
  }

  FLEXOPS_DEVICE void read(const multi::Pointers<R>& p, i64 at, int count) {
    read_real(param, p, R::kParam, at, count);
    read_real(grad, p, R::kGrad, at, count);
    read_codes(codes1, p.array[R::kExpAvg] + at, count);
    read_codes(codes2, p.array[R::kExpAvgSq] + at, count);
  }

  /// 16-bit elements stay as they are until widen() (see multi_tensor.cuh).
  static FLEXOPS_DEVICE void read_real(float (&out)[kLaneElements], const multi::Pointers<R>& p,
                                       int k, i64 at, int count) {
    if constexpr (whole) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const i64 from = at + place(v * multi::kVector);
        if (p.is_float(k)) {
          const auto four =
              load<Cache::normal>(reinterpret_cast<const Vec<float, 4>*>(p.array[k] + from * 4));
#pragma unroll
          for (int i = 0; i < 4; ++i) out[v * 4 + i] = four.at[i];
        } else {
          const auto two =
              load<Cache::normal>(reinterpret_cast<const Vec<float, 2>*>(p.array[k] + from * 2));
          out[v * 4] = two.at[0];
          out[v * 4 + 1] = two.at[1];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        out[i] = 0.0f;
        if (place(i) >= count) continue;
        const char* base = p.array[k];
        if (p.is_float(k)) {
          out[i] = reinterpret_cast<const float*>(base)[at + place(i)];
        } else {
          out[i] =
              bit_cast<float>(static_cast<u32>(reinterpret_cast<const u16*>(base)[at + place(i)]));
        }
      }
    }
  }

  static FLEXOPS_DEVICE void widen(float (&inout)[kLaneElements], const multi::Pointers<R>& p,
                                   int k) {
    if (p.is_float(k)) return;
    if (p.is_bf16(k)) {
      widen_halves<bf16>(inout);
    } else {
      widen_halves<f16>(inout);
    }
  }
  template <typename T>
  static FLEXOPS_DEVICE void widen_halves(float (&inout)[kLaneElements]) {
#pragma unroll
    for (int i = kLaneElements - 1; i >= 0; --i)
      inout[i] = whole ? half_of<T>(bit_cast<u32>(inout[i / 4 * 4 + i % 4 / 2]), i % 2)
                       : half_of<T>(bit_cast<u32>(inout[i]), 0);
  }

  static FLEXOPS_DEVICE void write_real(const multi::Pointers<R>& p, int k, i64 at, int count,
                                        const float (&in)[kLaneElements]) {
    if (p.is_float(k)) {
      write_as<float>(p.array[k], at, count, in);
    } else if (p.is_bf16(k)) {
      write_as<bf16>(p.array[k], at, count, in);
    } else {
      write_as<f16>(p.array[k], at, count, in);
    }
  }
  template <typename T>
  static FLEXOPS_DEVICE void write_as(char* base, i64 at, int count,
                                      const float (&in)[kLaneElements]) {
    if constexpr (whole) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        store<T>(base, at + place(v * 4), {in[v * 4], in[v * 4 + 1], in[v * 4 + 2], in[v * 4 + 3]});
    } else {
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        if (place(i) < count) reinterpret_cast<T*>(base)[at + place(i)] = from_float<T>(in[i]);
      }
    }
  }

  static FLEXOPS_DEVICE void read_codes(u32 (&out)[kVectors], const char* codes, int count) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (whole) {
        out[v] = load<Cache::normal>(reinterpret_cast<const u32*>(codes + place(v * 4)));
      } else {
        out[v] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (place(v * 4 + i) < count)
            out[v] |= static_cast<u32>(static_cast<u8>(codes[place(v * 4 + i)])) << (8 * i);
        }
      }
    }
  }

  static FLEXOPS_DEVICE void write_codes(char* codes, int count, const u32 (&in)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (whole) {
        store<Cache::normal>(reinterpret_cast<u32*>(codes + place(v * 4)), in[v]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (place(v * 4 + i) < count)
            codes[place(v * 4 + i)] = static_cast<char>(in[v] >> (8 * i));
        }
      }
    }
  }
};

FLEXOPS_DEVICE float scale_factor(float scale, float most) {
  return scale > 0.0f && scale < bit_cast<float>(0x7f800000u) ? fminf(most * kLess / scale, 3e38f)
                                                              : 0.0f;
}

/// A warp's step of `count` elements from `at` on, a multiple of the block. Makes the factors, if
/// they are not there yet, once its loads are on their way.
template <Data data, bool whole>
FLEXOPS_DEVICE void step_block(const typename Rule<data>::Shared& s,
                               const multi::Pointers<Rule<data>>& p, const float* step, Factors& f,
                               i64 at, int count) {
  using R = Rule<data>;
  Fragment<data, whole> x;
  float* const scale1 = reinterpret_cast<float*>(p.array[R::kExpAvgScale]) + at / kBlock;
  float* const scale2 = reinterpret_cast<float*>(p.array[R::kExpAvgSqScale]) + at / kBlock;
  x.read(p, at, count);
  const float unit1 = *scale1 * (1.0f / kMost1), unit2 = *scale2 * (1.0f / kMost2);
  if (!f.ready) f.find(s, *step);
  x.widen(x.param, p, R::kParam);
  x.widen(x.grad, p, R::kGrad);
  const float sign = f.sign * f.unscale, kept1 = unit1 * s.beta1, kept2 = unit2 * s.beta2;
  float exp_avg[kLaneElements], exp_avg_sq[kLaneElements];
  u32 most1 = 0,
      most2 = 0;  // bits of numbers that are not negative are in their order, with NaN on top
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const float root1 = byte_to_float<128>(x.codes1[i / 4] ^ 0x80808080u, i % 4),
                root2 = byte_to_float<0>(x.codes2[i / 4], i % 4);
    const float g = x.grad[i] * sign + x.param[i] * f.l2, square2 = root2 * root2;
    exp_avg[i] = root1 * fabsf(root1) * kept1 + g * s.one_minus_beta1;
    exp_avg_sq[i] = square2 * square2 * kept2 + g * s.one_minus_beta2 * g;
    x.param[i] -= x.param[i] * f.decay;
    x.param[i] -= f.step_size * exp_avg[i] *
                  approximate_inverse(approximate_sqrt(exp_avg_sq[i]) * f.inverse_bias2 + f.eps);
    if (whole || Fragment<data, whole>::place(i) < count) {
      most1 = Max{}(most1, bit_cast<u32>(exp_avg[i]) & 0x7fffffffu);
      most2 = Max{}(most2, bit_cast<u32>(exp_avg_sq[i]) & 0x7fffffffu);
    }
  }
  x.write_real(p, R::kParam, at, count, x.param);
  if (s.grad_scale) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) x.grad[i] *= f.unscale;
    x.write_real(p, R::kGrad, at, count, x.grad);
  }
  const float new_scale1 = bit_cast<float>(warp_reduce(most1, Max{})),
              new_scale2 = bit_cast<float>(warp_reduce(most2, Max{}));
  const float factor1 = scale_factor(new_scale1, kMost1),
              factor2 = scale_factor(new_scale2, kMost2);
  const u32 seed = f.seed + static_cast<u32>(at) + static_cast<u32>(at >> 32) * 0x9e3779b9u;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    u32 word1[4], word2[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = v * 4 + i;
      const u32 random = random_word(seed, Fragment<data, whole>::place(n));
      word1[i] = encode1(exp_avg[n], factor1, half_to_float(random, 0));
      word2[i] = encode2(exp_avg_sq[n], factor2, half_to_float(random, 1));
    }
    x.codes1[v] = pack_bytes(word1[0], word1[1], word1[2], word1[3]);
    x.codes2[v] = pack_bytes(word2[0], word2[1], word2[2], word2[3]);
  }
  x.write_codes(p.array[R::kExpAvg] + at, count, x.codes1);
  x.write_codes(p.array[R::kExpAvgSq] + at, count, x.codes2);
  if (threadIdx.x % kWarpSize == 0) {
    *scale1 = new_scale1;
    *scale2 = new_scale2;
  }
}

template <Data data>
__global__ void __launch_bounds__(Rule<data>::kThreads, Rule<data>::kMinBlocks)
    adam8bit_kernel(const FLEXOPS_GRID_CONSTANT multi::Launch<Rule<data>> launch) {
  using R = Rule<data>;
  constexpr int kChunk = multi::kChunk<R>;
  static_assert(kChunk % (kBlock * (R::kThreads / kWarpSize)) == 0);
  const auto& s = launch.shared;
  if (s.found_inf && *s.found_inf != 0.0f) return;
  // Find the block's chunk of a tensor.
  const int t = multi::find_tensor(launch, blockIdx.x);
  const multi::Pointers<R> p(launch.row[t]);
  const i64 begin = static_cast<i64>(blockIdx.x - launch.first_chunk[t]) * kChunk,
            left = p.numel - begin;
  const int size = static_cast<int>(left < kChunk ? left : kChunk);
  const float* step = launch.row[t].extra[R::kStep];
  Factors f;
  // A warp steps a block of kBlock elements, which share their scales, at a time.
  for (int at = static_cast<int>(threadIdx.x) / kWarpSize * kBlock; at < size;
       at += R::kThreads / kWarpSize * kBlock) {
    if (size - at >= kBlock && (p.flags & multi::kAligned)) {
      step_block<data, true>(s, p, step, f, begin + at, kBlock);
    } else {
      step_block<data, false>(s, p, step, f, begin + at, size - at < kBlock ? size - at : kBlock);
    }
  }
}

}  // namespace flexops::adam8bit
