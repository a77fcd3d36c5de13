// The launcher of products of matrices of one shape.

#include "common/launch.h"
#include "common/tensor_map.h"
#include "common/tensor_view.h"
#include "muon/muon_product.cuh"

namespace flexops {
namespace {

template <int kForm>
const char* launch_product(muon::Product& p, const TensorView& a, const TensorView& b,
                           void* stream) {
  const auto map = [](const TensorView& x, unsigned box_rows) {
    return map_matrices(x.dtype, x.data, x.size(0), x.size(1), x.size(2), x.size(2),
                        x.size(1) * x.size(2), box_rows);
  };
  using Shape = muon::Shape<kForm>;
  p.a = map(a, kForm == muon::kColumns ? 64 : 128), p.b = map(b, kForm == muon::kRows ? 128 : 64);
  LaunchConfig config{blocks(Shape::kBlocks), {Shape::kThreads}, stream, Shape::kBytes};
  config.cluster = Shape::kBlocks;
  const auto& product = kernel<muon::product_hopper<kForm>>;
  const int64_t clusters = resident_clusters(product, config);
  config.grid = blocks(Shape::kBlocks * (clusters < 1 ? 1 : least(clusters, p.tiles)));
  launch(product, config, p);
  return last_error();
}

}  // namespace

const char* muon_product__cuda(const TensorView& out, const TensorView& a, const TensorView& b,
                               const TensorView& added, int64_t form, bool symmetric, double alpha,
                               double beta, double diagonal, void* stream) {
  if (gpu_facts().capability != 90) return "muon_product_ has kernels for GPUs of 9.0 only";
  const bool columns_a = form == muon::kColumns, columns_b = form != muon::kRows;
  const int64_t m = a.size(columns_a ? 2 : 1), k = a.size(columns_a ? 1 : 2),
                n = b.size(columns_b ? 2 : 1);
  if (out.numel == 0 || a.numel == 0) return "muon_product_: matrices must not be empty";
  if (b.size(columns_b ? 1 : 2) != k || out.size(1) != m || out.size(2) != n ||
      out.size(0) % a.size(0) || out.size(0) / a.size(0) > 2 || b.size(0) != a.size(0) ||
      (symmetric && m != n))
    return "muon_product_: the matrices' sizes do not fit";
  if (m % 8 || n % 8 || k % 8) return "muon_product_: sizes must be multiples of 8";
  muon::Product p = {};
  p.out = out.as<f16>(), p.low = out.size(0) > a.size(0) ? p.out + out.numel / 2 : nullptr;
  p.added = added ? added.as<f16>() : nullptr;
  p.alpha = static_cast<float>(alpha), p.beta = static_cast<float>(beta);
  p.diagonal = static_cast<float>(diagonal);
  p.m = static_cast<int>(m), p.n = static_cast<int>(n), p.k = static_cast<int>(k);
  p.tiles_m = static_cast<int>(ceil_div(m, 256)), p.tiles_n = static_cast<int>(ceil_div(n, 256));
  p.tiles = static_cast<int>(a.size(0)) *
            (symmetric ? p.tiles_m * (p.tiles_m + 1) / 2 : p.tiles_m * p.tiles_n);
  p.symmetric = symmetric;
  if (form == muon::kRows) return launch_product<muon::kRows>(p, a, b, stream);
  if (form == muon::kMixed) return launch_product<muon::kMixed>(p, a, b, stream);
  return launch_product<muon::kColumns>(p, a, b, stream);
}

}  // namespace flexops
