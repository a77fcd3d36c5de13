// flexops::adagrad_: argument checks and registration (schema: flexops/ops/adagrad.py).

#include "common/binding.h"

#include "adagrad/adagrad.h"
#include "common/cpu.h"
#include "common/multi_tensor_binding.h"

namespace flexops {
namespace {

#if FLEXOPS_DEVICE_CUDA

void launch(TensorTable& table, const AdagradOptions& options, const Tensor& where) {
  DeviceGuard guard(where);
  check_launch("flexops::adagrad_", adagrad_cuda(table.data(), table.size(), options, current_stream(where)));
}

#else

AdagradStep make_step(const AdagradOptions& o, double step) {
  const double lr = o.lr_tensor ? *o.lr_tensor : o.lr;
  AdagradStep s;
  s.lr = static_cast<float>(lr / (1 + (step - 1) * o.lr_decay));
  s.eps = static_cast<float>(o.eps);
  s.l2 = static_cast<float>(o.weight_decay);
  s.sign = o.maximize ? -1.0f : 1.0f;
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  return s;
}

void launch(TensorTable& table, const AdagradOptions& options, const Tensor&) {
  if (options.found_inf && *options.found_inf != 0) return;
  const std::vector<TensorRow>& rows = table.rows();
  std::vector<AdagradStep> steps(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) steps[i] = make_step(options, *rows[i].step += 1.0f);
  for_each_piece(rows, 32, [&](size_t i, int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(adagrad_cpu)(rows[i], steps[i], begin, end); });
}

#endif

void adagrad_(TensorList params, TensorList grads, TensorList sums, TensorList state_steps, double lr, double lr_decay, double weight_decay,
              double eps, bool maximize, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
              std::optional<Tensor> found_inf) {
  if (params.empty()) return;
  TensorTable table("flexops::adagrad_", {{"params", params, true}, {"grads", grads, true, grad_scale.has_value()}, {"sums", sums, false}},
                    &state_steps);
  AdagradOptions options;
  table.fill(options, lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf);
  options.lr_decay = lr_decay;
  options.eps = eps;
  launch(table, options, params[0]);
  table.finish();
}

}  // namespace

FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "adagrad_", adagrad_); }

}  // namespace flexops
