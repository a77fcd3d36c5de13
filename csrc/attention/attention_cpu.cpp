// Attention forward on the CPU; see attention_cpu.h.
//
//   For each tile of queries: Q^T; for each block of keys that the tile sees: S^T = K Q^T, scores,
//   P^T = e^(S^T - maximum so far), what was summed so far times e^(old - new maximum), O^T += V^T
//   P^T. At the end O = O^T divided by the rows' sums, LSE = maximum + log(sum).

#include "attention/attention_cpu.h"

namespace flexops::FLEXOPS_ISA {

/// Softmax's state of a tile's queries.
struct TileSums {
  alignas(64) float maximum[kTile], sum[kTile], correction[kTile];
};

static inline float settled(float maximum) {
  return maximum == -kAttentionInfinity ? 0.0f : maximum;
}
static inline Floats settled(Floats maximum) {
  return maximum == -kAttentionInfinity ? Floats{} : maximum;
}

/// Scores of kN registers of queries become weights (pairs of bfloat16 of neighbouring keys, in the
/// place of the even ones).
template <bool kPairs, int kN>
static void weigh_columns(float* s, int64_t keys, float factor, TileSums& sums, int64_t column) {
  Floats maximum[kN], shift[kN], sum[kN] = {};
  for (int j = 0; j < kN; ++j) maximum[j] = load_floats(sums.maximum + column + j * kLanes);
  for (int64_t i = 0; i < keys; ++i) {
    for (int j = 0; j < kN; ++j)
      maximum[j] = greater(load_floats(s + i * kStride + j * kLanes), maximum[j]);
  }
  for (int j = 0; j < kN; ++j) {
    float* before = sums.maximum + column + j * kLanes;
    shift[j] = settled(maximum[j]) * factor;
    store_floats(sums.correction + column + j * kLanes,
                 weight_of(load_floats(before) * factor - shift[j]));
    store_floats(before, maximum[j]);
  }
  const auto weigh = [&](int64_t i, int j) {
    const Floats weight = weight_of(load_floats(s + i * kStride + j * kLanes) * factor - shift[j]);
    sum[j] += weight;
    return weight;
  };
  for (int64_t i = 0; i < keys; i += kPairs ? 2 : 1) {
    for (int j = 0; j < kN; ++j) {
      Floats weight = weigh(i, j);
      if constexpr (kPairs) {
        const Words odd =
            i + 1 < keys ? round_to_upper_half(weigh(i + 1, j)) & 0xffff0000u : Words{};
        weight = (Floats)(round_to_upper_half(weight) >> 16 | odd);
      }
      store_floats(s + i * kStride + j * kLanes, weight);
    }
  }
  for (int j = 0; j < kN; ++j) {
    float* total = sums.sum + column + j * kLanes;
    store_floats(total,
                 load_floats(total) * load_floats(sums.correction + column + j * kLanes) + sum[j]);
  }
}
template <bool kPairs>
static void weigh(float* s, int64_t keys, int64_t columns, float factor, TileSums& sums) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes)
    weigh_columns<kPairs, 4>(s + column, keys, factor, sums, column);
  for (; column < columns; column += kLanes)
    weigh_columns<kPairs, 1>(s + column, keys, factor, sums, column);
}

static void multiply_columns(float* out, int64_t rows, int64_t columns, const float* factors) {
  for (int64_t j = 0; j < columns; j += kLanes) {
    const Floats factor = load_floats(factors + j);
    for (int64_t i = j; i < rows * kStride; i += kStride)
      store_floats(out + i, load_floats(out + i) * factor);
  }
}
static bool all_one(const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (factors[i] != 1.0f) return false;
  }
  return true;
}

/// What O^T's columns are multiplied by at last, in `correction`, and LSE.
static void finish(const AttentionForward& call, const AttentionSequence& s, int64_t first,
                   int64_t rows, float factor, TileSums& sums) {
  const float* sink = call.problem.sinks ? call.problem.sinks + s.head : nullptr;
  const int64_t batch = call.problem.packed() ? 0 : s.batch;
  float* lse = call.lse
                   ? call.lse + batch * call.lse_batch + s.head * call.lse_head + s.first_q + first
                   : nullptr;
  for (int64_t i = 0; i < rows; ++i) {
    const bool none = sums.maximum[i] == -kAttentionInfinity;
    float shift = settled(sums.maximum[i]) * factor, total = sums.sum[i], part = 1.0f;
    if (sink) {  // one more score
      const float most = none || *sink > shift ? settled(*sink) : shift;
      part = none ? 0.0f : __builtin_expf(shift - most);
      total = total * part + __builtin_expf(*sink - most), shift = most;
    }
    sums.correction[i] = total == 0.0f ? 0.0f : part / total;
    if (lse) lse[i] = total == 0.0f ? -kAttentionInfinity : shift + __builtin_logf(total);
  }
}

template <bool kPairs>
class ForwardTiles {
 public:
  explicit ForwardTiles(const AttentionForward& call)
      : call_(call),
        p_(call.problem),
        type_(call.problem.type),
        words_(words_of<kPairs>(p_.head_dim)),
        stride_k_(words_ + apart()),
        stride_v_(p_.head_dim_v + apart()),
        scratch_(words_ * kStride + stride_k_ * most(kKeys, kTile) + p_.head_dim_v * kStride +
                 stride_v_ * most(kKeys, kTile) + kKeys * kStride + kTile * kKeys +
                 kKeys * kStride + 128),
        q_(scratch_.take(words_ * kStride)),
        k_(scratch_.take(stride_k_ * most(kKeys, kTile))),
        v_(scratch_.take(stride_v_ * most(kKeys, kTile))),
        s_(scratch_.take(kKeys * kStride)),
        o_(scratch_.take(p_.head_dim_v * kStride)),
        buffer_(scratch_.take(kTile * kKeys + kKeys * kStride)) {}

  bool ready() const { return static_cast<bool>(scratch_); }

  void compute(const AttentionSequence& s, int64_t first) {
    const int64_t rows = least(kTile, s.length_q - first), columns = rounded_up(rows, kLanes),
                  dim = p_.head_dim_v;
    const KeyRange range(p_, s, first, rows);
    const Scores scores(p_, s, first, rows);
    TileSums sums;
    for (int64_t i = 0; i < kTile; ++i) sums.maximum[i] = -kAttentionInfinity, sums.sum[i] = 0.0f;
    load_transposed<kPairs>(call_.q.data, s.row_q(call_.q, first), call_.q.row, rows, p_.head_dim,
                            type_, q_, k_);
    memset(o_, 0, static_cast<size_t>(dim * kStride) * sizeof(float));
    for (int64_t key = range.begin; key < range.end; key += kKeys) {
      const int64_t keys = least(kKeys, range.end - key);
      const Left k = place_rows(key, keys, s), v = place_steps(key, keys, s);
      multiply<kPairs>(
          {k.data, k.stride, 1, q_, kStride, s_, kStride, keys, columns, words_, false});
      scores.apply(s_, nullptr, key, keys, buffer_);
      weigh<kPairs>(s_, keys, columns, scores.factor(), sums);
      if (!all_one(sums.correction, columns)) multiply_columns(o_, dim, columns, sums.correction);
      multiply<kPairs>({v.data, 1, v.stride, s_, kPairs ? 2 * kStride : kStride, o_, kStride, dim,
                        columns, words_of<kPairs>(keys), true});
    }
    finish(call_, s, first, rows, scores.factor(), sums);
    multiply_columns(o_, dim, columns, sums.correction);
    store_transposed(o_, rows, dim, call_.o.data, s.row_q(call_.o, first), call_.o.row, type_, v_);
  }

 private:
  /// A block of K or V: float32 is read where it lies, unless rows are so far apart that they share
  /// few sets of the cache.
  bool stays(const AttentionTensor& x) const {
    return type_ == ElementType::f32 && x.row * 4 < kFar;
  }
  struct Left {
    const float* data;
    int64_t stride;
  };
  Left place_rows(int64_t key, int64_t keys, const AttentionSequence& s) const {
    const AttentionTensor& k = call_.k;
    const int64_t at = s.row_k(k, key);
    if (stays(k)) return {static_cast<const float*>(k.data) + at, k.row};
    load_rows<kPairs>(k.data, at, k.row, keys, p_.head_dim, type_, k_, stride_k_);
    return {k_, stride_k_};
  }
  Left place_steps(int64_t key, int64_t keys, const AttentionSequence& s) const {
    const AttentionTensor& v = call_.v;
    const int64_t at = s.row_k(v, key);
    if (stays(v)) return {static_cast<const float*>(v.data) + at, v.row};
    load_steps<kPairs>(v.data, at, v.row, keys, p_.head_dim_v, type_, v_, stride_v_);
    return {v_, stride_v_};
  }

  static constexpr int64_t kFar = 4096;  // bytes: rows of which all begin in one set
  int64_t apart() const { return type_ == ElementType::f32 ? 16 : 0; }

  const AttentionForward& call_;
  const Attention& p_;
  ElementType type_;
  int64_t words_, stride_k_, stride_v_;
  Scratch scratch_;
  float *q_, *k_, *v_, *s_, *o_, *buffer_;
};

template <bool kPairs>
static bool forward_items(const AttentionForward& call, int64_t* taken) {
  const Attention& p = call.problem;
  ForwardTiles<kPairs> tiles(call);
  if (!tiles.ready()) return false;
  const int64_t items = attention_cpu_items(call), count = attention_cpu_tiles(p);
  for (int64_t item = take_item(taken); item < items; item = take_item(taken)) {
    const int64_t both = item / count, first = (count - 1 - item % count) *
                                               kTile;  // under a causal mask, the longest first
    const AttentionSequence s(p, both / p.heads_q, both % p.heads_q);
    if (first < s.length_q) tiles.compute(s, first);
  }
  return true;
}

/// One query of each head, as in decoding: those of the heads that share a key head become the rows
/// of one tile, which sees all of the keys that a window leaves.
static AttentionForward with_grouped_rows(AttentionForward call) {
  Attention& p = call.problem;
  const int64_t group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  if (p.length_q != 1 || group == 1 || p.packed() || p.bias || p.alibi || p.sinks ||
      call.lse_head != 1)
    return call;
  const KeyRange range(p, AttentionSequence(p, 0, 0), 0, 1);
  call.k.data = static_cast<char*>(call.k.data) + range.begin * call.k.row * element_size(p.type);
  call.v.data = static_cast<char*>(call.v.data) + range.begin * call.v.row * element_size(p.type);
  p.length_k = p.rows_k = most(0, range.end - range.begin), p.window_left = p.window_right = -1;
  p.heads_q = p.heads_k, p.length_q = p.rows_q = group;
  call.q.row = call.q.head, call.q.head *= group;
  call.o.row = call.o.head, call.o.head *= group;
  call.lse_head = group;
  return call;
}

bool attention_cpu(const AttentionForward& original, int64_t* taken) {
  const AttentionForward call = with_grouped_rows(original);
  if (call.problem.type == ElementType::bf16 && multiplies_bf16())
    return forward_items<true>(call, taken);
  return forward_items<false>(call, taken);
}

}  // namespace flexops::FLEXOPS_ISA
