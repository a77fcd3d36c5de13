// flexops::adam_ and flexops::adam_copy_: argument checks and registration (schemas: flexops/ops/adam.py).

#include "common/binding.h"

#include "adam/adam.h"
#include "adam/adam_binding.h"
#include "common/cpu.h"
#include "common/multi_tensor_binding.h"

namespace flexops {
namespace {

/// The arguments that adam_ and adam_copy_ share.
struct Numbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize, decoupled;
  std::optional<Tensor>&lr_tensor, &grad_scale, &found_inf;
  bool stochastic;
  std::optional<Tensor>& grad_factor;
};

#if FLEXOPS_DEVICE_CUDA

void launch(const char* op, TensorTable& table, const AdamOptions& options, const Tensor& where) {
  check_launch(op, adam_cuda(table.data(), table.size(), options, current_stream(where)));
}

#else

void launch(const char*, TensorTable& table, const AdamOptions& options, const Tensor&) {
  if (options.found_inf && *options.found_inf != 0) return;
  const std::vector<TensorRow>& rows = table.rows();
  std::vector<AdamStep> steps(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) steps[i] = make_adam_step(options, *rows[i].step += 1.0f);
  for_each_piece(rows, 32, [&](size_t i, int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(adam_cpu)(rows[i], steps[i], begin, end); });
}

#endif

void run(const char* op, TensorTable table, const Numbers& n, const Tensor& where) {
  AdamOptions options;
  table.fill(options, n.lr, n.lr_tensor, n.weight_decay, n.maximize, n.grad_scale, n.found_inf);
  fill_adam(options, n.beta1, n.beta2, n.eps, n.decoupled);
  options.stochastic = n.stochastic;
  options.grad_factor = table.number("grad_factor", n.grad_factor);
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(where);
#endif
  launch(op, table, options, where);
  table.finish();
}

void adam_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
           TensorList state_steps, double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad, bool maximize,
           bool decoupled, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
           bool stochastic, std::optional<Tensor> grad_factor) {
  if (params.empty()) return;
  const char* op = "flexops::adam_";
  const TensorColumn param{"params", params, true}, grad{"grads", grads, true, grad_scale.has_value()}, average{"exp_avgs", exp_avgs, true},
      square{"exp_avg_sqs", exp_avg_sqs, true}, largest{"max_exp_avg_sqs", max_exp_avg_sqs, true};
  run(op,
      amsgrad ? TensorTable(op, {param, grad, average, square, largest}, &state_steps)
              : TensorTable(op, {param, grad, average, square}, &state_steps),
      {lr, beta1, beta2, eps, weight_decay, maximize, decoupled, lr_tensor, grad_scale, found_inf, stochastic, grad_factor}, params[0]);
}

void adam_copy_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                TensorList state_steps, TensorList copies, double lr, double beta1, double beta2, double eps, double weight_decay,
                bool amsgrad, bool maximize, bool decoupled, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
                std::optional<Tensor> found_inf, bool stochastic, std::optional<Tensor> grad_factor) {
  if (params.empty()) return;
  const char* op = "flexops::adam_copy_";
  const TensorColumn param{"params", params, true}, grad{"grads", grads, true, grad_scale.has_value()}, average{"exp_avgs", exp_avgs, true},
      square{"exp_avg_sqs", exp_avg_sqs, true}, largest{"max_exp_avg_sqs", max_exp_avg_sqs, true}, copy{"copies", copies, true};
  TensorTable table = amsgrad ? TensorTable(op, {param, grad, average, square, largest, copy}, &state_steps)
                              : TensorTable(op, {param, grad, average, square, copy}, &state_steps);
  if (!amsgrad) {  // the copy's place is behind the largest squares
    for (TensorRow& row : table.rows()) {
      std::swap(row.array[kAdamMaxExpAvgSq], row.array[kAdamCopy]);
      std::swap(row.type[kAdamMaxExpAvgSq], row.type[kAdamCopy]);
    }
  }
  run(op, std::move(table),
      {lr, beta1, beta2, eps, weight_decay, maximize, decoupled, lr_tensor, grad_scale, found_inf, stochastic, grad_factor}, params[0]);
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "adam_", adam_);
  FLEXOPS_IMPL(m, "adam_copy_", adam_copy_);
}

}  // namespace flexops
