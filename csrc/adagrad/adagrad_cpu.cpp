// Adagrad on the CPU: compiled once per ISA level (common/cpu.h).

#include "adagrad/adagrad.h"
#include "common/multi_tensor_cpu.h"

namespace flexops::FLEXOPS_ISA {

namespace {
struct AdagradRule {
  static constexpr int kArrays = 3, kUnscaled = kAdagradGrad;
  static constexpr unsigned kReads = 0b111, kWrites = 0b101, kTyped = 0b011;
};

template <typename V>
inline void update(V (&x)[3], const AdagradStep& s) {
  if (s.grad_scale != 0.0f) x[kAdagradGrad] = x[kAdagradGrad] / s.grad_scale;
  V g = x[kAdagradGrad] * s.sign;
  if (s.l2 != 0.0f) g = g + x[kAdagradParam] * s.l2;
  x[kAdagradSum] = x[kAdagradSum] + g * g;
  x[kAdagradParam] = x[kAdagradParam] - (g * s.lr) / (square_root(x[kAdagradSum]) + s.eps);
}
}  // namespace

void adagrad_cpu(const TensorRow& row, const AdagradStep& step, int64_t begin, int64_t end) {
  const AdagradStep s = step;  // a copy that the stores cannot alias
  update_row<AdagradRule>(row, s.grad_scale != 0.0f, begin, end, [&s](auto& x) { update(x, s); });
}

}  // namespace flexops::FLEXOPS_ISA
