// Grouped products with weights of 4 bits: out[t] = W[e] x[t] for the rows t of each group e. A
// block takes every gridDim-th tile of a group's rows of x and of W (persistent); tiles are those
// of grouped_linear.cuh. Here by mma.sync, on sm_80 and newer.
#pragma once

#include "grouped_linear/grouped_linear.cuh"
#include "int4_linear/int4_many_rows.cuh"

namespace flexops::int4 {

struct GroupedParams : Params {  // m: rows of all groups; n, tiles_n: of one matrix
  const int* offsets;
  int groups_of_rows;
  int blocks_n;  // tiles of a block that a matrix has
};

/// Calls body(group, its first row of x, end of the group's rows, tile of rows of W) for each tile
/// of this block. Rows of no group are those of group number `groups_of_rows`.
template <int kTokens, class Body>
FLEXOPS_DEVICE void each_grouped_tile(const GroupedParams& p, const Body& body) {
  grouped::RowTiles<kTokens> tiles(p.offsets, p.groups_of_rows, p.m, p.blocks_n);
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tiles.seek(tile);
       tile += static_cast<int>(gridDim.x))
    body(tiles.expert, tiles.row(tile), tiles.end, tiles.column_tile(tile));
}

inline constexpr int kGroupedBeside = 8;  // warps of a block, which has 256 rows of W

template <class T, int kTokens, bool kMxfp4>
__global__ void __launch_bounds__(256, 1)
    grouped_rows(const FLEXOPS_GRID_CONSTANT GroupedParams params) {
  wait_for_previous();
  each_grouped_tile<8 * kTokens>(params, [&](int group, int row, int end, int n_tile) {
    Params p = params;
    p.m = end - row, p.cluster = 1;
    p.x = static_cast<const T*>(params.x) + static_cast<i64>(row) * p.k;
    p.out = static_cast<T*>(params.out) + static_cast<i64>(row) * p.n;
    const bool none = group == params.groups_of_rows;
    if (none) p.tiles_k = 0;  // sums of nothing
    const i64 tile = none ? 0 : static_cast<i64>(group) * p.tiles_n;
    p.packed += tile * params.tiles_k * 512;
    p.scales += tile * p.groups * 16;
    if (p.zeros) p.zeros += tile * p.groups * 16;
    multiply_many_rows<T, kTokens, kGroupedBeside, kMxfp4>(p, Place(n_tile));
    __syncthreads();  // the sums have been read
  });
}

}  // namespace flexops::int4
