// Lion on the CPU: compiled once per ISA level (common/cpu.h).

#include "common/multi_tensor_cpu.h"
#include "lion/lion.h"

namespace flexops::FLEXOPS_ISA {

namespace {
struct LionRule {
  static constexpr int kArrays = 3, kUnscaled = kLionGrad;
  static constexpr unsigned kReads = 0b111, kWrites = 0b101, kTyped = 0b111;
};

template <typename V>
inline void update(V (&x)[3], const LionStep& s) {
  if (s.grad_scale != 0.0f) x[kLionGrad] = x[kLionGrad] / s.grad_scale;
  const V g = x[kLionGrad] * s.sign, one = V{} + 1.0f;
  const V mixed = x[kLionExpAvg] * s.beta1 + g * s.one_minus_beta1;
  const V direction =
      mixed > 0.0f ? one : (mixed < 0.0f ? -one : mixed);  // as torch.sign, but NaN stays NaN
  x[kLionParam] = x[kLionParam] - x[kLionParam] * s.decay - direction * s.lr;
  x[kLionExpAvg] = x[kLionExpAvg] * s.beta2 + g * s.one_minus_beta2;
}
}  // namespace

void lion_cpu(const TensorRow& row, const LionStep& step, int64_t begin, int64_t end) {
  const LionStep s = step;  // a copy that the stores cannot alias
  update_row<LionRule>(row, s.grad_scale != 0.0f, begin, end, [&s](auto& x) { update(x, s); },
                       {s.stochastic ? 1u << kLionExpAvg : 0u, s.key});
}

}  // namespace flexops::FLEXOPS_ISA
