// Adam's launcher.

#include "adam/adam.h"

#include "adam/adam.cuh"
#include "adam/adam_launch.h"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

/// The rows that need the general kernel, or those that do not.
template <bool general>
void step_rows(const TensorRow* rows, int64_t count, const AdamOptions& options, cudaStream_t stream) {
  using Rule = adam::Rule<general>;
  multi::for_each_launch<Rule>(
      rows, count, adam::make_numbers(options), [&](int64_t i) { return multi::needs_general<adam::Rule<true>>(rows[i]) == general; },
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
