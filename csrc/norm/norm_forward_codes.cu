// The norms' forward kernels that are compiled apart, for the time it takes: codes, and rows without aligned vectors.

#include "norm/norm_forward_codes.cuh"
#include "norm/norm_forward_ragged.cuh"
#include "norm/norm_launch.h"

namespace flexops::norm {

#define FLEXOPS_NORM_CODES(items)                                                                    \
  {FLEXOPS_NORM_KERNEL(forward_codes<float, items>), FLEXOPS_NORM_KERNEL(forward_codes<f16, items>), \
   FLEXOPS_NORM_KERNEL(forward_codes<bf16, items>)}
const void* codes_kernel(NormType type, int items) {
  static const void* const kernels[2][3] = {FLEXOPS_NORM_CODES(kItems), FLEXOPS_NORM_CODES(kManyItems)};
  return kernels[items == kManyItems][static_cast<int>(type)];
}

const void* ragged_kernel() { return FLEXOPS_NORM_KERNEL(forward_ragged); }

}  // namespace flexops::norm
