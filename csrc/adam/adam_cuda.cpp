// Adam's launcher.

#include "adam/adam.h"

#include "adam/adam.cuh"
#include "adam/adam_launch.h"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

using adam::Mode;

Mode mode_of(const TensorRow& row) {
  const multi::Data data = multi::data_of<adam::Rule<Mode::mixed>>(row);
  if (data != multi::Data::mixed) return data == multi::Data::f32 ? Mode::f32 : Mode::bf16;
  if (!row.is_bf16(kAdamGrad) || !row.is_f32(kAdamExpAvg) || !row.is_f32(kAdamExpAvgSq)) return Mode::mixed;
  if (row.array[kAdamMaxExpAvgSq] || row.array[kAdamCopy]) return Mode::mixed;
  return row.is_f32(kAdamParam) ? Mode::bf16_grad : row.is_bf16(kAdamParam) ? Mode::bf16_average_f32 : Mode::mixed;
}

/// The rows that need this kernel.
template <Mode mode>
void step_rows(const KernelOf<multi::Launch<adam::Rule<mode>>>& kernel, const TensorRow* rows, int64_t count, const AdamOptions& options,
               void* stream) {
  multi::launch_rows<adam::Rule<mode>>(
      kernel, rows, count, adam::make_numbers(options), [&](int64_t i) { return mode_of(rows[i]) == mode; },
      [&](int64_t i, int) { return rows[i].step; }, stream);
}

}  // namespace

const char* adam_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  const auto grad = rare_kernel<adam::adam_kernel<Mode::bf16_grad>>;
  const auto average_f32 = rare_kernel<adam::adam_kernel<Mode::bf16_average_f32>>;
  const auto mixed = rare_kernel<adam::adam_kernel<Mode::mixed>>;
  for (int64_t i = 0; i < count; ++i) {  // before anything is written
    const Mode mode = mode_of(rows[i]);
    if (mode == Mode::bf16_grad && !ready(grad)) return last_error();
    if (mode == Mode::bf16_average_f32 && !ready(average_f32)) return last_error();
    if (mode == Mode::mixed && !ready(mixed)) return last_error();
  }
  multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows(kernel<adam::adam_kernel<Mode::f32>>, rows, count, options, stream);
  step_rows(kernel<adam::adam_kernel<Mode::bf16>>, rows, count, options, stream);
  step_rows(grad, rows, count, options, stream);
  step_rows(average_f32, rows, count, options, stream);
  step_rows(mixed, rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
