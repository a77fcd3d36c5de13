// Grouped products with weights of 4 bits on Hopper (sm_90a), by wgmma: out^T = W x^T. W is the
// left operand, 64 rows of it for a consumer warpgroup, which dequantizes them in registers; x is
// the right one, in shared memory, by the copy engine.
//
// A block is one per multiprocessor and stays there (persistent). Its producer fills a ring of
// stages, chunks of columns of x and of the tile's rows of W, and is ahead while results are
// stored.
#pragma once

#include "common/wgmma.cuh"
#include "int4_grouped/int4_grouped.cuh"

namespace flexops::int4 {

struct GroupedHopperParams {
  GroupedParams p;
  int x_tiles;  // tiles of columns of a box of x
  // Boxes: 64 columns and kN rows of x; a stage's words, scales and zero points.
  hopper::TensorMap x, words, scales, zeros;
};

inline constexpr int kGroupedConsumers = 4;  // warpgroups
inline constexpr int kGroupedThreads = (kGroupedConsumers + 1) * hopper::kWarpgroup;

/// Shared memory, in bytes. A stage: kChunk tiles of columns of x, words, scales, zero points.
template <int kN, Codes kCodes>
struct GroupedLayout {
  static constexpr int kChunk = kN < 64 ? 4 : 2, kTiles = 4 * kGroupedConsumers;
  static constexpr int kNumbers = kChunk * 32 * (kCodes == Codes::whole ? 1 : 2);
  static constexpr int kWords = kChunk * kN * 128, kScales = kWords + kTiles * kChunk * 512,
                       kZeros = kScales + kTiles * kNumbers,
                       kStage = kZeros + (kCodes == Codes::mxfp4 ? 0 : kTiles * kNumbers);
  static constexpr int kFit = (226 << 10) / kStage, kStages = kFit < 8 ? kFit : 8;
  static constexpr int kBarriers = kStages * kStage, kBytes = kBarriers + 16 * kStages;
  static_assert(kStage % 1024 == 0, "tiles of x begin at multiples of 1024 bytes");
};

template <class T, int kN, Codes kCodes>
__global__ void __launch_bounds__(kGroupedThreads, 1)
    grouped_rows_hopper(const FLEXOPS_GRID_CONSTANT GroupedHopperParams params) {
  using namespace hopper;
  using Layout = GroupedLayout<kN, kCodes>;
  using X = Tile<kN, 64>;
  constexpr bool kSmall = kCodes != Codes::whole, kMxfp4 = kCodes == Codes::mxfp4;
  constexpr int kChunk = Layout::kChunk, kStages = Layout::kStages, kTiles = Layout::kTiles,
                kConsumers = kGroupedConsumers;
  __align__(1024) extern __shared__ u8 staged[];
  const GroupedParams& p = params.p;
  const u32 memory = shuffle(shared_address(staged), 0);
  const Ring<kStages> ring = {memory + Layout::kBarriers};
  const int thread = static_cast<int>(threadIdx.x), warp = shuffle(thread / 32, 0),
            lane = thread % 32;
  if (thread == 0) {
    prefetch(params.x), prefetch(params.words), prefetch(params.scales);
    ring.init(4 * kConsumers), fence_init(), fence_async();
  }
  let_next_start();
  __syncthreads();
  wait_for_previous();
  const int all_chunks = (p.tiles_k + kChunk - 1) / kChunk;
  const int shift = p.group_shift - 6;  // log2 of tiles to a group
  const auto groups_of = [&](int tiles) { return kSmall ? 2 * tiles : tiles >> shift; };
  const int row_numbers = groups_of(kChunk) * 32;  // bytes of a tile of rows, of a stage
  RingState<kStages> at;

  if (warp >= 4 * kConsumers) {
    leave_registers<32>();
    if (thread != 4 * kConsumers * 32) return;
    // The producer. Of rows and columns past the last one, the copy engine stores zeros.
    const u32 bytes = Layout::kWords + kTiles * (kChunk * 512 + (p.zeros ? 2 : 1) * row_numbers);
    each_grouped_tile<kN>(p, [&](int group, int row, int, int n_tile) {
      const int first_tile = group * p.tiles_n + n_tile * kTiles,
                chunks = group < p.groups_of_rows ? all_chunks : 0;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk, at.next()) {
        const u32 full = ring.fill(at, bytes), to = memory + at.stage * Layout::kStage;
        const int tile = chunk * kChunk, of_group = groups_of(tile) * 8;
        load_tile(to + Layout::kWords, params.words, full, 0, tile, first_tile, 0);
        load_tile(to + Layout::kScales, params.scales, full, of_group, 0, first_tile, 0);
        if (!kMxfp4 && p.zeros)
          load_tile(to + Layout::kZeros, params.zeros, full, of_group, 0, first_tile, 0);
        if (params.x_tiles == kChunk) {
          load_tile(to, params.x, full, 0, row, tile, 0);
        } else {
#pragma unroll
          for (int i = 0; i < kChunk; ++i)
            load_tile(to + i * X::kBytes, params.x, full, (tile + i) * 64, row, 0, 0);
        }
      }
    });
  } else {
    take_registers<112>();
    constexpr bool kAhead = kN != 128;  // a tile is dequantized while the one before is multiplied
    const u8* const words = staged + Layout::kWords + warp * kChunk * 512 + lane * 16;
    const u8* const numbers = staged + Layout::kScales + warp * row_numbers + lane / 4 * 4;
    u32 left[2][16];
    each_grouped_tile<kN>(p, [&](int group, int row, int end, int n_tile) {
      const int chunks = group < p.groups_of_rows ? all_chunks : 0;
      u32 before = 0;  // the stage that is read by what is under way
      float acc[kN / 2] = {};
      pin(acc);
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk, at.next()) {
        ring.wait(at);
#pragma unroll
        for (int tile = 0; tile < kChunk; ++tile) {
          u32(&to)[16] = left[kAhead ? tile % 2 : 0];
          const u32 stage = at.stage * Layout::kStage;
          const uint4 codes = *reinterpret_cast<const uint4*>(words + stage + tile * 512);
          const auto of_half = [&](int half) {
            const u8* const number =
                numbers + stage + (kSmall ? 2 * tile + half : tile >> shift) * 32;
            const u32 zero =
                !kMxfp4 && p.zeros
                    ? *reinterpret_cast<const u32*>(number + Layout::kZeros - Layout::kScales)
                    : kEight;
            return Dequantizer<T, kMxfp4>(*reinterpret_cast<const u32*>(number), zero,
                                          p.half_scales);
          };
          const Dequantizer<T, kMxfp4> low = of_half(0), high = kSmall ? of_half(1) : low;
          low.widen(to, codes.x), low.widen(to + 4, codes.y);
          high.widen(to + 8, codes.z), high.widen(to + 12, codes.w);
          pin(to);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step)
            wgmma<T, false>(acc, to + 4 * step, X::rows(memory + stage + tile * X::kBytes, 0, step),
                            true);
          wgmma_commit();
          if constexpr (kAhead) {
            wgmma_wait<1>();
            pin(left[(tile + 1) % 2]);
            if (tile == 0 && chunk > 0 && lane == 0) arrive(before);
          } else {
            wgmma_wait<0>(acc);
          }
        }
        before = ring.empty(at.stage);
        if (!kAhead && lane == 0) arrive(before);
      }
      wgmma_wait<0>(acc);
      if (kAhead && chunks > 0 && lane == 0) arrive(before);
      const int line = n_tile * kTiles + warp;
      if (line >= p.tiles_n) return;
      T* const out = static_cast<T*>(p.out) + 16 * line + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const int token = row + 8 * j + lane / 4;
        u32* const to = reinterpret_cast<u32*>(out + static_cast<i64>(token) * p.n);
        const u32 low = transposed(pack2<T>(acc[4 * j], acc[4 * j + 1])),
                  high = transposed(pack2<T>(acc[4 * j + 2], acc[4 * j + 3]));
        if (token < end) to[0] = low, to[4] = high;
      }
    });
  }
}

}  // namespace flexops::int4
