// The launcher of products whose weights the copy engine brings: how they are divided, and the
// grid.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "common/tensor_map.h"
#include "few_rows/few_rows.h"
#include "few_rows/few_rows_copied_hopper.cuh"
#include "few_rows/few_rows_sums_launch.h"

namespace flexops {

inline int64_t weights_of(const FewRows& call) { return call.weights.count; }
inline int64_t columns_of(const FewRows& call, int64_t i) { return call.weights[i].size(0); }

/// How many tiles of lines a block has, and how many blocks share columns.
struct CopiedPlan {
  int tiles, cluster;
};

/// Whether that kernel is the one: of fewer rows the others are faster.
inline bool takes_copied(const FewRows& call, const Gpu& gpu) {
  const auto fits = [](const TensorView& tensor) { return !tensor || aligned(tensor.data); };
  bool takes = gpu.capability == 90 && call.x.rows() > 8 && call.x.columns() % 64 == 0 &&
               fits(call.x) && fits(call.norm) && fits(call.residual);
  for (int64_t i = 0; i < call.weights.count; ++i) takes = takes && fits(call.weights[i]);
  return takes;
}

/// The plan by which the busiest multiprocessor reads least: a block reads its lines and x, and
/// adding the sums of a cluster takes as long as reading some stages. Clusters that do not all run
/// at once follow each other without a pause; few clusters of 8 find room.
inline CopiedPlan choose_copied(const FewRows& call, int processors) {
  constexpr int kTiles[] = {2, 3, 4, 7};
  const int pair = call.activation ? 2 : 1;
  const int64_t chunks = ceil_div(call.x.columns(), int64_t{few_rows::kCopiedColumns});
  CopiedPlan best = {};
  double least_cost = 0;
  for (int sharing = 1; sharing * pair <= 4 && sharing <= chunks; sharing *= 2) {
    for (const int tiles : kTiles) {
      const int cluster = sharing * pair;
      const double rounds = static_cast<double>(clusters_with_work(call, 16 * tiles)) /
                            clusters_of(cluster, processors);
      const int64_t stages = ceil_div(chunks, int64_t{sharing}) * (2 * tiles + 1);
      const double cost = std::max(rounds, 1.0) * stages + (sharing > 1 ? 8 : 0);
      if (best.tiles == 0 || cost < least_cost) least_cost = cost, best = {tiles, cluster};
    }
  }
  return best;
}

template <class T, int kTiles>
void launch_copied(const FewRows& call, int cluster, void* stream) {
  using Layout = few_rows::CopiedLayout<kTiles>;
  const Gpu& gpu = gpu_facts();
  const int64_t k = call.x.columns(), tiles_k = k / 64;
  const int pair = call.activation ? 2 : 1;
  few_rows::CopiedParams p = {};
  p.result = make_result(call, 16 * kTiles, cluster);
  p.all_chunks = static_cast<int>(ceil_div(k, int64_t{few_rows::kCopiedColumns}));
  p.chunks = static_cast<int>(ceil_div(int64_t{p.all_chunks}, int64_t{cluster / pair}));
  p.early = call.early;
  const int half = gpu.shared_of_processor / 2 - 1024;
  p.stages = few_rows::kCopiedMostStages;
  while (p.stages > 2 && (Layout::bytes(p.stages) > half || p.stages > p.chunks)) --p.stages;
  p.x = map_matrices(call.x.dtype, call.x.data, tiles_k, p.result.rows, 64, k, 64,
                     few_rows::kCopiedRows, 2);
  for (int64_t i = 0; i < call.weights.count; ++i)
    p.weights[i] = map_matrices(call.x.dtype, call.weights[i].data, tiles_k, columns_of(call, i),
                                64, k, 64, 16 * kTiles, 2);
  int64_t count = int64_t{p.result.blocks} * cluster;
  const int64_t at_once = int64_t{clusters_of(cluster, gpu.processors)} * cluster;
  if (count < at_once && fills_once(count, gpu.processors)) count = at_once;
  launch(kernel<few_rows::product_copied_hopper<T, kTiles>>,
         {blocks(count),
          {32 * few_rows::kCopiedWarps},
          stream,
          Layout::bytes(p.stages),
          static_cast<unsigned>(cluster),
          true},
         p);
}

template <class T>
void launch_copied(const FewRows& call, const CopiedPlan& plan, void* stream) {
  if (plan.tiles == 2) return launch_copied<T, 2>(call, plan.cluster, stream);
  if (plan.tiles == 3) return launch_copied<T, 3>(call, plan.cluster, stream);
  if (plan.tiles == 4) return launch_copied<T, 4>(call, plan.cluster, stream);
  launch_copied<T, 7>(call, plan.cluster, stream);
}

}  // namespace flexops
