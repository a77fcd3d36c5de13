// Adam's launcher.

#include "adam/adam.h"

#include "adam/adam.cuh"
#include "adam/adam_launch.h"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

using adam::Mode;

bool is_all_bf16(const TensorRow& row) {
  if (row.array[kAdamMaxExpAvgSq] || row.array[kAdamCopy]) return false;
  return row.is_bf16(kAdamParam) && row.is_bf16(kAdamGrad) && row.is_bf16(kAdamExpAvg) && row.is_bf16(kAdamExpAvgSq);
}

Mode mode_of(const TensorRow& row) {
  if (is_all_bf16(row)) return Mode::bf16;
  if (!row.is_f32(kAdamExpAvg) || !row.is_f32(kAdamExpAvgSq) || !row.is_f32(kAdamMaxExpAvgSq)) return Mode::narrow;
  return multi::needs_general<adam::Rule<Mode::general>>(row) ? Mode::general : Mode::plain;
}

/// The rows that need this kernel.
template <Mode mode>
void step_rows(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  multi::launch_rows<adam::Rule<mode>>(
      kernel<adam::adam_kernel<mode>>, rows, count, adam::make_numbers(options), [&](int64_t i) { return mode_of(rows[i]) == mode; },
      [&](int64_t i, int) { return rows[i].step; }, stream);
}

}  // namespace

const char* adam_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows<Mode::plain>(rows, count, options, stream);
  step_rows<Mode::general>(rows, count, options, stream);
  step_rows<Mode::bf16>(rows, count, options, stream);
  step_rows<Mode::narrow>(rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
