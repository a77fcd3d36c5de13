// Cross entropy's launchers: how many threads and blocks share a row.

#include "common/dispatch.cuh"
#include "cross_entropy/cross_entropy.cuh"
#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/cross_entropy_launch.h"

namespace flexops {
namespace {

constexpr int64_t kCountedByBlocks =
    1024;  // targets; of more, a kernel counts those that are not ignored

/// A kernel for each type, of which logits seldom are float16.
using Kernels = KernelOf<Params>[3];
const Kernels kRows = FLEXOPS_EACH_COMMON_TYPE(cross_entropy::cross_entropy_rows);
/// Without gradients: 16-bit logits need fewer registers then.
const Kernels kForwardRows = {kernel<cross_entropy::cross_entropy_rows<float>>,
                              rare_kernel<cross_entropy::cross_entropy_rows<f16, false>>,
                              kernel<cross_entropy::cross_entropy_rows<bf16, false>>};

const KernelOf<Params>& rows_kernel(const Params& p, ElementType type) {
  return (p.out ? kRows : kForwardRows)[static_cast<int>(type)];
}

int64_t vectors_held(const Params& p, ElementType type) {
  return p.out || type == ElementType::f32 ? cross_entropy::kVectors
                                           : cross_entropy::kForwardVectors;
}

Params make_params(const void* logits, const int64_t* target, const Logits& shape) {
  Params p;
  p.logits = const_cast<void*>(logits), p.out = nullptr;
  p.target = reinterpret_cast<const i64*>(target);
  p.losses = p.maxima = p.sums = p.divisor = nullptr, p.upstream = nullptr;
  p.rows = shape.rows, p.stride = shape.stride, p.out_stride = 0,
  p.ignore_index = shape.ignore_index;
  p.length = static_cast<int>(shape.length);
  p.each_row = p.count = 0;
  p.lanes = p.blocks = 1, p.log_lanes = 0, p.part = 0;
  p.smoothing = shape.smoothing, p.z_loss = shape.z_loss;
  return p;
}

void launch(const KernelOf<Params>& kernel, const Params& p, int64_t count, int64_t threads,
            void* stream) {
  flexops::launch(kernel, {blocks(count), blocks(threads), stream}, p);
}

/// Rows that a warp or less holds.
bool launch_short(Params& p, ElementType type, int64_t vectors, void* stream) {
  const int64_t held = vectors_held(p, type);
  if (vectors > cross_entropy::kNarrowWarp * held) return false;
  while (p.lanes * held < vectors) p.lanes *= 2, ++p.log_lanes;
  p.part = static_cast<int>(vectors);
  const int64_t threads = cross_entropy::kShortThreads;
  launch(rows_kernel(p, type), p, ceil_div(p.rows * p.lanes, threads), threads, stream);
  return true;
}

void launch_rows(Params& p, ElementType type, void* stream, int64_t vectors) {
  if (launch_short(p, type, vectors, stream)) return;
  if (p.out && type == ElementType::f32 && vectors >= cross_entropy::kRingLeast &&
      launch_ring(p, vectors, stream))
    return;
  const int64_t held = vectors_held(p, type);
  const int64_t most = !p.out ? cross_entropy::kForwardThreads
                       : vectors <= 2 * cross_entropy::kRowThreads * held
                           ? cross_entropy::kRowThreads
                           : 2 * cross_entropy::kRowThreads;
  const int64_t threads = least(ceil_div(ceil_div(vectors, held), 32) * 32, most);
  p.part = static_cast<int>(vectors);
  p.lanes = static_cast<int>(threads < 64 ? 64 : threads);
  launch(rows_kernel(p, type), p, p.rows, p.lanes, stream);
}

void launch_finish(const Logits& shape, const int64_t* target, const LossStats& stats, float* loss,
                   Reduction reduction, void* stream) {
  flexops::launch(kernel<cross_entropy::cross_entropy_finish>,
                  {{1}, {cross_entropy::kMostThreads}, stream},
                  reinterpret_cast<const i64*>(target), stats.losses, stats.divisor, loss,
                  shape.rows, shape.ignore_index, reduction == Reduction::mean);
}

}  // namespace

const char* cross_entropy_cuda(void* logits, const int64_t* target, const Logits& shape,
                               Reduction reduction, bool write_gradient,
                               const GradientFactors& factors, const LossStats& stats, float* loss,
                               void* stream) {
  if (shape.rows > 0) {
    Params p = make_params(logits, target, shape);
    p.losses = stats.losses, p.maxima = stats.maxima, p.sums = stats.sums;
    if (write_gradient) {
      p.out = logits, p.out_stride = shape.stride;
      p.upstream = factors.data, p.each_row = factors.each_row;
      if (reduction == Reduction::mean) {
        p.count = shape.rows <= kCountedByBlocks;
        if (!p.count) {
          launch_finish(shape, target, stats, nullptr, reduction, stream);
          p.divisor = stats.divisor;
        }
      }
    }
    launch_rows(p, shape.type, stream, row_vectors(logits, shape));
  }
  if (reduction != Reduction::none) launch_finish(shape, target, stats, loss, reduction, stream);
  return last_error();
}

const char* cross_entropy_backward_cuda(const void* logits, const int64_t* target,
                                        const LossStats& stats, const GradientFactors& factors,
                                        void* out, const Logits& shape, void* stream) {
  if (shape.rows * shape.length == 0) return nullptr;
  Params p = make_params(logits, target, shape);
  p.maxima = stats.maxima, p.sums = stats.sums, p.divisor = stats.divisor;
  p.upstream = factors.data, p.each_row = factors.each_row;
  p.out = out, p.out_stride = shape.length;
  const int64_t vectors = row_vectors(logits, shape);
  if (!launch_short(p, shape.type, vectors, stream)) {
    p.lanes = cross_entropy::kGradientThreads;
    p.part = cross_entropy::kGradientThreads * cross_entropy::kVectors;
    p.blocks = static_cast<int>(ceil_div(vectors, p.part));
    launch(rows_kernel(p, shape.type), p, p.rows * p.blocks, p.lanes, stream);
  }
  return last_error();
}

const char* scale_rows_cuda(void* values, ElementType type, int64_t rows, int64_t length,
                            const float* factors, bool each_row, void* stream) {
  if (rows * length == 0) return nullptr;
  constexpr int64_t kBlocks =
      2048;  // few enough to come and go quickly where there is nothing to do, as there mostly is
  const int64_t elements = 16 / element_size(type);
  const int64_t work = ceil_div((each_row ? length : rows * length) + elements,
                                elements * cross_entropy::kScaleThreads);
  const Dim3 grid =
      blocks(least(work, kBlocks), each_row ? least(rows, ceil_div(kBlocks, work)) : 1);
  const LaunchConfig config = {grid, {cross_entropy::kScaleThreads}, stream};
  with_floats(type, [&](auto of) {
    using T = decltype(of);
    flexops::launch(kernel<cross_entropy::scale_rows<T>>, config, static_cast<T*>(values), factors,
                    rows, length, each_row);
  });
  return last_error();
}

}  // namespace flexops
