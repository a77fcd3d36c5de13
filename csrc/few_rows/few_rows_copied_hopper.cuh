// Products of 9 to 16 rows on Hopper: the copy engine brings weights and rows to shared memory,
// where mma.sync's operands are read from. Weights are the left one. Formulas:
// flexops/ops/few_rows.py.
//
// A stage is 128 columns of two, three, four or seven tiles of 16 lines of W, and of x; each warp
// has 16 of these columns. Where one block for each multiprocessor has all the work, there is room
// for a block of the next kernel, which asks for its first weights meanwhile (see
// int4_sixteen_rows_hopper.cuh). A norm's weights multiply x's operands.
#pragma once

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/wgmma.cuh"
#include "few_rows/few_rows_sums_hopper.cuh"

namespace flexops::few_rows {

struct CopiedParams {
  Result result;
  // Boxes: 64 columns, all rows (or a block's lines), two tiles of columns.
  hopper::TensorMap x, weights[kMaxWeights];
  int chunks;  // of 128 columns, that a block has at most
  int all_chunks;
  int stages;
  bool early;
};

inline constexpr int kCopiedRows = 16, kCopiedWarps = 8, kCopiedColumns = 16 * kCopiedWarps,
                     kCopiedMostStages = 8;

/// Shared memory, in bytes. The sums, of warps and of the block, take the place of the stages.
template <int kTiles>
struct CopiedLayout {
  static constexpr int kWeights = 16 * kTiles * kCopiedColumns * 2,
                       kX = kCopiedRows * kCopiedColumns * 2, kStage = kWeights + kX,
                       kPart = kCopiedRows * kSumsStride<16 * kTiles>,  // floats
      kGains = 2 * kCopiedColumns;
  static constexpr FLEXOPS_DEVICE int barriers(int stages) {
    constexpr int kSums = (kCopiedWarps + 1) * kPart * 4;
    return stages * kStage > kSums ? stages * kStage : kSums;
  }
  /// The norm's weights of each stage.
  static constexpr FLEXOPS_DEVICE int gains(int stages) {
    return barriers(stages) + 16 * kCopiedMostStages;
  }
  static constexpr FLEXOPS_DEVICE int bytes(int stages) { return gains(stages) + stages * kGains; }
};

/// kTiles: of lines of W.
template <class T, int kTiles>
__global__ void __launch_bounds__(32 * kCopiedWarps, 2)
    product_copied_hopper(const FLEXOPS_GRID_CONSTANT CopiedParams p) {
  using namespace hopper;
  using Layout = CopiedLayout<kTiles>;
  using W = Panels<16 * kTiles, kCopiedColumns>;
  using X = Panels<kCopiedRows, kCopiedColumns>;
  constexpr int kWarps = kCopiedWarps, kLines = 16 * kTiles, kEights = kCopiedRows / 8;
  __align__(1024) extern __shared__ u8 copied[];
  const int thread = static_cast<int>(threadIdx.x), warp = shuffle(thread / 32, 0),
            lane = thread % 32, stages = p.stages;
  const Share share(p.result);
  const TensorMap& weights = p.weights[share.which];
  const int begin = p.chunks * share.part, count = max(min(p.chunks, p.all_chunks - begin), 0);
  const u32 memory = shared_address(copied), full = memory + Layout::barriers(stages),
            empty = full + 8 * kCopiedMostStages, gains = memory + Layout::gains(stages);
  const T* const norm = static_cast<const T*>(p.result.norm);
  if (thread < stages) {
    init(full + 8 * thread, 1), init(empty + 8 * thread, kWarps);
    fence_init(), fence_async();
  }
  let_next_start();
  __syncthreads();

  // Of lines and columns past the last one, the copy engine stores zeros.
  const auto fetch_weights = [&](int chunk, int slot) {
    const u32 bar = full + 8 * slot;
    const int column = (begin + chunk) * kCopiedColumns,
              bytes = norm ? 2 * min(kCopiedColumns, p.result.k - column) : 0;
    expect(bar, Layout::kStage + bytes);
    load_tile(memory + slot * Layout::kStage, weights, bar, 0, share.block * kLines,
              2 * (begin + chunk), 0);
    if (norm) load_bytes(gains + slot * Layout::kGains, norm + column, bytes, bar);
  };
  const auto fetch_x = [&](int chunk, int slot) {
    load_tile(memory + slot * Layout::kStage + Layout::kWeights, p.x, full + 8 * slot, 0, 0,
              2 * (begin + chunk), 0);
  };
  const int first = min(count, stages);
  if (!p.early) wait_for_previous();
  if (thread == 0) {
#pragma unroll 1
    for (int i = 0; i < first; ++i) fetch_weights(i, i);
  }
  wait_for_previous();
  if (thread == 0) {
#pragma unroll 1
    for (int i = 0; i < first; ++i) fetch_x(i, i);
  }
  __syncwarp();

  float acc[kTiles][kEights][4] = {}, squares[kEights] = {};
  int slot = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    // Warps take turns at filling the stage before this one, once all have read it.
    const int read = chunk - 1;
    if (lane == 0 && read >= 0 && read + stages < count && chunk % kWarps == warp) {
      const int before = slot == 0 ? stages - 1 : slot - 1;
      wait(empty + 8 * before, slot == 0 ? phase ^ 1 : phase);
      fetch_weights(read + stages, before), fetch_x(read + stages, before);
    }
    __syncwarp();
    wait(full + 8 * slot, phase);
    const u32 w = memory + slot * Layout::kStage, x = w + Layout::kWeights;
    u32 right[4];
    X::load_right(right, x, 0, 16 * warp);
    if (norm) {
      const bool inside = (begin + chunk) * kCopiedColumns + 16 * warp < p.result.k;
      const u8* const own = copied + Layout::gains(stages) + slot * Layout::kGains + 32 * warp;
#pragma unroll
      for (int i = 0; i < 2 * kEights; ++i) {
        const u32 gain = reinterpret_cast<const u32*>(own)[lane % 4 + i % 2 * 4];
        right[i] = weigh<T>(right[i], inside ? gain : 0, p.result.offset, squares[i / 2]);
      }
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      u32 left[4];
      W::load_left(left, w, 16 * r, 16 * warp);
#pragma unroll
      for (int n = 0; n < kEights; ++n)
        flexops::mma<T>(acc[r][n], left, right[2 * n], right[2 * n + 1]);
    }
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * slot);
    if (++slot == stages) slot = 0, phase ^= 1;
  }
  __syncthreads();  // all have read the stages
  float* const parts = reinterpret_cast<float*>(copied);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) store_sums<kLines>(parts + warp * Layout::kPart, 16 * r, acc[r]);
  if (norm) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const float square = warp_reduce<4>(squares[n], Sum());
      if (lane % 4 == 0)
        store_square<kLines>(parts + warp * Layout::kPart, 8 * n + lane / 4, square);
    }
  }
  __syncthreads();
  write_sums<T, kWarps, kCopiedRows, kLines>(p.result, share, parts,
                                             parts + kWarps * Layout::kPart);
}

}  // namespace flexops::few_rows
