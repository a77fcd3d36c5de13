// Launchers of grouped products.

#include "activation/activation_launch.h"
#include "common/dispatch.cuh"
#include "common/tensor_map.h"
#include "grouped_linear/grouped_linear_hopper.cuh"
#include "grouped_linear/grouped_linear_mma.cuh"

namespace flexops {
namespace grouped {
namespace {

/// Tests' choice: false leaves Hopper's own kernels out.
bool hopper_allowed = true;

template <class Params>
struct Kernels {
  KernelOf<Params> bf16_kernel, f16_kernel;
  const KernelOf<Params>& of(Dtype type) const {
    return type == Dtype::bf16 ? bf16_kernel : f16_kernel;
  }
};
/// float16 is rare, and gelu by erf with it.
#define FLEXOPS_PRODUCT(name, ...)                                                             \
  {kGate == kErfGate ? rare_kernel<name<bf16, __VA_ARGS__>> : kernel<name<bf16, __VA_ARGS__>>, \
   rare_kernel<name<f16, __VA_ARGS__>>}
template <int kForm, int kGate, int kGather>
constexpr Kernels<HopperParams> kHopper = FLEXOPS_PRODUCT(product_hopper, kForm, kGate, kGather);
template <int kForm, int kGate>
constexpr Kernels<MmaParams> kMma = FLEXOPS_PRODUCT(product, kForm, kGate);

/// Tiles of `Shape`, and for how many blocks of threads there are tiles at most: the last one of
/// each expert may be a partial one.
template <class Shape, int kForm>
int64_t divide(Product& p) {
  p.tiles_m = static_cast<int>(ceil_div(p.m, Shape::kM));
  p.tiles_n = static_cast<int>(ceil_div(Shape::kGated ? p.n / 2 : p.n, Shape::kColumns));
  return kForm == kOuter ? int64_t{p.tiles_m} * p.tiles_n * p.experts
                         : (ceil_div(p.rows, Shape::kM) + p.experts + 1) * p.tiles_n;
}

/// a and b are contiguous; sizes are as in Product, of which `p` has the results and the order.
template <int kForm, int kGate, int kGather>
const char* launch_hopper(Product p, const TensorView& a, const TensorView& b, void* stream) {
  using Shape = HopperShape<kForm, kGate, kGather>;
  const bool outer = kForm == kOuter;
  HopperParams params = {};
  const int64_t most = divide<Shape, kForm>(p);
  params.product = p;
  params.gathered = kGather == kGatherA ? a.data : kGather == kGatherB ? b.data : nullptr;
  params.a = map_matrices(a.dtype, a.data, 1, a.size(0), a.size(1), a.size(1), 0, outer ? 64 : 128);
  params.b =
      map_matrices(b.dtype, b.data, outer ? 1 : b.size(0), b.size(-2), b.size(-1), b.size(-1),
                   outer ? 0 : b.size(1) * b.size(2), kForm == kByRows ? 128 : 64);
  launch(kHopper<kForm, kGate, kGather>.of(a.dtype),
         {blocks(least(most, gpu_facts().processors)), {Shape::kThreads}, stream, Shape::kBytes},
         params);
  return last_error();
}

template <int kForm, int kGate>
const char* launch_product(Product p, const TensorView& a, const TensorView& b,
                           const TensorView& offsets, int64_t rows, int64_t m, int64_t n, int64_t k,
                           void* stream) {
  p.offsets = offsets.as<int>(), p.experts = static_cast<int>(offsets.numel);
  p.rows = static_cast<int>(rows);
  p.m = static_cast<int>(m), p.n = static_cast<int>(n), p.k = static_cast<int>(k);
  if (p.stride == 0) p.stride = n;
  if (hopper_allowed && gpu_facts().capability == 90) {
    if (!p.order) return launch_hopper<kForm, kGate, kNoGather>(p, a, b, stream);
    if constexpr (kForm == kOuter) {
      if (a.size(0) == rows) return launch_hopper<kForm, kGate, kGatherB>(p, a, b, stream);
    }
    if constexpr (kForm != kByRows || kGate != kNoGate)
      return launch_hopper<kForm, kGate, kGatherA>(p, a, b, stream);
  }
  if (p.order) return "rows are gathered by Hopper's kernels only";
  using Shape = MmaShape<kForm, kGate>;
  const int64_t most = divide<Shape, kForm>(p);
  launch(kMma<kForm, kGate>.of(a.dtype),
         {blocks(least(most, gpu_facts().processors)), {Shape::kThreads}, stream, Shape::kBytes},
         MmaParams{a.data, b.data, p});
  return last_error();
}

/// Rows of [tokens, n] by the order of `slots` choices, if that is given.
Product make_product(const TensorView& order, int64_t tokens, int64_t slots) {
  Product p = {};
  if (order) p.order = order.as<int>(), p.choices = static_cast<int>(slots / tokens);
  return p;
}

}  // namespace
}  // namespace grouped

const char* grouped_rows_cuda(const TensorView& x, const TensorView& weight,
                              const TensorView& offsets, const TensorView& out, void* stream) {
  grouped::Product p = {};
  p.out = out.data;
  return grouped::launch_product<grouped::kByRows, grouped::kNoGate>(
      p, x, weight, offsets, x.size(0), 0, weight.size(1), weight.size(2), stream);
}

const char* grouped_columns_cuda(const TensorView& x, const TensorView& weight,
                                 const TensorView& offsets, const TensorView& order, int64_t slots,
                                 const TensorView& out, void* stream) {
  grouped::Product p = grouped::make_product(order, x.size(0), slots);
  p.out = out.data;
  return grouped::launch_product<grouped::kByColumns, grouped::kNoGate>(
      p, x, weight, offsets, slots, 0, weight.size(2), weight.size(1), stream);
}

const char* grouped_outer__cuda(const TensorView& out, const TensorView& grad, const TensorView& x,
                                const TensorView& offsets, const TensorView& order, int64_t column,
                                void* stream) {
  const int64_t a = grad.size(0), b = x.size(0), slots = a > b ? a : b;
  grouped::Product p = grouped::make_product(order, a < b ? a : b, slots);
  p.out = out.as<uint16_t>() + column, p.stride = out.size(2);
  return grouped::launch_product<grouped::kOuter, grouped::kNoGate>(
      p, grad, x, offsets, slots, grad.size(1), x.size(1), 0, stream);
}

const char* grouped_gated_cuda(const TensorView& x, const TensorView& weight,
                               const TensorView& offsets, const TensorView& order, int64_t slots,
                               int64_t which, bool, const TensorView& gated,
                               const TensorView& packed, void* stream) {
  grouped::Product p = grouped::make_product(order, x.size(0), slots);
  p.out = packed ? packed.data : nullptr, p.gated = gated.data;
  p.function = activation::function_of(which);
  const auto launch = p.function.erf
                          ? grouped::launch_product<grouped::kByRows, grouped::kErfGate>
                          : grouped::launch_product<grouped::kByRows, grouped::kSigmoidGate>;
  return launch(p, x, weight, offsets, slots, 0, weight.size(1), weight.size(2), stream);
}

}  // namespace flexops

// For tests, which run all kernels on one GPU: 0 leaves Hopper's own out.
extern "C" __attribute__((visibility("default"))) void flexops_grouped_hopper(int allowed) {
  flexops::grouped::hopper_allowed = allowed != 0;
}
