// Products of more rows of x on Hopper (sm_90a), by wgmma: out^T = W x^T. W is the left operand, 64
// rows of it for a consumer warpgroup, which dequantizes them in registers while the tile before is
// multiplied; x is the right one, in shared memory, by the copy engine.
//
// A producer fills a ring of stages: chunks of columns of x and of the block's rows of W. The
// consumer warpgroups are beside each other along n, or kDepth of them share the columns.
#pragma once

#include "common/wgmma.cuh"
#include "int4_linear/int4_codes.cuh"

namespace flexops::int4 {

struct HopperParams {
  Params p;
  // Boxes: 64 columns and kN rows of x; a stage's words, scales and zero points. Few large copies,
  // because the copy engine takes some 70 cycles for each.
  hopper::TensorMap x, words, scales, zeros;
  // With shared rows: those of the last warpgroup; the ones above are of the others.
  hopper::TensorMap last_words, last_scales, last_zeros;
};

/// Tiles of rows of a cluster of two blocks that share rows: seven warpgroups' rows, so that 28672
/// rows are 128 blocks with the same work, and not 112. Each block has the columns of three, and
/// half the columns of the fourth, which are between those of the two.
inline constexpr int kSharingTiles = 28;

/// Consumer warpgroups, with so many rows of x. More than two would not have registers for 256.
FLEXOPS_DEVICE constexpr int hopper_groups(int tokens) { return tokens == 256 ? 2 : 4; }
FLEXOPS_DEVICE constexpr int hopper_threads(int tokens) {
  return (hopper_groups(tokens) + 1) * hopper::kWarpgroup;
}
/// Tiles of columns of a stage.
FLEXOPS_DEVICE constexpr int hopper_chunk(int tokens, int depth) {
  return depth == 4 || tokens < 64 || (tokens == 64 && depth == 2) ? 4 : 2;
}

/// Shared memory, in bytes. A stage: tiles of x, words, scales, zero points. The sums take the
/// place of the stages.
template <int kN, int kDepth, bool kSmall>
struct HopperLayout {
  static constexpr int kLines = 64 * hopper_groups(kN) / kDepth, kTiles = kLines / 16;
  static constexpr int kChunk = hopper_chunk(kN, kDepth);
  static constexpr int kNumbers = kChunk * 32 * (kSmall ? 2 : 1);
  static constexpr int kWords = kChunk * kN * 128, kScales = kWords + kTiles * kChunk * 512,
                       kZeros = kScales + kTiles * kNumbers, kStage = kZeros + kTiles * kNumbers;
  static constexpr int kFit = (225 << 10) / kStage, kStages = kFit < 8 ? kFit : 8;
  static constexpr int kStride = kLines + 4;  // of the sums: lanes write to different banks
  static constexpr int kSums = kDepth * kN * kStride * 4;
  static constexpr int kBarriers = kStages * kStage > kSums ? kStages* kStage : kSums;
  static constexpr int kBytes = kBarriers + 16 * kStages;
};

/// kShared: see kSharingTiles. The shared rows are the last warpgroup's, in the last pass.
template <class T, int kN, int kDepth, bool kSmall, bool kShared = false>
__global__ void __launch_bounds__(hopper_threads(kN), 1)
    many_rows_hopper(const FLEXOPS_GRID_CONSTANT HopperParams params) {
  using namespace hopper;
  using Layout = HopperLayout<kN, kDepth, kSmall>;
  using X = Tile<kN, 64>;
  constexpr int kChunk = Layout::kChunk, kStages = Layout::kStages, kGroups = hopper_groups(kN),
                kThreads = kGroups * kWarpgroup;  // that multiply
  __align__(1024) extern __shared__ u8 staged[];
  const Params& p = params.p;
  const Place place(p);
  const u32 memory = shuffle(shared_address(staged), 0);
  const Ring<kStages> ring = {memory + Layout::kBarriers};
  const int thread = static_cast<int>(threadIdx.x), warp = shuffle(thread / 32, 0),
            lane = thread % 32;
  // Tiles of rows that a copy brings: with shared rows, those of the last warpgroup come apart.
  constexpr int kPasses = kShared ? 4 / kGroups : 1, kLastTiles = kShared ? 4 : 0,
                kOwnTiles = Layout::kTiles - kLastTiles;
  const int first_token = place.token_tile * kN,
            cluster_tile = place.n_tile * (kShared ? kSharingTiles : Layout::kTiles),
            block_tile = cluster_tile + (kShared ? place.rank * 16 : 0);
  const auto first_tile_of = [&](int pass) { return block_tile + pass * Layout::kTiles; };
  const auto last_tile_of = [&](int pass) {
    return pass == kPasses - 1 ? cluster_tile + 12 : first_tile_of(pass) + kOwnTiles;
  };
  if (thread == 0) ring.init(4 * kGroups), fence_init(), fence_async();
  let_next_start();
  __syncthreads();
  // The block's chunks of columns.
  const i64 chunks = (p.tiles_k + kChunk - 1) / kChunk;
  const int part_begin = static_cast<int>(chunks * place.rank / p.cluster),
            part_end = static_cast<int>(chunks * (place.rank + 1) / p.cluster),
            begin = kShared ? 0 : part_begin,
            count = kShared ? static_cast<int>(chunks) : part_end - part_begin;
  const int shift = p.group_shift - 6;  // log2 of tiles to a group
  const auto groups_of = [&](int tiles) { return kSmall ? 2 * tiles : tiles >> shift; };
  const int row_numbers = groups_of(kChunk) * 32;  // bytes of a tile of rows, of a stage
  float* const sums = reinterpret_cast<float*>(staged);
  RingState<kStages> at;

  if (warp >= 4 * kGroups) {
    leave_registers<32>();
    if (warp > 4 * kGroups) return;
    // The producer. Of rows and columns past the last one, the copy engine stores zeros.
    const auto fetch_weight = [&](int pass, int chunk, u32 full) {
      if (lane != 0) return;
      const int first_tile = first_tile_of(pass), last_tile = last_tile_of(pass);
      const int tile = (begin + chunk) * kChunk, group = groups_of(tile) * 8;
      const u32 to = memory + at.stage * Layout::kStage;
      const bool last =
          kShared && (pass < kPasses - 1 || (chunk >= part_begin && chunk < part_end));
      const int of_row = kChunk * 512 + (p.zeros ? 2 : 1) * row_numbers;
      expect(full, Layout::kWords + (kOwnTiles + (last ? kLastTiles : 0)) * of_row);
      load_tile(to + Layout::kWords, params.words, full, 0, tile, first_tile, 0);
      load_tile(to + Layout::kScales, params.scales, full, group, 0, first_tile, 0);
      if (p.zeros) load_tile(to + Layout::kZeros, params.zeros, full, group, 0, first_tile, 0);
      if (!last) return;
      load_tile(to + Layout::kWords + kOwnTiles * kChunk * 512, params.last_words, full, 0, tile,
                last_tile, 0);
      const u32 numbers = kOwnTiles * row_numbers;
      load_tile(to + Layout::kScales + numbers, params.last_scales, full, group, 0, last_tile, 0);
      if (p.zeros)
        load_tile(to + Layout::kZeros + numbers, params.last_zeros, full, group, 0, last_tile, 0);
    };
    const auto fetch_x = [&](int chunk, u32 full) {
      if (lane < kChunk)
        load_tile(memory + at.stage * Layout::kStage + lane * X::kBytes, params.x, full,
                  ((begin + chunk) * kChunk + lane) * 64, first_token, 0, 0);
    };
    const int ahead = min(count, kStages);
    for (int i = 0; i < ahead; ++i, at.next()) fetch_weight(0, i, ring.full(at.stage));
    wait_for_previous();
    at = {};
    for (int i = 0; i < ahead; ++i, at.next()) fetch_x(i, ring.full(at.stage));
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass > 0) barrier(2, kThreads + 32);
      for (int i = pass > 0 ? 0 : ahead; i < count; ++i, at.next()) {
        ring.acquire(at);
        fetch_weight(pass, i, ring.full(at.stage));
        __syncwarp();
        fetch_x(i, ring.full(at.stage));
      }
    }
  } else {
    take_registers<kN == 256 ? 232 : 112>();
    // While a tile is multiplied, the next one is dequantized.
    constexpr int kTiles = kChunk / kDepth;  // of a chunk, of a warpgroup
    constexpr bool kAhead = kTiles % 2 == 0 && kN != 128;
    const int deep = warp / 4 % kDepth, own = warp / 4 / kDepth * 4 + warp % 4;  // tile of rows
    const u8* const words = staged + Layout::kWords + own * kChunk * 512 + lane * 16;
    const u8* const numbers = staged + Layout::kScales + own * row_numbers + lane / 4 * 4;
    u32 left[2][16];
    const auto leave_out = [&](int some) {
#pragma unroll 1
      for (int i = 0; i < some; ++i, at.next()) {
        ring.wait(at);
        if (lane == 0) arrive(ring.empty(at.stage));
      }
    };
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      // The chunks that the warpgroup multiplies.
      const bool shares = kShared && pass == kPasses - 1 && own >= kOwnTiles;
      const int first_chunk = shares ? part_begin : 0, end_chunk = shares ? part_end : count;
      float acc[kN / 2] = {};
      pin(acc);
      if constexpr (kShared) leave_out(first_chunk);
#pragma unroll 1
      for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
        const int before = at.stage == 0 ? kStages - 1 : at.stage - 1;
        ring.wait(at);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int tile = deep * kTiles + i;
          u32(&to)[16] = left[kAhead ? i % 2 : 0];
          const uint4 all =
              *reinterpret_cast<const uint4*>(words + at.stage * Layout::kStage + tile * 512);
          const auto of_half = [&](int half) {
            const int group = kSmall ? 2 * tile + half : tile >> shift;
            const u8* const number = numbers + at.stage * Layout::kStage + group * 32;
            const u32 zero =
                p.zeros ? *reinterpret_cast<const u32*>(number + Layout::kZeros - Layout::kScales)
                        : kEight;
            return Dequantizer<T>(*reinterpret_cast<const u32*>(number), zero, p.half_scales);
          };
          const Dequantizer<T> low = of_half(0), high = kSmall ? of_half(1) : low;
          low.widen(to, all.x), low.widen(to + 4, all.y);
          high.widen(to + 8, all.z), high.widen(to + 12, all.w);
          pin(to);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step)
            wgmma<T, false>(acc, to + 4 * step,
                            X::rows(memory + at.stage * Layout::kStage + tile * X::kBytes, 0, step),
                            true);
          wgmma_commit();
          if constexpr (kAhead) {
            wgmma_wait<1>();
            pin(left[(i + 1) % 2]);
            if (i == 0 && chunk > first_chunk && lane == 0) arrive(ring.empty(before));
          } else {
            wgmma_wait<0>(acc);
          }
        }
        if (!kAhead && lane == 0) arrive(ring.empty(at.stage));
        at.next();
      }
      wgmma_wait<0>(acc);
      if (kAhead && kShared && end_chunk > first_chunk && lane == 0)
        arrive(ring.empty(at.stage == 0 ? kStages - 1 : at.stage - 1));
      if constexpr (kShared) leave_out(count - end_chunk);
      // The sums, by rows of x, take the place of the stages, which all consumers have read.
      barrier(1, kThreads);
      float* const to = sums + (deep * kN + lane % 4 * 2) * Layout::kStride + own * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[(8 * j + i % 2) * Layout::kStride + i / 2 * 8] = acc[4 * j + i];
      }
      barrier(1, kThreads);
      if constexpr (!kShared) {
        write_sums<T>(p, place.rank, sums, kDepth, Layout::kStride, kN, Layout::kLines, first_token,
                      block_tile * 16, kThreads);
      } else if (pass < kPasses - 1) {
        add_sums<T>(p, 0, 1, sums, 1, Layout::kStride, kN, Layout::kLines, first_token,
                    first_tile_of(pass) * 16, kThreads);
        fence_async();
        barrier(2, kThreads + 32);
      } else {
        add_sums<T>(p, 0, 1, sums, 1, Layout::kStride, kN, kOwnTiles * 16, first_token,
                    first_tile_of(pass) * 16, kThreads);
        write_sums<T>(p, place.rank, sums + kOwnTiles * 16, 1, Layout::kStride, kN, kLastTiles * 16,
                      first_token, last_tile_of(pass) * 16, kThreads);
      }
    }
  }
}

}  // namespace flexops::int4
