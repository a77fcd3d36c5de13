// The launcher of products of a few rows: which kernel, and its blocks.

#include "few_rows/few_rows.h"

#include "common/launch.h"
#include "few_rows/few_rows.cuh"
#include "few_rows/few_rows_copied_launch.h"
#include "few_rows/few_rows_fma_hopper.cuh"

namespace flexops {
namespace {

using few_rows::Params;

constexpr int64_t kLong = 4096;             // of k, for blocks of many warps
constexpr int64_t kMostStaged = 100 << 10;  // bytes of rows in shared memory
constexpr int kMostStagedRows = 2;          // more take longer to copy than to read as needed
constexpr int kMostFmaRows = 2;

/// Kernels by shape and gated.
using Kernels = KernelOf<Params>[2];
#define FLEXOPS_FEW_ROWS(which, name, shape, ...)                 \
  {which<few_rows::name<T, few_rows::shape, false, __VA_ARGS__>>, \
   which<few_rows::name<T, few_rows::shape, true, __VA_ARGS__>>}
/// Of the shapes for at most 8 rows, and of all.
#define FLEXOPS_FEW_ROWS_SHORT(which, name, ...)         \
  FLEXOPS_FEW_ROWS(which, name, kMany, __VA_ARGS__),     \
      FLEXOPS_FEW_ROWS(which, name, kSome, __VA_ARGS__), \
      FLEXOPS_FEW_ROWS(which, name, kFew, __VA_ARGS__)
#define FLEXOPS_FEW_ROWS_SHAPES(which, ...)                 \
  FLEXOPS_FEW_ROWS_SHORT(which, product, __VA_ARGS__),      \
      FLEXOPS_FEW_ROWS(which, product, kTall, __VA_ARGS__), \
      FLEXOPS_FEW_ROWS(which, product, kTallFew, __VA_ARGS__)

template <class T>
KernelOf<Params> kernel_for(int shape, bool gated, bool norm, bool vectors, bool staged) {
  using few_rows::kDirect, few_rows::kDirectNorm, few_rows::kStaged;
  static const Kernels kInShared[] = {FLEXOPS_FEW_ROWS_SHORT(kernel, product, kStaged, true)};
  static const Kernels kPlain[] = {FLEXOPS_FEW_ROWS_SHAPES(kernel, kDirect, true)};
  static const Kernels kNormed[] = {FLEXOPS_FEW_ROWS_SHAPES(kernel, kDirectNorm, true)};
  static const Kernels kRagged[] = {FLEXOPS_FEW_ROWS_SHAPES(rare_kernel, kDirect, false)};
  static const Kernels kRaggedNormed[] = {FLEXOPS_FEW_ROWS_SHAPES(rare_kernel, kDirectNorm, false)};
  if (staged) return kInShared[shape][gated];
  if (vectors) return (norm ? kNormed : kPlain)[shape][gated];
  return (norm ? kRaggedNormed : kRagged)[shape][gated];
}

template <class T, few_rows::Input kInput>
KernelOf<Params> fma_kernel_for(int shape, bool gated, int rows) {
  static const Kernels kOne[] = {FLEXOPS_FEW_ROWS_SHORT(kernel, product_by_fma_hopper, kInput, 1)};
  static const Kernels kTwo[] = {FLEXOPS_FEW_ROWS_SHORT(kernel, product_by_fma_hopper, kInput, 2)};
  return (rows == 1 ? kOne : kTwo)[shape][gated];
}
#undef FLEXOPS_FEW_ROWS_SHAPES
#undef FLEXOPS_FEW_ROWS_SHORT
#undef FLEXOPS_FEW_ROWS

}  // namespace

const char* few_rows_cuda(const FewRows& o, void* stream) {
  if (takes_copied(o, gpu_facts())) {
    const CopiedPlan plan = choose_copied(o, gpu_facts().processors);
    o.x.dtype == Dtype::bf16 ? launch_copied<bf16>(o, plan, stream)
                             : launch_copied<f16>(o, plan, stream);
    return last_error();
  }
  const bool gated = o.activation != kFewNone;
  const int64_t width = o.out.columns();
  Params p = {};
  p.x = o.x.data, p.norm = o.norm ? o.norm.data : nullptr, p.out = o.out.data;
  p.residual = o.residual ? o.residual.data : nullptr;
  p.rows = static_cast<int>(o.x.rows()), p.k = static_cast<int>(o.x.columns());
  p.width = static_cast<int>(width), p.count = static_cast<int>(o.weights.count);
  p.eps = o.eps, p.offset = o.offset;
  p.activation = static_cast<int>(o.activation);
  p.early = o.early && gpu_facts().capability >= 90;
  bool vectors = p.k % 8 == 0 && aligned(o.x.data) && (!o.norm || aligned(o.norm.data));
  int64_t all = 0;
  for (int i = 0; i < p.count; ++i) {
    vectors = vectors && aligned(o.weights[i].data);
    p.weights[i] = o.weights[i].data, p.biases[i] = o.biases.count ? o.biases[i].data : nullptr;
    p.columns[i] = static_cast<int>(o.weights[i].size(0));
    p.starts[i] = gated ? 0 : static_cast<int>(all);
    all += p.columns[i];
  }
  const int64_t processors = gpu_facts().processors;
  const int64_t some = ceil_div(gated ? 2 * width : all, few_rows::kColumns);
  const bool few = some <= processors && p.k >= kLong;
  const int shape = p.rows > 8               ? few ? few_rows::kTallFew : few_rows::kTall
                    : few                    ? few_rows::kFew
                    : some <= 2 * processors ? few_rows::kSome
                                             : few_rows::kMany;
  const int lines = few_rows::kColumns * few_rows::kShapes[shape].tiles;
  int64_t count = 0;
  for (int i = 0; i < p.count; ++i) {
    if (!gated || i == 0) count += ceil_div(p.columns[i], gated ? lines / 2 : lines);
    p.ends[i] = static_cast<int>(count);
  }
  const int64_t bytes = 2 * p.rows * int64_t{few_rows::staged_stride(p.k)};
  const bool staged = vectors && p.norm && p.rows <= kMostStagedRows && bytes <= kMostStaged;
  // Measured on an H200 only: other GPUs' clocks may not depend on tensor cores.
  const bool by_fma = gpu_facts().capability == 90 && p.rows <= kMostFmaRows && vectors &&
                      staged == (p.norm != nullptr);
  const auto start = [&](auto type) {
    using T = decltype(type);
    const auto chosen = !by_fma  ? kernel_for<T>(shape, gated, p.norm != nullptr, vectors, staged)
                        : staged ? fma_kernel_for<T, few_rows::kStaged>(shape, gated, p.rows)
                                 : fma_kernel_for<T, few_rows::kDirect>(shape, gated, p.rows);
    const auto warps = static_cast<unsigned>(few_rows::kShapes[shape].warps);
    LaunchConfig config{blocks(count), {32 * warps}, stream, staged ? bytes : 0};
    config.early = p.early;
    launch(chosen, config, p);
  };
  if (o.x.dtype == Dtype::bf16) {
    start(bf16{});
  } else {
    start(f16{});
  }
  return last_error();
}

}  // namespace flexops
