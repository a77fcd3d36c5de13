// The launcher of grouped products with 4-bit weights: which kernel, and its tiles.

#include "int4_grouped/int4_grouped.h"

#include <stdint.h>

#include <type_traits>

#include "common/tensor_map.h"
#include "int4_grouped/int4_grouped.cuh"
#include "int4_grouped/int4_grouped_hopper.cuh"

namespace flexops {
namespace {

using int4::Codes;
using int4::GroupedParams;

GroupedParams make_params(const Int4Grouped& c) {
  const Int4View& w = c.weight;
  GroupedParams p = {};
  p.x = c.x, p.packed = w.packed, p.out = c.out;
  p.scales = static_cast<const uint16_t*>(w.scales);
  p.zeros = static_cast<const uint16_t*>(w.zeros);
  p.m = static_cast<int>(c.m), p.n = static_cast<int>(w.n / c.groups), p.k = static_cast<int>(w.k);
  p.tiles_n = p.n / 16, p.tiles_k = static_cast<int>(w.tiles_k);
  p.groups = static_cast<int>(w.groups), p.group_shift = log2_of(w.group_size);
  p.cluster = 1, p.token_tiles = 1, p.half_scales = w.scale_type == ElementType::f16;
  p.offsets = c.offsets, p.groups_of_rows = static_cast<int>(c.groups);
  return p;
}

/// Blocks for the tiles of `tokens` rows of x and `lines` rows of W: the last one of each group may
/// be a partial one.
Dim3 divide(GroupedParams& p, int64_t tokens, int64_t lines, int64_t most) {
  p.blocks_n = static_cast<int>(ceil_div(p.n, lines));
  return blocks(least((ceil_div(p.m, tokens) + p.groups_of_rows + 1) * p.blocks_n, most));
}

LaunchConfig config_of(Dim3 grid, int threads, int64_t shared_bytes, void* stream) {
  LaunchConfig config{grid, {static_cast<unsigned>(threads)}, stream, shared_bytes};
  config.early = gpu_facts().capability >= 90;
  return config;
}

template <class T, int kTokens>
void launch_mma(const Int4Grouped& c, void* stream) {
  constexpr int kStaged =
      int4::kManyStages * (kTokens * 1024 + int4::kGroupedBeside * int4::kWarpStage);
  constexpr int kLines = 16 * int4::kManyRows * int4::kGroupedBeside,
                kSums = kTokens * 8 * (kLines + 4) * 4;
  GroupedParams p = make_params(c);
  const Dim3 grid = divide(p, 8 * kTokens, kLines, gpu_facts().processors);
  const LaunchConfig config =
      config_of(grid, 32 * int4::kGroupedBeside, kStaged > kSums ? kStaged : kSums, stream);
  if (c.weight.mxfp4) return launch(kernel<int4::grouped_rows<T, kTokens, true>>, config, p);
  launch(kernel<int4::grouped_rows<T, kTokens, false>>, config, p);
}

template <class T, int kN, Codes kCodes>
void launch_hopper(const Int4Grouped& c, const KernelOf<int4::GroupedHopperParams>& chosen,
                   void* stream) {
  using Layout = int4::GroupedLayout<kN, kCodes>;
  constexpr unsigned kChunk = Layout::kChunk, kTiles = Layout::kTiles;
  int4::GroupedHopperParams params = {};
  GroupedParams& p = params.p = make_params(c);
  const Dtype type = std::is_same_v<T, bf16> ? Dtype::bf16 : Dtype::f16;
  params.x_tiles = p.k % 64 == 0 ? kChunk : 1;
  params.x = p.k % 64 == 0 ? map_matrices(type, p.x, p.tiles_k, p.m, 64, p.k, 64, kN, kChunk)
                           : map_matrices(type, p.x, 1, p.m, p.k, p.k, 0, kN);
  const int64_t tiles = c.weight.tiles_n;  // of all groups
  const auto numbers = [&](const void* of) {
    return map_words(of ? of : p.scales, tiles, 1, int64_t{p.groups} * 8, kTiles, 1,
                     (kChunk * 64 >> p.group_shift) * 8);
  };
  params.words = map_words(p.packed, tiles, p.tiles_k, 128, kTiles, kChunk, 128);
  params.scales = numbers(p.scales), params.zeros = numbers(p.zeros);
  const Dim3 grid = divide(p, kN, 16 * kTiles, gpu_facts().processors);
  launch(chosen, config_of(grid, int4::kGroupedThreads, Layout::kBytes, stream), params);
}

template <class T, int kN>
void launch_hopper(const Int4Grouped& c, void* stream) {
  using int4::grouped_rows_hopper;
  if (c.weight.mxfp4)
    return launch_hopper<T, kN, Codes::mxfp4>(c, kernel<grouped_rows_hopper<T, kN, Codes::mxfp4>>,
                                              stream);
  if (c.weight.group_size == 32)
    return launch_hopper<T, kN, Codes::whole32>(
        c, rare_kernel<grouped_rows_hopper<T, kN, Codes::whole32>>, stream);
  launch_hopper<T, kN, Codes::whole>(c, kernel<grouped_rows_hopper<T, kN, Codes::whole>>, stream);
}

/// Rows of x of a tile: by wgmma 16, 32, 64 or 128, by mma.sync -32 or -64. Measured on an
/// H200; groups do not have the same number of rows.
int64_t choose(const Int4Grouped& c) {
  const int64_t rows = ceil_div(c.m, c.groups);
  if (gpu_facts().capability != 90) return rows <= 16 ? -32 : -64;
  return rows <= 8 ? 16 : rows <= 16 ? 32 : rows <= 48 ? 64 : 128;
}

template <class T>
void launch_product(const Int4Grouped& c, int64_t plan, void* stream) {
  if (plan == -32) return launch_mma<T, 4>(c, stream);
  if (plan == -64) return launch_mma<T, 8>(c, stream);
  if (plan == 16) return launch_hopper<T, 16>(c, stream);
  if (plan == 32) return launch_hopper<T, 32>(c, stream);
  if (plan == 64) return launch_hopper<T, 64>(c, stream);
  launch_hopper<T, 128>(c, stream);
}

}  // namespace

const char* int4_grouped_cuda(const Int4Grouped& call, int64_t plan, void* stream) {
  const int64_t chosen = plan ? plan : choose(call);
  call.type == ElementType::bf16 ? launch_product<bf16>(call, chosen, stream)
                                 : launch_product<f16>(call, chosen, stream);
  return last_error();
}

}  // namespace flexops
