#include "common/dispatch.cuh"
#include "common/launch.h"
#include "softcap/softcap.cuh"

namespace softcap_lib {

static LaunchConfig config_for(int64_t count, void* stream) { return {blocks(ceil_div(count, 256)), {256}, stream}; }

const char* softcap_cuda(const TensorView& x, double cap, const TensorView& out, void* stream) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    launch(kernel<softcap_kernel<T>>, config_for(x.numel, stream), x.as<T>(), static_cast<float>(cap), out.as<T>(), x.numel);
  });
  return last_error();
}

const char* softcap_backward_cuda(const TensorView& grad, const TensorView& y, double cap, const TensorView& out, void* stream) {
  with_floats(grad.dtype, [&](auto type) {
    using T = decltype(type);
    const auto config = config_for(grad.numel, stream);
    launch(kernel<softcap_backward_kernel<T>>, config, grad.as<T>(), y.as<T>(), static_cast<float>(cap), out.as<T>(), grad.numel);
  });
  return last_error();
}

}  // namespace softcap_lib
