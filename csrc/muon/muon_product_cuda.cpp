// The launcher of products of matrices of one shape.

#include "common/launch.h"
#include "common/tensor_map.h"
#include "common/tensor_view.h"
#include "muon/muon_product.cuh"

namespace flexops {
namespace {

template <bool kColumns>
const char* launch_product(muon::Product& p, const TensorView& a, const TensorView& b,
                           void* stream) {
  using Shape = muon::Shape<kColumns>;
  const auto map = [](const TensorView& x) {
    return map_matrices(x.dtype, x.data, x.size(0), x.size(1), x.size(2), x.size(2),
                        x.size(1) * x.size(2), kColumns ? 64 : 128);
  };
  p.a = map(a), p.b = map(b);
  LaunchConfig config{blocks(Shape::kBlocks), {Shape::kThreads}, stream, Shape::kBytes};
  config.cluster = Shape::kBlocks;
  const auto& product = kernel<muon::product_hopper<kColumns>>;
  const int64_t clusters = resident_clusters(product, config);
  config.grid = blocks(Shape::kBlocks * (clusters < 1 ? 1 : least(clusters, p.tiles)));
  launch(product, config, p);
  return last_error();
}

}  // namespace

const char* muon_product__cuda(const TensorView& out, const TensorView& a, const TensorView& b,
                               const TensorView& added, bool columns, double alpha, double beta,
                               double diagonal, void* stream) {
  if (gpu_facts().capability != 90) return "muon_product_ has kernels for GPUs of 9.0 only";
  if (out.numel == 0 || a.numel == 0) return "muon_product_: matrices must not be empty";
  const int64_t count = a.size(0), n = a.size(columns ? 2 : 1), k = a.size(columns ? 1 : 2);
  if (out.size(0) % count || out.size(0) / count > 2 || out.size(1) != n || out.size(2) != n)
    return "muon_product_: out does not fit the operands";
  if (n % 8 || k % 8) return "muon_product_: sizes must be multiples of 8";
  muon::Product p = {};
  const auto map = [n](const TensorView& x) {
    return map_matrices(x.dtype, x.data, x.size(0), n, n, n, n * n, 64);
  };
  p.out = map(out), p.low = out.size(0) > count ? static_cast<int>(count) : 0;
  p.adds = static_cast<bool>(added);
  if (added) p.added = map(added);
  p.alpha = static_cast<float>(alpha), p.beta = static_cast<float>(beta);
  p.diagonal = static_cast<float>(diagonal);
  p.n = static_cast<int>(n), p.k = static_cast<int>(k);
  const int across = static_cast<int>(ceil_div(n, 256));
  p.of_matrix = across * (across + 1) / 2, p.tiles = static_cast<int>(count) * p.of_matrix;
  return columns ? launch_product<true>(p, a, b, stream) : launch_product<false>(p, a, b, stream);
}

}  // namespace flexops
