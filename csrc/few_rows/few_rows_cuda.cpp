// The launcher of products of a few rows: which kernel, and a block for each 16 columns.

#include "few_rows/few_rows.h"

#include "common/launch.h"
#include "few_rows/few_rows.cuh"

namespace flexops {
namespace {

using few_rows::Params;

constexpr int64_t kManyBlocks = 4;  // for each multiprocessor: then blocks of fewer warps

/// By gated, norm and aligned.
template <class T, int kWarps, int kRowTiles>
KernelOf<Params> kernel_of(bool gated, bool norm, bool aligned) {
  using few_rows::product;
  if (!aligned) {
    static const KernelOf<Params> kRagged[2][2] = {
        {rare_kernel<product<T, kWarps, kRowTiles, false, false, false>>,
         rare_kernel<product<T, kWarps, kRowTiles, false, true, false>>},
        {rare_kernel<product<T, kWarps, kRowTiles, true, false, false>>,
         rare_kernel<product<T, kWarps, kRowTiles, true, true, false>>}};
    return kRagged[gated][norm];
  }
  static const KernelOf<Params> kAligned[2][2] = {
      {kernel<product<T, kWarps, kRowTiles, false, false, true>>,
       kernel<product<T, kWarps, kRowTiles, false, true, true>>},
      {kernel<product<T, kWarps, kRowTiles, true, false, true>>,
       kernel<product<T, kWarps, kRowTiles, true, true, true>>}};
  return kAligned[gated][norm];
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
  int64_t blocks_so_far = 0, start = 0;
  for (int i = 0; i < p.count; ++i) {
    const TensorView& weight = o.weights[i];
    const int64_t columns = weight.size(0);
    vectors = vectors && aligned(weight.data);
    p.weights[i] = weight.data, p.biases[i] = o.biases.count ? o.biases[i].data : nullptr;
    p.columns[i] = static_cast<int>(columns), p.starts[i] = static_cast<int>(start);
    if (!gated) blocks_so_far += ceil_div(columns, few_rows::kColumns), start += columns;
    p.ends[i] = static_cast<int>(blocks_so_far);
  }
  if (gated) blocks_so_far = ceil_div(width, few_rows::kColumns / 2);
  const bool many = blocks_so_far >= kManyBlocks * gpu_facts().processors;
  const auto start_with = [&](auto type) {
    using T = decltype(type);
    const bool two = p.rows > 8;
    const auto chosen = many  ? two ? kernel_of<T, 4, 2>(gated, o.norm.dim >= 0, vectors)
                                    : kernel_of<T, 4, 1>(gated, o.norm.dim >= 0, vectors)
                         : two ? kernel_of<T, 8, 2>(gated, o.norm.dim >= 0, vectors)
                              : kernel_of<T, 8, 1>(gated, o.norm.dim >= 0, vectors);
    LaunchConfig config{blocks(blocks_so_far), {many ? 128u : 256u}, stream};
    config.early = o.early && gpu_facts().capability >= 90;
    launch(chosen, config, p);
  };
  if (o.x.dtype == Dtype::bf16) {
    start_with(bf16{});
  } else {
    start_with(f16{});
  }
  return last_error();
}

}  // namespace flexops
