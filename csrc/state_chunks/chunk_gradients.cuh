// The gradients of a chunk that do not depend on other chunks, by tensor cores, on sm_80 and newer.
//
// In the words of state_chunks.cuh, with E[i, j] = exp(G[i] - G[j]) for j <= i, else 0:
//
//   X = (dO z^T) E              Y = -(dv z^T) E, without the diagonal; with the delta rule
//   dq = exp(G) dO S^T + X r k
//   dk = -exp(G) dv S^T + Y r k          what k changes as a query of the state; delta rule
//   w  = exp(L - G) z dS'^T + X^T q + Y^T k     what it changes, and r, along which z is added
//   dr = k.w,  k's gradient is dk + r w
//   dG = q.dq + k.dk - r dr,  dL = exp(L) <S, dS'> + the sum of r k.(exp(L - G) z dS'^T)
//
// and a decay's logarithm has the sum of dG of its step and later ones of the chunk, and dL. q and
// k are those that the recurrence takes, normalized and scaled. X's diagonal is left out of
// products and added afterwards: nothing of it is left in dG, and with fast decays it is most of X.
//
// A warp has 16 steps and some of q's columns. The columns of values are summed over, 64 at a time.
#pragma once

#include "state_chunks/state_chunks.cuh"

namespace flexops::state_chunks {

struct GradientParams {
  StateScan scan;                // out: z, as v where there is no delta rule
  const bf16 *grad, *dv;         // [batch, length, heads, columns]
  const bf16 *states, *changes;  // S and dS', [batch, chunks, heads, columns, rows]
  bf16 *dq, *dk;                 // [batch, length, heads, rows], of each head
  float *dg, *dr;                // [batch, length, heads]
  float* skipped;                // dO.v of each step, of that shape; null: not wanted
  int chunks;
};

/// Of columns of q, and groups of four warps; 32 columns or more each.
template <int Rows>
inline constexpr int kParts = Rows >= 128 ? 4 : 2;

/// What one pass finds of each step, and of a chunk.
template <int Parts>
struct OfSteps {
  float sums[kChunk], rates[kChunk], norms_q[kChunk], norms_k[kChunk], along[kChunk],
      diagonal[kChunk], dots[Parts][4][kChunk], of_states[4 * Parts], halves[2];
};

/// Shared memory, in bytes.
template <int Rows>
struct Gradients {
  using Keys = Panels<kChunk, Rows>;
  using Steps = OfSteps<kParts<Rows>>;
  static constexpr int kThreads = 128 * kParts<Rows>, kQueries = 0, kKeys = Keys::kBytes,
                       kChanges = 2 * Keys::kBytes, kGrad = kChanges + Square::kBytes,
                       kOfValues = kGrad + Square::kBytes, kState = kOfValues + Square::kBytes,
                       kOfState = kState + Keys::kBytes, kSteps = kOfState + Keys::kBytes,
                       kBytes = kSteps + sizeof(Steps);
  /// Four matrices of steps by steps, in the place of what only they are made of.
  static constexpr int kMatrices = kChanges;
  static_assert(kSteps - kMatrices >= 4 * Square::kBytes);
};

template <int Rows, bool Delta>
__global__ void __launch_bounds__(Gradients<Rows>::kThreads, 1)
    chunk_gradients(const FLEXOPS_GRID_CONSTANT GradientParams p) {
  using G = Gradients<Rows>;
  using Keys = typename G::Keys;
  constexpr int kThreads = G::kThreads, kGroups = kParts<Rows>,
                kTiles = Rows / kGroups / 16;  // of 16 columns, of a warp
  enum Dot { kOfQuery, kOfKey, kOfChange, kOfLast };
  __align__(1024) extern __shared__ u8 memory[];
  auto& of = *reinterpret_cast<typename G::Steps*>(memory + G::kSteps);
  auto &sums = of.sums, &rates = of.rates, &norms_q = of.norms_q, &norms_k = of.norms_k;
  auto& dots = of.dots;
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(memory));
  const StateScan& s = p.scan;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, tile = thread / 32 % 4,
            part = thread / 128, first = part * 16 * kTiles;
  const u32 head = blockIdx.x % s.heads, chunk = blockIdx.x / s.heads % p.chunks,
            batch = blockIdx.x / s.heads / p.chunks, group = head / (s.heads / s.groups);
  const i64 begin = static_cast<i64>(chunk) * kChunk;
  const int steps = static_cast<int>(min(s.length - begin, i64{kChunk}));
  const i64 of_step = (batch * s.length + begin) * s.heads + head;  // of the first step
  const auto rows_of = [&](const void* all, const ScanStrides& strides, u32 own) {
    return static_cast<const bf16*>(all) + batch * strides.batch + begin * strides.step +
           own * strides.head;
  };
  load_rows<Keys, kThreads>(shared + G::kQueries, rows_of(s.q, s.of_q, group), s.of_q.step, steps,
                            s.rows);
  load_rows<Keys, kThreads>(shared + G::kKeys, rows_of(s.k, s.of_k, group), s.of_k.step, steps,
                            s.rows);
  if (thread < kChunk) read_gates(s, batch, begin, steps, head, sums, rates);

  float of_q[kTiles][8] = {}, of_k[kTiles][8] = {}, change[kTiles][8] = {};  // dq, dk and w
  float x[4 / kGroups][8] = {}, y[4 / kGroups][8] = {}, product = 0.0f;
#pragma unroll 1
  for (int column = 0; column < s.columns; column += 64) {
    const int columns = s.columns - column;
    const i64 stride = static_cast<i64>(s.heads) * s.columns;
    const auto values = [&](int at, const void* from, const ScanStrides& strides) {
      load_rows<Square, kThreads>(shared + at, rows_of(from, strides, head) + column, strides.step,
                                  steps, columns);
    };
    const auto state = [&](int at, const bf16* from) {
      load_rows<Keys, kThreads>(shared + at,
                                from + (static_cast<i64>(blockIdx.x) * s.columns + column) * s.rows,
                                s.rows, columns, s.rows);
    };
    const ScanStrides dense = {s.length * stride, stride, s.columns};
    if (Delta) {
      values(G::kChanges, s.out, dense);
      values(G::kOfValues, p.dv, dense);
    } else {
      values(G::kChanges, s.v, s.of_v);
    }
    values(G::kGrad, p.grad, dense);
    state(G::kState, p.states), state(G::kOfState, p.changes);
    async_commit(), async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 of_out[4], of_v[4], z[4], right[4];
      Square::load_left(of_out, shared + G::kGrad, 16 * tile, 16 * i);
      Square::load_left(z, shared + G::kChanges, 16 * tile, 16 * i);
      if (Delta) Square::load_left(of_v, shared + G::kOfValues, 16 * tile, 16 * i);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Keys::load_right_transposed(right, shared + G::kState, 16 * i, first + 16 * j);
        mma_pair<bf16>(of_q[j], of_out, right);
        if (Delta) mma_pair<bf16>(of_k[j], of_v, right);
        Keys::load_right_transposed(right, shared + G::kOfState, 16 * i, first + 16 * j);
        mma_pair<bf16>(change[j], z, right);
      }
#pragma unroll
      for (int j = 0; j < 4 / kGroups; ++j) {
        const int other = part + kGroups * j;
        if (other > tile) continue;
        Square::load_right(right, shared + G::kChanges, 16 * other, 16 * i);
        mma_pair<bf16>(x[j], of_out, right);
        if (Delta) mma_pair<bf16>(y[j], of_v, right);
      }
    }
#pragma unroll 4
    for (int i = thread; i < Keys::kBytes / 16; i += kThreads) {
      float left[8], right[8];
      widen(left, load<bf16, 8>(memory + G::kState + 16 * i, 0));
      widen(right, load<bf16, 8>(memory + G::kOfState + 16 * i, 0));
#pragma unroll
      for (int j = 0; j < 8; ++j) product = __fmaf_rn(left[j], right[j], product);
    }
    __syncthreads();
  }
  product = warp_reduce<32>(product, Sum());
  if (lane == 0) of.of_states[thread / 32] = product;
  if (thread >= 32 && thread < kChunk) sums[thread] += sums[31];
  constexpr int kVectors = Rows / 8;  // of a row
  for (int row = thread / kVectors; row < kChunk; row += kThreads / kVectors) {
    const auto factor = [&](const u8* tensor) {
      return norm_factor<Keys>(tensor, row, thread % kVectors, s.normalize);
    };
    const float q = factor(memory + G::kQueries), k = factor(memory + G::kKeys);
    const u32 place = Keys::place(0, row, thread % kVectors);
    float of_query[8], of_key[8], both = 0.0f;
    widen(of_query, load<bf16, 8>(memory + G::kQueries + place, 0));
    widen(of_key, load<bf16, 8>(memory + G::kKeys + place, 0));
#pragma unroll
    for (int i = 0; i < 8; ++i) both = __fmaf_rn(of_query[i], of_key[i], both);
    both = warp_reduce<kVectors>(both, Sum());
    if (thread % kVectors == 0) norms_q[row] = q, norms_k[row] = k, of.along[row] = both;
  }
  __syncthreads();

  // A lane has rows `own` and `own` + 8, and columns `pair`, the next one, and so on for every
  // eight.
  const int own = 16 * tile + lane / 4, pair = lane % 4 * 2;
  const float all = sums[kChunk - 1];
  const auto matrix = [&](int which) { return shared + G::kMatrices + which * Square::kBytes; };
#pragma unroll
  for (int j = 0; j < 4 / kGroups; ++j) {
    const int other = part + kGroups * j;
    if (other > tile) continue;
    u32 words[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = own + i % 2 * 8;
      float numbers[4][2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 16 * other + i / 2 * 8 + pair + c;
        const float decay = column < row ? expf(sums[row] - sums[column]) : 0.0f;
        const float of_x = column < row ? x[j][2 * i + c] * decay : 0.0f,
                    of_y = column < row ? -y[j][2 * i + c] * decay : 0.0f,
                    key = norms_k[column] * rates[column];
        if (column == row) of.diagonal[row] = x[j][2 * i + c];
        numbers[0][c] = of_x * key, numbers[1][c] = of_x * norms_q[row] * s.scale;
        numbers[2][c] = of_y * key, numbers[3][c] = of_y * norms_k[row];
      }
#pragma unroll
      for (int which = 0; which < 4; ++which)
        words[which][i] = pack2<bf16>(numbers[which][0], numbers[which][1]);
    }
#pragma unroll
    for (int which = 0; which < (Delta ? 4 : 2); ++which)
      Square::store_words(matrix(which), 16 * tile, 16 * other, words[which]);
  }
  // Sums along rows of products with q or k as they lie.
  const auto dot = [&](int which, const float (&numbers)[kTiles][8], int tensor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 vector = (first + 16 * j) / 8 + i;
          const u32 word =
              load<u32, 1>(memory + tensor + Keys::place(0, own + 8 * r, vector) + lane % 4 * 4, 0)
                  .at[0];
#pragma unroll
          for (int c = 0; c < 2; ++c)
            sum = __fmaf_rn(half_of<bf16>(word, c), numbers[j][4 * i + 2 * r + c], sum);
        }
      }
      sum = warp_reduce<4>(sum, Sum());
      if (lane % 4 == 0) dots[part][which][own + 8 * r] = sum;
    }
  };
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float sum = sums[own + i / 2 % 2 * 8];
      of_q[j][i] *= expf(sum), change[j][i] *= expf(all - sum);
      if (Delta) of_k[j][i] *= -expf(sum);
    }
  }
  dot(kOfLast, change, G::kKeys);
  __syncthreads();
#pragma unroll
  for (int other = 0; other < 4; ++other) {
    u32 left[4][4], right[4];
    if (other <= tile) {
      Square::load_left(left[0], matrix(0), 16 * tile, 16 * other);
      if (Delta) Square::load_left(left[2], matrix(2), 16 * tile, 16 * other);
    }
    if (other >= tile) {
      Square::load_left_transposed(left[1], matrix(1), 16 * other, 16 * tile);
      if (Delta) Square::load_left_transposed(left[3], matrix(3), 16 * other, 16 * tile);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (other <= tile || Delta) {
        Keys::load_right_transposed(right, shared + G::kKeys, 16 * other, first + 16 * j);
        if (other <= tile) {
          mma_pair<bf16>(of_q[j], left[0], right);
          if (Delta) mma_pair<bf16>(of_k[j], left[2], right);
        }
        if (Delta && other >= tile) mma_pair<bf16>(change[j], left[3], right);
      }
      if (other >= tile) {
        Keys::load_right_transposed(right, shared + G::kQueries, 16 * other, first + 16 * j);
        mma_pair<bf16>(change[j], left[1], right);
      }
    }
  }
  dot(kOfQuery, of_q, G::kQueries), dot(kOfChange, change, G::kKeys);
  if (Delta) dot(kOfKey, of_k, G::kKeys);
  __syncthreads();

  const auto dot_of = [&](int which, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) sum += dots[i][which][row];
    return sum;
  };
  float later = 0.0f;  // dG, and sums of it
  if (thread < kChunk) {
    const float rate = rates[thread], q = norms_q[thread] * s.scale, k = norms_k[thread],
                dr = k * dot_of(kOfChange, thread), own = of.diagonal[thread];
    float last = rate * k * dot_of(kOfLast, thread);
    later = q * dot_of(kOfQuery, thread) - rate * dr;
    if (Delta) later += k * dot_of(kOfKey, thread);
    if (thread < steps) {
      const i64 at = of_step + static_cast<i64>(thread) * s.heads;
      p.dr[at] = __fmaf_rn(own, q * k * of.along[thread], dr);
      if (!Delta && p.skipped) p.skipped[at] = own;
    }
    last = warp_reduce<32>(last, Sum());
#pragma unroll
    for (int behind = 1; behind < 32; behind *= 2) {
      const float other = shuffle(later, lane + behind);
      if (lane + behind < 32) later += other;
    }
    // of both warps: the sums of `last`; of the second one: all of dG
    if (lane == 0) of.halves[thread / 32] = last, dots[0][kOfLast][thread] = later;
  }
  __syncthreads();
  if (thread < steps) {
    float last = of.halves[0] + of.halves[1], states = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) states += of.of_states[i];
    last = __fmaf_rn(expf(all), states, last);
    if (thread < 32) later += dots[0][kOfLast][32];
    p.dg[of_step + static_cast<i64>(thread) * s.heads] = later + last;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own + 8 * r;
    const i64 to = (of_step + static_cast<i64>(row) * s.heads) * s.rows + first;
    const float q = norms_q[row] * s.scale, k = norms_k[row], rate = rates[row];
    const float own_k = of.diagonal[row] * rate * k, own_q = of.diagonal[row] * rate * q;
    // Of normalized rows: less what is along them.
    float along_q = 0.0f, along_k = 0.0f;
    if (s.normalize) {
      along_q = dot_of(kOfQuery, row) + own_k * of.along[row];
      along_k = rate * dot_of(kOfChange, row) + own_q * of.along[row];
      if (Delta) along_k += dot_of(kOfKey, row);
      along_q *= q * norms_q[row] * norms_q[row], along_k *= k * k * k;
    }
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      u32 words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 place = Keys::place(0, row, (first + 16 * j) / 8 + i) + lane % 4 * 4;
        const u32 word_q = load<u32, 1>(memory + G::kQueries + place, 0).at[0],
                  word_k = load<u32, 1>(memory + G::kKeys + place, 0).at[0];
        float numbers[2][2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int at = i % 2 * 4 + 2 * r + c;
          const float query = half_of<bf16>(word_q, c), key = half_of<bf16>(word_k, c);
          const float of_query = __fmaf_rn(own_k, key, of_q[j + i / 2][at]);
          float of_key = __fmaf_rn(own_q, query, rate * change[j + i / 2][at]);
          if (Delta) of_key += of_k[j + i / 2][at];
          numbers[0][c] = q * of_query - along_q * query;
          numbers[1][c] = k * of_key - along_k * key;
        }
        words[0][i] = pack2<bf16>(numbers[0][0], numbers[0][1]);
        words[1][i] = pack2<bf16>(numbers[1][0], numbers[1][1]);
      }
      const int columns = s.rows - first - 16 * j;
      store_columns(p.dq + to + 16 * j, words[0], columns, row < steps);
      store_columns(p.dk + to + 16 * j, words[1], columns, row < steps);
    }
  }
}

}  // namespace flexops::state_chunks
