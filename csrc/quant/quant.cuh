// Group-wise quantization's kernels. Formulas and format: flexops/ops/quant.py, which they
// reproduce bit for bit: so every float operation that decides a result is an explicit, unfused
// one.
//
// Memory decides: bf16 to 4 bits in groups of 64 reads 2 and writes 0.56 bytes an element. So each
// element is read once, 16 bytes at a time, its group stays in registers, and a thread that
// quantizes has several loads in flight. Results are marked as the first to be evicted; inputs are
// not: among the lines that other kernels leave in the cache, lines so marked have little room,
// which costs 5 %. Codes that are read bypass the first-level cache (see common/once.cuh), and
// blocks that dequantize ask the second-level one for what others will read some microseconds
// later: 2 to 3 %. Three ways:
//   rows      groups along contiguous memory, of whole 16-byte vectors: 1 to 32 neighbouring lanes
//             hold a group's
//   columns   groups across contiguous rows (FlexGen's weights along dim 0): a lane holds 16 bytes
//             of a few rows
//   any       the rest: 1 to 32 lanes or a whole block hold a group's elements in pairs, or go over
//             a long group twice
// Kernels are instantiated for each type of elements (one for both 16-bit types is 15 % slower
// along columns), except `any`. All else is uniform over the grid and known at run time: that costs
// next to nothing.
#pragma once

#include "common/device.cuh"
#include "common/divisor.cuh"
#include "common/elements.cuh"
#include "common/once.cuh"

namespace flexops::quant {

// Tuned on one H200.

inline constexpr Cache kLoads = Cache::normal, kStores = Cache::streaming;
inline constexpr int kRowThreads = 128;
inline constexpr int kLogVectors = 2;
inline constexpr int kVectors = 1 << kLogVectors;  // rows: vectors of a lane
inline constexpr int kColumnThreads = 64;
inline constexpr int kColumnRows = 16;  // columns: rows of a group that one lane holds to quantize
inline constexpr int kColumnSlots =
    128 / kColumnRows;  // lanes that share a column's group, at most
inline constexpr int kPartThreads = 128;
inline constexpr int kPartCodes = 4;        // columns: rows of bytes that one lane dequantizes
inline constexpr int kDecodeThreads = 256;  // rows, dequantizing
inline constexpr int kAnyThreads = 256;
inline constexpr int kAnyHeld = 16;  // any: elements that a lane holds, in pairs
inline constexpr int kNarrowWarp =
    32;  // lanes that share a group; a wavefront of 64 holds two such
inline constexpr i64 kRowsAhead = 2 << 20,
                     kColumnsAhead =
                         4 << 20;  // bytes of codes: so far ahead of their use are they asked for
inline constexpr int kLine = 128;  // bytes of a cache line

/// QuantLayout as kernels take it, with what the launcher has worked out.
struct Params {
  const void* x;  // quantize: the input; dequantize: the codes
  void* out;      // quantize: the codes; dequantize: the result
  void* scales;   // read or written
  i64 outer, length, inner;
  i64 outer_stride, length_stride, inner_stride;
  i64 groups, group_size, group_bytes;
  i64 total;  // vectors (rows; idle lanes' too), a lane's parts of columns (columns), groups (any)
  Divisor chunks;                    // columns: vectors in `inner`
  Divisor parts;                     // columns, dequantizing: of kPartCodes rows of a group's bytes
  Divisor group_count, inner_count;  // `groups` and `inner`, to divide 31 bits by
  int lanes, log_lanes;              // that share a group, a power of two (any: or a whole block)
  int used;                          // rows: vectors a group; what lanes there are beyond them idle
  int bits;
  int pair;  // entries a group in scales: 2, or 1 if symmetric
  ElementType type, scale_type;
  bool flat;    // rows: vector v is at 16 * v: no gaps, idle lanes and short groups. Else `total`
                // fits 31 bits, for quick divisions
  bool paired;  // any: two neighbours, and their codes, can be read and written at once
  // To dequantize:
  u32 flip;                            // see decode()
  float base;                          // see decode()
  int log_pair;                        // rows: of the bytes of a group's entries in scales
  int codes_of_block, pairs_of_block;  // rows: bytes that a block reads, of codes and of scales
  i64 code_bytes, pair_bytes;  // of all codes and of all scales: nothing is asked for beyond
  i64 pairs_ahead;             // rows: kRowsAhead for scales
};

// ---- numbers ----

inline constexpr float kFloatMax = 3.40282347e38f;
// Adding 1.5 * 2^23 rounds to an integer, half to even, whose low bits are the sum's low bits.
inline constexpr float kRound = 12582912.0f;
inline constexpr u32 kRoundBits = 0x4b400000u;

FLEXOPS_DEVICE float largest_of(ElementType type) {
  return bit_cast<float>(type == ElementType::f16    ? 0x477fe000u
                         : type == ElementType::bf16 ? 0x7f7f0000u
                                                     : 0x7f7fffffu);
}

/// An element's bits. Only the 16-bit ones have to look at the type.
template <int kBytes>
using Bits = typename detail::Word<kBytes>::type;

template <ElementType kType>
inline constexpr int kSize = kType == ElementType::f32 ? 4 : 2;

template <int kBytes>
inline constexpr int kVector = 16 / kBytes;

template <int kBytes>
using Vector = Vec<Bits<kBytes>, kVector<kBytes>>;

template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<u32, N>& in, ElementType) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = bit_cast<float>(in.at[i]);
}
template <int N>
FLEXOPS_DEVICE void widen(float (&out)[N], const Vec<u16, N>& in, ElementType type) {
  const auto words = bit_cast<Vec<u32, N / 2>>(in);
  if (type == ElementType::bf16) {  // outside the loop, to stay a branch
#pragma unroll
    for (int i = 0; i < N; ++i)
      out[i] = bit_cast<float>(i % 2 ? words.at[i / 2] & 0xffff0000u : words.at[i / 2] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      out[i] = to_float(f16{static_cast<u16>(words.at[i / 2] >> (i % 2 * 16))});
  }
}

template <int N>
FLEXOPS_DEVICE Vec<u32, N> narrow(const float (&in)[N], ElementType, u32) {
  Vec<u32, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.at[i] = bit_cast<u32>(in[i]);
  return out;
}
template <int N>
FLEXOPS_DEVICE Vec<u16, N> narrow(const float (&in)[N], ElementType type, u16) {
  Vec<u32, N / 2> words;
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    words.at[i] = type == ElementType::bf16 ? pack2<bf16>(in[2 * i], in[2 * i + 1])
                                            : pack2<f16>(in[2 * i], in[2 * i + 1]);
  return bit_cast<Vec<u16, N>>(words);
}

/// Quotient and remainder. `quick` is of the same number: much faster, and for all but very large
/// tensors.
FLEXOPS_DEVICE i64 divide(i64 value, i64 by, const Divisor& quick, i64& remainder) {
  if (value >> 31 == 0) {
    u32 rest;
    const u32 quotient = flexops::divide(static_cast<u32>(value), quick, rest);
    remainder = rest;
    return quotient;
  }
  const i64 quotient = value / by;
  remainder = value - quotient * by;
  return quotient;
}

}  // namespace flexops::quant
