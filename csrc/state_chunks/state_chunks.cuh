// Recurrences over long sequences, by tensor cores, on sm_80 and newer. What they compute:
// flexops/ops/state_scan.py.
//
// Steps are taken by chunks of 64 (section 3 of arXiv 2412.06464). Let S be the state before a
// chunk, G the sum of the decays' logarithms up to a step, and L all of the chunk's. Of step i, u
// is what it adds to the state along k, before later steps' decays:
//
//   A[i, j] = r[i] exp(G[i] - G[j]) k[i].k[j]   for j < i, else 0
//   u = inverse(1 + A) diag(r) (v - exp(G) k S)       without the delta rule: diag(r) v
//   B[i, j] = exp(G[i] - G[j]) q[i].k[j]        for j <= i, else 0
//   out = exp(G) q S + B u
//   S' = exp(L) S + (exp(L - G) k)^T u
//
// `prepare_chunks` computes inverse(1 + A) diag(r), B and the factors of steps, for all chunks at
// once; `scan_chunks` goes through a state's chunks, one after another. There a warp has 16 columns
// of a state, as the rows of accumulators: all its products are of these columns alone, and each
// result is the next product's left operand as it lies in registers. Half of a block's warps only
// copy the next chunk to shared memory.
//
// States and sums are float32; operands of products, the state among them, are rounded to bfloat16.
// The triangular matrix is inverted in float32.
#pragma once

#include "common/fragments.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "state_scan/state_scan_gates.cuh"

namespace flexops::state_chunks {

inline constexpr int kChunk = 64, kPrepareThreads = 128;
inline constexpr float kLeastLogarithm = -100.0f;  // of a decay: its exponential is 0

struct Params {
  StateScan scan;
  u8* work;    // of each state and each chunk of the launch
  i64 first;   // chunk of the launch
  int chunks;  // of the launch
  int parts;   // blocks of a state's columns
  int stages;  // 2: the next chunk is copied while this one is computed; 1: there is no room
};

using Square = Panels<kChunk, kChunk>;

/// What is prepared of a chunk and a head.
struct Work {
  static constexpr int kSystem = 0, kScores = Square::kBytes, kFactors = 2 * Square::kBytes,
                       kBytes = kFactors + 4 * kChunk * 4;
  /// Of factors, those of each step: of k S, of q S, of u; and of S, the same for all steps.
  static constexpr int kOfKeys = 0, kOfQueries = kChunk, kOfChange = 2 * kChunk,
                       kOfState = 3 * kChunk;
};

// ---- what does not depend on the state ----

inline constexpr int kStride = kChunk + 4;  // of the float32 matrix
template <int Rows>
FLEXOPS_DEVICE constexpr int prepare_bytes() {
  return 2 * Panels<kChunk, Rows>::kBytes + kChunk * kStride * 4;
}

using Matrix = float (*)[kStride];

/// Inverts the 16 x 16 blocks of 1 + A along the diagonal, A strictly lower triangular, in place: a
/// thread has a column, of which rows follow from those above.
FLEXOPS_DEVICE void invert_blocks(Matrix a, int thread) {
  const int begin = thread / 16 * 16, column = thread % 16;
  float inverse[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    inverse[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j)
      inverse[i] = __fmaf_rn(-a[begin + i][begin + j], inverse[j], inverse[i]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) a[begin + i][begin + column] = inverse[i];
}

/// Of inverted blocks of N x N along the diagonal, and A below them: inverts those of 2N x 2N. What
/// is below is -(the lower block) A (the upper block).
template <int N>
FLEXOPS_DEVICE void join_blocks(Matrix a, float* between, int thread) {
  constexpr int kParts = kChunk / (2 * N) * N * N / 4;  // of four columns
#pragma unroll
  for (int product = 0; product < 2; ++product) {
    float sums[kParts / kPrepareThreads][4] = {};
#pragma unroll
    for (int i = 0; i < kParts / kPrepareThreads; ++i) {
      const int part = thread + i * kPrepareThreads, column = part % (N / 4) * 4,
                row = part / (N / 4) % N, block = part / (N * N / 4);
      const int upper = 2 * N * block, lower = upper + N;
      const float* const left = product ? a[lower + row] + lower : a[lower + row] + upper;
      const float* const right =
          product ? between + block * N * N + column : a[upper] + upper + column;
#pragma unroll 4
      for (int j = 0; j < N; ++j) {
        const auto of = load<float, 4>(right, j * (product ? N : kStride));
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sums[i][c] = __fmaf_rn(product ? -left[j] : left[j], of.at[c], sums[i][c]);
      }
    }
#pragma unroll
    for (int i = 0; i < kParts / kPrepareThreads; ++i) {
      const int part = thread + i * kPrepareThreads, column = part % (N / 4) * 4,
                row = part / (N / 4) % N, block = part / (N * N / 4);
      float* const to = product ? a[2 * N * block + N + row] + 2 * N * block + column
                                : between + (block * N + row) * N + column;
      store<float>(to, 0, sums[i]);
    }
    __syncthreads();
  }
}

template <int Rows, bool Delta>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_chunks(const FLEXOPS_GRID_CONSTANT Params p) {
  using Tile = Panels<kChunk, Rows>;
  __align__(1024) extern __shared__ u8 memory[];
  __shared__ float sums[kChunk], rates[kChunk], of_q[kChunk], of_k[kChunk];
  const u32 tile_q = static_cast<u32>(__cvta_generic_to_shared(memory)),
            tile_k = tile_q + Tile::kBytes;
  const Matrix system = reinterpret_cast<Matrix>(memory + 2 * Tile::kBytes);
  const StateScan& s = p.scan;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const u32 head = blockIdx.x % s.heads, chunk = blockIdx.x / s.heads % p.chunks,
            batch = blockIdx.x / s.heads / p.chunks, group = head / (s.heads / s.groups);
  const i64 begin = (p.first + chunk) * kChunk;
  const int steps = static_cast<int>(min(s.length - begin, i64{kChunk}));
  u8* const work = p.work + static_cast<i64>(blockIdx.x) * Work::kBytes;

  const auto rows_of = [&](const void* all, const ScanStrides& strides) {
    return static_cast<const bf16*>(all) + batch * strides.batch + begin * strides.step +
           group * strides.head;
  };
  load_rows<Tile, kPrepareThreads>(tile_q, rows_of(s.q, s.of_q), s.of_q.step, steps, s.rows);
  load_rows<Tile, kPrepareThreads>(tile_k, rows_of(s.k, s.of_k), s.of_k.step, steps, s.rows);
  async_commit();
  if (warp < 2) {
    state_scan::Gate gate = {0.0f, 0.0f};
    if (thread < steps) gate = state_scan::gate_of(s, batch, begin + thread, head);
    float sum = gate.logarithm < kLeastLogarithm ? kLeastLogarithm : gate.logarithm;
#pragma unroll
    for (int ahead = 1; ahead < 32; ahead *= 2) {
      const float other = shuffle(sum, lane - ahead);
      if (lane >= ahead) sum += other;
    }
    sums[thread] = sum, rates[thread] = gate.rate;
  }
  async_wait<0>();
  __syncthreads();
  if (warp == 1) sums[thread] += sums[31];

  // Factors of rows of q and k.
  constexpr int kLanes = Rows / 8;  // of a row
  for (int row = thread / kLanes; row < kChunk; row += kPrepareThreads / kLanes) {
    const auto factor = [&](u32 tile) {
      if (!s.normalize) return 1.0f;
      float all[8], squares = 0.0f;
      widen(all, load<bf16, 8>(memory + (Tile::place(tile, row, thread % kLanes) - tile_q), 0));
#pragma unroll
      for (int i = 0; i < 8; ++i) squares = __fmaf_rn(all[i], all[i], squares);
      return rsqrtf(warp_reduce<kLanes>(squares, Sum()) + state_scan::kNormEpsilon);
    };
    const float q = factor(tile_q) * s.scale, k = factor(tile_k);
    if (thread % kLanes == 0) of_q[row] = q, of_k[row] = k;
  }

  // A warp has 16 steps, and their products with those before and themselves.
  float along_q[4][8] = {}, along_k[4][8] = {};
#pragma unroll
  for (int i = 0; i < Rows / 16; ++i) {
    u32 left_q[4], left_k[4];
    Tile::load_left(left_q, tile_q, 16 * warp, 16 * i);
    if (Delta) Tile::load_left(left_k, tile_k, 16 * warp, 16 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > warp) continue;
      u32 right[4];
      Tile::load_right(right, tile_k, 16 * j, 16 * i);
      mma_pair<bf16>(along_q[j], left_q, right);
      if (Delta) mma_pair<bf16>(along_k[j], left_k, right);
    }
  }
  __syncthreads();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + lane / 4 + 8 * half;
    const float sum = sums[row], q = of_q[row], k = of_k[row] * rates[row];
    u32 scores[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 8 * i + lane % 4 * 2;
      float score[2], entry[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = 4 * (i % 2) + 2 * half + c;
        const float other = of_k[column + c];
        const float decay = column + c <= row ? expf(sum - sums[column + c]) : 0.0f;
        const float rate = Delta ? 1.0f : rates[column + c];
        score[c] = column + c <= row ? along_q[i / 2][at] * decay * q * other * rate : 0.0f;
        entry[c] = column + c < row ? along_k[i / 2][at] * decay * k * other : 0.0f;
      }
      scores[i] = pack2<bf16>(score[0], score[1]);
      if (Delta) store<float>(system[row], column, entry);
    }
    bf16* const to = reinterpret_cast<bf16*>(work + Work::kScores) + row * kChunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 words[4] = {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3]};
      store_columns(to + 32 * i, words, 32, true);
    }
  }
  if (thread < kChunk) {
    const float sum = sums[thread], all = sums[kChunk - 1], k = of_k[thread];
    float* const factors = reinterpret_cast<float*>(work + Work::kFactors) + thread;
    factors[Work::kOfKeys] = expf(sum) * k;
    factors[Work::kOfQueries] = expf(sum) * of_q[thread];
    factors[Work::kOfChange] = expf(all - sum) * k * (Delta ? 1.0f : rates[thread]);
    factors[Work::kOfState] = expf(all);
  }
  if constexpr (Delta) {
    float* const between = reinterpret_cast<float*>(memory);  // q is not needed any more
    __syncthreads();
    if (thread < kChunk) invert_blocks(system, thread);
    __syncthreads();
    join_blocks<16>(system, between, thread);
    join_blocks<32>(system, between, thread);
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kPrepareThreads; ++i) {
      const int row = thread / 8 + i * (kPrepareThreads / 8), column = thread % 8 * 8;
      float numbers[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) numbers[c] = system[row][column + c] * rates[column + c];
      store<bf16>(work + Work::kSystem, row * kChunk + column, numbers);
    }
  }
}

// ---- one chunk after another ----

/// Shared memory of a stage, in bytes.
template <int Rows, int Warps>
struct Stage {
  using Keys = Panels<kChunk, Rows>;
  using Values = Panels<kChunk, 16 * Warps>;
  static constexpr int kKeys = 0, kQueries = Keys::kBytes, kValues = 2 * Keys::kBytes,
                       kWork = kValues + Values::kBytes, kBytes = kWork + Work::kBytes;
};

template <int Rows, int Warps, bool Delta>
__global__ void __launch_bounds__(64 * Warps, 1) scan_chunks(const FLEXOPS_GRID_CONSTANT Params p) {
  using S = Stage<Rows, Warps>;
  using Keys = typename S::Keys;
  using Values = typename S::Values;
  constexpr int kCopying = 32 * Warps, kThreads = 2 * kCopying;
  __align__(1024) extern __shared__ u8 memory[];
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(memory));
  const StateScan& s = p.scan;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32 % Warps, lane = thread % 32;
  const u32 index = blockIdx.x / p.parts, head = index % s.heads, batch = index / s.heads,
            group = head / (s.heads / s.groups);
  const int first_column = static_cast<int>(blockIdx.x % p.parts) * 16 * Warps;
  const auto steps_of = [&](int chunk) {
    return static_cast<int>(min(s.length - (p.first + chunk) * kChunk, i64{kChunk}));
  };

  if (thread < kCopying) {
    const auto fetch = [&](int chunk) {
      const i64 begin = (p.first + chunk) * kChunk;
      const int steps = steps_of(chunk);
      const u32 to = shared + chunk % p.stages * S::kBytes;
      const auto rows_of = [&](const void* all, const ScanStrides& strides, u32 of) {
        return static_cast<const bf16*>(all) + batch * strides.batch + begin * strides.step +
               of * strides.head;
      };
      const u8* const work =
          p.work + ((static_cast<i64>(batch) * p.chunks + chunk) * s.heads + head) * Work::kBytes;
      load_rows<Keys, kCopying>(to + S::kKeys, rows_of(s.k, s.of_k, group), s.of_k.step, steps,
                                s.rows);
      load_rows<Keys, kCopying>(to + S::kQueries, rows_of(s.q, s.of_q, group), s.of_q.step, steps,
                                s.rows);
      load_rows<Values, kCopying>(to + S::kValues, rows_of(s.v, s.of_v, head) + first_column,
                                  s.of_v.step, steps, s.columns - first_column);
      const auto square = [&](int at) {
        load_rows<Square, kCopying>(to + S::kWork + at, reinterpret_cast<const bf16*>(work + at),
                                    kChunk, kChunk, kChunk);
      };
      if (Delta) square(Work::kSystem);
      square(Work::kScores);
      if (thread < kChunk)
        async_copy16(to + S::kWork + Work::kFactors + 16 * thread,
                     work + Work::kFactors + 16 * thread, true);
    };
    const bool ahead = p.stages > 1;
    fetch(0), async_commit();
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const bool more = chunk + 1 < p.chunks;
      if (ahead && more) fetch(chunk + 1);
      async_commit(), async_wait(ahead ? 1 : 0);
      barrier(1, kThreads);  // the chunk is there
      barrier(2, kThreads);  // it has been read
      if (!ahead && more) fetch(chunk + 1);
    }
    return;
  }

  // Of accumulators a lane has columns lane / 4 and lane / 4 + 8 of the state, or of values, and
  // rows, or steps, lane % 4 * 2, the next one, and so on for every eight.
  const int own = first_column + 16 * warp + lane / 4, pair = lane % 4 * 2;
  float* const state = s.state + batch * s.state_batch + head * s.state_head;
  float now[Rows / 16][8];
  const auto transfer = [&](bool writes) {
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = 16 * i + j / 4 * 8 + pair + j % 2, column = own + j / 2 % 2 * 8;
        const bool inside = row < s.rows && column < s.columns;
        float* const at = state + row * s.state_row + column * s.state_column;
        if (writes && inside) *at = now[i][j];
        if (!writes) now[i][j] = inside ? *at : 0.0f;
      }
    }
  };
  transfer(false);
  const float skip = s.skip.data ? state_scan::read_gate(s.skip, 0, 0, head) : 0.0f;

#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const u32 stage = shared + chunk % p.stages * S::kBytes, keys = stage + S::kKeys,
              queries = stage + S::kQueries, values = stage + S::kValues,
              system = stage + S::kWork + Work::kSystem, scores = stage + S::kWork + Work::kScores;
    const float* const factors = reinterpret_cast<const float*>(
        memory + chunk % p.stages * S::kBytes + S::kWork + Work::kFactors);
    barrier(1, kThreads);  // the chunk is there
    // Of 16 steps a lane has four pairs: of steps `pair` and `pair` + 8, of two columns each.
    const auto scale_steps = [&](float (&at)[8], int tile, int which) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const auto of = load<float, 2>(factors + which, 16 * tile + j * 2 + pair);
#pragma unroll
        for (int i = 0; i < 4; ++i) at[j + i] *= of.at[i % 2];
      }
    };
    const auto round_to = [](u32(&words)[4], const float (&numbers)[8]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack2<bf16>(numbers[2 * i], numbers[2 * i + 1]);
    };
    const auto read_values = [&](float (&to)[8], int tile) {
      u32 words[4];
      Values::load_left_transposed(words, values, 16 * tile, 16 * warp);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = half_of<bf16>(words[i / 2], i % 2);
    };

    // k S and q S
    float change[4][8] = {}, result[4][8] = {};
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i) {
      u32 left[4];
      round_to(left, now[i]);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        u32 right[4];
        if (Delta) {
          Keys::load_right(right, keys, 16 * tile, 16 * i);
          mma_pair<bf16>(change[tile], left, right);
        }
        Keys::load_right(right, queries, 16 * tile, 16 * i);
        mma_pair<bf16>(result[tile], left, right);
      }
    }
    // u, or v, and the same for the next state
    u32 changes[4][4], left[4][4];
    if constexpr (Delta) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        float wanted[8];
        read_values(wanted, tile);
        scale_steps(change[tile], tile, Work::kOfKeys);
#pragma unroll
        for (int i = 0; i < 8; ++i) wanted[i] -= change[tile][i], change[tile][i] = 0.0f;
        round_to(left[tile], wanted);
      }
#pragma unroll
      for (int sum = 0; sum < 4; ++sum) {
#pragma unroll
        for (int tile = sum; tile < 4; ++tile) {
          u32 right[4];
          Square::load_right(right, system, 16 * tile, 16 * sum);
          mma_pair<bf16>(change[tile], left[sum], right);
        }
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) read_values(change[tile], tile);
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      round_to(changes[tile], change[tile]);
      scale_steps(change[tile], tile, Work::kOfChange);
      round_to(left[tile], change[tile]);
      scale_steps(result[tile], tile, Work::kOfQueries);
    }
    // the results
#pragma unroll
    for (int sum = 0; sum < 4; ++sum) {
#pragma unroll
      for (int tile = sum; tile < 4; ++tile) {
        u32 right[4];
        Square::load_right(right, scores, 16 * tile, 16 * sum);
        mma_pair<bf16>(result[tile], changes[sum], right);
      }
    }
    // the next state
    const float kept = factors[Work::kOfState];
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) now[i][j] *= kept;
#pragma unroll
      for (int sum = 0; sum < 4; ++sum) {
        u32 right[4];
        Keys::load_right_transposed(right, keys, 16 * sum, 16 * i);
        mma_pair<bf16>(now[i], left[sum], right);
      }
    }
    const i64 begin = (p.first + chunk) * kChunk;
    const int steps = steps_of(chunk), column = first_column + 16 * warp + lane % 2 * 8;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      if (s.skip.data) {
        float own_values[8];
        read_values(own_values, tile);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          result[tile][i] = __fmaf_rn(skip, own_values[i], result[tile][i]);
      }
      u32 words[4];
      round_to(words, result[tile]);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = transposed(words[i]);
      transpose_quad(words);
      const int step = 16 * tile + lane % 4 / 2 * 8 + lane / 4;
      if (step < steps && column < s.columns)
        store<Cache::normal>(
            reinterpret_cast<uint4*>(
                static_cast<bf16*>(s.out) +
                ((batch * s.length + begin + step) * s.heads + head) * s.columns + column),
            uint4{words[0], words[1], words[2], words[3]});
    }
    barrier(2, kThreads);  // it has been read
  }
  transfer(true);
}

}  // namespace flexops::state_chunks
