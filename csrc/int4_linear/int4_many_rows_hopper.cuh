// Products of more rows of x on Hopper (sm_90a), by wgmma: W is the left operand, 64 rows of it for
// a consumer warpgroup, which its threads dequantize in registers, some tiles of columns ahead; x
// is the right one, in shared memory.
//
// A thread's codes are 8 neighbouring columns of each 32 (int4_linear.cuh), where wgmma's left
// operand has pairs of columns of 16. So the producer warpgroup stores x with its columns in the
// order in which the threads of a quad have theirs: it transposes 4 x 4 pairs of each 32 columns.
#pragma once

#include "common/wgmma.cuh"
#include "int4_linear/int4_linear.cuh"

namespace flexops::int4 {

inline constexpr int kHopperGroups = 2, kHopperStages = 4;
inline constexpr int kHopperChunk = 4,
                     kHopperChunks = 4;  // tiles of a chunk of W; chunks of a ring
/// Floats from one row of x's sums to the next one's: lanes write to different banks.
inline constexpr int kHopperStride = 64 * kHopperGroups + 4;

/// Shared memory, in bytes from its beginning on: stages of x, x as it is copied, a ring of chunks
/// for each consumer warp, and barriers. The sums take the place of the first two.
template <int kN, bool kSmall>
struct HopperLayout {
  static constexpr int kPieces = kN >= 64 ? kN / 64 : 1;  // of 16 rows, of a producer's warp
  static constexpr int kAhead = kN <= 64 ? 4 : 3;         // tiles of x that are copied ahead
  static constexpr int kNumbers = kHopperChunk * 32 * (kSmall ? 2 : 1);
  static constexpr int kChunkBytes = kHopperChunk * 512 + 2 * kNumbers;
  static constexpr int kRaw = kN * 128 * kHopperStages, kRawBytes = kPieces * 8192;
  static constexpr int kEnd = kRaw + kRawBytes * kAhead, kSums = kN * kHopperStride * 4;
  static constexpr int kChunks = kEnd > kSums ? kEnd : kSums;
  static constexpr int kBarriers = kChunks + 4 * kHopperGroups * kHopperChunks * kChunkBytes;
  static constexpr int kBytes = kBarriers + 16 * kHopperStages + 32 * kHopperGroups * kHopperChunks;
};

/// Copies 64 columns of kN rows of x after another, and stores them in wgmma's order.
template <class T, int kN, bool kSmall>
FLEXOPS_DEVICE void produce_x(const Params& p, const hopper::Ring<kHopperStages>& ring, u8* memory,
                              int first_token, int begin, int count) {
  using Layout = HopperLayout<kN, kSmall>;
  using X = hopper::Tile<kN, 64>;
  constexpr int kPieces = Layout::kPieces, kAhead = Layout::kAhead;
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup, warp = thread / 32,
            lane = thread % 32;
  if (16 * warp < kN) {
    u8* const raw = memory + Layout::kRaw + warp * 2048;
    // Lanes copy 128 bytes of a row together; then each reads 64 of them.
    const auto fetch = [&](int slot, int tile) {
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int piece = 8 * j + lane / 4, token = first_token + 64 * i + 16 * warp + piece / 2;
          const int column = 64 * (begin + tile) + 32 * (piece % 2) + 8 * (lane % 4);
          const bool valid = tile < count && token < p.m && column < p.k;
          async_copy16(
              raw + slot * Layout::kRawBytes + i * 8192 + piece * 64 +
                  (lane % 4 ^ piece / 2 % 4) * 16,
              static_cast<const T*>(p.x) + (valid ? static_cast<i64>(token) * p.k + column : 0),
              valid);
        }
      }
      async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) fetch(i, i);
    hopper::RingState<kHopperStages> at;
    int slot = 0;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
      async_wait(kAhead - 1);
      __syncwarp();
      ring.acquire(at);
      const u32 to = hopper::shared_address(memory) + at.stage * X::kBytes;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          v[j] = *reinterpret_cast<const uint4*>(raw + slot * Layout::kRawBytes + i * 8192 +
                                                 lane * 64 + (j ^ lane / 2 % 4) * 16);
        const u32 words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                                 {v[0].y, v[1].y, v[2].y, v[3].y},
                                 {v[0].z, v[1].z, v[2].z, v[3].z},
                                 {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                           X::place(to, 64 * i + 16 * warp + lane / 2, 4 * (lane % 2) + j)),
                       "r"(words[j][0]), "r"(words[j][1]), "r"(words[j][2]), "r"(words[j][3])
                       : "memory");
      }
      hopper::fence_async();
      __syncwarp();
      if (lane == 0) hopper::arrive(ring.full(at.stage));
      at.next();
      fetch(slot, tile + kAhead);
      slot = slot + 1 == kAhead ? 0 : slot + 1;
    }
  }
}

/// The sums of 64 rows of W and kN rows of x. A warp streams its 16 rows of W by itself.
template <class T, int kN, bool kSmall>
FLEXOPS_DEVICE void multiply_x(const Params& p, const hopper::Ring<kHopperStages>& ring, u8* memory,
                               int tile_n, int begin, int count, float (&acc)[kN / 2]) {
  using namespace hopper;
  using Layout = HopperLayout<kN, kSmall>;
  using X = Tile<kN, 64>;
  constexpr int kGroups = kSmall ? 2 : 1;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const u32 x = shuffle(shared_address(memory), 0);
  u8* const chunks = memory + Layout::kChunks + warp * kHopperChunks * Layout::kChunkBytes;
  const u32 barriers =
      shared_address(memory) + Layout::kBarriers + 16 * kHopperStages + 8 * kHopperChunks * warp;
  const i64 row = min(tile_n, p.tiles_n - 1);
  const int shift = p.group_shift - 6;  // log2 of tiles to a group
  const auto groups_of = [&](int tiles) { return kSmall ? 2 * tiles : tiles >> shift; };
  const auto fetch = [&](int stage, int chunk) {
    const int tiles = min(kHopperChunk, count - chunk * kHopperChunk);
    if (tiles <= 0 || lane != 0) return;
    const int tile = begin + chunk * kHopperChunk, bytes = groups_of(tiles) * 32;
    const i64 number = (row * p.groups + groups_of(tile)) * 16;
    const u32 to = shared_address(chunks) + stage * Layout::kChunkBytes,
              barrier = barriers + 8 * stage;
    expect(barrier, tiles * 512 + (p.zeros ? 2 : 1) * bytes);
    load_bytes(to, p.packed + (row * p.tiles_k + tile) * 512, tiles * 512, barrier);
    load_bytes(to + kHopperChunk * 512, p.scales + number, bytes, barrier);
    if (p.zeros)
      load_bytes(to + kHopperChunk * 512 + Layout::kNumbers, p.zeros + number, bytes, barrier);
  };
  if (lane == 0) {
    for (int i = 0; i < kHopperChunks; ++i) init(barriers + 8 * i, 1);
    fence_init();
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < kHopperChunks; ++i) fetch(i, i);
  // A dequantized weight: codes less the whole part of the zero point are exact.
  const auto widen = [&](u32(&to)[16], int stage, int tile) {
    const u8* const from = chunks + stage * Layout::kChunkBytes;
    const uint4 all = reinterpret_cast<const uint4*>(from)[tile * 32 + lane];
    const u32 each[4] = {all.x, all.y, all.z, all.w};
    const u32* const scales = reinterpret_cast<const u32*>(from + kHopperChunk * 512) + lane / 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int number = 8 * (kSmall ? 2 * tile + group : tile >> shift);
      const u32 scale = scales[number],
                zero = p.zeros ? scales[Layout::kNumbers / 4 + number] : 0x48004800u;
      u32 factor[2], whole[2], rest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float s = half_of<T>(scale, i), z = half_of<f16>(zero, i);
        const float near = fminf(fmaxf(rintf(z), -64.0f), 64.0f), less = (near - z) * s;
        factor[i] = pack2<T>(s, s), rest[i] = pack2<T>(less, less);
        whole[i] = pack2<T>(-Code<T>::kOffset - near, -Code<T>::kOffset - near);
      }
#pragma unroll
      for (int step = group * 4 / kGroups; step < (group + 1) * 4 / kGroups; ++step) {
        u32 left[4];
        widen_codes<T>(left, each[step]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[4 * step + i] =
              fma2<T>(fma2<T>(left[i], Code<T>::kOnes, whole[i % 2]), factor[i % 2], rest[i % 2]);
      }
    }
  };
  // While a tile is multiplied, the next one is dequantized. Nothing is under way where loops end:
  // there ptxas would wait for each wgmma.
  if (count <= 0) return;
  u32 left[2][16];
  wait(barriers, 0);
  widen(left[0], 0, 0);
  RingState<kHopperStages> at;
  RingState<kHopperChunks> here, next;
#pragma unroll 1
  for (int first = 0; first < count; first += kHopperChunk) {
    next.next();
#pragma unroll
    for (int j = 0; j < kHopperChunk; ++j) {
      const bool last = j == kHopperChunk - 1;
      if (first + j >= count) break;
      ring.wait(at);
      if (last && first + kHopperChunk < count) wait(barriers + 8 * next.stage, next.phase);
      pin(left[j % 2]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<T, false>(acc, left[j % 2] + 4 * step, X::rows(x + at.stage * X::kBytes, 0, step),
                        true);
      wgmma_commit();
      widen(left[(j + 1) % 2], last ? next.stage : here.stage, last ? 0 : j + 1);
      wgmma_wait<0>(acc);
      if (lane == 0) arrive(ring.empty(at.stage));
      at.next();
    }
    // All lanes have read the chunk.
    fence_async();
    __syncwarp();
    fetch(here.stage, first / kHopperChunk + kHopperChunks);
    here = next;
  }
}

/// Two consumer warpgroups and a producer.
template <class T, int kN, bool kSmall>
__global__ void __launch_bounds__(384, 1) many_rows_hopper(const FLEXOPS_GRID_CONSTANT Params p) {
  __align__(1024) extern __shared__ u8 staged[];
  const Place place(p);
  const u32 memory = shuffle(hopper::shared_address(staged), 0);
  const hopper::Ring<kHopperStages> ring = {memory + HopperLayout<kN, kSmall>::kBarriers};
  const int thread = static_cast<int>(threadIdx.x), group = thread / hopper::kWarpgroup;
  const int first_token = place.token_tile * kN, first_tile = place.n_tile * 4 * kHopperGroups;
  if (thread == 0) {
    ring.init(4 * kHopperGroups, kN >= 64 ? 4 : kN / 16);
    hopper::fence_init(), hopper::fence_async();
  }
  let_next_start();
  __syncthreads();
  // The block's part of the columns, in whole chunks.
  const i64 chunks = (p.tiles_k + kHopperChunk - 1) / kHopperChunk;
  const int begin = static_cast<int>(chunks * place.rank / p.cluster) * kHopperChunk,
            end = min(static_cast<int>(chunks * (place.rank + 1) / p.cluster) * kHopperChunk,
                      p.tiles_k);
  float acc[kN / 2] = {};
  if (group == kHopperGroups) {
    wait_for_previous();
    produce_x<T, kN, kSmall>(p, ring, staged, first_token, begin, end - begin);
  } else {
    hopper::pin(acc);
    multiply_x<T, kN, kSmall>(p, ring, staged, first_tile + thread / 32, begin, end - begin, acc);
  }
  __syncthreads();

  // The sums, to shared memory by row of x, those of the cluster's blocks added, and written.
  float* const sums = reinterpret_cast<float*>(staged);
  if (group < kHopperGroups) {
    const int lane = thread % 32, line = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(8 * j + lane % 4 * 2 + i % 2) * kHopperStride + line + i / 2 * 8] = acc[4 * j + i];
    }
  }
  __syncthreads();
  if (p.cluster > 1) cluster_sync();
  constexpr int kLines = 64 * kHopperGroups;
  const int tokens = min(p.m - first_token, kN), first_line = first_tile * 16;
  for (int i = thread + 384 * place.rank; i < tokens * (kLines / 2); i += 384 * p.cluster) {
    const int token = i / (kLines / 2), line = i % (kLines / 2) * 2, n = first_line + line;
    const float* const from = sums + token * kHopperStride + line;
    float total[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      total[j] = p.cluster > 1 ? cluster_load(from + j, 0) : from[j];
      for (int rank = 1; rank < p.cluster; ++rank) total[j] += cluster_load(from + j, rank);
      if (p.bias && n + j < p.n) total[j] += to_float(static_cast<const T*>(p.bias)[n + j]);
    }
    T* const out = static_cast<T*>(p.out) + static_cast<i64>(first_token + token) * p.n + n;
    if (n + 1 < p.n && p.n % 2 == 0) {
      *reinterpret_cast<u32*>(out) = pack2<T>(total[0], total[1]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (n + j < p.n) out[j] = from_float<T>(total[j]);
      }
    }
  }
  if (p.cluster > 1) cluster_sync();  // others may still read this block's shared memory
}

}  // namespace flexops::int4
