// The launcher of products of a few rows: which kernel, and a block for each 16 columns.

#include "few_rows/few_rows.h"

#include "common/launch.h"
#include "few_rows/few_rows.cuh"

namespace flexops {
namespace {

using few_rows::Params;

constexpr int64_t kManyBlocks = 4;  // for each multiprocessor: then blocks of fewer warps

/// By gated, norm and aligned.
template <class T, int kShape>
KernelOf<Params> kernel_of(bool gated, bool norm, bool aligned) {
  using few_rows::product;
  static const KernelOf<Params> kRagged[2][2] = {
      {rare_kernel<product<T, kShape, false, false, false>>,
       rare_kernel<product<T, kShape, false, true, false>>},
      {rare_kernel<product<T, kShape, true, false, false>>,
       rare_kernel<product<T, kShape, true, true, false>>}};
  static const KernelOf<Params> kAligned[2][2] = {{kernel<product<T, kShape, false, false, true>>,
                                                   kernel<product<T, kShape, false, true, true>>},
                                                  {kernel<product<T, kShape, true, false, true>>,
                                                   kernel<product<T, kShape, true, true, true>>}};
  return (aligned ? kAligned : kRagged)[gated][norm];
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
  const bool many = all >= kManyBlocks * few_rows::kColumns * gpu_facts().processors;
  const int shape = p.rows > 8 ? few_rows::kTall : many ? few_rows::kMany : few_rows::kFew;
  const int lines = few_rows::kColumns * few_rows::kShapes[shape].tiles;
  int64_t count = 0;
  for (int i = 0; i < p.count; ++i) {
    if (!gated || i == 0) count += ceil_div(p.columns[i], gated ? lines / 2 : lines);
    p.ends[i] = static_cast<int>(count);
  }
  const auto start = [&](auto type) {
    using T = decltype(type);
    const bool norm = o.norm.dim >= 0;
    const auto chosen =
        shape == few_rows::kTall   ? kernel_of<T, few_rows::kTall>(gated, norm, vectors)
        : shape == few_rows::kMany ? kernel_of<T, few_rows::kMany>(gated, norm, vectors)
                                   : kernel_of<T, few_rows::kFew>(gated, norm, vectors);
    LaunchConfig config{
        blocks(count), {32u * static_cast<unsigned>(few_rows::kShapes[shape].warps)}, stream};
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
