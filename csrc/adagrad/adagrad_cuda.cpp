// Adagrad's launcher.

#include "adagrad/adagrad.h"

#include "adagrad/adagrad.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

using multi::Data;

template <Data data>
void step_rows(const KernelOf<multi::Launch<adagrad::Rule<data>>>& kernel, const TensorRow* rows, int64_t count, const AdagradOptions& o,
               void* stream) {
  typename adagrad::Rule<data>::Shared s;
  s.grad_scale = o.grad_scale;
  s.found_inf = o.found_inf;
  s.lr_tensor = o.lr_tensor;
  s.lr = static_cast<float>(o.lr);
  s.lr_decay = static_cast<float>(o.lr_decay);
  s.eps = static_cast<float>(o.eps);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.maximize = o.maximize;
  multi::launch_rows<adagrad::Rule<data>>(
      kernel, rows, count, s, [&](int64_t i) { return multi::data_of<adagrad::Rule<Data::mixed>>(rows[i]) == data; },
      [&](int64_t i, int) { return rows[i].step; }, stream);
}

}  // namespace

const char* adagrad_cuda(const TensorRow* rows, int64_t count, const AdagradOptions& options, void* stream) {
  const auto mixed = rare_kernel<adagrad::adagrad_kernel<Data::mixed>>;
  if (multi::lacks_mixed(mixed, rows, count)) return last_error();
  multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows(kernel<adagrad::adagrad_kernel<Data::f32>>, rows, count, options, stream);
  step_rows(kernel<adagrad::adagrad_kernel<Data::bf16>>, rows, count, options, stream);
  step_rows(mixed, rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
