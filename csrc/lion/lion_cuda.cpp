// Lion's launcher.

#include "lion/lion.h"

#include "common/multi_tensor_launch.h"
#include "lion/lion.cuh"

namespace flexops {
namespace {

using multi::Mode;

Mode mode_of(const TensorRow& row) {
  const multi::Data data = multi::data_of<lion::Rule<Mode::mixed>>(row);
  if (data != multi::Data::mixed) return data == multi::Data::f32 ? Mode::f32 : Mode::bf16;
  return row.is_bf16(kLionParam) && row.is_bf16(kLionGrad) && row.is_f32(kLionExpAvg) ? Mode::bf16_average_f32 : Mode::mixed;
}

template <Mode mode>
void step_rows(const KernelOf<multi::Launch<lion::Rule<mode>>>& kernel, const TensorRow* rows, int64_t count, const LionOptions& o,
               void* stream) {
  typename lion::Rule<mode>::Shared s;
  s.grad_scale = o.grad_scale;
  s.found_inf = o.found_inf;
  s.lr_tensor = o.lr_tensor;
  s.lr = static_cast<float>(o.lr);
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.maximize = o.maximize;
  s.stochastic = o.stochastic;
  multi::launch_rows<lion::Rule<mode>>(
      kernel, rows, count, s, [&](int64_t i) { return mode_of(rows[i]) == mode; },
      [&](int64_t i, int) -> const float* { return rows[i].step; }, stream);
}

}  // namespace

const char* lion_cuda(const TensorRow* rows, int64_t count, const LionOptions& options, void* stream) {
  const auto average_f32 = rare_kernel<lion::lion_kernel<Mode::bf16_average_f32>>;
  const auto mixed = rare_kernel<lion::lion_kernel<Mode::mixed>>;
  for (int64_t i = 0; i < count; ++i) {
    const Mode mode = mode_of(rows[i]);
    if (mode == Mode::bf16_average_f32 ? !ready(average_f32) : mode == Mode::mixed && !ready(mixed)) return last_error();
  }
  if (rows[0].step) multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows(kernel<lion::lion_kernel<Mode::f32>>, rows, count, options, stream);
  step_rows(kernel<lion::lion_kernel<Mode::bf16>>, rows, count, options, stream);
  step_rows(average_f32, rows, count, options, stream);
  step_rows(mixed, rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
