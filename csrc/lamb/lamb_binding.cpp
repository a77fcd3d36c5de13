// flexops::lamb_, and its two passes, lamb_moments_ and lamb_apply_: argument checks and registration (schemas: flexops/ops/lamb.py).

#include "common/binding.h"

#include "adam/adam_binding.h"
#include "common/cpu.h"
#include "common/multi_tensor_binding.h"
#include "lamb/lamb.h"

namespace flexops {
namespace {

#if FLEXOPS_DEVICE_CUDA

void measure(const char* op, TensorTable& table, const LambOptions& options, const Tensor& norms) {
  DeviceGuard guard(norms);
  const int64_t size = lamb_partials(table.data(), table.size());
  const Tensor partials = empty(&size, 1, Dtype::f32, norms);
  check_launch(op,
               lamb_moments_cuda(table.data(), table.size(), options, partials.data<float>(), norms.data<float>(), current_stream(norms)));
}

void apply(const char* op, TensorTable& table, const LambOptions& options, const Tensor& norms) {
  DeviceGuard guard(norms);
  check_launch(op, lamb_apply_cuda(table.data(), table.size(), options, norms.data<const float>(), current_stream(norms)));
}

#else

LambStep make_step(const LambOptions& o, double step) {
  LambStep s;
  static_cast<AdamStep&>(s) = make_adam_step(o, step);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.inverse_bias1 = static_cast<float>(1 / (1 - pow(o.beta1, step)));
  s.rate = 0.0f;
  return s;
}

/// In pieces of one size whatever the number of threads, so that the order of additions is always the same.
void measure(const char*, TensorTable& table, const LambOptions& options, const Tensor& norms) {
  constexpr int64_t kPiece = 32768;
  struct Piece {
    size_t row;
    int64_t begin, end;
    LambSums sums;
  };
  std::vector<TensorRow>& rows = table.rows();
  float* out = norms.data<float>();
  memset(out, 0, rows.size() * 2 * sizeof(float));
  if (options.found_inf && *options.found_inf != 0) return;
  std::vector<LambStep> steps(rows.size());
  std::vector<Piece> pieces;
  for (size_t i = 0; i < rows.size(); ++i) {
    steps[i] = make_step(options, *rows[i].step += 1.0f);
    const int64_t numel = rows[i].numel;
    for (int64_t at = 0; at < numel; at += kPiece) pieces.push_back({i, at, at + kPiece < numel ? at + kPiece : numel, {0, 0}});
  }
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Piece& piece = pieces[static_cast<size_t>(n)];
      piece.sums = FLEXOPS_ISA_CALL(lamb_moments_cpu)(rows[piece.row], steps[piece.row], piece.begin, piece.end);
    }
  });
  std::vector<LambSums> totals(rows.size(), LambSums{0, 0});
  for (const Piece& piece : pieces) {
    totals[piece.row].param += piece.sums.param;
    totals[piece.row].update += piece.sums.update;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    out[2 * i] = static_cast<float>(totals[i].param);
    out[2 * i + 1] = static_cast<float>(totals[i].update);
  }
}

void apply(const char*, TensorTable& table, const LambOptions& options, const Tensor& norms) {
  if (options.found_inf && *options.found_inf != 0) return;
  const std::vector<TensorRow>& rows = table.rows();
  const float* squares = norms.data<float>();
  const double lr = options.lr_tensor ? *options.lr_tensor : options.lr;
  std::vector<LambStep> steps(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const double param = sqrt(squares[2 * i]), update = sqrt(squares[2 * i + 1]);
    steps[i] = make_step(options, *rows[i].step);
    steps[i].rate = static_cast<float>(options.adapt && param > 0 && update > 0 ? lr * (param / update) : lr);
  }
  for_each_piece(rows, 32, [&](size_t i, int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(lamb_apply_cpu)(rows[i], steps[i], begin, end); });
}

#endif

/// The sums of squares of every row's parameter and update.
Tensor first_pass(const char* op, TensorTable& table, const LambOptions& options, const Tensor& where) {
  const int64_t shape[] = {table.size(), 2};
  Tensor norms = empty(shape, 2, Dtype::f32, where);
  measure(op, table, options, norms);
  return norms;
}

Tensor lamb_moments_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList state_steps, double beta1,
                     double beta2, double eps, double weight_decay, bool maximize, std::optional<Tensor> grad_scale,
                     std::optional<Tensor> found_inf, bool stochastic) {
  FLEXOPS_CHECK(!params.empty(), "flexops::lamb_moments_: params must hold at least one tensor");
  TensorTable table("flexops::lamb_moments_",
                    {{"params", params, true, false},
                     {"grads", grads, true, grad_scale.has_value()},
                     {"exp_avgs", exp_avgs, true},
                     {"exp_avg_sqs", exp_avg_sqs, true}},
                    &state_steps);
  LambOptions options = {};
  table.fill(options, 0.0, std::nullopt, weight_decay, maximize, grad_scale, found_inf);
  fill_adam(options, beta1, beta2, eps, false);
  options.stochastic = stochastic;
  Tensor norms = first_pass("flexops::lamb_moments_", table, options, params[0]);
  table.finish();
  return norms;
}

void lamb_apply_(TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList state_steps, Tensor norms, double lr,
                 double beta1, double beta2, double eps, double weight_decay, bool adapt, std::optional<Tensor> lr_tensor,
                 std::optional<Tensor> found_inf) {
  if (params.empty()) return;
  TensorTable table("flexops::lamb_apply_",
                    {{"params", params, true}, {"exp_avgs", exp_avgs, true, false}, {"exp_avg_sqs", exp_avg_sqs, true, false}},
                    &state_steps);
  FLEXOPS_CHECK(norms.dtype() == Dtype::f32 && norms.dim() == 2 && norms.size(0) == table.size() && norms.size(1) == 2,
                "flexops::lamb_apply_: norms must be a float32 tensor of shape [", table.size(), ", 2], got ", dtype_name(norms.dtype()),
                " ", shape_text(norms));
  table.check_place("norms", 0, norms);
  norms = contiguous(norms);
  LambOptions options = {};
  table.fill(options, lr, lr_tensor, weight_decay, false, std::nullopt, found_inf);
  fill_adam(options, beta1, beta2, eps, false);
  options.adapt = adapt;
  apply("flexops::lamb_apply_", table, options, norms);
  table.finish();
}

/// Both passes, for tensors that lie on one rank: torch hands their lists over once.
void lamb_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList state_steps, double lr,
           double beta1, double beta2, double eps, double weight_decay, bool adapt, bool maximize, std::optional<Tensor> lr_tensor,
           std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, bool stochastic) {
  if (params.empty()) return;
  const char* op = "flexops::lamb_";
  TensorTable table(op,
                    {{"params", params, true},
                     {"grads", grads, true, grad_scale.has_value()},
                     {"exp_avgs", exp_avgs, true},
                     {"exp_avg_sqs", exp_avg_sqs, true}},
                    &state_steps);
  LambOptions options = {};
  table.fill(options, lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf);
  fill_adam(options, beta1, beta2, eps, false);
  options.adapt = adapt;
  options.stochastic = stochastic;
  const Tensor norms = first_pass(op, table, options, params[0]);
  for (TensorRow& row : table.rows()) {  // the second pass has no gradients
    row.array[kLambApplyExpAvg] = row.array[kLambExpAvg], row.type[kLambApplyExpAvg] = row.type[kLambExpAvg];
    row.array[kLambApplyExpAvgSq] = row.array[kLambExpAvgSq], row.type[kLambApplyExpAvgSq] = row.type[kLambExpAvgSq];
  }
  apply(op, table, options, norms);
  table.finish();
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "lamb_", lamb_);
  FLEXOPS_IMPL(m, "lamb_moments_", lamb_moments_);
  FLEXOPS_IMPL(m, "lamb_apply_", lamb_apply_);
}

}  // namespace flexops
