// Adagrad's launcher.

#include "adagrad/adagrad.h"

#include "adagrad/adagrad.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

template <bool general>
typename adagrad::Rule<general>::Shared make_shared(const AdagradOptions& o) {
  typename adagrad::Rule<general>::Shared s;
  s.grad_scale = o.grad_scale;
  s.found_inf = o.found_inf;
  s.lr_tensor = o.lr_tensor;
  s.lr = static_cast<float>(o.lr);
  s.lr_decay = static_cast<float>(o.lr_decay);
  s.eps = static_cast<float>(o.eps);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.maximize = o.maximize;
  return s;
}

template <bool general>
void step_rows(const TensorRow* rows, int64_t count, const AdagradOptions& options, void* stream) {
  using Rule = adagrad::Rule<general>;
  multi::launch_rows<Rule>(
      kernel<adagrad::adagrad_kernel<general>>, rows, count, make_shared<general>(options),
      [&](int64_t i) { return multi::needs_general<Rule>(rows[i]) == general; }, [&](int64_t i, int) { return rows[i].step; }, stream);
}

}  // namespace

const char* adagrad_cuda(const TensorRow* rows, int64_t count, const AdagradOptions& options, void* stream) {
  multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows<false>(rows, count, options, stream);
  step_rows<true>(rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
