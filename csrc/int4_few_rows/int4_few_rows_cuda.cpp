// The launcher of products of a few rows with 4-bit weights: which kernel, how the weights are
// divided, and the grid.

#include "int4_few_rows/int4_few_rows.h"

#include "common/launch.h"
#include "int4_few_rows/int4_few_rows.cuh"
#include "int4_few_rows/int4_sixteen_rows_launch.h"

namespace flexops {
namespace {

using int4::FewParams;

/// A configuration: as a number, for measurements, `chunk << 24 | resident << 16 | stages << 8 |
/// cluster`.
struct FewPlan {
  int chunk;     // tiles of a stage: 8, or 4 where a block has little shared memory
  int resident;  // blocks of a multiprocessor
  int stages;    // of a warp's ring
  int cluster;   // blocks that share the columns of a row tile
};

/// What follows from it.
struct FewGrid {
  int chunks, pass_rows;
  int64_t groups;  // of blocks that share columns
  int64_t bytes;
};

FewGrid grid_of(const FewParams& p, const Gpu& gpu, const FewPlan& plan) {
  const int64_t groups = int64_t{gpu.processors} * plan.resident / plan.cluster;
  const int64_t used = least(groups, p.units);
  const int64_t rows = ceil_div(p.units, used) * (p.activation ? 2 : 1);
  const auto chunks =
      static_cast<int>(ceil_div(ceil_div(p.tiles_k, plan.chunk), int64_t{plan.cluster}));
  int pass_rows = static_cast<int>(least(rows, p.m <= 2 ? 16 : 8));
  const auto bytes = [&] {
    return int4::FewLayout(plan.chunk, p.m,
                           p.m <= 2   ? 2
                           : p.m <= 4 ? 4
                                      : 8,
                           chunks, pass_rows, plan.stages, p.group_shift == 5, p.norm)
        .bytes;
  };
  while (pass_rows > 2 && bytes() > gpu.shared_of_block) pass_rows = pass_rows / 4 * 2;
  return {chunks, pass_rows, used, bytes()};
}

bool fits(const FewParams& p, const Gpu& gpu, const FewPlan& plan) {
  return plan.stages >= 2 && grid_of(p, gpu, plan).bytes <= gpu.shared_of_block;
}

/// Tuned on one H200.
FewPlan choose(const FewParams& p, const Gpu& gpu) {
  const int64_t rows = ceil_div(p.units, gpu.processors);  // of a block, if it is alone
  const bool few = p.m <= 2, clusters = gpu.capability >= 90;
  const bool wide = p.m > 1 || p.tiles_k >= 128;  // rows of x
  FewPlan plan = {gpu.shared_of_block >= 160 << 10 ? 8 : 4, 1, 2, 1};
  // In a decode step of 8 B, two blocks for gate and up took 20 us per layer, one 32.
  const bool three = few && clusters && rows == 3 && !p.activation && p.tiles_k < 192;
  const int64_t tiles = rows * (p.activation ? 2 : 1);
  if (three || (few && tiles >= 10 && p.tiles_k < 192)) plan.resident = 2;
  // Rows of x take memory and time; a cluster's blocks share them.
  if (three || (clusters && wide && rows <= (few ? 2 : 3))) plan.cluster = 2;
  if (grid_of(p, gpu, plan).bytes > gpu.shared_of_processor / plan.resident - 1024)
    plan.resident = 1;
  while (clusters && plan.cluster < 8 && !fits(p, gpu, plan)) plan.cluster *= 2;
  return plan;
}

/// Whether the kernel of up to 16 rows takes these. It has no norm.
bool by_sixteen_rows(const Int4FewRows& call, const Gpu& gpu) {
  return gpu.capability == 90 && !call.norm;
}

template <class T, int kChunk, int kSlots>
void launch_few(const FewParams& p, const LaunchConfig& config) {
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::few_rows_int4<T, kChunk, kSlots, true>>, config, p);
  launch(kernel<int4::few_rows_int4<T, kChunk, kSlots, false>>, config, p);
}

template <class T, int kChunk>
void launch_few(const FewParams& p, const LaunchConfig& config) {
  if (p.m <= 2) return launch_few<T, kChunk, 4>(p, config);
  if (p.m <= 4) return launch_few<T, kChunk, 2>(p, config);
  launch_few<T, kChunk, 1>(p, config);
}

template <class T>
void launch_few(const FewParams& p, int chunk, const LaunchConfig& config) {
  chunk == 8 ? launch_few<T, 8>(p, config) : launch_few<T, 4>(p, config);
}

}  // namespace

const char* int4_few_rows_cuda(const Int4FewRows& call, void* stream) {
  const Gpu& gpu = gpu_facts();
  const auto byte = [&](int shift) { return static_cast<int>(call.plan >> shift & 255); };
  if (call.plan ? byte(24) == 16 : by_sixteen_rows(call, gpu)) {
    const SixteenPlan plan = call.plan ? SixteenPlan{byte(16) >> 4, byte(16) & 15, byte(8), byte(0)}
                                       : choose_sixteen(call, gpu.processors);
    call.x.dtype == Dtype::bf16 ? launch_sixteen<bf16>(call, plan, stream)
                                : launch_sixteen<f16>(call, plan, stream);
    return last_error();
  }
  if (call.x.rows() > kMostInt4RowsAnywhere)
    return "more than 8 rows need a GPU of 9.0, and no norm";
  FewParams p = {};
  p.x = call.x.data, p.norm = call.norm.data, p.residual = call.residual.data;
  p.out = call.out.data;
  p.m = static_cast<int>(call.x.rows()), p.k = static_cast<int>(call.x.columns());
  p.width = static_cast<int>(call.out.columns()), p.count = static_cast<int>(call.packed.count);
  p.tiles_k = static_cast<int>(ceil_div(p.k, 64));
  p.group_shift = call.group_size == 32 ? 5 : call.group_size == 64 ? 6 : 7;
  p.groups = static_cast<int>(ceil_div(int64_t{p.tiles_k} * 64, call.group_size));
  p.activation = static_cast<int>(call.activation), p.eps = call.eps, p.offset = call.offset;
  p.half_scales = call.scales[0].dtype == Dtype::f16;
  for (int i = 0; i < p.count; ++i) {
    FewParams::Weight& weight = p.weights[i];
    const auto numbers = [&](const TensorViews& of) {
      return of.count ? static_cast<const uint16_t*>(of[i].data) : nullptr;
    };
    weight.packed = call.packed[i].as<uint8_t>();
    weight.scales = numbers(call.scales), weight.zeros = numbers(call.zeros);
    weight.bias = call.biases.count ? call.biases[i].data : nullptr;
    weight.start = p.activation ? 0 : 16 * p.units;
    const int tiles = static_cast<int>(call.packed[i].size(0));
    weight.columns = static_cast<int>(least(16 * tiles, p.width - weight.start));
    p.units = p.activation ? tiles : p.units + tiles;
    weight.end = p.units;
  }
  const FewPlan plan = call.plan ? FewPlan{byte(24), byte(16), byte(8), byte(0)} : choose(p, gpu);
  if (!fits(p, gpu, plan)) return "these rows do not fit into shared memory";
  const FewGrid grid = grid_of(p, gpu, plan);
  p.cluster = plan.cluster, p.stages = plan.stages;
  p.chunks = grid.chunks, p.pass_rows = grid.pass_rows;
  p.each = static_cast<int>(p.units / grid.groups);
  p.longer = static_cast<int>(p.units % grid.groups);
  const LaunchConfig config = {
      {static_cast<unsigned>(plan.cluster), static_cast<unsigned>(grid.groups)},
      {32 * int4::kFewWarps},
      stream,
      grid.bytes,
      static_cast<unsigned>(plan.cluster),
      gpu.capability >= 90};
  call.x.dtype == Dtype::bf16 ? launch_few<bf16>(p, plan.chunk, config)
                              : launch_few<f16>(p, plan.chunk, config);
  return last_error();
}

}  // namespace flexops
