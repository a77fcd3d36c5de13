// The launcher of products of a few rows: which kernel, and a block for each multiprocessor.

#include "few_rows/few_rows.h"

#include "common/arithmetic.h"
#include "common/launch.h"
#include "few_rows/few_rows.cuh"

namespace flexops {
namespace {

using few_rows::Params;

constexpr int64_t kRing = 96 << 10;    // bytes of shared memory: two kernels run side by side
constexpr int64_t kBeside = 20 << 10;  // and what a block has besides, at most
constexpr int64_t kMostStages = 8;

/// Kernels by shape and gated.
using Kernels = KernelOf<Params>[2];
#define FLEXOPS_FEW_ROWS(which, shape, norm, aligned)                  \
  {which<few_rows::product<T, few_rows::shape, false, norm, aligned>>, \
   which<few_rows::product<T, few_rows::shape, true, norm, aligned>>}
#define FLEXOPS_FEW_ROWS_SHAPES(which, norm, aligned)                                           \
  {FLEXOPS_FEW_ROWS(which, kLow, norm, aligned), FLEXOPS_FEW_ROWS(which, kTall, norm, aligned), \
   FLEXOPS_FEW_ROWS(which, kTallFew, norm, aligned)}

template <class T>
KernelOf<Params> kernel_for(int shape, bool gated, bool norm, bool vectors) {
  static const Kernels kPlain[] = FLEXOPS_FEW_ROWS_SHAPES(kernel, false, true);
  static const Kernels kNormed[] = FLEXOPS_FEW_ROWS_SHAPES(kernel, true, true);
  static const Kernels kRagged[] = FLEXOPS_FEW_ROWS_SHAPES(rare_kernel, false, false);
  static const Kernels kRaggedNormed[] = FLEXOPS_FEW_ROWS_SHAPES(rare_kernel, true, false);
  if (vectors) return (norm ? kNormed : kPlain)[shape][gated];
  return (norm ? kRaggedNormed : kRagged)[shape][gated];
}
#undef FLEXOPS_FEW_ROWS_SHAPES
#undef FLEXOPS_FEW_ROWS

}  // namespace

const char* few_rows_cuda(const FewRows& o, void* stream) {
  const bool gated = o.activation != kFewNone;
  const int64_t width = o.out.columns();
  Params p = {};
  p.x = o.x.data, p.norm = o.norm ? o.norm.data : nullptr, p.out = o.out.data;
  p.residual = o.residual ? o.residual.data : nullptr;
  p.rows = static_cast<int>(o.x.rows()), p.k = static_cast<int>(o.x.columns());
  p.width = static_cast<int>(width), p.count = static_cast<int>(o.weights.count);
  p.eps = o.eps, p.offset = o.offset;
  p.activation = static_cast<int>(o.activation);
  bool vectors = p.k % 8 == 0 && aligned(o.x.data) && (!o.norm || aligned(o.norm.data));
  int64_t all = 0;
  for (int i = 0; i < p.count; ++i) {
    vectors = vectors && aligned(o.weights[i].data);
    p.weights[i] = o.weights[i].data, p.biases[i] = o.biases.count ? o.biases[i].data : nullptr;
    p.columns[i] = static_cast<int>(o.weights[i].size(0));
    p.starts[i] = gated ? 0 : static_cast<int>(all);
    all += p.columns[i];
  }
  const auto& gpu = gpu_facts();
  const auto tiles_of = [&](int64_t columns, int shape) {
    const int lines = few_rows::kColumns * few_rows::kShapes[shape].tiles;
    return ceil_div(columns, gated ? lines / 2 : lines);
  };
  const int shape = p.rows <= 8 ? few_rows::kLow
                    : tiles_of(gated ? width : all, few_rows::kTall) < gpu.processors
                        ? few_rows::kTallFew
                        : few_rows::kTall;
  int64_t count = 0;
  for (int i = 0; i < p.count; ++i) {
    if (!gated || i == 0) count += tiles_of(p.columns[i], shape);
    p.ends[i] = static_cast<int>(count);
  }
  p.tiles = static_cast<int>(count);
  const int64_t stage =
      few_rows::kWarps * few_rows::stage_bytes(few_rows::kShapes[shape], p.rows, p.norm != nullptr);
  const int64_t most = least(kRing, gpu.shared_of_block - kBeside) / stage;
  p.stages = static_cast<int>(most < 2 ? 2 : least(most, kMostStages));
  const auto start = [&](auto type) {
    using T = decltype(type);
    LaunchConfig config{
        blocks(least(count, gpu.processors)), {32 * few_rows::kWarps}, stream, p.stages * stage};
    config.early = o.early && gpu.capability >= 90;
    launch(kernel_for<T>(shape, gated, p.norm != nullptr, vectors), config, p);
  };
  if (o.x.dtype == Dtype::bf16) {
    start(bf16{});
  } else {
    start(f16{});
  }
  return last_error();
}

}  // namespace flexops
