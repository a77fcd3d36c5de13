// Softmax's forward launcher.

#include "softmax/softmax_launch.h"

namespace flexops {
namespace {

/// As pointers, because each <<<>>> costs build time.
template <softmax::Type type, bool kMasked>
Kernels kernels() {
  return {reinterpret_cast<const void*>(&softmax::softmax_rows<type, kMasked>), softmax_long_kernel(type)};
}

template <bool kMasked>
Kernels kernels(SoftmaxType type) {
  return type == SoftmaxType::f32   ? kernels<softmax::kF32, kMasked>()
         : type == SoftmaxType::f16 ? kernels<softmax::kF16, kMasked>()
                                    : kernels<softmax::kBf16, kMasked>();
}

}  // namespace

const char* softmax_cuda(const void* x, const void* mask, void* out, const SoftmaxRows& rows, void* stream) {
  if (rows.rows * rows.length == 0) return nullptr;
  Params p = make_params(x, out, rows);
  if (mask) {
    p.mask = mask;
    p.mask_kind = static_cast<softmax::Mask>(rows.mask);
    p.mask_step = rows.mask_step;
    p.mask_dims = rows.mask_dims;
    for (int d = 0; d < rows.mask_dims; ++d) p.mask_sizes[d] = rows.mask_sizes[d], p.mask_strides[d] = rows.mask_strides[d];
  }
  return launch(mask ? kernels<true>(rows.type) : kernels<false>(rows.type), p, rows.type, softmax::kFloats, stream);
}

}  // namespace flexops
