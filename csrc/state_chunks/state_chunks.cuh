// Recurrences over long sequences, by tensor cores, on sm_80 and newer. What they compute:
// flexops/ops/state_scan.py.
//
// Steps are taken by chunks of 64 (section 3 of arXiv 2412.06464). Let S be the state before a
// chunk, G the sum of the decays' logarithms up to a step, and L all of the chunk's; r is the rate.
// Of step i, r z is what it adds to the state along k, before later steps' decays:
//
//   A[i, j] = r[j] exp(G[i] - G[j]) k[i].k[j]   for j < i, else 0
//   z = inverse(1 + A) (v - exp(G) k S)         without the delta rule: v
//   B[i, j] = r[j] exp(G[i] - G[j]) q[i].k[j]   for j <= i, else 0
//   out = exp(G) q S + B z
//   S' = exp(L) S + (r exp(L - G) k)^T z
//
// `prepare_chunks` computes inverse(1 + A), B and the factors of steps, for all chunks at once;
// `scan_chunks` goes through a state's chunks, one after another. There a warp has 16 columns of a
// state, as the rows of accumulators: all its products are of these columns alone, and each result
// is the next product's left operand as it lies in registers. Half of a block's warps only copy the
// next chunk to shared memory.
//
// The gradients: let dO be that of out, dS' that of the state behind a chunk. Then
//
//   dz = B^T dO + r exp(L - G) k dS'
//   dv = inverse(1 + A)^T dz                    without the delta rule: dz
//   dS = exp(L) dS' + (exp(G) q)^T dO - (exp(G) k)^T dv
//
// `scan_chunks` computes these, too, from the last chunk to the first one, after it has gone
// through them without results, to keep each chunk's S, and z. The rest is chunk_gradients.cuh.
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

/// What a launch of `scan_chunks` does: results; without results, S of each chunk, and z in their
/// place; or, where the values are dO, dv in their place, dS' of each chunk, and at last dS.
enum class Way { results, keeping, backward };

struct Params {
  StateScan scan;
  const float* initial;  // the state to begin with, as `scan.state` lies; null: zeros
  u8* work;              // of each state and each chunk of the launch
  bf16* states;          // what is kept of chunks: [batch, chunks, heads, columns, rows]
  i64 first;             // chunk of the launch
  int chunks;            // of the launch
  int parts;             // blocks of a state's columns
  int stages;  // 2: the next chunk is copied while this one is computed; 1: there is no room
};

using Square = Panels<kChunk, kChunk>;

/// What is prepared of a chunk and a head.
struct Work {
  static constexpr int kSystem = 0, kScores = Square::kBytes, kFactors = 2 * Square::kBytes,
                       kBytes = kFactors + 4 * kChunk * 4;
  /// Of factors, those of each step: of k S, of q S, of z; and of S, the same for all steps.
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

/// Of each step: the sum of decays' logarithms, in each warp of two; and the rate. For 64 threads.
FLEXOPS_DEVICE void read_gates(const StateScan& s, i64 batch, i64 begin, int steps, i64 head,
                               float* sums, float* rates) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
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

/// What a row of q or k is multiplied with, for threads that have its vectors.
template <class Tile>
FLEXOPS_DEVICE float norm_factor(const u8* tile, int row, int vector, bool normalize) {
  if (!normalize) return 1.0f;
  float all[8], squares = 0.0f;
  widen(all, load<bf16, 8>(tile + Tile::place(0, row, vector), 0));
#pragma unroll
  for (int i = 0; i < 8; ++i) squares = __fmaf_rn(all[i], all[i], squares);
  return rsqrtf(warp_reduce<Tile::kColumns / 8>(squares, Sum()) + state_scan::kNormEpsilon);
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
  if (warp < 2) read_gates(s, batch, begin, steps, head, sums, rates);
  async_wait<0>();
  __syncthreads();
  if (warp == 1) sums[thread] += sums[31];

  // Factors of rows of q and k.
  constexpr int kLanes = Rows / 8;  // of a row
  for (int row = thread / kLanes; row < kChunk; row += kPrepareThreads / kLanes) {
    const auto factor = [&](const u8* tile) {
      return norm_factor<Tile>(tile, row, thread % kLanes, s.normalize);
    };
    const float q = factor(memory) * s.scale, k = factor(memory + Tile::kBytes);
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
    const float sum = sums[row], q = of_q[row], k = of_k[row];
    u32 scores[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 8 * i + lane % 4 * 2;
      float score[2], entry[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = 4 * (i % 2) + 2 * half + c;
        const float decay = column + c <= row ? expf(sum - sums[column + c]) : 0.0f;
        const float factor = decay * of_k[column + c] * rates[column + c];
        score[c] = column + c <= row ? along_q[i / 2][at] * q * factor : 0.0f;
        entry[c] = column + c < row ? along_k[i / 2][at] * k * factor : 0.0f;
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
    factors[Work::kOfChange] = expf(all - sum) * k * rates[thread];
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
      for (int c = 0; c < 8; ++c) numbers[c] = system[row][column + c];
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

/// Of accumulators of 16 columns of a state, or of values, a lane has columns lane / 4 and
/// lane / 4 + 8, and rows, or steps, `pair`, the next one, and so on for every eight.
FLEXOPS_DEVICE void round_to(u32 (&words)[4], const float (&numbers)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack2<bf16>(numbers[2 * i], numbers[2 * i + 1]);
}

template <int Rows, int Warps, bool Delta, Way way>
__global__ void __launch_bounds__(64 * Warps, 1) scan_chunks(const FLEXOPS_GRID_CONSTANT Params p) {
  using S = Stage<Rows, Warps>;
  using Keys = typename S::Keys;
  using Values = typename S::Values;
  constexpr int kCopying = 32 * Warps, kThreads = 2 * kCopying;
  constexpr bool kKeeping = way == Way::keeping, kBackward = way == Way::backward;
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
  const auto chunk_of = [&](int turn) { return kBackward ? p.chunks - 1 - turn : turn; };

  if (thread < kCopying) {
    const auto fetch = [&](int turn) {
      const int chunk = chunk_of(turn);
      const i64 begin = (p.first + chunk) * kChunk;
      const int steps = steps_of(chunk);
      const u32 to = shared + turn % p.stages * S::kBytes;
      const auto rows_of = [&](const void* all, const ScanStrides& strides, u32 of) {
        return static_cast<const bf16*>(all) + batch * strides.batch + begin * strides.step +
               of * strides.head;
      };
      const u8* const work =
          p.work + ((static_cast<i64>(batch) * p.chunks + chunk) * s.heads + head) * Work::kBytes;
      load_rows<Keys, kCopying>(to + S::kKeys, rows_of(s.k, s.of_k, group), s.of_k.step, steps,
                                s.rows);
      if (!kKeeping)
        load_rows<Keys, kCopying>(to + S::kQueries, rows_of(s.q, s.of_q, group), s.of_q.step, steps,
                                  s.rows);
      load_rows<Values, kCopying>(to + S::kValues, rows_of(s.v, s.of_v, head) + first_column,
                                  s.of_v.step, steps, s.columns - first_column);
      const auto square = [&](int at) {
        load_rows<Square, kCopying>(to + S::kWork + at, reinterpret_cast<const bf16*>(work + at),
                                    kChunk, kChunk, kChunk);
      };
      if (Delta) square(Work::kSystem);
      if (!kKeeping) square(Work::kScores);
      if (thread < kChunk)
        async_copy16(to + S::kWork + Work::kFactors + 16 * thread,
                     work + Work::kFactors + 16 * thread, true);
    };
    const bool ahead = p.stages > 1;
    fetch(0), async_commit();
#pragma unroll 1
    for (int turn = 0; turn < p.chunks; ++turn) {
      const bool more = turn + 1 < p.chunks;
      if (ahead && more) fetch(turn + 1);
      async_commit(), async_wait(ahead ? 1 : 0);
      barrier(1, kThreads);  // the chunk is there
      barrier(2, kThreads);  // it has been read
      if (!ahead && more) fetch(turn + 1);
    }
    return;
  }

  const int own = first_column + 16 * warp + lane / 4, pair = lane % 4 * 2;
  const i64 place = batch * s.state_batch + head * s.state_head;
  float now[Rows / 16][8];
  const auto transfer = [&](bool writes) {
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = 16 * i + j / 4 * 8 + pair + j % 2, column = own + j / 2 % 2 * 8;
        const bool inside = row < s.rows && column < s.columns;
        const i64 at = place + row * s.state_row + column * s.state_column;
        if (writes && inside) s.state[at] = now[i][j];
        if (!writes) now[i][j] = inside && p.initial ? p.initial[at] : 0.0f;
      }
    }
  };
  transfer(false);
  const float skip = s.skip.data ? state_scan::read_gate(s.skip, 0, 0, head) : 0.0f;

#pragma unroll 1
  for (int turn = 0; turn < p.chunks; ++turn) {
    const int chunk = chunk_of(turn);
    const u32 stage = shared + turn % p.stages * S::kBytes, keys = stage + S::kKeys,
              queries = stage + S::kQueries, values = stage + S::kValues,
              system = stage + S::kWork + Work::kSystem, scores = stage + S::kWork + Work::kScores;
    const float* const factors = reinterpret_cast<const float*>(
        memory + turn % p.stages * S::kBytes + S::kWork + Work::kFactors);
    if constexpr (way != Way::results) {
      // the state's columns are rows of what is kept
      const i64 of = (static_cast<i64>(batch) * p.chunks + chunk) * s.heads + head;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = own + 8 * half;
        bf16* const to = p.states + (of * s.columns + column) * s.rows;
#pragma unroll
        for (int i = 0; i < Rows / 16; i += 2) {
          u32 words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float (&from)[8] = now[i + j / 2];
            const int at = j % 2 * 4 + 2 * half;
            words[j] = pack2<bf16>(from[at], from[at + 1]);
          }
          store_columns(to + 16 * i, words, s.rows - 16 * i, column < s.columns);
        }
      }
    }
    barrier(1, kThreads);  // the chunk is there
    const auto scale_steps = [&](float (&at)[8], int tile, int which) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const auto of = load<float, 2>(factors + which, 16 * tile + j * 2 + pair);
#pragma unroll
        for (int i = 0; i < 4; ++i) at[j + i] *= of.at[i % 2];
      }
    };
    const auto read_values = [&](float (&to)[8], int tile) {
      u32 words[4];
      Values::load_left_transposed(words, values, 16 * tile, 16 * warp);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = half_of<bf16>(words[i / 2], i % 2);
    };

    // k S and q S, or k dS'
    float change[4][8] = {}, result[4][8] = {};
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i) {
      u32 left[4];
      round_to(left, now[i]);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        u32 right[4];
        if (Delta || kBackward) {
          Keys::load_right(right, keys, 16 * tile, 16 * i);
          mma_pair<bf16>(change[tile], left, right);
        }
        if (way == Way::results) {
          Keys::load_right(right, queries, 16 * tile, 16 * i);
          mma_pair<bf16>(result[tile], left, right);
        }
      }
    }
    const float kept = factors[Work::kOfState];
    u32 changes[4][4], left[4][4];
    if constexpr (kBackward) {
      // dz, and dv; both products are with transposed matrices
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        scale_steps(change[tile], tile, Work::kOfChange);
        Values::load_left_transposed(left[tile], values, 16 * tile, 16 * warp);
      }
      const auto multiply = [&](float (&to)[4][8], u32 matrix) {
#pragma unroll
        for (int sum = 0; sum < 4; ++sum) {
#pragma unroll
          for (int tile = 0; tile <= sum; ++tile) {
            u32 right[4];
            Square::load_right_transposed(right, matrix, 16 * sum, 16 * tile);
            mma_pair<bf16>(to[tile], left[sum], right);
          }
        }
      };
      multiply(change, scores);
      if constexpr (Delta) {
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) round_to(left[tile], change[tile]);
        multiply(result, system);
      } else {
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
          for (int i = 0; i < 8; ++i) result[tile][i] = change[tile][i];
        }
      }
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        float numbers[8];
        read_values(numbers, tile);
        scale_steps(numbers, tile, Work::kOfQueries);
        round_to(changes[tile], numbers);
#pragma unroll
        for (int i = 0; i < 8; ++i) numbers[i] = -result[tile][i];
        scale_steps(numbers, tile, Work::kOfKeys);
        round_to(left[tile], numbers);
      }
    } else {
      // z, and the same for the next state
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
        if (kKeeping) {
#pragma unroll
          for (int i = 0; i < 8; ++i) result[tile][i] = change[tile][i];
        }
        scale_steps(change[tile], tile, Work::kOfChange);
        round_to(left[tile], change[tile]);
        if (!kKeeping) scale_steps(result[tile], tile, Work::kOfQueries);
      }
      if constexpr (!kKeeping) {
#pragma unroll
        for (int sum = 0; sum < 4; ++sum) {
#pragma unroll
          for (int tile = sum; tile < 4; ++tile) {
            u32 right[4];
            Square::load_right(right, scores, 16 * tile, 16 * sum);
            mma_pair<bf16>(result[tile], changes[sum], right);
          }
        }
      }
    }
    // the next state
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) now[i][j] *= kept;
#pragma unroll
      for (int sum = 0; sum < 4; ++sum) {
        u32 right[4];
        if (Delta || !kBackward) {
          Keys::load_right_transposed(right, keys, 16 * sum, 16 * i);
          mma_pair<bf16>(now[i], left[sum], right);
        }
        if (kBackward) {
          Keys::load_right_transposed(right, queries, 16 * sum, 16 * i);
          mma_pair<bf16>(now[i], changes[sum], right);
        }
      }
    }
    const i64 begin = (p.first + chunk) * kChunk;
    const int steps = steps_of(chunk), column = first_column + 16 * warp + lane % 2 * 8;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      if (kKeeping && !Delta) break;  // z is v
      if (!kKeeping && s.skip.data) {
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
  if (!kKeeping && s.state) transfer(true);
}

}  // namespace flexops::state_chunks
