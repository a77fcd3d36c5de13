#include "doctor/doctor.h"

namespace flexops::FLEXOPS_ISA {

void square_cpu(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] * x[i];
}

}  // namespace flexops::FLEXOPS_ISA
