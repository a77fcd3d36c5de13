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
  return row.is_bf16(kLionParam) && row.is_bf16(kLionGrad) && row.is_f32(kLionExpAvg)
             ? Mode::bf16_average_f32
             : Mode::mixed;
}

lion::Shared make_shared(const LionOptions& o) {
  lion::Shared s;
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
  return s;
}

}  // namespace

const char* lion_cuda(const TensorRow* rows, int64_t count, const LionOptions& options,
                      void* stream) {
  multi::step_rows(rows, count, mode_of, make_shared(options), stream,
                   kernel<lion::lion_kernel<Mode::f32>>, kernel<lion::lion_kernel<Mode::bf16>>,
                   rare_kernel<lion::lion_kernel<Mode::bf16_average_f32>>,
                   rare_kernel<lion::lion_kernel<Mode::mixed>>);
  return last_error();
}

}  // namespace flexops
