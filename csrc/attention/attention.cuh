// Fused attention: O = softmax(score(scale Q K^T)) V per sequence and head, and its gradients,
// without the matrix of scores in memory.
//
// After Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
// (2023) and Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
// Low-precision" (2024); the online softmax after Milakov and Gimelshein (2018).
//
//   attention.cuh              the problem, blocks of keys that a tile of queries sees, modifiers
//   attention_softmax.cuh      online softmax on a matrix product's fragments
//   attention_forward_hopper.cuh            sm_90a: copy engine, wgmma, warp specialization
//   attention_backward_hopper.cuh           the same, for the gradients
//   attention_backward_queries_hopper.cuh   dQ alone, in a fixed order
//   attention_mma.cuh          mma.sync and cp.async, for the three that follow
//   attention_forward.cuh      sm_80 and newer: cp.async, ldmatrix, mma.sync
//   attention_decode.cuh       the same for few queries and many keys, which are split
//   attention_backward.cuh     the same, for the gradients
//   attention_backward_rows.cuh   before and after both: rowsum(dO O), dQ from float32 to its type,
//                              sums of dK and dV over heads
//
// Keys that a query does not see have a weight of zero, and what they are multiplied with has to be
// finite: past a packed sequence's end the copy engine loads the next one's rows (past the tensor's
// end, zeros).
//
// Queries are cut into tiles of kM rows, keys into blocks of kN. Everything is computed in powers
// of two: softmax's e^x is 2^(x log2(e)), its factor folded into the scale.
#pragma once

#include "common/device.cuh"
#include "common/dtypes.cuh"
#include "common/element_type.h"

namespace flexops::attention {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
/// A window without a limit on one side: row + kUnlimited does not overflow.
constexpr int kUnlimited = 1 << 29;

/// What is to be computed. Lengths are below 2^29. Packed sequences (cumulative lengths given) lie
/// one after another in a batch of one.
struct Problem {
  int batch, heads_q, heads_k,
      group;               // group = heads_q / heads_k: query heads that share a key head
  int length_q, length_k;  // if packed, the longest
  const i32 *cumulative_q, *cumulative_k;  // [batch + 1], or null
  int head_dim,
      head_dim_v;  // of q and k, of v and o: multiples of 8, at most the kernel's kDim and kDimV
  int window_left,
      window_right;  // query i sees keys [i + offset - left, i + offset + right], offset = length_k
                     // - length_q; causal: right 0
  float scale, softcap;
  const void* bias;                                  // added to the scaled score
  i64 bias_batch, bias_head, bias_row, bias_column;  // strides in elements; 0 where it is broadcast
  Dtype bias_type;
  const float* alibi;  // slopes: score - slope |i + offset - j|
  i64 alibi_batch, alibi_head;
};

FLEXOPS_DEVICE float exp2_approx(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
FLEXOPS_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// A tensor [batch, length, heads, columns] or, packed, [1, tokens, heads, columns]; strides in
/// elements, columns are neighbours, rows begin at multiples of 16 bytes.
struct Tensor {
  void* data;
  i64 batch, row, head;
};

struct ForwardParams {
  Problem problem;
  Tensor q, k, v, o;        // the Hopper kernel has q, k and v as tensor maps
  float* lse;               // natural log; null if not wanted
  i64 lse_batch, lse_head;  // strides; rows are neighbours
  const float* sinks;  // [heads_q]: one more score of every row of a head, without a value; or null
  int tiles;           // of queries, per sequence and head
  int section;  // heads (of all sequences) whose tiles are handed out together: as many as the L2
                // cache has room for
};

struct BackwardParams {
  Problem problem;
  Tensor q, k, v, d_o, dk, dv, dq;  // dq: of the kernel that computes it alone
  const float *exponent, *delta;    // [heads_q, padded_rows]
  float* dq_sums;                   // [heads_q, padded_rows, kDim]
  i64 padded_rows;
  int group;    // query heads that a block goes over: all that share a key head, or one, and dk and
                // dv have its head
  int tiles;    // of keys, per sequence and group
  int section;  // groups
  int first_tile;  // number of the first one: where dQ is added up in a fixed order, each tile is a
                   // launch of its own
};

/// A tile of a sequence and head. Tiles are handed out by rows of tiles, within a section of heads.
struct TileNumber {
  int tile, head, batch;
  FLEXOPS_DEVICE TileNumber(int number, int batches, int heads, int tiles, int section) {
    const int first = number / (section * tiles) * section, within = number % (section * tiles);
    const int width = min(section, batches * heads - first), both = first + within % width;
    tile = within / width, batch = both / heads, head = both % heads;
  }
};

/// One sequence and head: where it begins (rows of packed tensors), how long it is.
struct Sequence {
  int batch, head, head_k;
  int first_q, first_k, length_q, length_k, offset;
  int coordinate;  // of the batch dimension

  template <class T>
  FLEXOPS_DEVICE T* rows_q(const Tensor& x, int row) const {
    return static_cast<T*>(x.data) + coordinate * x.batch +
           static_cast<i64>(first_q + row) * x.row + head * x.head;
  }
  template <class T>
  FLEXOPS_DEVICE T* rows_k(const Tensor& x, int row) const {
    return static_cast<T*>(x.data) + coordinate * x.batch +
           static_cast<i64>(first_k + row) * x.row + head_k * x.head;
  }

  FLEXOPS_DEVICE Sequence(const Problem& p, int batch_, int head_)
      : batch(batch_), head(head_), head_k(head_ / p.group) {
    first_q = p.cumulative_q ? p.cumulative_q[batch] : 0,
    first_k = p.cumulative_k ? p.cumulative_k[batch] : 0;
    length_q = p.cumulative_q ? p.cumulative_q[batch + 1] - first_q : p.length_q;
    length_k = p.cumulative_k ? p.cumulative_k[batch + 1] - first_k : p.length_k;
    offset = length_k - length_q;
    coordinate = p.cumulative_q ? 0 : batch;
  }
};

/// Blocks [begin, end).
struct Blocks {
  int begin, end;
  FLEXOPS_DEVICE bool none() const { return begin >= end; }
};
/// Blocks of kN keys that queries [m kM, m kM + kM) see.
template <int kM, int kN>
FLEXOPS_DEVICE Blocks visible_keys(const Problem& p, const Sequence& s, int m) {
  const int first = m * kM, last = min(first + kM, s.length_q) - 1;
  if (first > last) return {0, 0};
  return {max(0, first + s.offset - p.window_left) / kN,
          ceil_div(max(0, min(s.length_k, last + s.offset + p.window_right + 1)), kN)};
}
/// Blocks of kM queries that see any of the keys [n kN, n kN + kN).
template <int kM, int kN>
FLEXOPS_DEVICE Blocks seeing_queries(const Problem& p, const Sequence& s, int n) {
  const int first = n * kN, last = min(first + kN, s.length_k) - 1;
  if (first > last) return {0, 0};
  return {max(0, first - s.offset - p.window_right) / kM,
          ceil_div(max(0, min(s.length_q, last - s.offset + p.window_left + 1)), kM)};
}
/// Keys [lowest, highest) that query `row` sees.
struct Visible {
  int lowest, highest;
  FLEXOPS_DEVICE Visible(const Problem& p, const Sequence& s, int row)
      : lowest(row + s.offset - p.window_left),
        highest(min(s.length_k, row + s.offset + p.window_right + 1)) {}
  FLEXOPS_DEVICE bool operator()(int key) const { return key >= lowest && key < highest; }
};
/// Whether some query of [first, first + rows) does not see some key of [key, key + keys).
FLEXOPS_DEVICE bool is_partial(const Problem& p, const Sequence& s, int first, int rows, int key,
                               int keys) {
  return key + keys > min(s.length_k, first + s.offset + p.window_right + 1) ||
         key < first + rows - 1 + s.offset - p.window_left;
}

// ---- Score modifiers: functions of the product, before softmax. kPlain: only the scale, which
// softmax then applies for nothing. ----
//
//   struct Modifier {
//     static constexpr bool kPlain = false;
//     Modifier(const Problem&, const Sequence&);
//     float value(float product, int query, int key) const;  // the score, for forward kernels
//     // The score, and its derivative by the product without the scale, for backward kernels.
//     float operator()(float product, int query, int key, float& slope) const;
//   };

struct Plain {
  static constexpr bool kPlain = true;
  FLEXOPS_DEVICE Plain(const Problem&, const Sequence&) {}
  FLEXOPS_DEVICE float operator()(float product, int, int, float&) const { return product; }
};

/// softcap tanh(scale q k / softcap) - alibi |distance| + bias, each where it is. With more than
/// one of them, or with none, the problem says which there are: that costs less than as many
/// kernels.
template <bool kSoftcap, bool kAlibi, bool kBias>
struct Modified {
  static constexpr bool kPlain = false, kOne = kSoftcap + kAlibi + kBias == 1;
  const Problem& p;
  const Sequence& s;
  float alibi = 0;
  i64 bias = 0;

  FLEXOPS_DEVICE Modified(const Problem& problem, const Sequence& sequence)
      : p(problem), s(sequence) {
    if (kAlibi && (kOne || p.alibi))
      alibi = p.alibi[s.batch * p.alibi_batch + s.head * p.alibi_head];
    if (kBias) bias = s.batch * p.bias_batch + s.head * p.bias_head;
  }
  FLEXOPS_DEVICE float bias_at(int query, int key) const {
    if (query >= s.length_q || key >= s.length_k) return 0;
    const i64 at = bias + query * p.bias_row + key * p.bias_column;
    if (p.bias_type == Dtype::boolean)
      return static_cast<const u8*>(p.bias)[at] ? 0.0f : -infinity();
    if (p.bias_type == Dtype::f32) return static_cast<const float*>(p.bias)[at];
    if (p.bias_type == Dtype::f16) return to_float(static_cast<const f16*>(p.bias)[at]);
    return to_float(static_cast<const bf16*>(p.bias)[at]);
  }
  FLEXOPS_DEVICE float operator()(float product, int query, int key, float& slope) const {
    float score = product * p.scale;
    if (kSoftcap && (kOne || p.softcap > 0)) {  // tanh(x) = 1 - 2 / (e^2x + 1)
      const float tanh =
          1.0f -
          __fdividef(2.0f, exp2_approx(fminf(score / p.softcap * (2 * kLog2E), 126.0f)) + 1.0f);
      score = p.softcap * tanh, slope = 1.0f - tanh * tanh;
    } else {
      slope = 1.0f;
    }
    if (kAlibi) score -= alibi * static_cast<float>(abs(query + s.offset - key));
    if (kBias && (kOne || p.bias)) score += bias_at(query, key);
    return score;
  }
  FLEXOPS_DEVICE float value(float product, int query, int key) const {
    float slope;
    return (*this)(product, query, key, slope);
  }
};

/// What a score is multiplied by to be the exponent of a power of two.
template <class Modifier>
FLEXOPS_DEVICE float exponent_scale(const Problem& p) {
  return Modifier::kPlain ? p.scale * kLog2E : kLog2E;
}

}  // namespace flexops::attention
