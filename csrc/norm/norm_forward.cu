// The norms' forward launcher: which kernel, and how many threads a row.

#include "norm/norm_forward.cuh"

#include "norm/norm_launch.h"

namespace flexops {
namespace {

using norm::Forward;

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
#define FLEXOPS_NORM_HELD(...)                                                                                 \
  {FLEXOPS_NORM_KERNEL(forward_held<float, __VA_ARGS__>), FLEXOPS_NORM_KERNEL(forward_held<f16, __VA_ARGS__>), \
   FLEXOPS_NORM_KERNEL(forward_held<bf16, __VA_ARGS__>)}
const void* const kFew[3] = FLEXOPS_NORM_HELD(false, norm::kFewItems);
const void* const kMany[3] = FLEXOPS_NORM_HELD(false, norm::kManyItems);
const void* const kAdding[3] = FLEXOPS_NORM_HELD(true, norm::kItems);
// For bf16 alone: each of these takes a second to compile, and kMany is at most a tenth slower.
const void* const kLayer[3] = {nullptr, nullptr, FLEXOPS_NORM_KERNEL(forward_layer<bf16>)};
const void* const kCodes[3] = {FLEXOPS_NORM_KERNEL(forward_codes<float>), FLEXOPS_NORM_KERNEL(forward_codes<f16>),
                               FLEXOPS_NORM_KERNEL(forward_codes<bf16>)};
const void* const kRows[3] = {FLEXOPS_NORM_KERNEL(forward_rows<float>), FLEXOPS_NORM_KERNEL(forward_rows<norm::Half>),
                              FLEXOPS_NORM_KERNEL(forward_rows<norm::Any>)};

/// A kernel, how many vectors of a row its threads hold, how many rows its groups take, and how many threads they have at most.
struct Way {
  const void* kernel;
  int64_t items, together = 1;
  int most = norm::kHeldThreads;
};

bool has_few_rows(const Forward& p, int64_t items) { return p.rows * ((p.vectors + items - 1) / items) < kBusy; }

Way choose(const Forward& p, const NormForward& a, bool vectors) {
  const auto type = static_cast<int>(a.row_type);
  const bool codes = a.codes != NormCodes::none, halves = a.row_type != NormType::f32;
  const auto fits = [&](int64_t items) { return vectors && a.type == a.row_type && p.vectors <= items * norm::kHeldThreads; };
  if (codes && p.same && fits(norm::kManyItems)) {
    // Short rows are read better by more lanes.
    return {kCodes[type], p.vectors > norm::kItems * norm::kNarrowWarp ? norm::kManyItems : norm::kItems};
  }
  if (!codes && a.residual && fits(norm::kItems)) return {kAdding[type], norm::kItems};
  if (!codes && !a.residual) {
    const bool layer = halves && a.centered;
    if (p.same && !layer && fits(norm::kFewItems)) return {kFew[type], norm::kFewItems};
    if (p.same && layer && kLayer[type] && fits(norm::kItems) && !has_few_rows(p, norm::kItems))
      return {kLayer[type], norm::kItems, norm::kTogether};
    if (fits(norm::kManyItems)) return {kMany[type], norm::kManyItems};
  }
  if (!vectors) return {kRows[2], norm::kRowsItems<norm::Any>, 1, norm::kMostThreads};
  return {kRows[halves], norm::kRowsItems<bf16>, 1, norm::kMostThreads};
}

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
  p.nothing = 0, p.lasting = norm::is_large(a.rows * a.columns, a.row_type);
  p.same = a.weight != nullptr && a.weight_type == a.type;
  const Way way = choose(p, a, vectors);
  // With few rows, each gets more threads than it needs.
  p.lanes = norm::lanes_for(has_few_rows(p, way.items) ? p.vectors : (p.vectors + way.items - 1) / way.items, way.most);
  const norm::Grid grid(p.lanes, (a.rows + way.together - 1) / way.together);
  norm::launch(way.kernel, p, dim3(static_cast<unsigned>(grid.blocks)), grid.threads, 0, stream);
  return norm::last_error();
}

}  // namespace flexops
