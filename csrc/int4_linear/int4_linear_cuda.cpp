// The launchers of products with 4-bit weights: which kernel, its tiles, and the grid.

#include "int4_linear/int4_linear.h"

#include "common/launch.h"
#include "int4_linear/int4_few_rows.cuh"
#include "int4_linear/int4_many_rows.cuh"
#include "int4_linear/int4_unpack.cuh"

namespace flexops {
namespace {

using int4::Params;

/// A kernel's configuration: as a number, for measurements, `rows << 24 | warps_n << 16 | warps <<
/// 8 | cluster`.
struct Plan {
  int rows;     // tiles of 16 rows of the weight for a warp
  int warps_n;  // warps beside each other along n; 0: few_rows
  int warps;    // of a block; those that are not beside each other share the columns
  int cluster;  // blocks that share the columns
};

int log2_of(int64_t value) {
  int log = 0;
  while (int64_t{1} << log < value) ++log;
  return log;
}

/// Measured on one H200.
Plan choose(const Int4Product& c, const Gpu& gpu) {
  const bool clusters = gpu.capability >= 90;
  const int64_t tiles = c.weight.tiles_n, k = c.weight.tiles_k;
  // Blocks that share the columns, until each multiprocessor has `wanted` of them.
  const auto share = [&](int64_t count, int64_t wanted, int most) {
    int cluster = 1;
    while (clusters && cluster < most && count * cluster * 4 <= wanted * gpu.processors * 3)
      cluster *= 2;
    return cluster;
  };
  if (c.m <= 8) {
    if (tiles >= 8 * gpu.processors) return {2, 0, 4, 1};
    if (tiles >= gpu.processors) return {2, 0, k >= 64 ? 16 : 8, 1};
    return {1, 0, k >= 64 ? 16 : 8, 1};
  }
  if (c.m <= 16) {
    if (tiles >= 8 * gpu.processors) return {2, 0, 4, 1};
    return {2, 0, 8, share(ceil_div(tiles, 2), 2, 4)};
  }
  if (tiles >= 8 * gpu.processors) return {int4::kManyRows, 8, 8, 1};
  const int warps = gpu.shared_of_block >= 180 << 10 ? 8 : 4;
  return {int4::kManyRows, 2, warps, share(ceil_div(tiles, 4) * ceil_div(c.m, 64), 1, 2)};
}

Params make_params(const Int4Product& c, const Plan& plan) {
  const Int4View& w = c.weight;
  Params p;
  p.x = c.x, p.packed = w.packed, p.bias = c.bias, p.out = c.out;
  p.scales = static_cast<const uint16_t*>(w.scales);
  p.zeros = static_cast<const uint16_t*>(w.zeros);
  p.m = static_cast<int>(c.m), p.n = static_cast<int>(w.n), p.k = static_cast<int>(w.k);
  p.tiles_n = static_cast<int>(w.tiles_n), p.tiles_k = static_cast<int>(w.tiles_k);
  p.groups = static_cast<int>(w.groups), p.group_shift = log2_of(w.group_size);
  p.cluster = plan.cluster, p.token_tiles = 1;
  p.warps_n = plan.warps_n > 0 ? plan.warps_n : 1;
  p.log_rows = log2_of(16 * plan.rows * p.warps_n);
  return p;
}

LaunchConfig config_of(const Params& p, const Plan& plan, int64_t shared_bytes, void* stream) {
  const int64_t blocks_n = ceil_div(p.tiles_n, plan.rows * p.warps_n);
  return {blocks(blocks_n * p.token_tiles * plan.cluster),
          {static_cast<unsigned>(32 * plan.warps)},
          stream,
          shared_bytes,
          static_cast<unsigned>(plan.cluster),
          gpu_facts().capability >= 90};
}

template <class T, class S, int kRows, int kTokens, int kAhead, int kThreads, int kBlocks>
void launch_few(Params& p, const Plan& plan, void* stream) {
  const LaunchConfig config =
      config_of(p, plan, int64_t{plan.warps} * kRows * kTokens * 512, stream);
  if (p.group_shift == 5)
    return launch(
        rare_kernel<int4::few_rows<T, S, kRows, kTokens, kAhead, kThreads, kBlocks, true>>, config,
        p);
  launch(kernel<int4::few_rows<T, S, kRows, kTokens, kAhead, kThreads, kBlocks, false>>, config, p);
}

template <class T, class S, int kTokens, int kBeside>
void launch_many(Params& p, const Plan& plan, void* stream) {
  const int64_t stage = kTokens * 1024 + kBeside * int4::kWarpStage;
  const int64_t staged = plan.warps / kBeside * int4::kManyStages * stage;
  const int64_t parts = int64_t{plan.warps} * int4::kManyRows * kTokens * 512;
  p.token_tiles = static_cast<int>(ceil_div(p.m, 8 * kTokens));
  const LaunchConfig config = config_of(p, plan, staged > parts ? staged : parts, stream);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::many_rows<T, S, kTokens, kBeside, true>>, config, p);
  launch(kernel<int4::many_rows<T, S, kTokens, kBeside, false>>, config, p);
}

template <class T, class S>
void launch_product(Params& p, const Plan& plan, void* stream) {
  if (plan.warps_n == 0) {
    if (p.m > 8) return launch_few<T, S, 2, 2, 2, 256, 2>(p, plan, stream);
    if (plan.rows == 4) return launch_few<T, S, 4, 1, 2, 256, 1>(p, plan, stream);
    if (plan.rows == 2) return launch_few<T, S, 2, 1, 3, 512, 1>(p, plan, stream);
    if (plan.warps > 8) return launch_few<T, S, 1, 1, 2, 512, 2>(p, plan, stream);
    return launch_few<T, S, 1, 1, 4, 256, 2>(p, plan, stream);
  }
  if (plan.warps_n == 2) {
    if (p.m <= 32) return launch_many<T, S, 4, 2>(p, plan, stream);
    return launch_many<T, S, 8, 2>(p, plan, stream);
  }
  if (p.m <= 32) return launch_many<T, S, 4, 8>(p, plan, stream);
  launch_many<T, S, 8, 8>(p, plan, stream);
}

template <class T>
void launch_unpack(int4::UnpackParams& p, void* stream) {
  launch(kernel<int4::unpack<T>>, {blocks(ceil_div(p.tiles, 8)), {256}, stream}, p);
}

}  // namespace

const char* int4_product_cuda(const Int4Product& call, int64_t plan, void* stream) {
  const Gpu& gpu = gpu_facts();
  const auto byte = [&](int shift) { return static_cast<int>(plan >> shift & 255); };
  const Plan chosen = plan ? Plan{byte(24), byte(16), byte(8), byte(0)} : choose(call, gpu);
  Params p = make_params(call, chosen);
  const bool halves = call.weight.scale_type == ElementType::f16;
  if (call.type == ElementType::bf16) {
    halves ? launch_product<bf16, f16>(p, chosen, stream)
           : launch_product<bf16, bf16>(p, chosen, stream);
  } else {
    halves ? launch_product<f16, f16>(p, chosen, stream)
           : launch_product<f16, bf16>(p, chosen, stream);
  }
  return last_error();
}

const char* int4_unpack_cuda(const Int4View& w, void* out, ElementType type, void* stream) {
  int4::UnpackParams p;
  p.packed = w.packed, p.scales = w.scales, p.zeros = w.zeros, p.out = out;
  p.n = static_cast<int>(w.n), p.k = static_cast<int>(w.k);
  p.tiles_k = static_cast<int>(w.tiles_k), p.groups = static_cast<int>(w.groups);
  p.group_shift = log2_of(w.group_size);
  p.scale_type = w.scale_type, p.zero_type = w.zero_type;
  p.tiles = w.tiles_n * w.tiles_k;
  if (type == ElementType::f32) {
    launch_unpack<float>(p, stream);
  } else if (type == ElementType::f16) {
    launch_unpack<f16>(p, stream);
  } else {
    launch_unpack<bf16>(p, stream);
  }
  return last_error();
}

}  // namespace flexops
