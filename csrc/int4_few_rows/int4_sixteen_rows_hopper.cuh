// Products of up to 16 rows of x on Hopper, by mma.sync: W is the left operand, x the right one.
// Codes are multiplied as they are; scales and zero points are applied to the sums of a group: with
// so few rows that takes half the instructions of dequantizing the codes, as wgmma requires. The
// sums of x, which zero points are multiplied by, come from a left operand of ones.
//
// A stage is eight tiles of columns of two, four or seven tiles of rows, each for one warp, by
// three or four copies of the copy engine. Two teams of eight warps take the stages in turn, or a
// block has one team, and a multiprocessor two blocks, one of which computes while the other one
// adds its sums. How many tiles of rows: so that all blocks run at once and have the same work.
//
// Where columns are short, a block leaves room for one of the next kernel, which reads its first
// weights meanwhile. Then there is one block for each multiprocessor: with fewer, some would get
// two of the next kernel, and those the next two, and so on. Blocks without work of their own do
// the last one's once more.
#pragma once

#include "common/wgmma.cuh"
#include "few_rows/few_rows_sums_hopper.cuh"
#include "int4_linear/int4_codes.cuh"

namespace flexops::int4 {

struct SixteenParams {
  few_rows::Result result;
  // Boxes: 64 columns, all rows and eight tiles of columns of x, or one; a stage's words, scales
  // and zero points of each weight.
  hopper::TensorMap x, words[few_rows::kMaxWeights], scales[few_rows::kMaxWeights],
      zeros[few_rows::kMaxWeights];
  int tiles_k;
  int group_shift;  // log2 of the group size
  int stages;
  int chunks;   // of columns, that a block has at most, as many as a stage has
  int x_tiles;  // tiles of columns of a box of x
  bool has_zeros, half_scales;
};

inline constexpr int kSixteenTeam = 8, kSixteenMostStages = 8;
// A multiple of the teams, so that a stage belongs to one of them. Another one would come to a
// stage two phases ahead, which its barrier cannot distinguish from now.
FLEXOPS_DEVICE constexpr int sixteen_least_stages(int teams) { return 2 * teams; }

/// Whether two blocks fit into a multiprocessor's registers: 64 of them, or 128 for one team.
template <int kTokens, int kTeams, int kTiles>
inline constexpr bool kSixteenBeside = kTeams == 1 || (kTokens == 1 && kTiles <= 4);

/// Shared memory, in bytes. The sums, of warps and of the block, take the place of the stages.
template <int kTiles>
struct SixteenLayout {
  static constexpr int kWords = kTiles * kSixteenTeam * 512;
  int numbers, weights, x, x_at, sums, barriers, bytes;
  FLEXOPS_DEVICE SixteenLayout(int tokens, int teams, int group_shift, int stages) {
    const int of_tokens = tokens * few_rows::kSumsStride<16 * kTiles> * 4;
    numbers = kTiles * (64 * kSixteenTeam >> group_shift) * 32;  // scales of a stage
    weights = (kWords + 2 * numbers + 1023) / 1024 * 1024, x = kSixteenTeam * tokens * 128;
    x_at = stages * weights, sums = teams * kSixteenTeam * of_tokens;
    const int staged = x_at + stages * x, summed = sums + of_tokens;
    barriers = staged > summed ? staged : summed;
    bytes = barriers + 16 * kSixteenMostStages;
  }
};

/// kTokens: eights of rows of x, 1 or 2. kTiles: of rows of W.
template <class T, int kTokens, int kTeams, int kTiles, bool kSmall>
__global__ void __launch_bounds__(32 * kSixteenTeam * kTeams,
                                  kSixteenBeside<kTokens, kTeams, kTiles> ? 2 : 1)
    sixteen_rows_hopper(const FLEXOPS_GRID_CONSTANT SixteenParams p) {
  using namespace hopper;
  using X = Panels<8 * kTokens, 64>;
  using Layout = SixteenLayout<kTiles>;
  constexpr int kTeam = kSixteenTeam, kWarps = kTeam * kTeams, kUnits = kSmall ? 2 : 1;
  __align__(1024) extern __shared__ u8 staged[];
  const int thread = static_cast<int>(threadIdx.x), warp = shuffle(thread / 32, 0),
            lane = thread % 32;
  const int g = lane / 4, member = warp % kTeam, team = warp / kTeam;
  const few_rows::Share share(p.result);
  const hopper::TensorMap &words_map = p.words[share.which], &scales_map = p.scales[share.which],
                          &zeros_map = p.zeros[share.which];
  const int stages = p.stages;
  // The block's chunks of columns.
  const int begin = p.chunks * share.part,
            count = max(min(p.chunks, (p.tiles_k + kTeam - 1) / kTeam - begin), 0);
  const Layout at(8 * kTokens, kTeams, p.group_shift, stages);
  const u32 memory = shared_address(staged), full = memory + at.barriers,
            empty = full + 8 * kSixteenMostStages;
  if (thread < stages) {
    init(full + 8 * thread, 1), init(empty + 8 * thread, kTeam);
    fence_init(), fence_async();
  }
  let_next_start();
  __syncthreads();

  // Of rows and columns past the last one, the copy engine stores zeros.
  const auto fetch_weight = [&](int chunk, int slot) {
    const u32 to = memory + slot * at.weights, bar = full + 8 * slot;
    const int tile = (begin + chunk) * kTeam, tile_n = share.block * kTiles,
              number = (tile * 64 >> p.group_shift) * 8;
    expect(bar, Layout::kWords + (p.has_zeros ? 2 : 1) * at.numbers + at.x);
    load_tile(to, words_map, bar, 0, tile, tile_n, 0);
    load_tile(to + Layout::kWords, scales_map, bar, number, 0, tile_n, 0);
    if (p.has_zeros)
      load_tile(to + Layout::kWords + at.numbers, zeros_map, bar, number, 0, tile_n, 0);
  };
  const auto fetch_x = [&](int chunk, int slot) {
    const u32 to = memory + at.x_at + slot * at.x, bar = full + 8 * slot;
    const int tile = (begin + chunk) * kTeam;
    if (p.x_tiles > 1) return load_tile(to, p.x, bar, 0, 0, tile, 0);
#pragma unroll 1
    for (int i = 0; i < kTeam; ++i)
      load_tile(to + i * X::kBytes, p.x, bar, (tile + i) * 64, 0, 0, 0);
  };
  const int first = min(count, stages);
  if (thread == 0) {
#pragma unroll 1
    for (int i = 0; i < first; ++i) fetch_weight(i, i);
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < first; ++i) fetch_x(i, i);
  } else {
    wait_for_previous();
  }
  __syncwarp();

  const int of_tile = at.numbers / kTiles;
  float acc[kTiles][kTokens][4] = {};
  const auto multiply = [&](const u8* words, const u8* numbers, u32 x) {
    // Operands of 16 columns each.
    u32 right[4][kTokens][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 four[4];
      if constexpr (kTokens == 2) {
        X::load_right(four, x, 0, 16 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) right[i][j / 2][j % 2] = four[j];
      } else if (i % 2 == 0) {
        X::template load_matrices<false>(four, X::place(x, lane % 8, 2 * i + lane / 8));
#pragma unroll
        for (int j = 0; j < 4; ++j) right[i + j / 2][0][j % 2] = four[j];
      }
    }
    float sums[kUnits][kTokens][4] = {};
    constexpr u32 kOnes[4] = {Code<T>::kOnes, Code<T>::kOnes, Code<T>::kOnes, Code<T>::kOnes};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < kTokens; ++n)
        mma<T>(sums[i * kUnits / 4][n], kOnes, right[i][n][0], right[i][n][1]);
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      const uint4 all = *reinterpret_cast<const uint4*>(words + r * kTeam * 512);
      const u32 word[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float part[kTokens][4] = {};
#pragma unroll
        for (int i = u * 4 / kUnits; i < (u + 1) * 4 / kUnits; ++i) {
          u32 left[4];
          widen_codes<T>(left, word[i]);
#pragma unroll
          for (int n = 0; n < kTokens; ++n) mma<T>(part[n], left, right[i][n][0], right[i][n][1]);
        }
        const u8* const pair = numbers + r * of_tile + 32 * u;
        const u32 scales = *reinterpret_cast<const u32*>(pair),
                  zeros = p.has_zeros ? *reinterpret_cast<const u32*>(pair + at.numbers) : kEight;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float scale = number_of(scales, half, p.half_scales),
                      less = -Code<T>::kOffset - half_of<f16>(zeros, half);
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              acc[r][n][2 * half + i] += scale * (part[n][2 * half + i] + less * sums[u][n][i]);
          }
        }
      }
    }
  };

  const u8* const words = staged + member * 512 + lane * 16;
  const u8* const numbers = staged + Layout::kWords + (member * 64 >> p.group_shift) * 32 + g * 4;
  const u32 own_x = memory + at.x_at + member * X::kBytes;
  int slot = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    if (chunk % kTeams == team) {
      // Warps take turns at filling the team's stage before this one, once all have read it.
      const int read = chunk - kTeams;
      if (lane == 0 && read >= 0 && read + stages < count && chunk / kTeams % kTeam == member) {
        const bool wraps = slot < kTeams;
        const int before = slot - kTeams + (wraps ? stages : 0);
        wait(empty + 8 * before, wraps ? phase ^ 1 : phase);
        fetch_weight(read + stages, before), fetch_x(read + stages, before);
      }
      __syncwarp();
      wait(full + 8 * slot, phase);
      multiply(words + slot * at.weights, numbers + slot * at.weights, own_x + slot * at.x);
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * slot);
    }
    if (++slot == stages) slot = 0, phase ^= 1;
  }
  __syncthreads();  // all have read the stages
  float* const parts = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int r = 0; r < kTiles; ++r)
    few_rows::store_sums<16 * kTiles>(
        parts + warp * 8 * kTokens * few_rows::kSumsStride<16 * kTiles>, 16 * r, acc[r]);
  __syncthreads();
  few_rows::write_sums<T, kWarps, 8 * kTokens, 16 * kTiles>(
      p.result, share, parts, reinterpret_cast<float*>(staged + at.sums));
}

}  // namespace flexops::int4
