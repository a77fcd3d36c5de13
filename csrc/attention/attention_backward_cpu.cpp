// Attention backward on the CPU; see attention_cpu.h.
//
//   For a key head of a sequence, each query head that shares it and each tile of queries (of the
//   item's part): Q and dO, as they are and transposed, delta = rowsum(dO O) - dLSE; for each block
//   of keys that the tile sees: S^T = K Q^T, P^T = e^(score - LSE), dP^T = V dO^T, dS^T = P^T (dP^T
//   - delta), dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T. dQ is written after its tile, dK and dV
//   at the end.

#include "attention/attention_cpu.h"

namespace flexops::FLEXOPS_ISA {

/// The sum of a * b over a row of each.
static float dot_rows(const void* a, int64_t a_at, const void* b, int64_t b_at, int64_t count,
                      ElementType type) {
  alignas(64) float left[kRowBlock], right[kRowBlock];
  float out = 0.0f;
  for_row_blocks(count, 0, [&](int64_t at, int64_t part) {
    const float *x = widen(a, a_at + at, part, type, left),
                *y = widen(b, b_at + at, part, type, right);
    Floats sum = {};
    int64_t i = 0;
    for (; i + kLanes <= part; i += kLanes) sum += load_floats(x + i) * load_floats(y + i);
    if (i < part) sum += load_some(x + i, part - i, 0.0f) * load_some(y + i, part - i, 0.0f);
    out += sum_of_lanes(sum);
  });
  return out;
}

static void scale_floats(float* values, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_floats(values + i, load_floats(values + i) * scale);
}
static void add_floats(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_floats(to + i, load_floats(to + i) + load_floats(from + i));
}

/// What is added up of dK and dV of a key head: rows of floats.
struct KeyGradients {
  float *dk, *dv;
  int64_t padded, padded_v;

  KeyGradients(const Attention& p, float* at)
      : dk(at),
        padded(attention_cpu_padded(p.head_dim)),
        padded_v(attention_cpu_padded(p.head_dim_v)) {
    dv = dk + p.length_k * padded;
  }
  static int64_t floats(const Attention& p) {
    return p.length_k * (attention_cpu_padded(p.head_dim) + attention_cpu_padded(p.head_dim_v));
  }

  /// Writes the rows [begin, end).
  void store(const AttentionBackward& call, const AttentionSequence& s, int64_t begin,
             int64_t end) const {
    const Attention& p = call.problem;
    const auto type = p.type;
    scale_floats(dk + begin * padded, (end - begin) * padded, p.scale);
    for (int64_t row = begin; row < end; ++row) {
      store_row(dk + row * padded, call.dk.data, s.row_k(call.dk, row), p.head_dim, type);
      store_row(dv + row * padded_v, call.dv.data, s.row_k(call.dv, row), p.head_dim_v, type);
    }
  }

 private:
  static void store_row(const float* from, void* to, int64_t at, int64_t count, ElementType type) {
    narrow(from, to, at, count, type);
  }
};

template <bool kPairs>
class BackwardHeads {
 public:
  explicit BackwardHeads(const AttentionBackward& call)
      : call_(call),
        p_(call.problem),
        type_(call.problem.type),
        dim_(p_.head_dim),
        dim_v_(p_.head_dim_v),
        words_(words_of<kPairs>(dim_)),
        words_v_(words_of<kPairs>(dim_v_)),
        padded_(attention_cpu_padded(dim_)),
        padded_v_(attention_cpu_padded(dim_v_)),
        parts_(attention_cpu_parts(p_)),
        scratch_(p_.length_k * (words_ + words_v_) + (kPairs ? (p_.length_k + 1) / 2 * dim_ : 0) +
                 (parts_ > 1 ? 0 : KeyGradients::floats(p_)) + kTile * (padded_ + padded_v_) +
                 kStride * (words_ + words_v_ + dim_) + 3 * kKeys * kStride + buffer_floats() +
                 256),
        k_(scratch_.take(p_.length_k * words_)),
        v_(scratch_.take(p_.length_k * words_v_)),
        k_steps_(scratch_.take(kPairs ? (p_.length_k + 1) / 2 * dim_ : 0)),
        sums_(p_, parts_ > 1 ? nullptr : scratch_.take(KeyGradients::floats(p_))),
        q_(scratch_.take(kTile * padded_)),
        do_(scratch_.take(kTile * padded_v_)),
        q_transposed_(scratch_.take(words_ * kStride)),
        do_transposed_(scratch_.take(words_v_ * kStride)),
        dq_(scratch_.take(dim_ * kStride)),
        s_(scratch_.take(kKeys * kStride)),
        ds_(scratch_.take(kKeys * kStride)),
        slopes_(scratch_.take(kKeys * kStride)),
        buffer_(scratch_.take(buffer_floats())) {}

  bool ready() const { return static_cast<bool>(scratch_); }

  /// An item; its dK and dV go to `sums`, if there are several parts.
  void compute(int64_t item, float* sums) {
    const int64_t both = item / parts_, part = item % parts_, group = p_.heads_q / p_.heads_k;
    const int64_t batch = both / p_.heads_k, head = both % p_.heads_k * group;
    const AttentionSequence keys(p_, batch, head);
    if (parts_ > 1) sums_ = KeyGradients(p_, sums + item * KeyGradients::floats(p_));
    memset(sums_.dk, 0, static_cast<size_t>(KeyGradients::floats(p_)) * sizeof(float));
    load_keys(keys);
    const int64_t tiles = ceil_div(keys.length_q, kTile);
    for (int64_t tile = part; tile < group * tiles; tile += parts_) {
      add_tile(AttentionSequence(p_, batch, head + tile / tiles), tile % tiles * kTile);
    }
    if (parts_ == 1) sums_.store(call_, keys, 0, keys.length_k);
  }

 private:
  int64_t buffer_floats() const {
    return kTile * kKeys + kKeys * kStride + kTile * most(padded_, padded_v_);
  }

  /// K and V as left operands, side by side, for all tiles.
  void load_keys(const AttentionSequence& s) {
    const AttentionTensor &k = call_.k, &v = call_.v;
    const int64_t at = s.row_k(k, 0), at_v = s.row_k(v, 0);
    load_rows<kPairs>(k.data, at, k.row, s.length_k, dim_, type_, k_, words_);
    load_rows<kPairs>(v.data, at_v, v.row, s.length_k, dim_v_, type_, v_, words_v_);
    if (kPairs) load_steps<kPairs>(k.data, at, k.row, s.length_k, dim_, type_, k_steps_, dim_);
  }

  void load_tile(const AttentionSequence& s, int64_t first, int64_t rows) {
    const AttentionTensor &q = call_.q, &d_o = call_.d_o;
    const int64_t q_at = s.row_q(q, first), do_at = s.row_q(d_o, first);
    load_steps<kPairs>(q.data, q_at, q.row, rows, dim_, type_, q_, padded_);
    load_steps<kPairs>(d_o.data, do_at, d_o.row, rows, dim_v_, type_, do_, padded_v_);
    load_transposed<kPairs>(q.data, q_at, q.row, rows, dim_, type_, q_transposed_, buffer_);
    load_transposed<kPairs>(d_o.data, do_at, d_o.row, rows, dim_v_, type_, do_transposed_, buffer_);
    memset(dq_, 0, static_cast<size_t>(dim_ * kStride) * sizeof(float));
    const int64_t lse_at =
        (p_.packed() ? 0 : s.batch) * call_.lse_batch + s.head * call_.lse_head + s.first_q + first;
    for (int64_t i = 0; i < kTile; ++i)
      lse_[i] = kAttentionInfinity,
      delta_[i] = 0.0f;  // a weight of zero, as where nothing was seen
    for (int64_t i = 0; i < rows; ++i) {
      const float lse = call_.lse[lse_at + i];
      if (lse != -kAttentionInfinity) lse_[i] = lse;
      delta_[i] = dot_rows(call_.o.data, s.row_q(call_.o, first + i), d_o.data, do_at + i * d_o.row,
                           dim_v_, type_);
      if (call_.d_lse) delta_[i] -= call_.d_lse[lse_at + i];
    }
  }

  void add_tile(const AttentionSequence& s, int64_t first) {
    const int64_t rows = least(kTile, s.length_q - first), columns = rounded_up(rows, kLanes);
    const KeyRange range(p_, s, first, rows);
    const Scores scores(p_, s, first, rows);
    load_tile(s, first, rows);
    for (int64_t key = range.begin / kKeys * kKeys; key < range.end; key += kKeys) {
      add_block(scores, key, least(kKeys, s.length_k - key), rows, columns);
    }
    scale_floats(dq_, dim_ * kStride, p_.scale);
    store_transposed(dq_, rows, dim_, call_.dq.data, s.row_q(call_.dq, first), call_.dq.row, type_,
                     buffer_);
  }

  void add_block(const Scores& scores, int64_t key, int64_t keys, int64_t rows, int64_t columns) {
    multiply<kPairs>({k_ + key * words_, words_, 1, q_transposed_, kStride, s_, kStride, keys,
                      columns, words_, false});
    scores.apply(s_, slopes_, key, keys, buffer_);
    multiply<kPairs>({v_ + key * words_v_, words_v_, 1, do_transposed_, kStride, ds_, kStride, keys,
                      columns, words_v_, false});
    differentiate(scores, keys, columns);
    const float *p = kPairs ? p_pairs_ : s_, *ds = kPairs ? ds_pairs_ : ds_;
    const int64_t left_row = kPairs ? kTile / 2 : kStride, steps = words_of<kPairs>(rows);
    float *dk = sums_.dk + key * padded_, *dv = sums_.dv + key * padded_v_;
    multiply<kPairs>({p, left_row, 1, do_, padded_v_, dv, padded_v_, keys, padded_v_, steps, true});
    multiply<kPairs>({ds, left_row, 1, q_, padded_, dk, padded_, keys, padded_, steps, true});
    if constexpr (kPairs) {
      multiply<true>({k_steps_ + key / 2 * dim_, 1, dim_, ds_, 2 * kStride, dq_, kStride, dim_,
                      columns, words_of<true>(keys), true});
    } else {
      multiply<false>(
          {k_ + key * words_, 1, words_, ds_, kStride, dq_, kStride, dim_, columns, keys, true});
    }
  }

  /// S^T and dP^T become P^T and dS^T. Of pairs, dS^T is needed with neighbouring queries together
  /// and with neighbouring keys.
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
          const Words rounded = round_to_upper_half(gradient) >> 16;
          store_bf16(reinterpret_cast<uint16_t*>(p_pairs_ + i * (kTile / 2)) + j, weight);
          store_halves(reinterpret_cast<uint16_t*>(ds_pairs_ + i * (kTile / 2)) + j, rounded);
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
  ElementType type_;
  int64_t dim_, dim_v_, words_, words_v_, padded_, padded_v_, parts_;
  Scratch scratch_;
  float *k_, *v_, *k_steps_;  // of the key head
  KeyGradients sums_;
  float *q_, *do_, *q_transposed_, *do_transposed_, *dq_;  // of the tile
  float *s_, *ds_, *slopes_, *buffer_;                     // of the block
  alignas(64) float lse_[kTile], delta_[kTile], p_pairs_[kPairs ? kKeys * kTile / 2 : 1],
      ds_pairs_[kPairs ? kKeys * kTile / 2 : 1];
};

template <bool kPairs>
static bool backward_items(const AttentionBackward& call, float* workspace, int64_t* taken) {
  BackwardHeads<kPairs> heads(call);
  if (!heads.ready()) return false;
  const int64_t items = attention_cpu_items(call);
  for (int64_t item = take_item(taken); item < items; item = take_item(taken))
    heads.compute(item, workspace);
  return true;
}

bool attention_backward_cpu(const AttentionBackward& call, float* workspace, int64_t* taken) {
  if (call.problem.type == ElementType::bf16 && multiplies_bf16())
    return backward_items<true>(call, workspace, taken);
  return backward_items<false>(call, workspace, taken);
}

void attention_add_parts_cpu(const AttentionBackward& call, float* workspace, int64_t begin,
                             int64_t end) {
  const Attention& p = call.problem;
  const int64_t parts = attention_cpu_parts(p), floats = KeyGradients::floats(p),
                blocks = attention_cpu_key_blocks(p);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t both = item / blocks, first = item % blocks * kKeys;
    const AttentionSequence s(p, both / p.heads_k, both % p.heads_k * (p.heads_q / p.heads_k));
    const int64_t last = least(first + kKeys, s.length_k);
    if (first >= last) continue;
    const KeyGradients sums(p, workspace + both * parts * floats);
    for (int64_t part = 1; part < parts; ++part) {
      const KeyGradients more(p, sums.dk + part * floats);
      add_floats(sums.dk + first * sums.padded, more.dk + first * sums.padded,
                 (last - first) * sums.padded);
      add_floats(sums.dv + first * sums.padded_v, more.dv + first * sums.padded_v,
                 (last - first) * sums.padded_v);
    }
    sums.store(call, s, first, last);
  }
}

}  // namespace flexops::FLEXOPS_ISA
