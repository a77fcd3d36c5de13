// The norms' forward launcher: which kernel, and how many threads a row.

#include "norm/norm_forward.cuh"

#include "norm/norm_launch.h"

namespace flexops {
namespace {

using norm::Forward;

constexpr int64_t kLongLayer = 1024;
constexpr int64_t kBusy = 100000;  // threads that are enough for any GPU: with fewer, a row gets more of them

/// Whether all that a vector of the row's type goes with is aligned.
bool has_vectors(const NormForward& a, int64_t vector) {
  const auto fits = [&](const void* pointer, int64_t stride, int size) {
    return norm::is_aligned(pointer, vector * size < 16 ? vector * size : 16) && stride % vector == 0;
  };
  const int size = norm::size_of(a.type), row = norm::size_of(a.row_type), weight = norm::size_of(a.weight_type);
  return a.columns % vector == 0 && fits(a.x, a.x_stride, size) && fits(a.residual, a.residual_stride, row) && fits(a.weight, 0, weight) &&
         fits(a.bias, 0, weight) && fits(a.y, 0, a.codes == NormCodes::none ? size : 1) && fits(a.new_residual, 0, row);
}

#define FLEXOPS_NORM_KERNEL(...) reinterpret_cast<const void*>(&norm::__VA_ARGS__)
const void* const kAdding[3] = {FLEXOPS_NORM_KERNEL(forward_held<float, false, norm::kItems>),
                                FLEXOPS_NORM_KERNEL(forward_held<f16, false, norm::kItems>),
                                FLEXOPS_NORM_KERNEL(forward_held<bf16, false, norm::kItems>)};
// The plain ones that are worth their building: null where there is none.
const void* const kPlain[3] = {FLEXOPS_NORM_KERNEL(forward_held<float, true, norm::kItems>), nullptr,
                               FLEXOPS_NORM_KERNEL(forward_held<bf16, true, norm::kItems>)};
const void* const kPlainMany[3] = {nullptr, FLEXOPS_NORM_KERNEL(forward_held<f16, true, norm::kManyItems>),
                                   FLEXOPS_NORM_KERNEL(forward_held<bf16, true, norm::kManyItems>)};
const void* const kRows[3] = {FLEXOPS_NORM_KERNEL(forward_rows<float>), FLEXOPS_NORM_KERNEL(forward_rows<norm::Half>),
                              FLEXOPS_NORM_KERNEL(forward_rows<norm::Any>)};

}  // namespace

const char* norm_forward_cuda(const NormForward& a, void* stream) {
  if (a.rows == 0) return nullptr;
  const int64_t vector = 16 / norm::size_of(a.row_type);
  const bool vectors = has_vectors(a, vector);
  Forward p;
  p.x = a.x, p.residual = a.residual, p.weight = a.weight, p.bias = a.bias;
  p.y = a.y, p.new_residual = a.new_residual, p.mean = a.mean, p.rstd = a.rstd, p.scales = a.scales;
  p.rows = a.rows, p.x_stride = a.x_stride, p.residual_stride = a.residual_stride;
  p.columns = static_cast<int>(a.columns), p.vectors = static_cast<int>(vectors ? a.columns / vector : a.columns);
  p.eps = a.eps, p.inverse = 1.0f / static_cast<float>(a.columns);
  p.type = static_cast<norm::Type>(a.type), p.row_type = static_cast<norm::Type>(a.row_type);
  p.weight_type = static_cast<norm::Type>(a.weight_type), p.codes = static_cast<norm::Codes>(a.codes), p.centered = a.centered;
  const auto type = static_cast<int>(a.row_type);
  // With few rows, each gets more threads than it needs.
  const auto share = [&](int64_t items, int most) {
    const int64_t held = (p.vectors + items - 1) / items;
    p.lanes = norm::lanes_for(p.rows * held < kBusy ? p.vectors : held, most);
    return p.vectors <= p.lanes * items;
  };
  const bool plain = a.residual == nullptr && a.codes == NormCodes::none;
  // Layer norm's two reductions go faster with fewer threads a row.
  const bool many = plain && a.centered && a.columns >= kLongLayer && kPlainMany[type];
  const void* kernel;
  if (vectors && a.type == a.row_type && share(many ? norm::kManyItems : norm::kItems, norm::kHeldThreads)) {
    kernel = many ? kPlainMany[type] : plain && kPlain[type] ? kPlain[type] : kAdding[type];
  } else {
    share(vectors ? norm::kRowsItems<bf16> : norm::kRowsItems<norm::Any>, norm::kMostThreads);
    kernel = kRows[!vectors ? 2 : a.row_type == NormType::f32 ? 0 : 1];
  }
  const norm::Grid grid(p.lanes, a.rows);
  norm::launch(kernel, p, dim3(static_cast<unsigned>(grid.blocks)), grid.threads, 0, stream);
  return norm::last_error();
}

}  // namespace flexops
