// The launcher of Adam with 8-bit states.

#include "adam8bit/adam8bit.h"

#include "adam/adam_launch.h"
#include "adam8bit/adam8bit.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
using multi::Data;

const char* adam8bit_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options,
                          void* stream) {
  multi::step_rows(
      rows, count, multi::data_of<adam8bit::Rule<Data::mixed>>, adam::make_numbers(options), stream,
      kernel<adam8bit::adam8bit_kernel<Data::f32>>, kernel<adam8bit::adam8bit_kernel<Data::bf16>>,
      rare_kernel<adam8bit::adam8bit_kernel<Data::mixed>>);
  return last_error();
}

}  // namespace flexops
