// Element-wise CPU kernels over rows of tensors; for *_cpu.cpp files, once per ISA level (see cpu.h
// for why the namespace).
//
// An op brings a Rule: kArrays; kReads, kWrites and kTyped, which arrays, as bits; kUnscaled, the
// array that is also written if there is a gradient scale, or -1; and what updates registers
// (Floats) and single elements (float).
#pragma once

#include "common/cpu_elements.h"
#include "common/multi_tensor.h"
#include "common/stochastic.h"

namespace flexops::FLEXOPS_ISA {

// 16-bit data goes through float buffers of this many elements: few enough for a block to stay in
// the first-level cache.
constexpr int64_t kRowBlock = 256;

/// Which arrays are rounded stochastically where they are of bf16, as bits (two at most), and the
/// key of the step's random numbers.
struct Rounding {
  unsigned arrays = 0;
  uint32_t key = 0;
};

/// Elements from `begin` on, to neighbours in bf16, which narrow then has nothing to round of.
/// `values` is a buffer: whole registers.
static inline void round_block(float* values, int64_t begin, int64_t count, uint32_t key,
                               int shift) {
  Words lanes, bits;
  for (int k = 0; k < kLanes; ++k) lanes[k] = static_cast<uint32_t>(k);
  for (int64_t i = 0; i < count; i += kLanes) {
    memcpy(&bits, values + i, sizeof bits);
    bits = round_to_bf16(
        bits, scramble(lanes + (static_cast<uint32_t>(begin + i) + key)) >> shift & 0xffffu);
    memcpy(values + i, &bits, sizeof bits);
  }
}

/// Inlined by force: what the compiler leaves out of line goes through memory, five times slower.
template <class Rule, typename V, typename Update>
__attribute__((always_inline)) static inline void update_at(float* const* at, int64_t i,
                                                            bool unscaled, const Update& update) {
  V x[Rule::kArrays];
#pragma GCC unroll 8
  for (int k = 0; k < Rule::kArrays; ++k) {
    if (Rule::kReads >> k & 1) memcpy(&x[k], at[k] + i, sizeof(V));
  }
  update(x);
#pragma GCC unroll 8
  for (int k = 0; k < Rule::kArrays; ++k) {
    if (Rule::kWrites >> k & 1 || (k == Rule::kUnscaled && unscaled))
      memcpy(at[k] + i, &x[k], sizeof(V));
  }
}

/// Elements [begin, end) of a row, by update(x) for registers and for single elements.
template <class Rule, typename Update>
static inline void update_row(const TensorRow& row, bool unscaled, int64_t begin, int64_t end,
                              const Update& update, Rounding rounding = {}) {
  alignas(64) float buffers[Rule::kArrays][kRowBlock];
  for (int64_t from = begin; from < end; from += kRowBlock) {
    const int64_t count = end - from < kRowBlock ? end - from : kRowBlock;
    float* at[Rule::kArrays];
    for (int k = 0; k < Rule::kArrays; ++k) {
      const bool wide = !(Rule::kTyped >> k & 1) || row.type[k] == ElementType::f32;
      at[k] = wide ? static_cast<float*>(row.array[k]) + from : buffers[k];
      if (!wide && Rule::kReads >> k & 1) widen(row.array[k], from, count, row.type[k], buffers[k]);
    }
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) update_at<Rule, Floats>(at, i, unscaled, update);
    for (; i < count; ++i) few(i), update_at<Rule, float>(at, i, unscaled, update);
    for (int k = 0, shift = 0; k < Rule::kArrays; ++k) {
      const bool written = Rule::kWrites >> k & 1 || (k == Rule::kUnscaled && unscaled);
      if (rounding.arrays >> k & 1) {
        if (row.is_bf16(k)) round_block(buffers[k], from, count, rounding.key, shift);
        shift = 16;
      }
      if (written && at[k] == buffers[k])
        narrow(buffers[k], row.array[k], from, count, row.type[k]);
    }
  }
}

/// The sum of a register's lanes, always in the same order.
inline double sum_lanes(float value) { return value; }
inline double sum_lanes(Floats value) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += value[i];
  return sum;
}

}  // namespace flexops::FLEXOPS_ISA
