// bf16 and fp16 on the device, as bits: no cuda_bf16.h (NVRTC has it not at hand) and no hip_bf16.h
// (ROCm 5.2 has none).
//
//   float x = to_float(value);          // from f16, bf16, float
//   bf16 y = from_float<bf16>(x);       // rounds to nearest even; NaN stays NaN, overflow becomes
//   infinity
#pragma once

#include "common/device.cuh"

namespace flexops {

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

FLEXOPS_DEVICE float to_float(float value) { return value; }
FLEXOPS_DEVICE float to_float(bf16 value) {
  return bit_cast<float>(static_cast<u32>(value.bits) << 16);
}
FLEXOPS_DEVICE float to_float(f16 value) {
#if FLEXOPS_HIP
  return static_cast<float>(bit_cast<_Float16>(value.bits));
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
#endif
}

template <typename T>
FLEXOPS_DEVICE T from_float(float value);
template <>
FLEXOPS_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
FLEXOPS_DEVICE bf16 from_float<bf16>(float value) {
#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#else
  const u32 bits = bit_cast<u32>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<u16>(0x7fff)};  // what cvt.rn gives
  return {static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}
template <>
FLEXOPS_DEVICE f16 from_float<f16>(float value) {
#if FLEXOPS_HIP
  return {bit_cast<u16>(static_cast<_Float16>(value))};
#else
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return {bits};
#endif
}

/// The number in a word's low half (0) or high half (1).
template <typename T>
FLEXOPS_DEVICE float half_of(u32 word, int half) {
  return to_float(T{static_cast<u16>(word >> (half * 16))});
}
template <>
FLEXOPS_DEVICE float half_of<bf16>(u32 word, int half) {
  return bit_cast<float>(half ? word & 0xffff0000u : word << 16);
}

/// Two numbers as one word, the first in its low half.
template <typename T>
FLEXOPS_DEVICE u32 pack2(float low, float high) {
  return from_float<T>(low).bits | static_cast<u32>(from_float<T>(high).bits) << 16;
}
#if !FLEXOPS_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
FLEXOPS_DEVICE u32 pack2<bf16>(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
template <>
FLEXOPS_DEVICE u32 pack2<f16>(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

/// The lesser (greater) of each half of two words of T; NaN if either is NaN.
#define FLEXOPS_HAS_MIN2 1
template <typename T>
FLEXOPS_DEVICE u32 min2(u32 a, u32 b);
template <typename T>
FLEXOPS_DEVICE u32 max2(u32 a, u32 b);
#define FLEXOPS_DEFINE_MIN2(name, T, instruction)                 \
  template <>                                                     \
  FLEXOPS_DEVICE u32 name<T>(u32 a, u32 b) {                      \
    u32 out;                                                      \
    asm(instruction " %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); \
    return out;                                                   \
  }
FLEXOPS_DEFINE_MIN2(min2, bf16, "min.NaN.bf16x2")
FLEXOPS_DEFINE_MIN2(min2, f16, "min.NaN.f16x2")
FLEXOPS_DEFINE_MIN2(max2, bf16, "max.NaN.bf16x2")
FLEXOPS_DEFINE_MIN2(max2, f16, "max.NaN.f16x2")
#undef FLEXOPS_DEFINE_MIN2
#else
#define FLEXOPS_HAS_MIN2 0
#endif

// ---- numbers ----

FLEXOPS_DEVICE float infinity() { return bit_cast<float>(0x7f800000u); }
FLEXOPS_DEVICE float not_a_number() { return bit_cast<float>(0x7fc00000u); }

/// 2 to the power of `value`, with a relative error of 2^-22; results below 2^-126 are 0.
FLEXOPS_DEVICE float quick_exp2(float value) {
#if FLEXOPS_HIP
  return exp2f(value);
#else
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
#endif
}

/// 1 / value, within an ulp or so; 0 where that is subnormal.
FLEXOPS_DEVICE float quick_reciprocal(float value) {
#if FLEXOPS_HIP
  return __fdividef(1.0f, value);
#else
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
  return out;
#endif
}

/// The low bytes of four words.
FLEXOPS_DEVICE u32 pack_bytes(u32 a, u32 b, u32 c, u32 d) {
#if FLEXOPS_HIP
  return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | d << 24;
#else
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#endif
}

}  // namespace flexops
