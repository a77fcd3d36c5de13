// Lion's launcher.

#include "lion/lion.h"

#include "common/multi_tensor_launch.h"
#include "lion/lion.cuh"

namespace flexops {
namespace {

using multi::Data;

template <Data data>
void step_rows(const KernelOf<multi::Launch<lion::Rule<data>>>& kernel, const TensorRow* rows, int64_t count, const LionOptions& o,
               void* stream) {
  typename lion::Rule<data>::Shared s;
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
  multi::launch_rows<lion::Rule<data>>(
      kernel, rows, count, s, [&](int64_t i) { return multi::data_of<lion::Rule<Data::mixed>>(rows[i]) == data; },
      [](int64_t, int) -> const float* { return nullptr; }, stream);
}

}  // namespace

const char* lion_cuda(const TensorRow* rows, int64_t count, const LionOptions& options, void* stream) {
  const auto mixed = rare_kernel<lion::lion_kernel<Data::mixed>>;
  if (multi::lacks_mixed(mixed, rows, count)) return last_error();
  step_rows(kernel<lion::lion_kernel<Data::f32>>, rows, count, options, stream);
  step_rows(kernel<lion::lion_kernel<Data::bf16>>, rows, count, options, stream);
  step_rows(mixed, rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
