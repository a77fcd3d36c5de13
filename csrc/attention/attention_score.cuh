// Score modifiers of people's own (flexops/ops/_score_mod.py): FLEXOPS_SCORE, defined before this
// is compiled, is a function's body that computes the score from score, b, h, q and k, and what it
// looks up in `words`: of each table its first word and its sizes, then all their elements.
#pragma once

#include "attention/attention.cuh"

namespace flexops::attention {

/// A number and its derivative by the score that came in. Where the derivative is not used, the
/// compiler drops it.
struct Dual {
  float value, slope;
  FLEXOPS_DEVICE Dual(float v) : value(v), slope(0) {}
  FLEXOPS_DEVICE Dual(float v, float s) : value(v), slope(s) {}
};
FLEXOPS_DEVICE bool operator<(Dual a, Dual b) { return a.value < b.value; }
FLEXOPS_DEVICE bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
FLEXOPS_DEVICE bool operator>(Dual a, Dual b) { return a.value > b.value; }
FLEXOPS_DEVICE bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
FLEXOPS_DEVICE bool operator==(Dual a, Dual b) { return a.value == b.value; }
FLEXOPS_DEVICE bool operator!=(Dual a, Dual b) { return a.value != b.value; }

namespace score {
FLEXOPS_DEVICE int add(int a, int b) { return a + b; }
FLEXOPS_DEVICE int sub(int a, int b) { return a - b; }
FLEXOPS_DEVICE int mul(int a, int b) { return a * b; }
FLEXOPS_DEVICE int neg(int a) { return -a; }
FLEXOPS_DEVICE int abs(int a) { return a < 0 ? -a : a; }
FLEXOPS_DEVICE int minimum(int a, int b) { return a < b ? a : b; }
FLEXOPS_DEVICE int maximum(int a, int b) { return a > b ? a : b; }
FLEXOPS_DEVICE int floordiv(int a, int b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
FLEXOPS_DEVICE int mod(int a, int b) { return a - floordiv(a, b) * b; }
/// Where an element is, by the sizes of a table: an index beyond its ends is the one there.
template <class... Rest>
FLEXOPS_DEVICE int place(const int* sizes, int offset, int index, Rest... rest) {
  const int size = __ldg(sizes), here = offset * size + max(0, min(index, size - 1));
  if constexpr (sizeof...(rest) > 0) return place(sizes + 1, here, rest...);
  return here;
}
/// An element of the table whose first word and sizes are at `head`.
template <class... Index>
FLEXOPS_DEVICE int at(const int* words, int head, Index... index) {
  if constexpr (sizeof...(index) > 0)
    return __ldg(words + __ldg(words + head) + place(words + head + 1, 0, index...));
  return __ldg(words + __ldg(words + head));
}

// Functions are the hardware's own approximations (some 2^-21): a modifier is unrolled for each
// score that a thread holds, and the exact ones would take a minute to compile.
FLEXOPS_DEVICE float exponential(float x) { return exp2_approx(x * kLog2E); }
FLEXOPS_DEVICE float logarithm(float x) {
  float out;
  asm("lg2.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out * kLn2;
}
FLEXOPS_DEVICE float root(float x) {
  float out;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
FLEXOPS_DEVICE float nearest(float x) {
  float out;
  asm("cvt.rni.f32.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
/// Sine and, a quarter of a turn on, cosine.
FLEXOPS_DEVICE float sine(float x, float quarters) {
  constexpr float kTurn = 6.283185307179586f,
                  kRest = -1.7484555e-7f;  // 2 pi, and what its rounding left out
  const float turns = nearest(x / kTurn);
  float out;
  asm("sin.approx.f32 %0, %1;"
      : "=f"(out)
      : "f"(fmaf(-turns, kRest, fmaf(-turns, kTurn, x)) + quarters * (kTurn / 4)));
  return out;
}

FLEXOPS_DEVICE Dual add(Dual a, Dual b) { return {a.value + b.value, a.slope + b.slope}; }
FLEXOPS_DEVICE Dual sub(Dual a, Dual b) { return {a.value - b.value, a.slope - b.slope}; }
FLEXOPS_DEVICE Dual mul(Dual a, Dual b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
FLEXOPS_DEVICE Dual div(Dual a, Dual b) {
  const float quotient = __fdividef(a.value, b.value);
  return {quotient, __fdividef(a.slope - quotient * b.slope, b.value)};
}
FLEXOPS_DEVICE Dual neg(Dual a) { return {-a.value, -a.slope}; }
FLEXOPS_DEVICE Dual abs(Dual a) {
  return {fabsf(a.value), a.value > 0 ? a.slope : a.value < 0 ? -a.slope : 0.0f};
}
FLEXOPS_DEVICE Dual minimum(Dual a, Dual b) { return a.value <= b.value ? a : b; }
FLEXOPS_DEVICE Dual maximum(Dual a, Dual b) { return a.value >= b.value ? a : b; }
FLEXOPS_DEVICE Dual exp(Dual a) {
  const float y = exponential(a.value);
  return {y, a.slope * y};
}
FLEXOPS_DEVICE Dual exp2(Dual a) {
  const float y = exp2_approx(a.value);
  return {y, a.slope * y * kLn2};
}
FLEXOPS_DEVICE Dual log(Dual a) { return {logarithm(a.value), __fdividef(a.slope, a.value)}; }
FLEXOPS_DEVICE Dual tanh(Dual a) {
  const float y = 1 - __fdividef(2.0f, exponential(fminf(2 * a.value, 80.0f)) + 1);
  return {y, a.slope * (1 - y * y)};
}
FLEXOPS_DEVICE Dual sigmoid(Dual a) {
  const float y = __fdividef(1.0f, 1 + exponential(fminf(-a.value, 80.0f)));
  return {y, a.slope * y * (1 - y)};
}
FLEXOPS_DEVICE Dual sqrt(Dual a) {
  const float y = root(a.value);
  return {y, __fdividef(a.slope * 0.5f, y)};
}
FLEXOPS_DEVICE Dual sin(Dual a) { return {sine(a.value, 0), a.slope * sine(a.value, 1)}; }
FLEXOPS_DEVICE Dual cos(Dual a) { return {sine(a.value, 1), -a.slope * sine(a.value, 0)}; }
FLEXOPS_DEVICE Dual floor(Dual a) {
  float out;
  asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(out) : "f"(a.value));
  return out;
}
FLEXOPS_DEVICE Dual round(Dual a) { return nearest(a.value); }
FLEXOPS_DEVICE Dual detach(Dual a) { return a.value; }
FLEXOPS_DEVICE Dual tofloat(Dual a) { return a; }
FLEXOPS_DEVICE Dual where(bool condition, Dual a, Dual b) { return condition ? a : b; }
}  // namespace score

#if !defined(FLEXOPS_SCORE)
#define FLEXOPS_SCORE return score;
#endif
FLEXOPS_DEVICE Dual defined_score([[maybe_unused]] Dual score, [[maybe_unused]] int b,
                                  [[maybe_unused]] int h, [[maybe_unused]] int q,
                                  [[maybe_unused]] int k,
                                  [[maybe_unused]] const int* words){FLEXOPS_SCORE}

/// For how many of a thread's scores the code of a modifier is written out, which is then gone
/// through again; 0: for all of them. Of a long modifier, all of them would take most of the time
/// that a kernel takes to compile.
#if !defined(FLEXOPS_SCORES_AT_ONCE)
#define FLEXOPS_SCORES_AT_ONCE 0
#endif
template <class Modifier>
inline constexpr int kScoresAtOnce = 0;

/// See "Score modifiers" in attention.cuh.
struct Defined {
  static constexpr bool kPlain = false;
  const Problem& p;
  const Sequence& s;

  FLEXOPS_DEVICE Defined(const Problem& problem, const Sequence& sequence)
      : p(problem), s(sequence) {}
  FLEXOPS_DEVICE Dual score(float product, int query, int key) const {
    return defined_score(Dual(product * p.scale, 1.0f), s.batch, s.head, query, key,
                         static_cast<const int*>(p.bias));
  }
  /// Unchecked: look-ups stay within their tables, keys beyond the last one are masked afterwards,
  /// and what a row beyond the last one gets reaches no other row.
  FLEXOPS_DEVICE float value(float product, int query, int key) const {
    return score(product, query, key).value;
  }
  /// Of a row or key beyond the last one 0: products of gradients sum over both, and a function may
  /// be infinite or NaN there.
  FLEXOPS_DEVICE float operator()(float product, int query, int key, float& slope) const {
    const Dual out = score(product, min(query, s.length_q - 1), min(key, s.length_k - 1));
    const bool inside = query < s.length_q && key < s.length_k;
    slope = inside ? out.slope : 0.0f;
    return inside ? out.value : 0.0f;
  }
};
template <>
inline constexpr int kScoresAtOnce<Defined> = FLEXOPS_SCORES_AT_ONCE;

}  // namespace flexops::attention
