// Attention over a cache of codes: keys in 8 or 4 bits per channel, in groups of tokens, values per
// token, in groups of columns, after Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization
// for KV Cache" (2024). value = code step + minimum.
//
// The newest tokens stay as they are, in a ring: of `cached` tokens the first (cached - residual) /
// group * group are codes. So lengths alone say where a token is. A kernel's last part of a tile
// has the ring (attend_part, which also appends), and afterwards quantizes the group that leaves
// it.
//
// Codes are multiplied as they are, in fp16: a code's bits, put into the mantissa of 1024, are 1024
// + code, and in the high half of a byte 1024 + 16 code. What that adds, and the minima, are sums
// of rows that further products compute:
//
//   S = sum_d q_d (code_d step_d + min_d) = sum_d (q_d step_d) (1024 + code_d) + r
//   r = sum_d q_d min_d - 1024 sum_d (q_d step_d), the start of S's sums; q_d step_d is rounded
//   first O_d = sum_t (p_t step_t) (1024 + code_td) + m, m = sum_t p_t min_t - 1024 sum_t (p_t
//   step_t)
//
// Codes are the left operands of mma.sync, 16 tokens or columns of them, and the 8 queries that
// share a key head are the right one: S and O are computed transposed, so that most of a product is
// not zeros, and a thread needs few registers. mma.sync sums over columns in any order, so that a
// word of codes from ldmatrix is a left operand without shuffles: a lane's columns of Q are those
// of its words. In 4 bits, columns 2, 3, 6 and 7 of 8 are in high halves: their Q is divided by 16,
// as O is in the end (columns 1 and 3 of 4).
//
//   k_codes   [batch, heads, tokens, columns bits / 8]; 4 bits: of 8 columns, column i in half-byte
//             0, 4, 1, 5, 2, 6, 3, 7 of a word
//   k_steps   fp16 [batch, heads, tokens / group, {step, minimum}, columns]
//   v_codes   as k_codes, half-bytes in order
//   v_steps   fp16 [batch, heads, tokens / 32, columns / group, {step, minimum}, 32]
#pragma once

#include "kvcache_attention/kvcache_attention.cuh"

namespace flexops::attention {

inline constexpr int kCodedRows = 8;  // of a tile

struct CodesParams {
  CacheParams cache;  // k and v: the rings; length_k: tokens that a sequence can have
  u8 *k_codes, *v_codes;
  f16 *k_steps, *v_steps;
  int residual, group, value_group;  // tokens; tokens; columns
  int bits;
  Tensor from_k, from_v;  // compress(): [batch, tokens, heads, columns]
  int first, groups;      // the token that theirs begin with, and how many groups they are

  FLEXOPS_DEVICE i64 token(const Cached& s, int at) const {
    const Problem& problem = cache.decode.call.problem;
    return (static_cast<i64>(s.batch) * problem.heads_k + s.head_k) * problem.length_k + at;
  }
  FLEXOPS_DEVICE int coded(int tokens) const { return max(0, tokens - residual) & -group; }
};

/// Tokens' codes in shared memory, 16-byte vectors permuted so that ldmatrix reads 8 rows without
/// conflicts.
template <int kRows_, int kRowBytes_>
struct CodeTile {
  static constexpr int kRows = kRows_, kRowBytes = kRowBytes_, kVectors = kRowBytes / 16,
                       kBytes = kRows * kRowBytes, kApart = kRowBytes >= 128 ? 1 : 128 / kRowBytes,
                       kMask = kVectors >= 8 ? 7 : kVectors - 1;
  static FLEXOPS_DEVICE u32 place(u32 tile, u32 row, u32 vector) {
    return tile + row * kRowBytes + (vector ^ ((row / kApart & kMask))) * 16;
  }
};

FLEXOPS_DEVICE u32 multiply2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
/// Bytes of `word` that `selector` names (low, high), each as 1024 + its value.
FLEXOPS_DEVICE u32 widen_bytes(u32 word, u32 selector) {
  return __byte_perm(word, 0x64646464u, selector);
}
/// Half-bytes of `word` in `mask`. One instruction, of which the compiler makes two.
FLEXOPS_DEVICE u32 widen_halves(u32 word, u32 mask) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(0x64006400u));
  return out;
}

/// kKeys: tokens of a block, 32 or 64, which lie in one group.
template <int kDim, int kBits_, int kValueGroup_, int kWarps_, int kKeys_>
struct Coded {
  // Three blocks of threads have room on a multiprocessor of 228 KiB.
  static constexpr int kM = kCodedRows, kKeys = kKeys_, kColumns = kDim, kColumnsV = kDim,
                       kBits = kBits_, kWarps = kWarps_, kThreads = 32 * kWarps,
                       kValueGroup = kValueGroup_, kGroups = kDim / kValueGroup, kMost = 74 * 1024;
  using Codes = CodeTile<kKeys, kDim * kBits / 8>;
  using Q = Panels<kM, kDim>;
  static constexpr int kStepsK = kDim * 4, kStepsV = kGroups * 4 * kKeys;  // bytes
  static constexpr int kStage = 2 * Codes::kBytes + kStepsK + kStepsV;
  static constexpr int kFitting = (kMost - Q::kBytes) / (kWarps * kStage),
                       kStages = kFitting < 4 ? kFitting : 4,
                       kRing = (kStages * kWarps * kStage + 1023) / 1024 * 1024,
                       kBytes = kRing + Q::kBytes;
  static constexpr int kRow = kDim + 4, kMaxima = kWarps * kM * kRow, kSums = kMaxima + kWarps * kM;
  static_assert(kStages >= 2 && (kSums + kWarps * kM) * 4 <= kBytes, "room for the end");

  /// The first of the four columns of K that a lane has in a step.
  static FLEXOPS_DEVICE int column_of_step(int step) {
    return kBits == 8 ? 16 * step + lane_column() * 2
                      : 32 * (step / 2) + lane_column() * 4 + 4 * (step % 2);
  }
  /// Of a vector of codes: tiles of 16 columns.
  static constexpr int kTiles = 8 / kBits;
};

FLEXOPS_DEVICE u32 load_shared_word(u32 address) {
  u32 out;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
  return out;
}
FLEXOPS_DEVICE uint2 load_shared_words(u32 address) {
  uint2 out;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(out.x), "=r"(out.y)
               : "r"(address)
               : "memory");
  return out;
}

/// What a lane has of two rows, 2 (lane % 4) and the next: maxima and sums, of its tokens, and
/// their O, transposed: sum_t (p_t step_t) (1024 + code), and per group of columns sum_t p_t min_t
/// and -1024 sum_t p_t step_t.
template <class Shape>
struct CodedSums {
  static constexpr int kOut = Shape::kColumnsV / 4;
  float max[2] = {-infinity(), -infinity()}, sum[2] = {0, 0}, out[kOut] = {};
  float minima[Shape::kGroups][4] = {}, offset[Shape::kGroups][4] = {};

  /// Scores, of which every second one is of a row, become 2^(scale (score - max)).
  template <int N>
  FLEXOPS_DEVICE void update(float (&scores)[N], float scale) {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float best = max[r];
#pragma unroll
      for (int i = r; i < N; i += 2) best = fmaxf(best, scores[i]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) best = fmaxf(best, shuffle_xor(best, lanes));
      const float shift = best == -infinity() ? 0.0f : best * scale;  // a row that saw nothing yet
      correction[r] = exp2_approx(fmaf(max[r], scale, -shift)), max[r] = best;
      float total = 0;
#pragma unroll
      for (int i = r; i < N; i += 2)
        scores[i] = exp2_approx(fmaf(scores[i], scale, -shift)), total += scores[i];
      sum[r] = fmaf(sum[r], correction[r], total);
    }
    if (!__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= correction[i % 2];
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        minima[g][i] *= correction[i % 2], offset[g][i] *= correction[i % 2];
    }
  }
  /// To where combine_parts looks for them.
  FLEXOPS_DEVICE void store(float* parts, float scale) const {
    constexpr int kTiles = Shape::kTiles, kEach = 2 * kTiles;  // columns of a vector
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = warp * Shape::kM + lane_column() + r;
      float total = sum[r];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) total += shuffle_xor(total, lanes);
      if (lane_row() == 0) {
        parts[Shape::kMaxima + at] = max[r] == -infinity() ? -infinity() : max[r] * scale;
        parts[Shape::kSums + at] = total;
      }
#pragma unroll
      for (int vector = 0; vector < Shape::Codes::kVectors; ++vector) {
        constexpr int kWide = 8 * kEach;
        const int g = vector * kWide / Shape::kValueGroup;
        float* const to = parts + at * Shape::kRow + vector * kWide + lane_row() * kEach;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float share = Shape::kBits == 4 && i % 2 == 1 ? 0.0625f : 1.0f,
                      o = out[4 * (kTiles * vector + i / 2) + i % 2 * 2 + r];
          to[i] = (o + offset[g][r]) * share + minima[g][r];
        }
      }
    }
  }
};

/// A lane's two rows: their queries and what these see; and its part of Q, of row lane / 4.
template <class Shape, class Modifier>
struct CodedRows {
  u32 q[Shape::kColumns / 16][2];
  int query[2];
  Modifier modifier[2];
  Visible visible[2];
};

/// sum += left of 16 equal rows, `low` and `high` of the 16 columns, times right.
FLEXOPS_DEVICE void mma_equal_rows(float (&sum)[4], u32 low, u32 high, const u32 (&right)[2]) {
  const u32 left[4] = {low, low, high, high};
  mma<f16>(sum, left, right[0], right[1]);
}

/// Adds a block of tokens' codes, from `first` on, to a warp's online softmax. `stage`: where they
/// lie.
template <class Shape, class Modifier>
FLEXOPS_DEVICE void attend_codes(const CodedRows<Shape, Modifier>& own, u32 stage, int first,
                                 float scale, CodedSums<Shape>& sums) {
  constexpr int kDim = Shape::kColumns, kN = Shape::kKeys;
  constexpr bool kBytes = Shape::kBits == 8;
  constexpr u32 kOffset = 0xe400e400u;  // -1024, twice
  using Codes = typename Shape::Codes;
  const u32 v = stage + Codes::kBytes, k_steps = v + Codes::kBytes,
            v_steps = k_steps + Shape::kStepsK, lane = lane_id();

  // S^T = K Q^T: lane i gives the address of row i, which is row i % 8 of matrix i / 8.
  float minima_of_row[4] = {}, offset_of_row[4] = {}, scores[kN / 4] = {};
#pragma unroll
  for (int chunk = 0; chunk < Codes::kVectors; ++chunk) {
    constexpr int kSteps = kBytes ? 1 : 2;
    u32 q[kSteps][2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = kSteps * chunk + i;
      const u32 at = k_steps + Shape::column_of_step(step) * 2;
      const uint2 steps = load_shared_words(at), minima = load_shared_words(at + kDim * 2);
      q[i][0] = multiply2(own.q[step][0], steps.x), q[i][1] = multiply2(own.q[step][1], steps.y);
      // In 4 bits the second half of own.q is divided by 16.
      mma_equal_rows(minima_of_row, minima.x, kBytes ? minima.y : multiply2(minima.y, 0x4c004c00u),
                     own.q[step]);
      mma_equal_rows(offset_of_row, kOffset, kOffset, q[i]);
    }
#pragma unroll
    for (int part = 0; part < kN / 32; ++part) {
      u32 words[4];
      load_words<false>(words, Codes::place(stage, 32 * part + lane, chunk));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float* const out = &scores[8 * part + 4 * tile];
        const u32 a = words[2 * tile], b = words[2 * tile + 1];
        if constexpr (kBytes) {
          const u32 left[4] = {widen_bytes(a, 0x4140), widen_bytes(b, 0x4140),
                               widen_bytes(a, 0x4342), widen_bytes(b, 0x4342)};
          mma<f16>(out, left, q[0][0], q[0][1]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const u32 left[4] = {
                widen_halves(a >> 8 * i, 0x000f000fu), widen_halves(b >> 8 * i, 0x000f000fu),
                widen_halves(a >> 8 * i, 0x00f000f0u), widen_halves(b >> 8 * i, 0x00f000f0u)};
            mma<f16>(out, left, q[i % kSteps][0], q[i % kSteps][1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) scores[i] += minima_of_row[i % 2] + offset_of_row[i % 2];
  const bool whole = own.visible[0](first) && own.visible[0](first + kN - 1) &&
                     own.visible[1](first) && own.visible[1](first + kN - 1);
  if (!Modifier::kPlain || !whole) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int r = i % 2, key = first + lane_row() + i / 2 * 8;
      if constexpr (!Modifier::kPlain)
        scores[i] = own.modifier[r].value(scores[i], own.query[r], key);
      if (!own.visible[r](key)) scores[i] = -infinity();
    }
  }
  sums.update(scores, scale);

  // O^T += V^T P^T.
#pragma unroll
  for (int part = 0; part < kN / 16; ++part) {
    const float* const p = &scores[4 * part];
    const u32 right[2] = {transposed(pack2<f16>(p[0], p[1])), transposed(pack2<f16>(p[2], p[3]))};
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      const u32 steps =
          v_steps + part / 2 * (Shape::kGroups * 128) + g * 128 + part % 2 * 32 + lane_column() * 2;
      const u32 scaled[2] = {multiply2(right[0], load_shared_word(steps)),
                             multiply2(right[1], load_shared_word(steps + 16))};
      mma_equal_rows(sums.minima[g], load_shared_word(steps + 64), load_shared_word(steps + 80),
                     right);
      mma_equal_rows(sums.offset[g], kOffset, kOffset, scaled);
      // Lanes 0 to 15 give the addresses of 16 tokens' vectors, the others' of the next vectors.
      constexpr int kVectors = Shape::kValueGroup * Shape::kBits / 128,
                    kAtOnce = kVectors < 2 ? 1 : 2;
#pragma unroll
      for (int i = 0; i < kVectors; i += kAtOnce) {
        u32 words[4];
        const u32 vector = g * kVectors + i + (kAtOnce == 2 ? lane / 16 : 0);
        load_words<true>(words, Codes::place(v, 16 * part + lane % 16, vector));
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          float* const out = &sums.out[4 * Shape::kTiles * (g * kVectors + i + j)];
          const u32 a = words[2 * j], b = words[2 * j + 1];
          if constexpr (kBytes) {
            const u32 left[4] = {widen_bytes(a, 0x4240), widen_bytes(a, 0x4341),
                                 widen_bytes(b, 0x4240), widen_bytes(b, 0x4341)};
            mma<f16>(out, left, scaled[0], scaled[1]);
          } else {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              const u32 left[4] = {widen_halves(a >> 8 * tile, 0x000f000fu),
                                   widen_halves(a >> 8 * tile, 0x00f000f0u),
                                   widen_halves(b >> 8 * tile, 0x000f000fu),
                                   widen_halves(b >> 8 * tile, 0x00f000f0u)};
              mma<f16>(out + 4 * tile, left, scaled[0], scaled[1]);
            }
          }
        }
      }
    }
  }
}

/// The blocks of coded tokens that any row of a tile sees, and their parts; none where parts is 0.
struct CodedKeys {
  int lowest, highest, each, parts;
  FLEXOPS_DEVICE CodedKeys(const CodesParams& c, const Cached& s, int tile) {
    const CacheParams& p = c.cache;
    const TileKeys seen(p, s, tile, kCodedRows, p.keys);
    lowest = seen.lowest, highest = min(seen.highest, c.coded(min(s.cached, s.length_k)) / p.keys);
    const int count = max(0, highest - lowest);
    each = max(ceil_div(count, p.decode.splits), p.least), parts = ceil_div(count, each);
  }
};

/// Starts a warp's copies of a block's codes, and of what belongs to them.
template <class Tile>
FLEXOPS_DEVICE void copy_codes(u32 to, const u8* from) {
#pragma unroll
  for (int i = 0; i < Tile::kVectors * Tile::kRows / 32; ++i) {
    const int at = 32 * i + lane_id();
    async_copy16(Tile::place(to, at / Tile::kVectors, at % Tile::kVectors), from + 16 * at, true);
  }
}
FLEXOPS_DEVICE void copy_bytes(u32 to, const void* from, int bytes) {
  for (int i = 16 * lane_id(); i < bytes; i += 512)
    async_copy16(to + i, static_cast<const u8*>(from) + i, true);
}

/// Attends to codes: blocks [begin, end), below `coded`, as a part of a tile.
template <class T, class Shape, class Modifier>
FLEXOPS_DEVICE void attend_coded_part(const CodesParams& c, u8* memory, const Cached& s, int first,
                                      int begin, int end, int part) {
  using Codes = typename Shape::Codes;
  using Q = typename Shape::Q;
  constexpr int kWarps = Shape::kWarps, kStages = Shape::kStages, kStage = Shape::kStage,
                kN = Shape::kKeys;
  const CacheParams& p = c.cache;
  const Problem& problem = p.decode.call.problem;
  const int group = problem.group, warp = static_cast<int>(threadIdx.x) / 32;

  // Start the copies of this warp's first blocks.
  const u32 whole = static_cast<u32>(__cvta_generic_to_shared(memory)),
            ring = whole + warp * kStages * kStage;
  const int shift = 31 - __clz(c.group);  // a power of two
  const auto load = [&](int n, int stage) {
    if (n < end) {
      const u32 to = ring + stage * kStage, v = to + Codes::kBytes, steps = v + Codes::kBytes;
      const i64 token = c.token(s, n * kN);
      copy_codes<Codes>(to, c.k_codes + token * Codes::kRowBytes);
      copy_codes<Codes>(v, c.v_codes + token * Codes::kRowBytes);
      copy_bytes(steps, c.k_steps + (token >> shift) * (2 * Shape::kColumns), Shape::kStepsK);
      copy_bytes(steps + Shape::kStepsK, c.v_steps + (token >> 5) * (64 * Shape::kGroups),
                 Shape::kStepsV);
    }
    async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load(begin + warp + i * kWarps, i);
  wait_for_previous();
  if (p.overlaps) let_next_start();

  const u32 staged = whole + Shape::kRing;
  stage_queries<T, Q, Shape::kThreads>(p, s, first, staged);
  __syncthreads();
  const int row[2] = {first + lane_column(), first + lane_column() + 1},
            query[2] = {row[0] / group, row[1] / group};
  Cached of_row[2] = {s, s};
  of_row[0].head += row[0] % group, of_row[1].head += row[1] % group;
  CodedRows<Shape, Modifier> own = {{},
                                    {query[0], query[1]},
                                    {Modifier(problem, of_row[0]), Modifier(problem, of_row[1])},
                                    {s.visible(problem, query[0]), s.visible(problem, query[1])}};
  // Q in fp16, in the order of the codes' columns.
#pragma unroll
  for (int step = 0; step < Shape::kColumns / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = Shape::column_of_step(step) + 2 * i;
      const u32 word = load_shared_word(Q::place(staged, lane_row(), column / 8) + column % 8 * 2);
      const float share = Shape::kBits == 4 && i == 1 ? 0.0625f : 1.0f;
      own.q[step][i] = pack2<f16>(half_of<T>(word, 0) * share, half_of<T>(word, 1) * share);
    }
  }

  // Online softmax over this warp's blocks.
  const float scale = exponent_scale<Modifier>(problem);
  CodedSums<Shape> sums;
  int stage = 0;
#pragma unroll 1
  for (int n = begin + warp; n < end; n += kWarps) {
    async_wait(kStages - 2);
    __syncwarp();  // block n is there, and the one before no longer used
    load(n + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
    attend_codes(own, ring + stage * kStage, n * kN, scale, sums);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  async_wait(0);
  __syncthreads();
  float* const parts = reinterpret_cast<float*>(memory);
  sums.store(parts, scale);
  const Finish<T> finish = {p, s, first, part, false};
  combine_parts<Shape>(parts, s.length_q * group - first, problem.head_dim_v, finish, finish);
}

// ---- quantizing ----

struct Step {
  float step, minimum, inverse;
  FLEXOPS_DEVICE Step(float lowest, float highest, int bits)
      : step(to_float(from_float<f16>((highest - lowest) / static_cast<float>((1 << bits) - 1)))),
        minimum(to_float(from_float<f16>(lowest))),
        inverse(step > 0 ? 1.0f / step : 0.0f) {}
  FLEXOPS_DEVICE u32 code(float x, int bits) const {
    return static_cast<u32>(
        fminf(fmaxf(rintf((x - minimum) * inverse), 0.0f), static_cast<float>((1 << bits) - 1)));
  }
};

template <class T>
FLEXOPS_DEVICE void load_eight(float (&out)[8], const T* from) {
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = half_of<T>(words[i / 2], i % 2);
}
/// 8 codes to where the first one is. `key`: in the order of half-bytes of keys.
FLEXOPS_DEVICE void store_codes(u8* to, const u32 (&codes)[8], int bits, bool key) {
  if (bits == 8) {
    *reinterpret_cast<uint2*>(to) = uint2{pack_bytes(codes[0], codes[1], codes[2], codes[3]),
                                          pack_bytes(codes[4], codes[5], codes[6], codes[7])};
    return;
  }
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= codes[i] << 4 * (key ? i / 2 + i % 2 * 4 : i);
  *reinterpret_cast<u32*>(to) = word;
}

/// Quantizes the group of tokens from `first` on of one sequence and head, whose rows `key` and
/// `value` give, by kThreads threads. `scratch`: 16 columns floats for each 8 columns' thread.
template <class T, int kThreads, class Key, class Value>
FLEXOPS_DEVICE void compress_group(const CodesParams& c, const Cached& s, int first, float* scratch,
                                   const Key& key, const Value& value) {
  const Problem& problem = c.cache.decode.call.problem;
  const int dim = problem.head_dim, dim_v = problem.head_dim_v, bits = c.bits;
  const i64 token = c.token(s, first);
  // Keys: each thread has 8 columns of some tokens.
  const int octets = dim / 8, octet = static_cast<int>(threadIdx.x) % octets,
            subset = static_cast<int>(threadIdx.x) / octets, subsets = kThreads / octets;
  float lowest[8], highest[8], x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) lowest[i] = infinity(), highest[i] = -infinity();
  for (int t = subset; t < c.group; t += subsets) {
    load_eight(x, key(first + t) + 8 * octet);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      lowest[i] = fminf(lowest[i], x[i]), highest[i] = fmaxf(highest[i], x[i]);
  }
  float *const low = scratch + 8 * octet, *const high = low + subsets * dim;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    low[subset * dim + i] = lowest[i], high[subset * dim + i] = highest[i];
  __syncthreads();
  f16* const steps = c.k_steps + token / c.group * (2 * dim) + 8 * octet;
  for (int other = 0; other < subsets; ++other) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      lowest[i] = fminf(lowest[i], low[other * dim + i]),
      highest[i] = fmaxf(highest[i], high[other * dim + i]);
  }
  if (subset == 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Step step(lowest[i], highest[i], bits);
      steps[i] = from_float<f16>(step.step), steps[dim + i] = from_float<f16>(step.minimum);
    }
  }
  for (int t = subset; t < c.group; t += subsets) {
    u32 codes[8];
    load_eight(x, key(first + t) + 8 * octet);
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = Step(lowest[i], highest[i], bits).code(x[i], bits);
    store_codes(c.k_codes + ((token + t) * dim + 8 * octet) * bits / 8, codes, bits, true);
  }
  // Values: each thread has a token's group of columns.
  const int groups = dim_v / c.value_group;
  for (int at = static_cast<int>(threadIdx.x); at < c.group * groups; at += kThreads) {
    const int t = at / groups, g = at % groups, column = g * c.value_group;
    const T* const row = value(first + t) + column;
    float least = infinity(), most = -infinity();
    for (int j = 0; j < c.value_group; j += 8) {
      load_eight(x, row + j);
#pragma unroll
      for (int i = 0; i < 8; ++i) least = fminf(least, x[i]), most = fmaxf(most, x[i]);
    }
    const Step step(least, most, bits);
    f16* const to = c.v_steps + ((token + t) / 32 * groups + g) * 64 + (token + t) % 32;
    to[0] = from_float<f16>(step.step), to[32] = from_float<f16>(step.minimum);
    for (int j = 0; j < c.value_group; j += 8) {
      u32 codes[8];
      load_eight(x, row + j);
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = step.code(x[i], bits);
      store_codes(c.v_codes + ((token + t) * dim_v + column + j) * bits / 8, codes, bits, false);
    }
  }
}

/// Grid: tiles * (splits + 1) * batch * heads_k blocks. The last part of a tile is the ring's.
/// kN: keys of a block of the ring's.
template <class T, int kDim, int kBits, int kValueGroup, int kWarps, int kKeys, int kN,
          class Modifier>
__global__ void __launch_bounds__(32 * kWarps, 3)
    codes_attend(const FLEXOPS_GRID_CONSTANT CodesParams c) {
  using Shape = Coded<kDim, kBits, kValueGroup, kWarps, kKeys>;
  using Ring = Decode<T, kDim, kDim, kWarps, kN, Shape::kMost>;
  __align__(1024) extern __shared__ u8 memory[];
  if (!c.cache.early) wait_for_previous();
  const CacheParams& p = c.cache;
  const Problem& problem = p.decode.call.problem;
  const int tile = static_cast<int>(blockIdx.x) % p.decode.call.tiles,
            rest = static_cast<int>(blockIdx.x) / p.decode.call.tiles;
  const int split = rest % (p.decode.splits + 1), both = rest / (p.decode.splits + 1),
            first = tile * Shape::kM;
  Cached s(p, both / problem.heads_k, both % problem.heads_k * problem.group);
  const CodedKeys seen(c, s, tile);
  if (split < p.decode.splits) {
    if (split >= seen.parts) return wait_for_previous();
    const int begin = seen.lowest + split * seen.each;
    attend_coded_part<T, Shape, Modifier>(c, memory, s, first, begin,
                                          min(begin + seen.each, seen.highest), split);
    return;
  }
  // The ring, whose first token is the first that is no code.
  const int coded = c.coded(s.cached), leaves = c.coded(s.length_k);
  s.begin = max(s.begin, min(coded, s.length_k));
  const TileKeys recent(p, s, tile, Shape::kM, kN);
  const bool all = tile == 0 && (recent.lowest * kN > s.cached || recent.highest * kN < s.length_k);
  attend_part<T, Ring, Modifier, Shape::kM>(p, memory, s, first, recent.lowest, recent.highest, all,
                                            seen.parts, seen.parts == 0);
  if (tile != 0 || leaves == coded || s.length_k == s.cached) return;
  __syncthreads();
  const auto row = [&](const Tensor& ring) {
    return [&p, &s, &ring](int token) { return Place(p, s, token).in<const T>(ring, s); };
  };
  compress_group<T, Ring::kThreads>(c, s, coded, reinterpret_cast<float*>(memory),
                                    row(p.decode.call.k), row(p.decode.call.v));
}

/// Grid: batch * heads_q * length_q blocks of 128, one for each query and head.
template <class T>
__global__ void __launch_bounds__(128) codes_combine(const FLEXOPS_GRID_CONSTANT CodesParams c) {
  if (!c.cache.early) wait_for_previous();
  const Problem& problem = c.cache.decode.call.problem;
  const int query = static_cast<int>(blockIdx.x) % problem.length_q,
            both = static_cast<int>(blockIdx.x) / problem.length_q, head = both % problem.heads_q;
  const Cached s(c.cache, both / problem.heads_q, head);
  const CodedKeys seen(c, s, (query * problem.group + head % problem.group) / kCodedRows);
  wait_for_previous();
  if (c.cache.overlaps) let_next_start();
  if (seen.parts > 0) combine_splits<T>(c.cache.decode, s, query, seen.parts + 1);
}

/// Grid: batch * heads_k * groups blocks of 128.
template <class T>
__global__ void __launch_bounds__(128) compress(const FLEXOPS_GRID_CONSTANT CodesParams c) {
  __shared__ float scratch[2 * 8 * 128];
  const Problem& problem = c.cache.decode.call.problem;
  const int group = static_cast<int>(blockIdx.x) % c.groups,
            both = static_cast<int>(blockIdx.x) / c.groups;
  const Cached s(c.cache, both / problem.heads_k, both % problem.heads_k * problem.group);
  const auto row = [&](const Tensor& from) {
    return [&c, &s, &from](int token) {
      return static_cast<const T*>(from.data) + s.batch * from.batch +
             static_cast<i64>(token - c.first) * from.row + s.head_k * from.head;
    };
  };
  compress_group<T, 128>(c, s, c.first + group * c.group, scratch, row(c.from_k), row(c.from_v));
}

}  // namespace flexops::attention
