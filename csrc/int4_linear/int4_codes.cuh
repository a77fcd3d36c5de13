// What all kernels of 4-bit weights share: operands of mma.sync and wgmma from packed words, and
// what blocks of a cluster read of each other. The layout of the weight:
// flexops/ops/int4_linear.py.
#pragma once

#include "common/async.cuh"
#include "common/dtypes.cuh"
#include "common/hopper.cuh"

namespace flexops::int4 {

struct Params {
  const void* x;  // [m, k]
  const u8* packed;
  const u16 *scales, *zeros;  // float16 or bfloat16; float16 or null
  const void* bias;
  void* out;  // [m, n]
  int m, n, k;
  int tiles_n, tiles_k, groups;
  int group_shift;  // log2 of the group size
  int cluster;      // blocks that share the columns of one tile of the result
  int token_tiles;
  bool half_scales;  // float16
};

/// Which part of the result a block computes; blocks of a cluster follow each other.
struct Place {
  int rank, token_tile, n_tile;
  /// All columns of rows of W, of the first rows of x.
  FLEXOPS_DEVICE explicit Place(int n_tile_) : rank(0), token_tile(0), n_tile(n_tile_) {}
  FLEXOPS_DEVICE explicit Place(const Params& p) {
    const int block = static_cast<int>(blockIdx.x), rest = block / p.cluster;
    rank = block - rest * p.cluster;
    n_tile = rest / p.token_tiles;
    token_tile = rest - n_tile * p.token_tiles;
  }
};

/// What a code is: a whole number, in groups of 64 or 128 columns or of 32; or MXFP4's number, a
/// sign, two bits of exponent and one of mantissa, in groups of 32.
enum class Codes { whole, whole32, mxfp4 };

/// How a code becomes a number of T: its bits are put into the fraction of a power of two.
template <class T>
struct Code;
template <>
struct Code<bf16> {
  static constexpr u32 kMask = 0x000f000fu, kBits = 0x43004300u, kOnes = 0x3f803f80u;
  static constexpr float kOffset = 128.0f;
  static constexpr int kShift = 0;
  // A whole number of float16 plus 1024, as -kOffset less it.
  static constexpr u32 kMost = 0x57f057f0u, kWholeMask = 0x007f007fu, kWholeBits = 0xc300c300u;
};
template <>
struct Code<f16> {
  static constexpr u32 kMask = 0x00f000f0u, kBits = 0x54005400u, kOnes = 0x3c003c00u;
  static constexpr float kOffset = 64.0f;
  static constexpr int kShift = 4;
  static constexpr u32 kMost = 0x53e053e0u, kWholeMask = 0x03f003f0u, kWholeBits = 0xd400d400u;
};

/// (word & mask) | bits, in one instruction: both constants are in registers.
FLEXOPS_DEVICE u32 and_or(u32 word, u32 mask, u32 bits) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
  return out;
}
/// The left operand of an mma: codes plus kOffset.
template <class T>
FLEXOPS_DEVICE void widen_codes(u32 (&left)[4], u32 word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int by = 4 * i - Code<T>::kShift;
    left[i] = and_or(by >= 0 ? word >> by : word << -by, Code<T>::kMask, Code<T>::kBits);
  }
}

/// a * b + c of each half.
template <class T>
FLEXOPS_DEVICE u32 fma2(u32 a, u32 b, u32 c);
/// acc[16 x 8] += left[16 x 16] right[16 x 8].
template <class T>
FLEXOPS_DEVICE void mma(float (&acc)[4], const u32 (&left)[4], u32 right0, u32 right1);
#define FLEXOPS_DEFINE_INT4(T, type)                                                         \
  template <>                                                                                \
  FLEXOPS_DEVICE u32 fma2<T>(u32 a, u32 b, u32 c) {                                          \
    u32 out;                                                                                 \
    asm("fma.rn." type "x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));           \
    return out;                                                                              \
  }                                                                                          \
  template <>                                                                                \
  FLEXOPS_DEVICE void mma<T>(float (&acc)[4], const u32(&left)[4], u32 right0, u32 right1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                               \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                             \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1)); \
  }
FLEXOPS_DEFINE_INT4(bf16, "bf16")
FLEXOPS_DEFINE_INT4(f16, "f16")
#undef FLEXOPS_DEFINE_INT4

/// The left operand of an mma of MXFP4's numbers: their bits, as a subnormal number has them, times
/// the power of two that is between both exponents.
template <class T>
FLEXOPS_DEVICE void widen_mxfp4(u32 (&left)[4], u32 word) {
  constexpr bool kHalf = Code<T>::kShift != 0;
  constexpr int kTo = kHalf ? 9 : 6;
  constexpr u32 kSign = 0x80008000u, kRest = kHalf ? 0x0e000e00u : 0x01c001c0u,
                kPower = kHalf ? 0x74007400u : 0x7e807e80u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int by = 4 * i - kTo;
    const u32 sign = word << (12 - 4 * i) & kSign;
    left[i] = fma2<T>(and_or(by >= 0 ? word >> by : word << -by, kRest, sign), kPower,
                      kSign);  // -0 is what adds nothing
  }
}

/// The scales or zero points of rows g and g + 8 (half 0 and 1), float16 or bfloat16.
FLEXOPS_DEVICE float number_of(u32 word, int half, bool half_precision) {
  return half_precision ? half_of<f16>(word, half) : half_of<bf16>(word, half);
}

/// Dequantizes codes of rows g and g + 8: less the whole part of the zero point they are exact;
/// then they are scaled and rounded once.
template <class T, bool kMxfp4 = false>
struct Dequantizer {
  u32 whole[2], factor[2], rest[2];  // each twice in a word

  FLEXOPS_DEVICE Dequantizer(u32 scales, u32 zeros, bool half_scales) {
    u32 near, part;
    asm("{\n.reg .b32 low, high, sum;\nmax.f16x2 low, %2, %5;\nmin.f16x2 high, low, %3;\n"
        "add.rn.f16x2 %0, high, %4;\nsub.rn.f16x2 sum, %0, %4;\nsub.rn.f16x2 %1, sum, %2;\n}"
        : "=&r"(near), "=r"(part)
        : "r"(zeros), "r"(Code<T>::kMost), "r"(0x64006400u), "r"(0u));  // 1024
    near = and_or(near << Code<T>::kShift, Code<T>::kWholeMask, Code<T>::kWholeBits);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = number_of(scales, i, half_scales), less = half_of<f16>(part, i) * scale;
      whole[i] = __byte_perm(near, near, i ? 0x3232 : 0x1010);
      factor[i] = pack2<T>(scale, scale), rest[i] = pack2<T>(less, less);
    }
  }
  /// The left operand of four columns' mma.
  FLEXOPS_DEVICE void widen(u32* to, u32 word) const {
    u32 left[4];
    widen_codes<T>(left, word);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = fma2<T>(fma2<T>(left[i], Code<T>::kOnes, whole[i % 2]), factor[i % 2], rest[i % 2]);
  }
};
/// Of MXFP4 scales are powers of two: numbers are exact.
template <class T>
struct Dequantizer<T, true> {
  u32 factor[2];

  FLEXOPS_DEVICE Dequantizer(u32 scales, u32, bool half_scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = number_of(scales, i, half_scales);
      factor[i] = pack2<T>(scale, scale);
    }
  }
  FLEXOPS_DEVICE void widen(u32* to, u32 word) const {
    u32 left[4];
    widen_mxfp4<T>(left, word);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = fma2<T>(left[i], factor[i % 2], 0x80008000u);
  }
};
inline constexpr u32 kEight = 0x48004800u;  // the zero points of a weight without any

using hopper::cluster_leave;
using hopper::cluster_load;
using hopper::cluster_sync;

/// Writes the results of a row of x and four rows of W, from `n` on, with the bias.
template <class T>
FLEXOPS_DEVICE void write_quad(const Params& p, int token, int n, const float4& sum) {
  float total[4] = {sum.x, sum.y, sum.z, sum.w};
  T* const out = static_cast<T*>(p.out) + static_cast<i64>(token) * p.n + n;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (p.bias && n + j < p.n) total[j] += to_float(static_cast<const T*>(p.bias)[n + j]);
  }
  if (n + 4 <= p.n && p.n % 4 == 0) {
    *reinterpret_cast<uint2*>(out) = {pack2<T>(total[0], total[1]), pack2<T>(total[2], total[3])};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (n + j < p.n) out[j] = from_float<T>(total[j]);
  }
}

/// Adds the parts of a sum, `depth` in each of a cluster's blocks, in a fixed order, and writes
/// them with the bias. `parts`: [depth][tokens][stride], rows of W beside each other. `tokens`,
/// `lines`: the block's, as the threads that call it.
template <class T>
FLEXOPS_DEVICE void add_sums(const Params& p, int rank, int cluster, const float* parts, int depth,
                             int stride, int tokens, int lines, int first_token, int first_line,
                             int threads) {
  const int quads = lines / 4, present = min(p.m - first_token, tokens);
  for (int i = static_cast<int>(threadIdx.x) + threads * rank; i < present * quads;
       i += threads * cluster) {
    const int token = i / quads, line = i % quads * 4, n = first_line + line;
    float total[4] = {};
    for (int d = 0; d < depth; ++d) {
      const float4* const from =
          reinterpret_cast<const float4*>(parts + (d * tokens + token) * stride + line);
      float4 part[hopper::kMostClusterBlocks];
#pragma unroll
      for (int other = 0; other < hopper::kMostClusterBlocks; ++other) {
        if (other < cluster) part[other] = cluster > 1 ? cluster_load(from, other) : *from;
      }
#pragma unroll
      for (int other = 0; other < hopper::kMostClusterBlocks; ++other) {
        if (other >= cluster) break;
        total[0] += part[other].x, total[1] += part[other].y;
        total[2] += part[other].z, total[3] += part[other].w;
      }
    }
    write_quad<T>(p, first_token + token, n, {total[0], total[1], total[2], total[3]});
  }
}
/// The same once all blocks of the cluster have stored theirs; none goes on before all have read.
template <class T, class... Rest>
FLEXOPS_DEVICE void write_sums(const Params& p, int rank, Rest... rest) {
  if (p.cluster > 1) cluster_sync();
  add_sums<T>(p, rank, p.cluster, rest...);
  if (p.cluster > 1) cluster_leave();
}

}  // namespace flexops::int4
