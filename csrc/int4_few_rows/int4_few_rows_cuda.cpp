// The launcher of products of a few rows with 4-bit weights: how the weight is divided, and the
// grid.

#include "int4_few_rows/int4_few_rows.h"

#include "common/launch.h"
#include "int4_few_rows/int4_few_rows.cuh"

namespace flexops {
namespace {

using int4::FewParams;

/// A configuration: as a number, for measurements, `resident << 16 | stages << 8 | cluster`.
struct FewPlan {
  int resident;  // blocks of a multiprocessor
  int stages;    // of a warp's ring; 0: none that fits
  int cluster;   // blocks that share the columns of a row tile
  int chunks, pass_rows;
  int64_t blocks, bytes;
  int64_t cost;  // bytes that a multiprocessor reads, and what a cluster costs in such bytes
};

FewPlan plan_of(const FewParams& p, const Gpu& gpu, int resident, int stages, int cluster) {
  const bool small = p.group_shift == 5;
  const int tokens = p.m <= 2 ? 2 : p.m <= 8 ? 8 : 16, in_unit = p.activation ? 2 : 1;
  const int64_t groups = int64_t{gpu.processors} * resident / cluster;
  const int64_t used = groups < p.units ? groups : p.units;
  const int rows = static_cast<int>(ceil_div(p.units, used)) * in_unit;
  FewPlan plan = {resident, stages, cluster};
  plan.chunks = static_cast<int>(ceil_div(ceil_div(p.tiles_k, int4::kChunk), cluster));
  plan.pass_rows = static_cast<int>(least(rows, p.m <= 2 ? 16 : p.m <= 8 ? 8 : 4));
  plan.blocks = used * cluster;
  const int64_t room =
      least(gpu.shared_of_processor / resident - 1024, int64_t{gpu.shared_of_block});
  const auto bytes = [&](int count) {
    return int4::FewLayout(p.m, tokens, plan.chunks, plan.pass_rows, count, small, p.norm).bytes;
  };
  if (stages == 0) plan.stages = 8;
  while (stages == 0 && plan.stages > 1 && bytes(plan.stages) > room) --plan.stages;
  plan.bytes = bytes(plan.stages);
  if (plan.stages < 2 || plan.bytes > room) plan.stages = 0;
  plan.cost = resident * plan.chunks * int4::kChunk *
                  (int64_t{rows} * (small ? 640 : 576) + int64_t{p.m} * 128) +
              (cluster > 1 ? 1500 * cluster : 0);
  return plan;
}

/// Measured on one H200.
FewPlan choose(const FewParams& p, const Gpu& gpu) {
  FewPlan best = {};
  for (int cluster = 1; cluster <= (gpu.capability >= 90 ? 8 : 1); cluster *= 2) {
    for (int resident = 2; resident >= 1; --resident) {
      const FewPlan plan = plan_of(p, gpu, resident, 0, cluster);
      if (plan.stages && (!best.stages || plan.cost < best.cost)) best = plan;
    }
  }
  return best;
}

template <class T, int kSlots, int kTokens>
void launch_few(const FewParams& p, const LaunchConfig& config) {
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::few_rows_int4<T, kSlots, kTokens, true>>, config, p);
  launch(kernel<int4::few_rows_int4<T, kSlots, kTokens, false>>, config, p);
}

template <class T>
void launch_few(const FewParams& p, const LaunchConfig& config) {
  if (p.m <= 2) return launch_few<T, 4, 1>(p, config);
  if (p.m <= 8) return launch_few<T, 1, 1>(p, config);
  launch_few<T, 1, 2>(p, config);
}

}  // namespace

const char* int4_few_rows_cuda(const Int4FewRows& call, void* stream) {
  const Gpu& gpu = gpu_facts();
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
  const auto byte = [&](int shift) { return static_cast<int>(call.plan >> shift & 255); };
  const FewPlan plan = call.plan ? plan_of(p, gpu, byte(16), byte(8), byte(0)) : choose(p, gpu);
  if (plan.stages == 0) return "these rows do not fit into shared memory";
  p.cluster = plan.cluster, p.chunks = plan.chunks, p.pass_rows = plan.pass_rows;
  p.stages = plan.stages;
  const LaunchConfig config = {blocks(plan.blocks),
                               {32 * int4::kFewWarps},
                               stream,
                               plan.bytes,
                               static_cast<unsigned>(plan.cluster),
                               gpu.capability >= 90};
  call.x.dtype == Dtype::bf16 ? launch_few<bf16>(p, config) : launch_few<f16>(p, config);
  return last_error();
}

}  // namespace flexops
