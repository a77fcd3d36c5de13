// The launcher of Adam with 8-bit states.

#include "adam8bit/adam8bit.h"

#include "adam/adam_launch.h"
#include "adam8bit/adam8bit.cuh"
#include "common/multi_tensor_launch.h"

namespace flexops {
namespace {

using multi::Data;

template <Data data>
void step_rows(const KernelOf<multi::Launch<adam8bit::Rule<data>>>& kernel, const TensorRow* rows, int64_t count,
               const AdamOptions& options, void* stream) {
  multi::launch_rows<adam8bit::Rule<data>>(
      kernel, rows, count, adam::make_numbers(options),
      [&](int64_t i) { return multi::data_of<adam8bit::Rule<Data::mixed>>(rows[i]) == data; }, [&](int64_t i, int) { return rows[i].step; },
      stream);
}

}  // namespace

const char* adam8bit_cuda(const TensorRow* rows, int64_t count, const AdamOptions& options, void* stream) {
  const auto mixed = rare_kernel<adam8bit::adam8bit_kernel<Data::mixed>>;
  if (multi::lacks_mixed(mixed, rows, count)) return last_error();
  multi::launch_steps(rows, count, options.found_inf, stream);
  step_rows(kernel<adam8bit::adam8bit_kernel<Data::f32>>, rows, count, options, stream);
  step_rows(kernel<adam8bit::adam8bit_kernel<Data::bf16>>, rows, count, options, stream);
  step_rows(mixed, rows, count, options, stream);
  return last_error();
}

}  // namespace flexops
