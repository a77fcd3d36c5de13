// Attention backward on the CPU; see attention_cpu.h.
//
//   For a key head of a sequence: K and V as left operands; for each query head that shares it and each tile of queries: Q and dO, as they
//   are and transposed, delta = rowsum(dO O) - dLSE; for each block of keys that the tile sees: S^T = K Q^T, P^T = e^(score - LSE),
//   dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T. dQ is written after its tile, dK and dV at the
//   end.

#include "attention/attention_cpu.h"

namespace flexops::FLEXOPS_ISA {

/// The sum of a * b over a row of each.
static float dot_rows(const void* a, int64_t a_at, const void* b, int64_t b_at, int64_t count, RowType type) {
  alignas(64) float left[kRowBlock], right[kRowBlock];
  float out = 0.0f;
  for_row_blocks(count, 0, [&](int64_t at, int64_t part) {
    const float *x = widen_row(a, a_at + at, part, type, left), *y = widen_row(b, b_at + at, part, type, right);
    Floats sum = {};
    int64_t i = 0;
    for (; i + kLanes <= part; i += kLanes) sum += load_floats(x + i) * load_floats(y + i);
    if (i < part) sum += load_some(x + i, part - i, 0.0f) * load_some(y + i, part - i, 0.0f);
    out += sum_of_lanes(sum);
  });
  return out;
}

static void scale_floats(float* values, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i += kLanes) store_floats(values + i, load_floats(values + i) * scale);
}

template <bool kPairs>
class BackwardHeads {
 public:
  explicit BackwardHeads(const AttentionBackward& call)
      : call_(call),
        p_(call.problem),
        type_(static_cast<RowType>(call.problem.type)),
        dim_(p_.head_dim),
        dim_v_(p_.head_dim_v),
        words_(words_of<kPairs>(dim_)),
        words_v_(words_of<kPairs>(dim_v_)),
        padded_(rounded_up(dim_, kLanes)),
        padded_v_(rounded_up(dim_v_, kLanes)),
        scratch_(rounded_up(p_.length_k, 2) * (words_ + words_v_ + padded_ + padded_v_ + (kPairs ? dim_ / 2 + 1 : 0)) +
                 kTile * (2 * padded_ + 2 * padded_v_) + kStride * (words_ + words_v_ + padded_) + kKeys * kStride * 5 + kTile * kKeys +
                 kKeys * kStride + 512),
        k_(scratch_.take(p_.length_k * words_)),
        v_(scratch_.take(p_.length_k * words_v_)),
        k_steps_(kPairs ? scratch_.take((p_.length_k + 1) / 2 * dim_) : k_),
        dk_(scratch_.take(p_.length_k * padded_)),
        dv_(scratch_.take(p_.length_k * padded_v_)),
        q_(scratch_.take(kTile * padded_)),
        do_(scratch_.take(kTile * padded_v_)),
        q_transposed_(scratch_.take(words_ * kStride)),
        do_transposed_(scratch_.take(words_v_ * kStride)),
        dq_(scratch_.take(dim_ * kStride)),
        s_(scratch_.take(kKeys * kStride)),
        ds_(scratch_.take(kKeys * kStride)),
        slopes_(scratch_.take(kKeys * kStride)),
        buffer_(scratch_.take(most(kTile * kKeys + kKeys * kStride, kTile * most(padded_, padded_v_)))) {}

  bool ready() const { return static_cast<bool>(scratch_); }

  void compute(int64_t batch, int64_t head_k) {
    const int64_t group = p_.heads_q / p_.heads_k;
    const AttentionSequence first(p_, batch, head_k * group);
    load_keys(first);
    for (int64_t head = head_k * group; head < (head_k + 1) * group; ++head) {
      const AttentionSequence s(p_, batch, head);
      for (int64_t tile = 0; tile < s.length_q; tile += kTile) add_tile(s, tile);
    }
    store_keys(dk_, first, call_.dk, dim_, padded_, p_.scale);
    store_keys(dv_, first, call_.dv, dim_v_, padded_v_, 1.0f);
  }

 private:
  void load_keys(const AttentionSequence& s) {
    const AttentionTensor &k = call_.k, &v = call_.v;
    load_rows<kPairs>(k.data, s.row_k(k, 0), k.row, s.length_k, dim_, type_, k_, words_);
    load_rows<kPairs>(v.data, s.row_k(v, 0), v.row, s.length_k, dim_v_, type_, v_, words_v_);
    if (kPairs) load_steps<kPairs>(k.data, s.row_k(k, 0), k.row, s.length_k, dim_, type_, k_steps_, dim_);
    memset(dk_, 0, static_cast<size_t>(s.length_k * padded_) * sizeof(float));
    memset(dv_, 0, static_cast<size_t>(s.length_k * padded_v_) * sizeof(float));
  }

  void store_keys(float* from, const AttentionSequence& s, const AttentionTensor& to, int64_t columns, int64_t stride, float scale) {
    for (int64_t row = 0; row < s.length_k; ++row, from += stride) {
      if (scale != 1.0f) scale_floats(from, stride, scale);
      const int64_t at = s.row_k(to, row);
      if (type_ == RowType::f32) memcpy(static_cast<float*>(to.data) + at, from, static_cast<size_t>(columns) * sizeof(float));
      narrow_row(from, to.data, at, columns, type_);
    }
  }

  void load_tile(const AttentionSequence& s, int64_t first, int64_t rows) {
    const AttentionTensor &q = call_.q, &d_o = call_.d_o;
    const int64_t q_at = s.row_q(q, first), do_at = s.row_q(d_o, first);
    load_steps<kPairs>(q.data, q_at, q.row, rows, dim_, type_, q_, padded_);
    load_steps<kPairs>(d_o.data, do_at, d_o.row, rows, dim_v_, type_, do_, padded_v_);
    load_transposed<kPairs>(q.data, q_at, q.row, rows, dim_, type_, q_transposed_, buffer_);
    load_transposed<kPairs>(d_o.data, do_at, d_o.row, rows, dim_v_, type_, do_transposed_, buffer_);
    memset(dq_, 0, static_cast<size_t>(dim_ * kStride) * sizeof(float));
    const int64_t lse_at = (p_.packed() ? 0 : s.batch) * call_.lse_batch + s.head * call_.lse_head + s.first_q + first;
    for (int64_t i = 0; i < kTile; ++i) lse_[i] = kAttentionInfinity, delta_[i] = 0.0f;  // a weight of zero, as where nothing was seen
    for (int64_t i = 0; i < rows; ++i) {
      const float lse = call_.lse[lse_at + i];
      if (lse != -kAttentionInfinity) lse_[i] = lse;
      delta_[i] = dot_rows(call_.o.data, s.row_q(call_.o, first + i), d_o.data, do_at + i * d_o.row, dim_v_, type_);
      if (call_.d_lse) delta_[i] -= call_.d_lse[lse_at + i];
    }
  }

  void add_tile(const AttentionSequence& s, int64_t first) {
    const int64_t rows = least(kTile, s.length_q - first), columns = rounded_up(rows, kLanes);
    const KeyRange range(p_, s, first, rows);
    const Scores scores(p_, s, first, rows);
    load_tile(s, first, rows);
    for (int64_t key = most(0, range.begin) / kKeys * kKeys; key < range.end; key += kKeys) {
      add_block(scores, key, least(kKeys, s.length_k - key), rows, columns);
    }
    scale_floats(dq_, dim_ * kStride, p_.scale);
    store_transposed(dq_, rows, dim_, call_.dq.data, s.row_q(call_.dq, first), call_.dq.row, type_, buffer_);
  }

  void add_block(const Scores& scores, int64_t key, int64_t keys, int64_t rows, int64_t columns) {
    multiply<kPairs>({k_ + key * words_, words_, 1, q_transposed_, kStride, s_, kStride, keys, columns, words_, false});
    scores.apply(s_, slopes_, key, keys, buffer_);
    multiply<kPairs>({v_ + key * words_v_, words_v_, 1, do_transposed_, kStride, ds_, kStride, keys, columns, words_v_, false});
    differentiate(scores, keys, columns);
    const int64_t steps = words_of<kPairs>(rows), key_steps = words_of<kPairs>(keys);
    const float* ds = kPairs ? ds_rows_ : ds_;
    const int64_t left_row = kPairs ? kTile / 2 : kStride;
    multiply<kPairs>({kPairs ? p_rows_ : s_, left_row, 1, do_, padded_v_, dv_ + key * padded_v_, padded_v_, keys, padded_v_, steps, true});
    multiply<kPairs>({ds, left_row, 1, q_, padded_, dk_ + key * padded_, padded_, keys, padded_, steps, true});
    multiply<kPairs>({kPairs ? k_steps_ + key / 2 * dim_ : k_ + key * words_, 1, kPairs ? dim_ : words_, ds_,
                      kPairs ? 2 * kStride : kStride, dq_, kStride, dim_, columns, key_steps, true});
  }

  /// S^T and dP^T become P^T and dS^T. Of pairs, dS^T is needed with neighbouring queries together and with neighbouring keys.
  void differentiate(const Scores& scores, int64_t keys, int64_t columns) {
    const float factor = scores.factor();
    const bool has_slopes = scores.has_slopes();
    for (int64_t i = 0; i < keys; ++i) {
      for (int64_t j = 0; j < columns; j += kLanes) {
        float *s = s_ + i * kStride + j, *ds = ds_ + i * kStride + j;
        const Floats weight = weight_of(load_floats(s) * factor - load_floats(lse_ + j));
        Floats gradient = weight * (load_floats(ds) - load_floats(delta_ + j));
        if (has_slopes) gradient *= load_floats(slopes_ + i * kStride + j);
        if constexpr (kPairs) {
          store_bf16(reinterpret_cast<uint16_t*>(p_rows_ + i * (kTile / 2)) + j, weight);
          const Words rounded = round_to_upper_half(gradient) >> 16;
          store_halves(reinterpret_cast<uint16_t*>(ds_rows_ + i * (kTile / 2)) + j, rounded);
          if (i % 2 == 0) {
            store_floats(ds, (Floats)rounded);
          } else {
            store_floats(ds - kStride, (Floats)((Words)load_floats(ds - kStride) | rounded << 16));
          }
        } else {
          store_floats(s, weight);
          store_floats(ds, gradient);
        }
      }
    }
  }

  const AttentionBackward& call_;
  const Attention& p_;
  RowType type_;
  int64_t dim_, dim_v_, words_, words_v_, padded_, padded_v_;
  Scratch scratch_;
  float *k_, *v_, *k_steps_, *dk_, *dv_;                   // of the key head
  float *q_, *do_, *q_transposed_, *do_transposed_, *dq_;  // of the tile
  float *s_, *ds_, *slopes_, *buffer_;                     // of the block
  alignas(64) float lse_[kTile], delta_[kTile];
  alignas(64) float p_rows_[kPairs ? kKeys * kTile / 2 : 1], ds_rows_[kPairs ? kKeys * kTile / 2 : 1];
};

template <bool kPairs>
static void backward_items(const AttentionBackward& call, int64_t begin, int64_t end) {
  BackwardHeads<kPairs> heads(call);
  for (int64_t item = begin; item < end; ++item) heads.compute(item / call.problem.heads_k, item % call.problem.heads_k);
}

void attention_backward_cpu(const AttentionBackward& call, int64_t begin, int64_t end) {
  if (call.problem.type == AttentionType::bf16 && multiplies_bf16()) return backward_items<true>(call, begin, end);
  backward_items<false>(call, begin, end);
}

}  // namespace flexops::FLEXOPS_ISA
