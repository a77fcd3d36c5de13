// What the norms' kernels for the CPU share: elements, a register of them at a time. Compiled once per ISA level (common/cpu.h).
#pragma once

#include "norm/norm.h"

#include "common/cpu_math.h"

namespace flexops::FLEXOPS_ISA {

constexpr int64_t kBlock = 512;  // elements that go through a buffer at once
constexpr int64_t kSums = 4;     // independent sums, to hide an addition's latency
static_assert(kBlock % (kSums * kLanes) == 0);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline Floats zeros() { return Floats{}; }
static inline Floats spread(float value) { return Floats{} + value; }

// ---- elements, a register of them at a time ---------------------------------------------------------------------------

template <NormType type>
struct Element {
  using type_ = uint16_t;
};
template <>
struct Element<NormType::f32> {
  using type_ = float;
};
template <NormType type>
using Stored = typename Element<type>::type_;

template <NormType type>
static inline Floats load(const Stored<type>* from) {
  if constexpr (type == NormType::f32) return load_floats(from);
  if constexpr (type == NormType::bf16) return load_bf16(from);
  if constexpr (type == NormType::f16) return load_f16(from);
}

template <NormType type>
static inline void store(Stored<type>* to, Floats value) {
  if constexpr (type == NormType::f32) store_floats(to, value);
  if constexpr (type == NormType::bf16) store_bf16(to, value);
  if constexpr (type == NormType::f16) store_f16(to, value);
}

/// The first `count` of a register; the others are zeros. Out of line: rows have one such end, and every loop would have its own copy.
template <NormType type>
[[gnu::noinline]] static Floats load_some(const Stored<type>* from, int64_t count) {
  Stored<type> buffer[kLanes] = {};
  memcpy(buffer, from, static_cast<size_t>(count) * sizeof(Stored<type>));
  return load<type>(buffer);
}
template <NormType type>
[[gnu::noinline]] static void store_some(Stored<type>* to, Floats value, int64_t count) {
  Stored<type> buffer[kLanes];
  store<type>(buffer, value);
  memcpy(to, buffer, static_cast<size_t>(count) * sizeof(Stored<type>));
}
/// Zeros behind the first `count`.
static inline Floats keep(Floats value, int64_t count) {
  for (int64_t i = count; i < kLanes; ++i) value[i] = 0.0f;
  return value;
}

/// Calls f(index, count) for every register of a row, from `first` on; count is less than kLanes for the last one only.
template <typename F>
static inline void for_each(int64_t first, int64_t columns, const F& f) {
  int64_t i = first;
  for (; i + kLanes <= columns; i += kLanes) f(i, int64_t{kLanes});
  if (i < columns) f(i, columns - i);
}
template <typename F>
static inline void for_each(int64_t columns, const F& f) {
  for_each(0, columns, f);
}
/// The same with the number of a sum, which goes around.
template <typename F>
static inline void for_each_sum(int64_t first, int64_t columns, const F& f) {
  int64_t i = first;
  for (; i + kSums * kLanes <= columns; i += kSums * kLanes) {
    for (int k = 0; k < kSums; ++k) f(i + k * kLanes, int64_t{kLanes}, k);
  }
  for (; i < columns; i += kLanes) f(i, least(columns - i, kLanes), 0);
}
template <NormType type>
static inline Floats load_at(const Stored<type>* from, int64_t i, int64_t count) {
  return count == kLanes ? load<type>(from + i) : load_some<type>(from + i, count);
}
template <NormType type>
static inline void store_at(Stored<type>* to, int64_t i, Floats value, int64_t count) {
  count == kLanes ? store<type>(to + i, value) : store_some<type>(to + i, value, count);
}

struct Sums {
  Floats at[kSums] = {};
  float total() const { return sum_of_lanes((at[0] + at[1]) + (at[2] + at[3])); }
};

/// `count` elements of a type that is told at run time, as floats: in place or in `buffer`.
static inline const float* widen(const void* from, int64_t offset, int64_t count, NormType type, float* buffer) {
  if (type == NormType::f32) return static_cast<const float*>(from) + offset;
  const uint16_t* bits = static_cast<const uint16_t*>(from) + offset;
  type == NormType::bf16 ? bf16_to_float(bits, buffer, count) : f16_to_float(bits, buffer, count);
  return buffer;
}
static inline void narrow(const float* from, void* to, int64_t offset, int64_t count, NormType type) {
  if (type == NormType::f32) {
    memcpy(static_cast<float*>(to) + offset, from, static_cast<size_t>(count) * 4);
  } else {
    uint16_t* bits = static_cast<uint16_t*>(to) + offset;
    type == NormType::bf16 ? float_to_bf16(from, bits, count) : float_to_f16(from, bits, count);
  }
}

/// A weight or a bias: float32, or of the rows' type.
template <NormType type, bool kWide>
static inline Floats load_parameter(const void* from, int64_t i, int64_t count) {
  constexpr NormType own = kWide ? NormType::f32 : type;
  return load_at<own>(static_cast<const Stored<own>*>(from), i, count);
}

}  // namespace flexops::FLEXOPS_ISA
