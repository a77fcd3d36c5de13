// The launchers of products with 4-bit weights: which kernel, its tiles, and the grid.

#include "int4_linear/int4_linear.h"

#include <stdint.h>

#include <type_traits>

#include "common/tensor_map.h"
#include "int4_linear/int4_many_rows.cuh"
#include "int4_linear/int4_many_rows_hopper.cuh"
#include "int4_linear/int4_unpack.cuh"

namespace flexops {
namespace {

using int4::Params;

/// A kernel's configuration: as a number, for measurements, `first << 16 | second << 8 | cluster`.
struct Plan {
  int first;    // warps beside each other along n, 2 or 8; or wgmma's rows of x, 16 to 256
  int second;   // warps of a block; or consumer warpgroups that share the columns, or 7: blocks of
                // a cluster of two share rows
  int cluster;  // blocks that share the columns
};

/// wgmma's tiles and how blocks share the columns: the fewest tiles of a warpgroup one after the
/// other, then small clusters.
Plan choose_hopper(const Int4Product& c, int processors) {
  // 256 rows of x to a block, if at most two blocks have to share the columns.
  const bool widest =
      c.m > 128 && ceil_div(c.weight.tiles_n, 8) * ceil_div(c.m, 256) >= clusters_of(2, processors);
  const int tokens = c.m <= 16 ? 16 : c.m <= 32 ? 32 : c.m <= 64 ? 64 : widest ? 256 : 128;
  const int most_depth = tokens < 64 ? 4 : tokens < 256 ? 2 : 1;
  Plan best = {tokens, 1, 1};
  int64_t least_cost = INT64_MAX;
  for (int cluster = 1; cluster <= 8; ++cluster) {
    for (int depth = 1; depth <= most_depth; depth *= 2) {
      const int64_t chunk = int4::hopper_chunk(tokens, depth),
                    count = ceil_div(c.weight.tiles_n * depth, 4 * int4::hopper_groups(tokens)) *
                            ceil_div(c.m, tokens),
                    waves = ceil_div(count, clusters_of(cluster, processors)),
                    chunks = ceil_div(ceil_div(c.weight.tiles_k, chunk), cluster);
      if (cluster > 1 && waves > 1) continue;
      const int64_t cost = waves * chunks * chunk / depth;
      if (cost < least_cost) least_cost = cost, best = {tokens, depth, cluster};
    }
  }
  if (tokens >= 64) {  // three and a half times 64 rows to a block
    const int64_t count = ceil_div(c.weight.tiles_n, int64_t{int4::kSharingTiles}) *
                          ceil_div(c.m, tokens),
                  cost = ceil_div(count, clusters_of(2, processors)) * c.weight.tiles_k * 7 /
                         (2 * int4::hopper_groups(tokens));
    if (cost < least_cost) best = {tokens, 7, 2};
  }
  return best;
}

/// Measured on one H200.
Plan choose(const Int4Product& c, const Gpu& gpu) {
  const int64_t processors = gpu.processors, tiles_n = c.weight.tiles_n;
  if (gpu.capability == 90) return choose_hopper(c, gpu.processors);
  const int64_t count = ceil_div(tiles_n, 4) * ceil_div(c.m, c.m <= 16 ? 16 : 64);
  if (count >= 3 * processors && c.m > 32) return {8, 8, 1};
  if (count > processors || gpu.shared_of_block < 180 << 10) return {2, 4, 1};
  const int cluster = gpu.capability < 90 || 2 * count > processors ? 1
                      : 6 * count > processors                      ? 2
                                                                    : 4;
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
  p.cluster = plan.cluster, p.half_scales = w.scale_type == ElementType::f16;
  return p;
}

LaunchConfig config_of(int64_t grid, int threads, int64_t shared_bytes, int cluster, void* stream) {
  return {blocks(grid), {static_cast<unsigned>(threads)}, stream,
          shared_bytes, static_cast<unsigned>(cluster),   gpu_facts().capability >= 90};
}

template <class T, int kTokens, int kBeside>
void launch_many(Params& p, const Plan& plan, void* stream) {
  const int64_t stage = kTokens * 1024 + kBeside * int4::kWarpStage, depth = plan.second / kBeside;
  const int64_t staged = depth * int4::kManyStages * stage;
  const int lines = 16 * int4::kManyRows * kBeside;
  const int64_t sums = depth * kTokens * 8 * (lines + 4) * 4;
  p.token_tiles = static_cast<int>(ceil_div(p.m, 8 * kTokens));
  launch(kernel<int4::many_rows<T, kTokens, kBeside>>,
         config_of(ceil_div(p.n, lines) * p.token_tiles * plan.cluster, 32 * plan.second,
                   staged > sums ? staged : sums, plan.cluster, stream),
         p);
}

template <class T, int kN, int kDepth, bool kSmall, bool kShared>
void launch_hopper(Params& p, const KernelOf<int4::HopperParams>& hopper_kernel, void* stream) {
  using Layout = int4::HopperLayout<kN, kDepth, kSmall>;
  // Tiles of rows: of the last warpgroup, and of the others.
  constexpr unsigned kChunk = Layout::kChunk, kLast = kShared ? 4 : 0,
                     kOwn = Layout::kTiles - kLast;
  const auto words = [&](unsigned rows) {
    return map_words(p.packed, p.tiles_n, p.tiles_k, 128, rows, kChunk, 128);
  };
  const auto numbers = [&](const void* of, unsigned rows) {
    return map_words(of ? of : p.scales, p.tiles_n, 1, int64_t{p.groups} * 8, rows, 1,
                     (kChunk * 64 >> p.group_shift) * 8);
  };
  int4::HopperParams params = {};
  params.p = p;
  params.x = map_matrices(std::is_same_v<T, bf16> ? Dtype::bf16 : Dtype::f16, p.x, 1, p.m, p.k, p.k,
                          0, kN);
  params.words = words(kOwn);
  params.scales = numbers(p.scales, kOwn), params.zeros = numbers(p.zeros, kOwn);
  if constexpr (kShared) {
    params.last_words = words(kLast);
    params.last_scales = numbers(p.scales, kLast), params.last_zeros = numbers(p.zeros, kLast);
  }
  const int64_t clusters = ceil_div(p.tiles_n, kShared ? int4::kSharingTiles : kOwn);
  launch(hopper_kernel,
         config_of(clusters * ceil_div(p.m, kN) * p.cluster, int4::hopper_threads(kN),
                   Layout::kBytes, p.cluster, stream),
         params);
}

template <class T, int kN, int kDepth, bool kShared = false>
void launch_hopper(Params& p, void* stream) {
  p.token_tiles = static_cast<int>(ceil_div(p.m, kN));
  if (p.group_shift == 5)
    return launch_hopper<T, kN, kDepth, true, kShared>(
        p, rare_kernel<int4::many_rows_hopper<T, kN, kDepth, true, kShared>>, stream);
  launch_hopper<T, kN, kDepth, false, kShared>(
      p, kernel<int4::many_rows_hopper<T, kN, kDepth, false, kShared>>, stream);
}

template <class T, int kN>
void launch_hopper(Params& p, const Plan& plan, void* stream) {
  if constexpr (kN >= 64) {
    if (plan.second == 7) return launch_hopper<T, kN, 1, true>(p, stream);
  }
  if (plan.second == 4) return launch_hopper < T, kN, kN<64 ? 4 : 2>(p, stream);
  if (plan.second == 2) return launch_hopper<T, kN, 2>(p, stream);
  launch_hopper<T, kN, 1>(p, stream);
}

template <class T>
void launch_product(const Int4Product& c, const Plan& plan, void* stream) {
  Params p = make_params(c, plan);
  if (plan.first == 2) {
    if (p.m <= 16) return launch_many<T, 2, 2>(p, plan, stream);
    if (p.m <= 32) return launch_many<T, 4, 2>(p, plan, stream);
    return launch_many<T, 8, 2>(p, plan, stream);
  }
  if (plan.first == 8)
    return p.m <= 32 ? launch_many<T, 4, 8>(p, plan, stream)
                     : launch_many<T, 8, 8>(p, plan, stream);
  if (plan.first == 16) return launch_hopper<T, 16>(p, plan, stream);
  if (plan.first == 32) return launch_hopper<T, 32>(p, plan, stream);
  if (plan.first == 64) return launch_hopper<T, 64>(p, plan, stream);
  if (plan.first == 128) return launch_hopper<T, 128>(p, plan, stream);
  if (plan.second == 7) return launch_hopper<T, 256, 1, true>(p, stream);
  launch_hopper<T, 256, 1>(p, stream);
}

template <class T>
void launch_unpack(int4::UnpackParams& p, void* stream) {
  launch(kernel<int4::unpack<T>>, {blocks(ceil_div(p.tiles, 8)), {256}, stream}, p);
}

}  // namespace

const char* int4_product_cuda(const Int4Product& call, int64_t plan, void* stream) {
  const Gpu& gpu = gpu_facts();
  const auto byte = [&](int shift) { return static_cast<int>(plan >> shift & 255); };
  const Plan chosen =
      plan ? Plan{static_cast<int>(plan >> 16), byte(8), byte(0)} : choose(call, gpu);
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
