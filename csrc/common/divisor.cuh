// Division by a number that is known when a kernel is launched: a multiplication and a shift, where
// a division takes some 30 instructions.
//
//   launcher:  params.columns = make_divisor(columns);
//   kernel:    u32 column, row = divide(index, p.columns, column);     // index < 2^31
//
// After Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994.
#pragma once

#include "common/device.cuh"

namespace flexops {

struct Divisor {
  u32 by, magic;
  int shift;
};

/// Quotient and remainder of a number below 2^31.
FLEXOPS_DEVICE u32 divide(u32 value, const Divisor& d, u32& remainder) {
  const u32 quotient = (__umulhi(value, d.magic) + value) >> d.shift;
  remainder = value - quotient * d.by;
  return quotient;
}

#if !defined(__CUDACC_RTC__)
/// For launchers; `by` is from 1 to 2^31.
inline Divisor make_divisor(i64 by) {
  int shift = 0;
  while ((i64{1} << shift) < by) ++shift;
  const u64 magic =
      ((u64{1} << 32) * ((u64{1} << shift) - static_cast<u64>(by))) / static_cast<u64>(by) + 1;
  return {static_cast<u32>(by), static_cast<u32>(magic), shift};
}
#endif

}  // namespace flexops
