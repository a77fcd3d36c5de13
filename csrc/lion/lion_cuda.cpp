// Lion's launcher.

#include "lion/lion.h"

#include "common/multi_tensor_launch.h"
#include "lion/lion.cuh"

namespace flexops {
namespace {

using multi::Mode;

Mode mode_of(const TensorRow& row) {
  const multi::Data data = multi::data_of<lion::Rule<Mode::mixed>>(row);
  if (data != multi::Data::mixed) return data == multi::Data::f32 ? Mode::f32 : Mode::bf16;
  return row.is_bf16(kLionParam) && row.is_bf16(kLionGrad) && row.is_f32(kLionExpAvg)
             ? Mode::bf16_average_f32
             : Mode::mixed;
}

}  // namespace

const char* lion_cuda(const TensorRow* rows, int64_t count, const AverageOptions& options,
                      void* stream) {
  multi::step_rows(rows, count, mode_of, multi::make_average_numbers<lion::Shared>(options), stream,
                   kernel<lion::lion_kernel<Mode::f32>>, kernel<lion::lion_kernel<Mode::bf16>>,
                   rare_kernel<lion::lion_kernel<Mode::bf16_average_f32>>,
                   rare_kernel<lion::lion_kernel<Mode::mixed>>);
  return last_error();
}

}  // namespace flexops
