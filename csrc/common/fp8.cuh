// 8-bit floating-point numbers on the device, as bits: no cuda_fp8.h, so they exist wherever the
// rest does. The OCP formats, which torch calls float8_e4m3fn and float8_e5m2 (not AMD's fnuz
// ones).
//
//   e4m3 y = from_float<e4m3>(x);  // to nearest even; beyond the largest (infinities, too) the
//                                  // largest; NaN: 0x7f
//   float x = to_float(y);
//   u32 word = pack4<e4m3>(a, b, c, d);  // four neighbours, the first in the low byte
//   unpack4<e4m3>(out, word);            // float out[4]; from sm_89 on two instructions each
//   float most = kLargest<e4m3>;         // 448; e5m2: 57344; i8: 127
//
// pack4, unpack4 and kLargest know i8 as well: rounded to nearest even, clamped to [-127, 127]; NaN
// becomes any of these.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"

#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FLEXOPS_HAS_FP8 1
#else
#define FLEXOPS_HAS_FP8 0
#endif

namespace flexops {

struct e4m3 {
  u8 bits;
};
struct e5m2 {
  u8 bits;
};

template <typename T>
inline constexpr float kLargest = 127.0f;
template <>
inline constexpr float kLargest<e4m3> = 448.0f;
template <>
inline constexpr float kLargest<e5m2> = 57344.0f;

namespace detail {
/// The formats as float32 sees them.
template <typename T>
struct Fp8;
template <>
struct Fp8<e4m3> {
  static constexpr u32 kShift = 20;    // fraction bits that float32 has more
  static constexpr u32 kRebias = 120;  // what float32 adds to the exponent
  static constexpr u32 kLargestBits = 0x43e00000u, kLeastNormal = 0x3c800000u;
  static constexpr float kSubnormal = 16384.0f;  // its last place is worth the least subnormal
};
template <>
struct Fp8<e5m2> {
  static constexpr u32 kShift = 21, kRebias = 112;
  static constexpr u32 kLargestBits = 0x47600000u, kLeastNormal = 0x38800000u;
  static constexpr float kSubnormal = 128.0f;
};
}  // namespace detail

/// The bits of the nearest fp8 number, by integer arithmetic.
template <typename T>
FLEXOPS_DEVICE u32 fp8_bits(float value) {
  using F = detail::Fp8<T>;
  const u32 bits = bit_cast<u32>(value), sign = bits >> 24 & 0x80u;
  u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude > F::kLargestBits) magnitude = F::kLargestBits;
  if (magnitude < F::kLeastNormal) {  // the float adder rounds
    const float adder = F::kSubnormal;
    return sign |
           (bit_cast<u32>(__fadd_rn(bit_cast<float>(magnitude), adder)) - bit_cast<u32>(adder));
  }
  const u32 half = (1u << (F::kShift - 1)) - 1;
  return sign |
         (magnitude - (F::kRebias << 23) + half + (magnitude >> F::kShift & 1u)) >> F::kShift;
}

FLEXOPS_DEVICE float to_float(e5m2 value) {
  return to_float(f16{static_cast<u16>(value.bits << 8)});
}
FLEXOPS_DEVICE float to_float(e4m3 value) {
  const u32 magnitude = value.bits & 0x7fu, sign = static_cast<u32>(value.bits & 0x80u) << 24;
  const u32 small =
      magnitude < 8u ? 1u : 0u;  // subnormal: made normal, and what that adds taken off again
  const float base = small ? 0.015625f : 0.0f;
  const float out = bit_cast<float>((magnitude << 20) + ((120u + small) << 23)) - base;
  return bit_cast<float>(magnitude == 0x7fu ? 0x7fc00000u : sign | bit_cast<u32>(out));
}

#if FLEXOPS_HAS_FP8
#define FLEXOPS_FP8_PAIR(T, instruction)                               \
  /* Two numbers, the first in the low byte. */                        \
  template <>                                                          \
  FLEXOPS_DEVICE u16 fp8_pair<T>(float low, float high) {              \
    u16 out;                                                           \
    asm(instruction " %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low)); \
    return out;                                                        \
  }
template <typename T>
FLEXOPS_DEVICE u16 fp8_pair(float low, float high);
FLEXOPS_FP8_PAIR(e4m3, "cvt.rn.satfinite.e4m3x2.f32")
FLEXOPS_FP8_PAIR(e5m2, "cvt.rn.satfinite.e5m2x2.f32")
#undef FLEXOPS_FP8_PAIR
#else
template <typename T>
FLEXOPS_DEVICE u16 fp8_pair(float low, float high) {
  return static_cast<u16>(fp8_bits<T>(low) | fp8_bits<T>(high) << 8);
}
#endif

template <>
FLEXOPS_DEVICE e4m3 from_float<e4m3>(float value) {
  return {static_cast<u8>(fp8_pair<e4m3>(value, 0.0f))};
}
template <>
FLEXOPS_DEVICE e5m2 from_float<e5m2>(float value) {
  return {static_cast<u8>(fp8_pair<e5m2>(value, 0.0f))};
}

template <typename T>
FLEXOPS_DEVICE u32 pack4(float a, float b, float c, float d) {
  return fp8_pair<T>(a, b) | static_cast<u32>(fp8_pair<T>(c, d)) << 16;
}
/// The nearest whole number, as two's complement in the low byte, with rubbish above it.
FLEXOPS_DEVICE u32 i8_bits(float value) {
  return bit_cast<u32>(
      __fadd_rn(fminf(fmaxf(value, -127.0f), 127.0f), 12582912.0f));  // adding 1.5 * 2^23 rounds
}
template <>
FLEXOPS_DEVICE u32 pack4<i8>(float a, float b, float c, float d) {
  return pack_bytes(i8_bits(a), i8_bits(b), i8_bits(c), i8_bits(d));
}
/// pack4<i8> for numbers that round to no more than 127 and no less than -127.
FLEXOPS_DEVICE u32 pack4_within(float a, float b, float c, float d) {
  constexpr float kRound = 12582912.0f;
  return pack_bytes(bit_cast<u32>(__fadd_rn(a, kRound)), bit_cast<u32>(__fadd_rn(b, kRound)),
                    bit_cast<u32>(__fadd_rn(c, kRound)), bit_cast<u32>(__fadd_rn(d, kRound)));
}
template <>
FLEXOPS_DEVICE i8 from_float<i8>(float value) {
  return static_cast<i8>(i8_bits(value) & 255u);
}
FLEXOPS_DEVICE float to_float(i8 value) { return static_cast<float>(value); }

template <typename T>
FLEXOPS_DEVICE void unpack4(float (&out)[4], u32 word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = to_float(bit_cast<T>(static_cast<u8>(word >> (8 * i))));
}
/// No conversions: with 2^23's exponent above it, a byte is the float 2^23 + byte.
template <>
FLEXOPS_DEVICE void unpack4<i8>(float (&out)[4], u32 word) {
  const u32 positive = word ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = __fsub_rn(bit_cast<float>((positive >> (8 * i) & 255u) | 0x4b000000u), 8388736.0f);
}
/// An e5m2 number is the upper half of the f16 of the same value.
template <>
FLEXOPS_DEVICE void unpack4<e5m2>(float (&out)[4], u32 word) {
  out[0] = to_float(f16{static_cast<u16>(word << 8)});
  out[1] = to_float(f16{static_cast<u16>(word & 0xff00u)});
  out[2] = to_float(f16{static_cast<u16>(word >> 8 & 0xff00u)});
  out[3] = to_float(f16{static_cast<u16>(word >> 16 & 0xff00u)});
}
#if FLEXOPS_HAS_FP8
template <>
FLEXOPS_DEVICE void unpack4<e4m3>(float (&out)[4], u32 word) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(word >> (16 * i))));
    out[2 * i] = to_float(f16{static_cast<u16>(halves)});
    out[2 * i + 1] = to_float(f16{static_cast<u16>(halves >> 16)});
  }
}
#endif

}  // namespace flexops
