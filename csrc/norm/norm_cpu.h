// What the norms' kernels for the CPU share: elements, a register of them at a time. Compiled once
// per ISA level (common/cpu.h).
#pragma once

#include "norm/norm.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

constexpr int64_t kBlock = 512;  // elements that go through a buffer at once
constexpr int64_t kSums = 4;     // independent sums, to hide an addition's latency
static_assert(kBlock % (kSums * kLanes) == 0);

static inline Floats zeros() { return Floats{}; }
static inline Floats spread(float value) { return Floats{} + value; }

// ---- elements, a register of them at a time ----

template <ElementType type>
struct Element {
  using type_ = uint16_t;
};
template <>
struct Element<ElementType::f32> {
  using type_ = float;
};
template <ElementType type>
using Stored = typename Element<type>::type_;

/// The first `count` of a register; the others are zeros. Out of line: rows have one such end, and
/// every loop would have its own copy.
template <ElementType type>
[[gnu::noinline]] static Floats load_some(const Stored<type>* from, int64_t count) {
  Stored<type> buffer[kLanes] = {};
  memcpy(buffer, from, static_cast<size_t>(count) * sizeof(Stored<type>));
  return load_elements<type>(buffer, 0);
}
template <ElementType type>
[[gnu::noinline]] static void store_some(Stored<type>* to, Floats value, int64_t count) {
  Stored<type> buffer[kLanes];
  store_elements<type>(buffer, 0, value);
  memcpy(to, buffer, static_cast<size_t>(count) * sizeof(Stored<type>));
}
/// Zeros behind the first `count`.
static inline Floats keep(Floats value, int64_t count) {
  for (int64_t i = count; i < kLanes; ++i) value[i] = 0.0f;
  return value;
}

/// Calls f(index, count) for every register of a row, from `first` on; count is less than kLanes
/// for the last one only.
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
template <ElementType type>
static inline Floats load_at(const Stored<type>* from, int64_t i, int64_t count) {
  return count == kLanes ? load_elements<type>(from, i) : load_some<type>(from + i, count);
}
template <ElementType type>
static inline void store_at(Stored<type>* to, int64_t i, Floats value, int64_t count) {
  count == kLanes ? store_elements<type>(to, i, value) : store_some<type>(to + i, value, count);
}

struct Sums {
  Floats at[kSums] = {};
  float total() const { return sum_of_lanes((at[0] + at[1]) + (at[2] + at[3])); }
};

/// A weight or a bias: float32, or of the rows' type.
template <ElementType type, bool kWide>
static inline Floats load_parameter(const void* from, int64_t i, int64_t count) {
  constexpr ElementType own = kWide ? ElementType::f32 : type;
  return load_at<own>(static_cast<const Stored<own>*>(from), i, count);
}

}  // namespace flexops::FLEXOPS_ISA
