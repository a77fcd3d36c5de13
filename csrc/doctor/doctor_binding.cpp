#include "common/binding.h"
#include "doctor/doctor.h"

namespace flexops {

static Tensor doctor_square(Tensor x) {
  FLEXOPS_CHECK(x.dtype() == Dtype::f32, "flexops::doctor_square: x must be float32, got ", dtype_name(x.dtype()));
  x = contiguous(x);
  Tensor out = empty_like_contiguous(x, Dtype::f32);
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
  check_launch("flexops::doctor_square", square_cuda(x.data<float>(), out.data<float>(), x.numel(), current_stream(x)));
#else
  baseline::square_cpu(x.data<float>(), out.data<float>(), x.numel());
#endif
  return out;
}

FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "doctor_square", doctor_square); }

}  // namespace flexops
