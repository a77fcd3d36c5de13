// Adam's launcher.

#include "adam/adam.h"

#include <math.h>

#include "adam/adam.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

template <bool general>
typename adam::Rule<general>::Shared make_shared(const AdamOptions& o) {
  typename adam::Rule<general>::Shared s;
  s.grad_scale = o.grad_scale;
  s.found_inf = o.found_inf;
  s.lr_tensor = o.lr_tensor;
  s.lr = static_cast<float>(o.lr);
  s.log_beta1 = static_cast<float>(log(o.beta1));
  s.log_beta2 = static_cast<float>(log(o.beta2));
  s.beta1 = static_cast<float>(o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  s.eps = static_cast<float>(o.eps);
  s.weight_decay = static_cast<float>(o.weight_decay);
  s.decoupled = o.decoupled;
  s.maximize = o.maximize;
  return s;
}

/// The rows that need the general kernel, or those that do not.
template <bool general>
void step_rows(const TensorRow* rows, int64_t count, const AdamOptions& options, cudaStream_t stream) {
  using Rule = adam::Rule<general>;
  multi::for_each_launch<Rule>(
      rows, count, make_shared<general>(options), [&](int64_t i) { return multi::needs_general<adam::Rule<true>>(rows[i]) == general; },
      [&](int64_t i, int) { return rows[i].step; },
      [&](const auto& launch, uint32_t blocks) { adam::adam_kernel<general><<<blocks, Rule::kThreads, 0, stream>>>(launch); });
}

}  // namespace

const char* adam_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  multi::for_each_steps(rows, count, options.found_inf, [&](const multi::Steps& steps, int blocks) {
    adam::step_kernel<<<blocks, multi::Steps::kThreads, 0, on>>>(steps);
  });
  step_rows<false>(rows, count, options, on);
  step_rows<true>(rows, count, options, on);
  return multi::last_error();
}

}  // namespace flexops
