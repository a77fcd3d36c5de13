// The launchers of products with 4-bit weights: which kernel, its tiles, and the grid.

#include "int4_linear/int4_linear.h"

#include "common/launch.h"
#include "int4_linear/int4_16_rows.cuh"
#include "int4_linear/int4_many_rows.cuh"
#include "int4_linear/int4_many_rows_hopper.cuh"
#include "int4_linear/int4_unpack.cuh"

namespace flexops {
namespace {

using int4::Params;

/// A kernel's configuration: as a number, for measurements, `beside << 16 | warps << 8 | cluster`.
struct Plan {
  int beside;   // warps beside each other along n, 1 (up to 16 rows), 2 or 8; or wgmma's rows of x,
                // 32 or 64
  int warps;    // of a block; those that are not beside each other share the columns
  int cluster;  // blocks that share the columns
};

int log2_of(int64_t value) {
  int log = 0;
  while (int64_t{1} << log < value) ++log;
  return log;
}

/// wgmma's kernel rounds scales to x's dtype.
bool takes_hopper(const Int4Product& c) { return c.type == c.weight.scale_type; }

/// Measured on one H200.
Plan choose(const Int4Product& c, const Gpu& gpu) {
  const int64_t processors = gpu.processors;
  const bool clusters = gpu.capability >= 90;
  if (c.m <= 16) {
    const int64_t count = ceil_div(c.weight.tiles_n, 2);
    if (2 * count >= 7 * processors) return {1, 4, 1};
    const int warps = c.m <= 8 && count <= processors ? 16 : 8;
    int cluster = c.m > 8 && clusters && count <= processors ? 2 : 1;
    while (clusters && cluster < 4 && 2 * count * cluster <= processors &&
           c.weight.tiles_k >= 4 * warps * cluster)
      cluster *= 2;
    return {1, warps, cluster};
  }
  if (gpu.capability == 90 && takes_hopper(c)) {
    const int tokens = c.m <= 32 ? 32 : 64;
    const int64_t count =
        ceil_div(c.weight.tiles_n, 4 * int4::kHopperGroups) * ceil_div(c.m, tokens);
    int cluster = 1;
    while (cluster < 8 && c.weight.tiles_k >= 8 * cluster &&
           2 * cluster * count <= (cluster == 1 ? processors : 3 * processors / 4))
      cluster *= 2;
    return {tokens, 20, cluster};
  }
  const int64_t count = ceil_div(c.weight.tiles_n, 4) * ceil_div(c.m, 64);
  if (count >= 3 * processors && c.m > 32) return {8, 8, 1};
  if (count > processors || gpu.shared_of_block < 180 << 10) return {2, 4, 1};
  const int cluster = !clusters || 2 * count > processors ? 1 : 6 * count > processors ? 2 : 4;
  return {2, 8, cluster};
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
  p.cluster = plan.cluster;
  return p;
}

LaunchConfig config_of(int64_t grid, int warps, int64_t shared_bytes, int cluster, void* stream) {
  return {blocks(grid), {static_cast<unsigned>(32 * warps)}, stream,
          shared_bytes, static_cast<unsigned>(cluster),      gpu_facts().capability >= 90};
}

template <class T, class S, int kTokens, int kAhead, int kThreads, int kBlocks>
void launch_16(Params& p, const Plan& plan, void* stream) {
  constexpr int kRows = 2;
  p.token_tiles = 1, p.warps_n = 1, p.log_rows = log2_of(16 * kRows);
  const LaunchConfig config =
      config_of(ceil_div(p.tiles_n, kRows) * plan.cluster, plan.warps,
                int64_t{plan.warps} * kRows * kTokens * 512, plan.cluster, stream);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::rows_16<T, S, kRows, kTokens, kAhead, kThreads, kBlocks, true>>,
                  config, p);
  launch(kernel<int4::rows_16<T, S, kRows, kTokens, kAhead, kThreads, kBlocks, false>>, config, p);
}

template <class T, class S, int kTokens, int kBeside>
void launch_many(Params& p, const Plan& plan, void* stream) {
  const int64_t stage = kTokens * 1024 + kBeside * int4::kWarpStage;
  const int64_t staged = plan.warps / kBeside * int4::kManyStages * stage;
  const int64_t parts = int64_t{plan.warps} * int4::kManyRows * kTokens * 512;
  p.token_tiles = static_cast<int>(ceil_div(p.m, 8 * kTokens));
  p.warps_n = kBeside, p.log_rows = log2_of(16 * int4::kManyRows * kBeside);
  const int64_t grid = ceil_div(p.tiles_n, int4::kManyRows * kBeside) * p.token_tiles;
  const LaunchConfig config = config_of(grid * plan.cluster, plan.warps,
                                        staged > parts ? staged : parts, plan.cluster, stream);
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::many_rows<T, S, kTokens, kBeside, true>>, config, p);
  launch(kernel<int4::many_rows<T, S, kTokens, kBeside, false>>, config, p);
}

template <class T, class S>
void launch_many(Params& p, const Plan& plan, void* stream) {
  if (plan.beside == 1) {
    if (p.m > 8) return launch_16<T, S, 2, 2, 256, 2>(p, plan, stream);
    return launch_16<T, S, 1, 3, 512, 1>(p, plan, stream);
  }
  if (plan.beside == 2) {
    if (p.m <= 32) return launch_many<T, S, 4, 2>(p, plan, stream);
    return launch_many<T, S, 8, 2>(p, plan, stream);
  }
  if (p.m <= 32) return launch_many<T, S, 4, 8>(p, plan, stream);
  launch_many<T, S, 8, 8>(p, plan, stream);
}

template <class T, int kN>
void launch_hopper(Params& p, void* stream) {
  p.token_tiles = static_cast<int>(ceil_div(p.m, kN));
  const int64_t grid = ceil_div(p.tiles_n, 4 * int4::kHopperGroups) * p.token_tiles * p.cluster;
  const auto config = [&](int64_t bytes) {
    return config_of(grid, int4::kHopperThreads / 32, bytes, p.cluster, stream);
  };
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::many_rows_hopper<T, kN, true>>,
                  config(int4::HopperLayout<kN, true>::kBytes), p);
  launch(kernel<int4::many_rows_hopper<T, kN, false>>,
         config(int4::HopperLayout<kN, false>::kBytes), p);
}

template <class T>
void launch_product(const Int4Product& c, const Plan& plan, void* stream) {
  Params p = make_params(c, plan);
  if (plan.beside >= 32) {
    if (!takes_hopper(c)) return detail::note("this plan takes scales of x's dtype");
    if (plan.beside == 32) return launch_hopper<T, 32>(p, stream);
    return launch_hopper<T, 64>(p, stream);
  }
  c.weight.scale_type == ElementType::f16 ? launch_many<T, f16>(p, plan, stream)
                                          : launch_many<T, bf16>(p, plan, stream);
}

template <class T>
void launch_unpack(int4::UnpackParams& p, void* stream) {
  launch(kernel<int4::unpack<T>>, {blocks(ceil_div(p.tiles, 8)), {256}, stream}, p);
}

}  // namespace

const char* int4_product_cuda(const Int4Product& call, int64_t plan, void* stream) {
  const Gpu& gpu = gpu_facts();
  const auto byte = [&](int shift) { return static_cast<int>(plan >> shift & 255); };
  const Plan chosen = plan ? Plan{byte(16), byte(8), byte(0)} : choose(call, gpu);
  call.type == ElementType::bf16 ? launch_product<bf16>(call, chosen, stream)
                                 : launch_product<f16>(call, chosen, stream);
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
