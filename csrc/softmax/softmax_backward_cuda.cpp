// Softmax's backward launcher.

#include "softmax/softmax_backward.cuh"
#include "softmax/softmax_launch.h"

namespace flexops {

namespace {

/// Launches the kernel for rows of whole vectors, if these are such.
bool launch_whole(Params p, ElementType type, void* stream, const char*& error) {
  constexpr int64_t kMany = 1 << 22;
  const int64_t elements =
      vector_elements(type);  // float32 gains too little for what it takes to compile
  if (type == ElementType::f32 || p.queries.by != 0 ||
      (p.length | p.stride | p.grad_stride) % elements != 0 || p.rows * p.length < kMany)
    return false;
  Grid grid = make_grid(p, type, softmax::kWholeHeld, softmax::kWholeThreads);
  if (!grid.holds || p.lanes <= softmax::kNarrowWarp) return false;
  int64_t together = softmax::kWholeThreads / p.lanes;
  while (p.rows % together != 0) --together;
  grid.blocks[0] = p.rows / together, grid.threads[1] = together;
  error = launch(kernel<softmax::softmax_backward_whole<bf16>>, p, grid, stream);
  return true;
}

}  // namespace

const char* softmax_backward_cuda(const void* grad, int64_t grad_stride, const void* y, void* out,
                                  const SoftmaxRows& rows, void* stream) {
  if (rows.rows * rows.length == 0) return nullptr;
  Params p = make_params(y, out, rows);
  p.grad = grad, p.grad_stride = grad_stride;
  const char* error = nullptr;
  if (launch_whole(p, rows.type, stream, error)) return error;
  const Grid grid = make_grid(p, rows.type, softmax::kBackwardHeld, softmax::kMostThreads);
  const KernelOf<Params> kernels[] = {kernel<softmax::softmax_backward_rows<float>>,
                                      rare_kernel<softmax::softmax_backward_rows<f16>>,
                                      kernel<softmax::softmax_backward_rows<bf16>>};
  return launch(kernels[static_cast<int>(rows.type)], p, grid, stream);
}

}  // namespace flexops
