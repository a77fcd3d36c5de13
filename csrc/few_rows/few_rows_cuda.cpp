// The launcher of products of a few rows: which kernel, and a block for each 16 columns.

#include "few_rows/few_rows.h"

#include "common/launch.h"
#include "few_rows/few_rows.cuh"

namespace flexops {
namespace {

using few_rows::Params;

constexpr int64_t kMostStaged = 100 << 10;  // bytes of rows in shared memory

/// A kernel by shape and gated.
template <class T, few_rows::Input kInput, bool kAligned, bool kRare>
KernelOf<Params> kernel_of(int shape, bool gated) {
  using few_rows::product;
#define FLEXOPS_FEW_ROWS(which, shape)                   \
  {                                                      \
    which<product<T, shape, false, kInput, kAligned>>,   \
        which<product<T, shape, true, kInput, kAligned>> \
  }
  if constexpr (kRare) {
    static const KernelOf<Params> kKernels[][2] = {
        FLEXOPS_FEW_ROWS(rare_kernel, 0), FLEXOPS_FEW_ROWS(rare_kernel, 1),
        FLEXOPS_FEW_ROWS(rare_kernel, 2), FLEXOPS_FEW_ROWS(rare_kernel, 3)};
    return kKernels[shape][gated];
  } else {
    static const KernelOf<Params> kKernels[][2] = {
        FLEXOPS_FEW_ROWS(kernel, 0), FLEXOPS_FEW_ROWS(kernel, 1), FLEXOPS_FEW_ROWS(kernel, 2),
        FLEXOPS_FEW_ROWS(kernel, 3)};
    return kKernels[shape][gated];
  }
#undef FLEXOPS_FEW_ROWS
}

/// The usual rows fit into shared memory.
template <class T>
KernelOf<Params> kernel_for(int shape, bool gated, bool norm, bool vectors, bool staged) {
  if (staged) return kernel_of<T, few_rows::kStaged, true, false>(shape, gated);
  if (vectors)
    return norm ? kernel_of<T, few_rows::kDirectNorm, true, true>(shape, gated)
                : kernel_of<T, few_rows::kDirect, true, true>(shape, gated);
  return norm ? kernel_of<T, few_rows::kDirectNorm, false, true>(shape, gated)
              : kernel_of<T, few_rows::kDirect, false, true>(shape, gated);
}

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
  const int64_t processors = gpu_facts().processors, columns = gated ? 2 * width : all,
                tall = ceil_div(columns, few_rows::kColumns);
  const int shape = p.rows > 8               ? few_rows::kTall
                    : tall <= processors     ? few_rows::kFew
                    : tall <= 2 * processors ? few_rows::kSome
                                             : few_rows::kMany;
  const int lines = few_rows::kColumns * few_rows::kShapes[shape].tiles;
  int64_t count = 0;
  for (int i = 0; i < p.count; ++i) {
    if (!gated || i == 0) count += ceil_div(p.columns[i], gated ? lines / 2 : lines);
    p.ends[i] = static_cast<int>(count);
  }
  const int64_t bytes = 2 * p.rows * int64_t{few_rows::staged_stride(p.k)};
  const bool staged = vectors && bytes <= kMostStaged;
  const auto start = [&](auto type) {
    using T = decltype(type);
    const auto chosen = kernel_for<T>(shape, gated, p.norm != nullptr, vectors, staged);
    const auto warps = static_cast<unsigned>(few_rows::kShapes[shape].warps);
    LaunchConfig config{blocks(count), {32 * warps}, stream, staged ? bytes : 0};
    config.early = o.early && gpu_facts().capability >= 90;
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
