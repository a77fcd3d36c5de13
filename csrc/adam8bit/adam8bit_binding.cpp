// flexops::adam8bit_: argument checks and registration (schema: flexops/ops/adam8bit.py).

#include "common/binding.h"

#include "adam/adam_binding.h"
#include "adam8bit/adam8bit.h"
#include "common/cpu.h"
#include "common/multi_tensor_binding.h"

namespace flexops {
namespace {

constexpr const char* kOp = "flexops::adam8bit_";

/// Adds a list of scales as array k of every row.
void add_scales(TensorTable& table, const char* name, TensorList& scales, int k) {
  table.hold(scales);
  check_length(kOp, name, scales, "params", table.rows().size());
  for (size_t i = 0; i < scales.size(); ++i) {
    TensorRow& row = table.rows()[i];
    const int64_t blocks = (row.numel + kAdam8bitBlock - 1) / kAdam8bitBlock;
    table.check_place(name, i, scales[i]);
    FLEXOPS_CHECK(scales[i].dtype() == Dtype::f32 && scales[i].numel() >= blocks && scales[i].is_contiguous(), kOp, ": ", name_of(name, i),
                  " must be a contiguous float32 tensor of at least ", blocks, " elements, got ", dtype_name(scales[i].dtype()), " ",
                  shape_text(scales[i]));
    row.array[k] = scales[i].data();
  }
}

#if FLEXOPS_DEVICE_CUDA

void launch(TensorTable& table, const AdamOptions& options, const Tensor& where) {
  DeviceGuard guard(where);
  check_launch(kOp, adam8bit_cuda(table.data(), table.size(), options, current_stream(where)));
}

#else

Adam8bitStep make_step(const AdamOptions& options, double step) {
  Adam8bitStep s;
  static_cast<AdamStep&>(s) = make_adam_step(options, step);
  s.step = static_cast<uint32_t>(step);
  return s;
}

void launch(TensorTable& table, const AdamOptions& options, const Tensor&) {
  if (options.found_inf && *options.found_inf != 0) return;
  const std::vector<TensorRow>& rows = table.rows();
  std::vector<Adam8bitStep> steps(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) steps[i] = make_step(options, *rows[i].step += 1.0f);
  for_each_piece(rows, kAdam8bitBlock,
                 [&](size_t i, int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(adam8bit_cpu)(rows[i], steps[i], begin, end); });
}

#endif

void adam8bit_(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList exp_avg_scales,
               TensorList exp_avg_sq_scales, TensorList state_steps, double lr, double beta1, double beta2, double eps, double weight_decay,
               bool maximize, bool decoupled, std::optional<Tensor> lr_tensor, std::optional<Tensor> grad_scale,
               std::optional<Tensor> found_inf) {
  if (params.empty()) return;
  TensorTable table(kOp,
                    {{"params", params, true},
                     {"grads", grads, true, grad_scale.has_value()},
                     {"exp_avgs", exp_avgs, false, true, Dtype::i8},
                     {"exp_avg_sqs", exp_avg_sqs, false, true, Dtype::u8}},
                    &state_steps, /*row_major=*/true);
  add_scales(table, "exp_avg_scales", exp_avg_scales, kAdam8bitExpAvgScale);
  add_scales(table, "exp_avg_sq_scales", exp_avg_sq_scales, kAdam8bitExpAvgSqScale);
  AdamOptions options;
  table.fill(options, lr, lr_tensor, weight_decay, maximize, grad_scale, found_inf);
  fill_adam(options, beta1, beta2, eps, decoupled);
  launch(table, options, params[0]);
  table.finish();
}

}  // namespace

FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "adam8bit_", adam8bit_); }

}  // namespace flexops
