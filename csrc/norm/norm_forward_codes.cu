// The norms' forward kernels that are compiled apart, for the time it takes: codes, and all that others do not take.

#include "norm/norm_forward_codes.cuh"
#include "norm/norm_forward_ragged.cuh"
#include "norm/norm_forward_rows.cuh"
#include "norm/norm_launch.h"

namespace flexops::norm {

#define FLEXOPS_NORM_CODES(items)                                                                    \
  {FLEXOPS_NORM_KERNEL(forward_codes<float, items>), FLEXOPS_NORM_KERNEL(forward_codes<f16, items>), \
   FLEXOPS_NORM_KERNEL(forward_codes<bf16, items>)}
const void* codes_kernel(NormType type, int items) {
  static const void* const kernels[2][3] = {FLEXOPS_NORM_CODES(kItems), FLEXOPS_NORM_CODES(kManyItems)};
  return kernels[items == kManyItems][static_cast<int>(type)];
}

const void* rows_kernel(NormType type, bool vectors) {
  if (!vectors) return FLEXOPS_NORM_KERNEL(forward_ragged);
  return type == NormType::f32 ? FLEXOPS_NORM_KERNEL(forward_rows<float>) : FLEXOPS_NORM_KERNEL(forward_rows<Half>);
}

}  // namespace flexops::norm
