// Softmax's backward launcher, and the forward kernel for long rows.

#include "softmax/softmax_launch.h"

namespace flexops {

const void* softmax_long_kernel(SoftmaxType type) {
  return type == SoftmaxType::f32   ? reinterpret_cast<const void*>(&softmax::softmax_long<softmax::kF32>)
         : type == SoftmaxType::f16 ? reinterpret_cast<const void*>(&softmax::softmax_long<softmax::kF16>)
                                    : reinterpret_cast<const void*>(&softmax::softmax_long<softmax::kBf16>);
}

const char* softmax_backward_cuda(const void* grad, int64_t grad_stride, const void* y, void* out, const SoftmaxRows& rows, void* stream) {
  if (rows.rows * rows.length == 0) return nullptr;
  Params p = make_params(y, out, rows);
  p.grad = grad, p.grad_stride = grad_stride;
  const Grid grid = make_grid(p, rows.type, softmax::kBackwardHeld, softmax::kMostThreads);
  const void* kernel = rows.type == SoftmaxType::f32   ? reinterpret_cast<const void*>(&softmax::softmax_backward_rows<softmax::kF32>)
                       : rows.type == SoftmaxType::f16 ? reinterpret_cast<const void*>(&softmax::softmax_backward_rows<softmax::kF16>)
                                                       : reinterpret_cast<const void*>(&softmax::softmax_backward_rows<softmax::kBf16>);
  return launch(kernel, p, grid, stream);
}

}  // namespace flexops
