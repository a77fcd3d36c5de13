// The launcher of Adam with 8-bit states.

#include "adam8bit/adam8bit.h"

#include "adam/adam_launch.h"
#include "adam8bit/adam8bit.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

/// The rows that need the general kernel, or those that do not.
template <bool general>
void step_rows(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  using Rule = adam8bit::Rule<general>;
  multi::launch_rows<Rule>(
      kernel<adam8bit::adam8bit_kernel<general>>, rows, count, adam::make_numbers(options),
      [&](int64_t i) { return multi::needs_general<adam8bit::Rule<true>>(rows[i]) == general; },
      [&](int64_t i, int) { return rows[i].step; }, stream);
}

}  // namespace

const char* adam8bit_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows<false>(rows, count, options, stream);
  step_rows<true>(rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
