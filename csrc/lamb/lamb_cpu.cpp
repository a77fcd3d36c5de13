// LAMB on the CPU: compiled once per ISA level (common/cpu.h).

#include "common/multi_tensor_cpu.h"
#include "lamb/lamb.h"

namespace flexops::FLEXOPS_ISA {

namespace {

struct MomentsRule {
  static constexpr int kArrays = 4, kUnscaled = kLambGrad;
  static constexpr unsigned kReads = 0b1111, kWrites = 0b1100, kTyped = 0b1111;
};

struct ApplyRule {
  static constexpr int kArrays = 3, kUnscaled = -1;
  static constexpr unsigned kReads = 0b111, kWrites = 0b001, kTyped = 0b111;
};

/// The update before the trust ratio.
template <typename V>
inline V make_update(V param, V exp_avg, V exp_avg_sq, const LambStep& s) {
  return (exp_avg * s.inverse_bias1) / (square_root(exp_avg_sq) * s.inverse_bias2 + s.eps) +
         param * s.weight_decay;
}

/// What a piece has summed up in registers, and of single elements.
struct Sums {
  Floats params = {}, updates = {};
  float param = 0, update = 0;
  void add(Floats p, Floats u) { params = params + p * p, updates = updates + u * u; }
  void add(float p, float u) { param += p * p, update += u * u; }
};

template <typename V>
inline void move(V (&x)[4], const LambStep& s, Sums& sums) {
  if (s.grad_scale != 0.0f) x[kLambGrad] = x[kLambGrad] / s.grad_scale;
  const V g = x[kLambGrad] * s.sign;
  x[kLambExpAvg] = x[kLambExpAvg] * s.beta1 + g * s.one_minus_beta1;
  x[kLambExpAvgSq] = x[kLambExpAvgSq] * s.beta2 + (g * g) * s.one_minus_beta2;
  sums.add(x[kLambParam], make_update(x[kLambParam], x[kLambExpAvg], x[kLambExpAvgSq], s));
}

}  // namespace

LambSums lamb_moments_cpu(const TensorRow& row, const LambStep& step, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 4096;  // summed in float
  const LambStep s = step;          // a copy that the stores cannot alias
  LambSums total = {0, 0};
  for (int64_t at = begin; at < end; at += kPiece) {
    Sums sums;
    const Rounding rounding = {s.stochastic ? 1u << kLambExpAvg | 1u << kLambExpAvgSq : 0u, s.key};
    const int64_t until = end - at < kPiece ? end : at + kPiece;
    update_row<MomentsRule>(
        row, s.grad_scale != 0.0f, at, until, [&](auto& x) { move(x, s, sums); }, rounding);
    total.param += sum_lanes(sums.params) + sums.param;
    total.update += sum_lanes(sums.updates) + sums.update;
  }
  return total;
}

void lamb_apply_cpu(const TensorRow& row, const LambStep& step, int64_t begin, int64_t end) {
  const LambStep s = step;
  update_row<ApplyRule>(row, false, begin, end, [&](auto& x) {
    x[kLambApplyParam] =
        x[kLambApplyParam] -
        make_update(x[kLambApplyParam], x[kLambApplyExpAvg], x[kLambApplyExpAvgSq], s) * s.rate;
  });
}

}  // namespace flexops::FLEXOPS_ISA
