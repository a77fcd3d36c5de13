// Softmax's backward launcher.

#include "softmax/softmax_launch.h"

namespace flexops {
namespace {

template <softmax::Type type>
Kernels kernels() {
  return {reinterpret_cast<const void*>(&softmax::softmax_backward_rows<type>),
          reinterpret_cast<const void*>(&softmax::softmax_backward_long<type>)};
}

Kernels kernels(SoftmaxType type) {
  return type == SoftmaxType::f32   ? kernels<softmax::kF32>()
         : type == SoftmaxType::f16 ? kernels<softmax::kF16>()
                                    : kernels<softmax::kBf16>();
}

}  // namespace

const char* softmax_backward_cuda(const void* grad, int64_t grad_stride, const void* y, void* out, const SoftmaxRows& rows, void* stream) {
  if (rows.rows * rows.length == 0) return nullptr;
  Params p = make_params(y, out, rows);
  p.grad = grad, p.grad_stride = grad_stride;
  return launch(kernels(rows.type), p, rows.type, softmax::kBackwardFloats, stream);
}

}  // namespace flexops
