// What all kernels of 4-bit weights share: operands of mma.sync from packed words; and what blocks
// of a cluster read of each other. The layout of the weight: flexops/ops/int4_linear.py.
#pragma once

#include "common/async.cuh"
#include "common/dtypes.cuh"
#include "common/hopper.cuh"

namespace flexops::int4 {

/// How a code becomes a number of T: its bits are put into the fraction of a power of two.
template <class T>
struct Code;
template <>
struct Code<bf16> {
  static constexpr u32 kMask = 0x000f000fu, kBits = 0x43004300u, kOnes = 0x3f803f80u;
  static constexpr float kOffset = 128.0f;
  static constexpr int kShift = 0;
};
template <>
struct Code<f16> {
  static constexpr u32 kMask = 0x00f000f0u, kBits = 0x54005400u, kOnes = 0x3c003c00u;
  static constexpr float kOffset = 64.0f;
  static constexpr int kShift = 4;
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

FLEXOPS_DEVICE void cluster_sync() {
  FLEXOPS_SM90(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" :: : "memory");
}
/// A float at the same place of another block's shared memory.
FLEXOPS_DEVICE float cluster_load(const float* own, int rank) {
  float value = *own;
  FLEXOPS_SM90(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [there];\n}" : "=f"(value) : "r"(hopper::shared_address(own)),
      "r"(rank) : "memory");
  (void)rank;
  return value;
}

}  // namespace flexops::int4
