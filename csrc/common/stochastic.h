// Random numbers for stochastic rounding, from a step's number and an element's place: the same on
// every device, in flexops/ops/_multi_tensor.py, and in every run. For device code and for
// *_cpu.cpp files alike.
#pragma once

#if defined(FLEXOPS_DEVICE)
#define FLEXOPS_HERE FLEXOPS_DEVICE
#else
#define FLEXOPS_HERE \
  static inline __attribute__((always_inline))  // of each ISA level its own (common/cpu.h)
#endif

namespace flexops {

/// A bijection of 32 bits in which each bit of the input changes half of the output's (constants
/// after Wellons, "Prospecting for Hash Functions", 2018).
template <typename U>  // unsigned, or a register of them
FLEXOPS_HERE U scramble(U x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

/// The bits of a float, to one of its two neighbours in bf16, to each as likely as it is near:
/// `noise` is uniform below 2^16. The low half is zero then; infinities and NaN stay.
template <typename U>
FLEXOPS_HERE U round_to_bf16(U bits, U noise) {
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + noise) & 0xffff0000u;
}

}  // namespace flexops
