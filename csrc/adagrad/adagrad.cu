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
void step_rows(const TensorRow* rows, int64_t count, const AdagradOptions& options, cudaStream_t stream) {
  using Rule = adagrad::Rule<general>;
  multi::for_each_launch<Rule>(
      rows, count, make_shared<general>(options), [&](int64_t i) { return multi::needs_general<Rule>(rows[i]) == general; },
      [&](int64_t i, int) { return rows[i].step; },
      [&](const auto& launch, uint32_t blocks) { adagrad::adagrad_kernel<general><<<blocks, Rule::kThreads, 0, stream>>>(launch); });
}

}  // namespace

const char* adagrad_cuda(const TensorRow* rows, int64_t count, const AdagradOptions& options, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  multi::for_each_steps(rows, count, options.found_inf, [&](const multi::Steps& steps, int blocks) {
    adagrad::step_kernel<<<blocks, multi::Steps::kThreads, 0, on>>>(steps);
  });
  step_rows<false>(rows, count, options, on);
  step_rows<true>(rows, count, options, on);
  return multi::last_error();
}

}  // namespace flexops
