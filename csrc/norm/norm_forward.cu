// The norms' forward launcher: which kernel, and how many threads a row.

#include "norm/norm_forward.cuh"

#include "norm/norm_forward_held.cuh"
#include "norm/norm_forward_layer.cuh"
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

const void* const kFew[3] = {FLEXOPS_NORM_KERNEL(forward_held<float, false, true, norm::kFewItems>),
                             FLEXOPS_NORM_KERNEL(forward_held<f16, false, false, norm::kFewItems>),
                             FLEXOPS_NORM_KERNEL(forward_held<bf16, false, false, norm::kFewItems>)};
const void* const kMany[3] = {FLEXOPS_NORM_KERNEL(forward_held<float, false, true, norm::kManyItems>),
                              FLEXOPS_NORM_KERNEL(forward_held<f16, false, true, norm::kManyItems>),
                              FLEXOPS_NORM_KERNEL(forward_held<bf16, false, true, norm::kManyItems>)};
const void* const kAdding[3] = {FLEXOPS_NORM_KERNEL(forward_held<float, true, true, norm::kItems>),
                                FLEXOPS_NORM_KERNEL(forward_held<f16, true, true, norm::kItems>),
                                FLEXOPS_NORM_KERNEL(forward_held<bf16, true, true, norm::kItems>)};
// Layer norm's own, for bf16 alone: kMany does as well, at most a tenth slower with many rows and a microsecond with few.
const void* const kLayer = FLEXOPS_NORM_KERNEL(forward_layer<bf16>);
const void* const kFewLayer = FLEXOPS_NORM_KERNEL(forward_held<bf16, false, true, norm::kFewItems>);
/// A kernel, the elements of its vectors, how many of these its threads hold, how many rows its groups take, and whether it holds them in
/// shared memory, as far as that goes.
struct Way {
  const void* kernel;
  int64_t vector, items, together = 1;
  bool shared = false;
};

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Whether rows cut into that many parts are too few to fill a GPU.
bool has_few_rows(const NormForward& a, int64_t parts) { return a.rows * parts < kBusy; }

Way choose(const NormForward& a) {
  const auto type = static_cast<int>(a.row_type);
  const int64_t vector = 16 / norm::size_of(a.row_type), vectors = a.columns / vector;
  const bool codes = a.codes != NormCodes::none, layer = a.row_type != NormType::f32 && a.centered;
  const bool parameters = a.weight || a.bias, same = a.weight && a.weight_type == a.row_type;
  const bool aligned = has_vectors(a, vector),
             regular = aligned && a.type == a.row_type && (!parameters || same || a.weight_type == NormType::f32);
  const auto fits = [&](int64_t items) { return regular && vectors <= items * norm::kHeldThreads; };
  if (codes && same && fits(norm::kManyItems)) {
    // Short rows are read better by more lanes, as are few.
    const bool few = vectors <= norm::kItems * norm::kNarrowWarp || has_few_rows(a, ceil_divide(vectors, norm::kManyItems));
    const int items = few && fits(norm::kItems) ? norm::kItems : norm::kManyItems;
    return {norm::codes_kernel(a.row_type, items), vector, items};
  }
  if (!codes && a.residual && fits(norm::kItems)) return {kAdding[type], vector, norm::kItems};
  if (!codes && !a.residual) {
    if (same && !layer && fits(norm::kFewItems)) return {kFew[type], vector, norm::kFewItems};
    if (same && layer && a.row_type == NormType::bf16) {
      if (!has_few_rows(a, ceil_divide(vectors, norm::kItems))) {
        if (fits(norm::kItems)) return {kLayer, vector, norm::kItems, norm::kTogether};
      } else if (fits(norm::kFewItems)) {
        return {kFewLayer, vector, norm::kFewItems};
      }
    }
    if (fits(norm::kManyItems)) return {kMany[type], vector, norm::kManyItems};
  }
  return {norm::rows_kernel(a.row_type, aligned), aligned ? vector : 1, aligned ? norm::kItems : norm::kManyItems, 1, true};
}

/// How many vectors a thread has at least where rows are few.
int64_t least_vectors(const Way& way, NormCodes codes) {
  if (way.shared) return way.vector == 1 ? norm::kItems : 1;
  if (way.items != norm::kManyItems) return 1;
  return codes == NormCodes::none ? norm::kFewItems : norm::kManyItems;
}

/// How many of its `wanted` vectors a thread holds in shared memory, if one for each thread of a block takes `slots` bytes; single elements
/// by fours. Two blocks share a multiprocessor: one loads while the other stores.
int held_vectors(const Way& way, int64_t wanted, int64_t slots) {
  constexpr int64_t kReserved = 1024;  // a kernel's own shared memory, and the driver's
  const norm::Gpu& gpu = norm::current_gpu();
  const int64_t share = gpu.shared_of_processor / 2, limit = gpu.shared_of_block < share ? gpu.shared_of_block : share;
  const int64_t room = (limit - 2 * kReserved) / slots / 4 * 4;
  if (way.vector == 1) wanted = ceil_divide(wanted, 4) * 4;
  return static_cast<int>(wanted < room ? wanted : room);
}

}  // namespace

const char* norm_forward_cuda(const NormForward& a, void* stream) {
  if (a.rows == 0) return nullptr;
  const Way way = choose(a);
  const int64_t vectors = a.columns / way.vector, parts = ceil_divide(vectors, way.items);
  Forward p;
  p.x = a.x, p.residual = a.residual, p.weight = a.weight, p.bias = a.bias;
  p.y = a.y, p.new_residual = a.new_residual, p.mean = a.mean, p.rstd = a.rstd, p.scales = a.scales;
  p.rows = a.rows, p.x_stride = a.x_stride, p.residual_stride = a.residual_stride;
  p.columns = static_cast<int>(a.columns), p.vectors = static_cast<int>(vectors);
  p.eps = a.eps, p.inverse = 1.0f / static_cast<float>(a.columns);
  p.type = static_cast<norm::Type>(a.type), p.row_type = static_cast<norm::Type>(a.row_type);
  p.weight_type = static_cast<norm::Type>(a.weight_type), p.codes = static_cast<norm::Codes>(a.codes), p.centered = a.centered;
  p.nothing = 0, p.lasting = norm::is_large(a.rows * a.columns, a.row_type);
  p.same = a.weight != nullptr && a.weight_type == a.type;
  // With few rows, each gets more threads than it needs; but where a thread may have many vectors, it has two.
  p.lanes = norm::lanes_for(has_few_rows(a, parts) ? ceil_divide(vectors, least_vectors(way, a.codes)) : parts,
                            way.shared && way.vector > 1 ? norm::kMostThreads : norm::kHeldThreads);
  const norm::Grid grid(p.lanes, (a.rows + way.together - 1) / way.together);
  int64_t shared_bytes = 0;
  if (way.shared) {
    const int64_t slots = grid.threads * (way.vector == 1 ? int64_t{sizeof(norm::Raw<norm::Any>)} : int64_t{sizeof(norm::Raw<float>)});
    p.held = held_vectors(way, ceil_divide(vectors, p.lanes), slots), shared_bytes = p.held * slots;
  }
  norm::launch(way.kernel, p, dim3(static_cast<unsigned>(grid.blocks)), grid.threads, shared_bytes, stream);
  return norm::last_error();
}

}  // namespace flexops
