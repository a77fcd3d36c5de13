// The launcher of products of up to 16 rows on Hopper: how the weights are divided, and the grid.
#pragma once

#include <stdint.h>

#include "common/tensor_map.h"
#include "few_rows/few_rows_sums_launch.h"
#include "int4_few_rows/int4_few_rows.h"
#include "int4_few_rows/int4_sixteen_rows_hopper.cuh"

namespace flexops {

/// As a number, for measurements: `16 << 24 | teams << 20 | tiles << 16 | stages << 8 | cluster`.
struct SixteenPlan {
  int teams;    // of a block: 2, or 1 and two blocks on a multiprocessor
  int tiles;    // of rows, of a block: 2 or 4; of one team 4 or 7
  int stages;   // an even number
  int cluster;  // blocks that share columns, of a gate and what it gates
};

inline int64_t weights_of(const Int4FewRows& call) { return call.packed.count; }
inline int64_t columns_of(const Int4FewRows& call, int64_t i) {
  int64_t before = 0;
  for (int64_t j = 0; j < i && !call.activation; ++j) before += 16 * call.packed[j].size(0);
  return least(16 * call.packed[i].size(0), call.out.columns() - before);
}

/// Whether there is room for the next kernel: each block has few chunks of columns.
inline bool leaves_room(int64_t blocks, int64_t chunks, int processors) {
  return fills_once(blocks, processors) && chunks <= 8;
}

/// With room for the next kernel, if that is possible. Otherwise, if blocks of two teams run all at
/// once, a stage costs its tiles of rows and as much as three more, for x, and adding the sums of a
/// cluster as much as 16 tiles or more. Else there are blocks of one team, two on a multiprocessor.
/// Measured on one H200.
inline SixteenPlan choose_sixteen(const Int4FewRows& call, int processors) {
  const int64_t rows = call.x.rows(), chunks = ceil_div(ceil_div(call.x.columns(), int64_t{64}),
                                                        int64_t{int4::kSixteenTeam});
  const int pair = call.activation ? 2 : 1, most_sharing = rows <= 8 && chunks > 4 ? 2 : 1;
  for (int sharing = 1; sharing <= most_sharing; ++sharing) {
    for (int tiles = rows > 8 ? 4 : 2; tiles <= 4; tiles *= 2) {
      const int cluster = sharing * pair;
      if (leaves_room(clusters_with_work(call, 16 * tiles) * cluster, ceil_div(chunks, sharing),
                      processors))
        return {rows > 8 ? 1 : 2, tiles, 6, cluster};
    }
  }
  SixteenPlan best = {};
  int64_t least_cost = INT64_MAX;
  for (int log = 0, sharing = 1; sharing * pair <= 8; ++log, sharing *= 2) {
    const int cluster = sharing * pair;
    for (int tiles = 2; tiles <= 4; tiles *= 2) {
      if (clusters_with_work(call, 16 * tiles) > clusters_of(cluster, processors)) continue;
      const int64_t cost =
          ceil_div(chunks, sharing) * (tiles + 3) + (cluster > 1 ? 8 * (log + pair) : 0);
      if (cost < least_cost) least_cost = cost, best = {2, tiles, 4, cluster};
    }
  }
  if (best.teams) return best;
  const auto cost_of = [&](int tiles) {
    return ceil_div(clusters_with_work(call, 16 * tiles) * pair, int64_t{2} * processors) *
           (3 * tiles + 2);
  };
  return {1, cost_of(7) < cost_of(4) ? 7 : 4, 4, pair};
}

template <class T, int kTokens, int kTeams, int kTiles>
void launch_sixteen(const Int4FewRows& call, const SixteenPlan& plan, void* stream) {
  const Gpu& gpu = gpu_facts();
  const int64_t k = call.x.columns(), tiles_k = ceil_div(k, int64_t{64}),
                groups = ceil_div(tiles_k * 64, call.group_size);
  const int pair = call.activation ? 2 : 1;
  int4::SixteenParams p = {};
  p.result = make_result(call, 16 * kTiles, plan.cluster);
  p.tiles_k = static_cast<int>(tiles_k);
  p.group_shift = call.group_size == 32 ? 5 : call.group_size == 64 ? 6 : 7;
  p.stages = plan.stages;
  p.chunks = static_cast<int>(
      ceil_div(ceil_div(tiles_k, int64_t{int4::kSixteenTeam}), int64_t{plan.cluster / pair}));
  p.has_zeros = call.zeros.count > 0, p.half_scales = call.scales[0].dtype == Dtype::f16;
  int64_t count = int64_t{p.result.blocks} * plan.cluster;
  const bool beside =
      int4::kSixteenBeside<kTokens, kTeams, kTiles> && leaves_room(count, p.chunks, gpu.processors);
  if (beside) count = gpu.processors / plan.cluster * plan.cluster;
  const int half = gpu.shared_of_processor / 2 - 1024;
  const auto bytes = [&] {
    return int4::SixteenLayout<kTiles>(8 * kTokens, kTeams, p.group_shift, p.stages).bytes;
  };
  while (p.stages > int4::sixteen_least_stages(kTeams) &&
         bytes() > (beside || kTeams == 1 ? half : gpu.shared_of_block))
    p.stages -= kTeams;
  // More than half keeps the next kernel's blocks away.
  const int64_t shared = beside || kTeams == 1 || bytes() > half ? bytes() : half + 1024;
  if (k % 64 == 0) {
    p.x_tiles = int4::kSixteenTeam;
    p.x = map_matrices(call.x.dtype, call.x.data, tiles_k, p.result.rows, 64, k, 64, 8 * kTokens,
                       int4::kSixteenTeam);
  } else {
    p.x_tiles = 1,
    p.x = map_matrices(call.x.dtype, call.x.data, 1, p.result.rows, k, k, 0, 8 * kTokens);
  }
  for (int64_t i = 0; i < call.packed.count; ++i) {
    const int64_t tiles = call.packed[i].size(0);
    const auto numbers = [&](const TensorViews& of) {
      return map_words(of[i].data, tiles, 1, groups * 8, kTiles, 1,
                       (64 * int4::kSixteenTeam >> p.group_shift) * 8);
    };
    p.words[i] =
        map_words(call.packed[i].data, tiles, tiles_k, 128, kTiles, int4::kSixteenTeam, 128);
    p.scales[i] = numbers(call.scales),
    p.zeros[i] = numbers(p.has_zeros ? call.zeros : call.scales);
  }
  const LaunchConfig config = {blocks(count), {32u * int4::kSixteenTeam * kTeams}, stream,
                               shared,        static_cast<unsigned>(plan.cluster), true};
  if (p.group_shift == 5)
    return launch(rare_kernel<int4::sixteen_rows_hopper<T, kTokens, kTeams, kTiles, true>>, config,
                  p);
  launch(kernel<int4::sixteen_rows_hopper<T, kTokens, kTeams, kTiles, false>>, config, p);
}

template <class T, int kTokens>
void launch_sixteen(const Int4FewRows& call, const SixteenPlan& plan, void* stream) {
  if (plan.teams == 2 && plan.tiles == 2)
    return launch_sixteen<T, kTokens, 2, 2>(call, plan, stream);
  if (plan.teams == 2) return launch_sixteen<T, kTokens, 2, 4>(call, plan, stream);
  if (plan.tiles == 4) return launch_sixteen<T, kTokens, 1, 4>(call, plan, stream);
  launch_sixteen<T, kTokens, 1, 7>(call, plan, stream);
}

template <class T>
void launch_sixteen(const Int4FewRows& call, const SixteenPlan& plan, void* stream) {
  call.x.rows() <= 8 ? launch_sixteen<T, 1>(call, plan, stream)
                     : launch_sixteen<T, 2>(call, plan, stream);
}

}  // namespace flexops
