// Softmax's forward launcher.

#include "softmax/softmax_launch.h"

namespace flexops {
namespace {

/// A kernel (as a pointer, because each <<<>>> costs build time), and what it takes.
struct Kernel {
  const void* kernel;
  int held, most;
};

template <softmax::Type type, bool kMasked>
Kernel rows_kernel() {
  return {reinterpret_cast<const void*>(&softmax::softmax_rows<type, kMasked>), softmax::kHeld<type, kMasked>,
          softmax::kMostOfRows<type, kMasked>};
}

template <bool kMasked>
Kernel rows_kernel(SoftmaxType type) {
  return type == SoftmaxType::f32   ? rows_kernel<softmax::kF32, kMasked>()
         : type == SoftmaxType::f16 ? rows_kernel<softmax::kF16, kMasked>()
                                    : rows_kernel<softmax::kBf16, kMasked>();
}

template <softmax::Type type>
Kernel general_kernel() {
  return {reinterpret_cast<const void*>(&softmax::softmax_general<type>), softmax::kGeneralHeld<type>, softmax::kMostThreads};
}

Kernel general_kernel(SoftmaxType type) {
  return type == SoftmaxType::f32   ? general_kernel<softmax::kF32>()
         : type == SoftmaxType::f16 ? general_kernel<softmax::kF16>()
                                    : general_kernel<softmax::kBf16>();
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
    for (int d = 0; d < rows.mask_dims; ++d) p.mask_sizes[d] = make_size(rows.mask_sizes[d]), p.mask_strides[d] = rows.mask_strides[d];
  }
  const bool f32 = rows.type == SoftmaxType::f32, masked = p.mask_kind == softmax::kBoolean;
  if ((masked || p.mask_kind == softmax::kNoMask) && (p.scale > 0.0f || p.scale < 0.0f)) {
    const Kernel k = masked ? rows_kernel<true>(rows.type) : rows_kernel<false>(rows.type);
    const Grid grid = make_grid(p, rows.type, k.held, k.most);
    if (grid.holds) {
      if (p.scale < 0.0f) p.scale = -p.scale, p.flip = f32 ? 0x80000000u : 0x80008000u;
      return launch(k.kernel, p, grid, stream);
    }
  }
  const Kernel k = general_kernel(rows.type);
  const Grid grid = make_grid(p, rows.type, k.held, k.most);
  return launch(grid.holds ? k.kernel : softmax_long_kernel(rows.type), p, grid, stream);
}

}  // namespace flexops
