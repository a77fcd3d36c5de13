// What launchers of few_rows_sums_hopper.cuh's kernels share.
#pragma once

#include <stdint.h>

#include "common/launch.h"
#include "common/tensor_view.h"
#include "few_rows/few_rows_sums_hopper.cuh"

namespace flexops {

/// Clusters that have work, for blocks of so many lines. `call`: a FewRows or an Int4FewRows, of
/// which weights_of(call) says how many weights there are, and columns_of(call, i) their columns.
template <class Call>
int64_t clusters_with_work(const Call& call, int64_t lines) {
  int64_t clusters = 0;
  for (int64_t i = 0; i < (call.activation ? 1 : weights_of(call)); ++i)
    clusters += ceil_div(columns_of(call, i), lines);
  return clusters;
}

/// Whether there is nearly one block for each multiprocessor, and no more.
inline bool fills_once(int64_t blocks, int processors) {
  return blocks <= processors && 5 * blocks > 4 * processors;
}

template <class Call>
few_rows::Result make_result(const Call& call, int64_t lines, int cluster) {
  few_rows::Result r = {};
  r.norm = call.norm.data, r.residual = call.residual.data, r.out = call.out.data;
  r.eps = call.eps, r.offset = call.offset, r.k = static_cast<int>(call.x.columns());
  r.rows = static_cast<int>(call.x.rows()), r.width = static_cast<int>(call.out.columns());
  r.activation = static_cast<int>(call.activation), r.cluster = cluster;
  r.blocks = static_cast<int>(clusters_with_work(call, lines));
  int64_t end = 0, start = 0;
  for (int i = 0; i < few_rows::kMaxWeights; ++i) {
    few_rows::Result::Weight& weight = r.weights[i];
    weight.end = r.blocks;
    if (i >= weights_of(call)) continue;
    const int64_t columns = columns_of(call, i);
    weight.bias = call.biases.count ? call.biases[i].data : nullptr;
    weight.columns = static_cast<int>(columns);
    if (call.activation) continue;
    weight.start = static_cast<int>(start), start += columns;
    weight.end = static_cast<int>(end += ceil_div(columns, lines));
  }
  return r;
}

}  // namespace flexops
