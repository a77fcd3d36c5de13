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
  if (!row.is_f32(kAdamExpAvg) || !row.is_f32(kAdamExpAvgSq) || row.array[kAdamMaxExpAvgSq])
    return Mode::mixed;
  if (row.array[kAdamCopy])
    return row.is_f32(kAdamParam) && row.is_f32(kAdamGrad) && row.is_bf16(kAdamCopy)
               ? Mode::bf16_copy
               : Mode::mixed;
  if (!row.is_bf16(kAdamGrad)) return Mode::mixed;
  return row.is_f32(kAdamParam)    ? Mode::bf16_grad
         : row.is_bf16(kAdamParam) ? Mode::bf16_average_f32
                                   : Mode::mixed;
}

}  // namespace

const char* adam_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options,
                      void* stream) {
  multi::step_rows(rows, count, mode_of, adam::make_numbers(options), stream,
                   kernel<adam::adam_kernel<Mode::f32>>, kernel<adam::adam_kernel<Mode::bf16>>,
                   rare_kernel<adam::adam_kernel<Mode::bf16_grad>>,
                   rare_kernel<adam::adam_kernel<Mode::bf16_average_f32>>,
                   rare_kernel<adam::adam_kernel<Mode::bf16_copy>>,
                   rare_kernel<adam::adam_kernel<Mode::mixed>>);
  return last_error();
}

}  // namespace flexops
