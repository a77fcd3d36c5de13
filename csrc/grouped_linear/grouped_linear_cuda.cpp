// Launchers of grouped products.

#include "activation/activation_launch.h"
#include "common/dispatch.cuh"
#include "common/tensor_map.h"
#include "grouped_linear/grouped_linear_hopper.cuh"

namespace flexops {
namespace grouped {
namespace {

/// What one of the products is of; matrices are contiguous.
struct Product {
  const TensorView &a, &b, &offsets;
  int form;
  int64_t m, n, k;  // as in HopperParams
};

template <class T, int kForm, bool kGated>
constexpr KernelOf<HopperParams> kKernel = kernel<product_hopper<T, kForm, kGated>>;
template <class T, int kForm, bool kGated>
constexpr KernelOf<HopperParams> kRare = rare_kernel<product_hopper<T, kForm, kGated>>;

template <int kForm, bool kGated>
const KernelOf<HopperParams>& kernel_of(Dtype type) {
  return type == Dtype::bf16 ? kKernel<bf16, kForm, kGated> : kRare<f16, kForm, kGated>;
}

template <int kForm, bool kGated>
const char* launch_product(const Product& product, void* out, void* gated,
                           const activation::Function& function, void* stream) {
  using Shape = HopperShape<kForm, kGated>;
  const auto &a = product.a, &b = product.b;
  HopperParams p = {};
  p.offsets = product.offsets.as<int>(), p.out = out, p.product = gated;
  p.experts = static_cast<int>(product.offsets.numel), p.rows = static_cast<int>(a.size(0));
  p.m = static_cast<int>(product.m), p.n = static_cast<int>(product.n),
  p.k = static_cast<int>(product.k);
  p.tiles_m = static_cast<int>(ceil_div(product.m, Shape::kM));
  p.tiles_n = static_cast<int>(ceil_div(kGated ? product.n / 2 : product.n, Shape::kColumns));
  p.function = function;
  p.a = map_matrices(a.dtype, a.data, 1, a.size(0), a.size(1), a.size(1), 0,
                     kForm == kOuter ? 64 : 128);
  const bool matrices = kForm != kOuter;
  p.b = map_matrices(b.dtype, b.data, matrices ? b.size(0) : 1, b.size(-2), b.size(-1), b.size(-1),
                     matrices ? b.size(1) * b.size(2) : 0, kForm == kByRows ? 128 : 64);
  // At most so many tiles: the last one of each expert may be a partial one.
  const int64_t most = kForm == kOuter ? int64_t{p.tiles_m} * p.tiles_n * p.experts
                                       : (ceil_div(p.rows, Shape::kM) + p.experts + 1) * p.tiles_n;
  launch(kernel_of<kForm, kGated>(a.dtype),
         {blocks(least(most, gpu_facts().processors)), {Shape::kThreads}, stream, Shape::kBytes},
         p);
  return last_error();
}

}  // namespace
}  // namespace grouped

const char* grouped_rows_cuda(const TensorView& x, const TensorView& weight,
                              const TensorView& offsets, const TensorView& out, void* stream) {
  const grouped::Product product = {x, weight,         offsets,       grouped::kByRows,
                                    0, weight.size(1), weight.size(2)};
  return grouped::launch_product<grouped::kByRows, false>(product, out.data, nullptr, {}, stream);
}

const char* grouped_columns_cuda(const TensorView& x, const TensorView& weight,
                                 const TensorView& offsets, const TensorView& out, void* stream) {
  const grouped::Product product = {x, weight,         offsets,       grouped::kByColumns,
                                    0, weight.size(2), weight.size(1)};
  return grouped::launch_product<grouped::kByColumns, false>(product, out.data, nullptr, {},
                                                             stream);
}

const char* grouped_outer_cuda(const TensorView& grad, const TensorView& x,
                               const TensorView& offsets, const TensorView& out, void* stream) {
  if (x.size(0) == 0) {
    set_zero(out.as<uint32_t>(), ceil_div(out.numel, 2), stream);
    return last_error();
  }
  const grouped::Product product = {grad, x, offsets, grouped::kOuter, grad.size(1), x.size(1), 0};
  return grouped::launch_product<grouped::kOuter, false>(product, out.data, nullptr, {}, stream);
}

const char* grouped_gated_cuda(const TensorView& x, const TensorView& weight,
                               const TensorView& offsets, int64_t which, bool,
                               const TensorView& product, const TensorView& packed, void* stream) {
  const grouped::Product operands = {x, weight,         offsets,       grouped::kByRows,
                                     0, weight.size(1), weight.size(2)};
  return grouped::launch_product<grouped::kByRows, true>(operands, packed ? packed.data : nullptr,
                                                         product.data,
                                                         activation::function_of(which), stream);
}

}  // namespace flexops
