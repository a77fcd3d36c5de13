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

inline constexpr int kHopperGroups = 2, kHopperStages = 6;
/// Floats from one row of x's sums to the next one's: lanes write to different banks.
inline constexpr int kHopperStride = 64 * kHopperGroups + 4;

/// Bytes of shared memory: stages of x, which the sums take the place of, and the ring's barriers.
template <int kN>
inline constexpr int kHopperShared =
    (kN * 128 * kHopperStages > kN * kHopperStride * 4 ? kN * 128 * kHopperStages
                                                       : kN * kHopperStride * 4) +
    16 * kHopperStages;

/// Stores 64 columns of kN rows of x after another.
template <class T, int kN>
FLEXOPS_DEVICE void produce_x(const Params& p, const hopper::Ring<kHopperStages>& ring, u32 memory,
                              int first_token, int begin, int count) {
  using X = hopper::Tile<kN, 64>;
  constexpr int kPieces = kN >= 64 ? kN / 64 : 1;  // of 32 columns, for each thread
  constexpr int kAhead = kPieces >= 4 ? 1 : 4 / kPieces;
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup, half = thread % 2;
  const T* rows[kPieces];
  bool valid[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int token = first_token + thread / 2 + 64 * i;
    valid[i] = token < p.m && thread / 2 < kN;
    rows[i] = static_cast<const T*>(p.x) + static_cast<i64>(valid[i] ? token : 0) * p.k +
              static_cast<i64>(begin) * 64 + 32 * half;
  }
  uint4 values[kAhead][kPieces][4];
  const auto fetch = [&](uint4(&to)[kPieces][4], int tile) {
    const bool inside = tile < count && 64 * (begin + tile) + 32 * half < p.k;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[i][j] = uint4{0, 0, 0, 0};
        if (inside && valid[i])
          to[i][j] = load<Cache::constant>(
              reinterpret_cast<const uint4*>(rows[i] + static_cast<i64>(tile) * 64) + j);
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(values[i], i);
  hopper::RingState<kHopperStages> at;
  for (int first = 0; first < count; first += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a >= count) break;
      ring.acquire(at);
      const u32 to = memory + at.stage * X::kBytes;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint4(&v)[4] = values[a][i];
        const u32 words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                                 {v[0].y, v[1].y, v[2].y, v[3].y},
                                 {v[0].z, v[1].z, v[2].z, v[3].z},
                                 {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (kN >= 64 || thread / 2 < kN)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                             X::place(to, thread / 2 + 64 * i, 4 * half + j)),
                         "r"(words[j][0]), "r"(words[j][1]), "r"(words[j][2]), "r"(words[j][3])
                         : "memory");
        }
      }
      hopper::fence_async();
      __syncwarp();
      if (thread % 32 == 0) hopper::arrive(ring.full(at.stage));
      at.next();
      fetch(values[a], first + a + kAhead);
    }
  }
}

/// The sums of 64 rows of W and kN rows of x.
template <class T, int kN, bool kSmall>
FLEXOPS_DEVICE void multiply_x(const Params& p, const hopper::Ring<kHopperStages>& ring, u32 memory,
                               int tile_n, int begin, int count, float (&acc)[kN / 2]) {
  using namespace hopper;
  using X = Tile<kN, 64>;
  constexpr int kGroups = kSmall ? 2 : 1, kAhead = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const i64 row = min(tile_n, p.tiles_n - 1);
  const uint4* const words =
      reinterpret_cast<const uint4*>(p.packed) + (row * p.tiles_k + begin) * 32 + lane;
  const i64 numbers = row * p.groups * 8 + lane / 4;
  const u32* const scales = reinterpret_cast<const u32*>(p.scales) + numbers;
  const u32* const zeros = reinterpret_cast<const u32*>(p.zeros) + numbers;
  struct Ahead {
    uint4 words;
    u32 scales[kGroups], zeros[kGroups];
  };
  Ahead ahead[kAhead];
  const auto fetch = [&](Ahead& to, int tile) {
    if (tile >= count) return;
    to.words = load_once(words + static_cast<i64>(tile) * 32);
    const int first = kSmall ? 2 * (begin + tile) : (begin + tile) >> (p.group_shift - 6);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      to.scales[i] = load<Cache::constant>(scales + static_cast<i64>(first + i) * 8);
      to.zeros[i] =
          p.zeros ? load<Cache::constant>(zeros + static_cast<i64>(first + i) * 8) : 0x48004800u;
    }
  };
  // A dequantized weight: codes less the whole part of the zero point are exact.
  const auto widen = [&](u32(&to)[16], const Ahead& of) {
    const u32 each[4] = {of.words.x, of.words.y, of.words.z, of.words.w};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      u32 factor[2], whole[2], rest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = half_of<T>(of.scales[group], i), z = half_of<f16>(of.zeros[group], i);
        const float near = fminf(fmaxf(rintf(z), -64.0f), 64.0f), less = (near - z) * scale;
        factor[i] = pack2<T>(scale, scale), rest[i] = pack2<T>(less, less);
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
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(ahead[i], i);
  // While a tile is multiplied, the next one is dequantized. Nothing is under way where loops end:
  // there ptxas would wait for each wgmma.
  u32 left[2][16];
  widen(left[0], ahead[0]);
  RingState<kHopperStages> at;
#pragma unroll 1
  for (int first = 0; first < count; first += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int tile = first + a;
      if (tile >= count) break;
      fetch(ahead[a], tile + kAhead);
      ring.wait(at);
      pin(left[a % 2]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<T, false>(acc, left[a % 2] + 4 * step,
                        X::rows(memory + at.stage * X::kBytes, 0, step), true);
      wgmma_commit();
      widen(left[(a + 1) % 2], ahead[(a + 1) % kAhead]);
      wgmma_wait<0>(acc);
      if (lane == 0) arrive(ring.empty(at.stage));
      at.next();
    }
  }
}

/// Two consumer warpgroups and a producer.
template <class T, int kN, bool kSmall>
__global__ void __launch_bounds__(384, 1) many_rows_hopper(const FLEXOPS_GRID_CONSTANT Params p) {
  __align__(1024) extern __shared__ u8 staged[];
  const Place place(p);
  const u32 memory = shuffle(hopper::shared_address(staged), 0);
  const hopper::Ring<kHopperStages> ring = {memory + kHopperShared<kN> - 16 * kHopperStages};
  const int thread = static_cast<int>(threadIdx.x), group = thread / hopper::kWarpgroup;
  const int first_token = place.token_tile * kN, first_tile = place.n_tile * 4 * kHopperGroups;
  if (thread == 0) {
    ring.init(4 * kHopperGroups, 4);
    hopper::fence_init(), hopper::fence_async();
  }
  let_next_start();
  __syncthreads();
  // The block's part of the columns; groups of 128 may be divided between blocks.
  const int begin = static_cast<int>(static_cast<i64>(p.tiles_k) * place.rank / p.cluster),
            end = static_cast<int>(static_cast<i64>(p.tiles_k) * (place.rank + 1) / p.cluster);
  float acc[kN / 2] = {};
  if (group == kHopperGroups) {
    wait_for_previous();
    produce_x<T, kN>(p, ring, memory, first_token, begin, end - begin);
  } else {
    hopper::pin(acc);
    multiply_x<T, kN, kSmall>(p, ring, memory, first_tile + thread / 32, begin, end - begin, acc);
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
