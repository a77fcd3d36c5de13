// Lion's launcher.

#include "lion/lion.h"

#include "common/multi_tensor_launch.h"
#include "lion/lion.cuh"

namespace flexops {
namespace {

template <bool general>
typename lion::Rule<general>::Shared make_shared(const LionOptions& o) {
  typename lion::Rule<general>::Shared s;
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
  return s;
}

template <bool general>
void step_rows(const TensorRow* rows, int64_t count, const LionOptions& options, void* stream) {
  using Rule = lion::Rule<general>;
  multi::launch_rows<Rule>(
      kernel<lion::lion_kernel<general>>, rows, count, make_shared<general>(options),
      [&](int64_t i) { return multi::needs_general<Rule>(rows[i]) == general; }, [](int64_t, int) -> const float* { return nullptr; },
      stream);
}

}  // namespace

const char* lion_cuda(const TensorRow* rows, int64_t count, const LionOptions& options, void* stream) {
  step_rows<false>(rows, count, options, stream);
  step_rows<true>(rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
