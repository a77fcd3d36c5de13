// flexops::lion_: argument checks and registration (schema: flexops/ops/lion.py).

#include "common/binding.h"

#include "common/cpu.h"
#include "common/multi_tensor_binding.h"
#include "common/stochastic.h"
#include "lion/lion.h"

namespace flexops {
namespace {

#if FLEXOPS_DEVICE_CUDA

void launch(TensorTable& table, const LionOptions& options, const Tensor& where) {
  DeviceGuard guard(where);
  check_launch("flexops::lion_", lion_cuda(table.data(), table.size(), options, current_stream(where)));
}

#else

LionStep make_step(const LionOptions& o, const float* count) {
  const double lr = o.lr_tensor ? *o.lr_tensor : o.lr;
  LionStep s;
  s.lr = static_cast<float>(lr);
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.decay = static_cast<float>(lr * o.weight_decay);
  s.sign = o.maximize ? -1.0f : 1.0f;
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  s.stochastic = o.stochastic;
  s.key = count ? scramble(static_cast<uint32_t>(*count)) : 0;
  return s;
}

void launch(TensorTable& table, const LionOptions& options, const Tensor&) {
  if (options.found_inf && *options.found_inf != 0) return;
  const std::vector<TensorRow>& rows = table.rows();
  std::vector<LionStep> steps(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].step) *rows[i].step += 1.0f;
    steps[i] = make_step(options, rows[i].step);
  }
  for_each_piece(rows, 32, [&](size_t i, int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(lion_cpu)(rows[i], steps[i], begin, end); });
}

#endif

void lion_(TensorList params, TensorList grads, TensorList exp_avgs, double lr, double beta1, double beta2, double weight_decay,
           bool maximize, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
           TensorList state_steps, bool stochastic) {
  if (params.empty()) return;
  FLEXOPS_CHECK(!stochastic || !state_steps.empty(), "flexops::lion_: state_steps must be given to round stochastically");
  TensorTable table("flexops::lion_",
                    {{"params", params, true}, {"grads", grads, true, grad_scale.has_value()}, {"exp_avgs", exp_avgs, true}},
                    state_steps.empty() ? nullptr : &state_steps);
  LionOptions options;
  table.fill(options, lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf);
  options.beta1 = beta1;
  options.beta2 = beta2;
  options.stochastic = stochastic;
  launch(table, options, params[0]);
  table.finish();
}

}  // namespace

FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "lion_", lion_); }

}  // namespace flexops
