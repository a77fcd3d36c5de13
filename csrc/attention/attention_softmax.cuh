// Online softmax on the fragments of a matrix product's accumulators, and their way to memory.
//
// The fragment of mma.sync and of wgmma alike: a lane has rows lane / 4 and lane / 4 + 8 of its
// warp's 16, and columns 8 j + lane % 4 * 2 (+ 1) of them, as fragment[4 j + 2 (second row) (+ 1)].
// Four lanes, a quad, share a row.
#pragma once

#include "attention/attention_score.cuh"

namespace flexops::attention {

FLEXOPS_DEVICE int lane_id() { return static_cast<int>(threadIdx.x % 32); }
/// The first column of a lane's pair, and its first row.
FLEXOPS_DEVICE int lane_column() { return lane_id() % 4 * 2; }
FLEXOPS_DEVICE int lane_row() { return lane_id() / 4; }

FLEXOPS_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
FLEXOPS_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

/// The first `kFirst` elements to the end, so that a loop finds the next ones where they were:
/// registers have no index.
template <int kFirst, int N>
FLEXOPS_DEVICE void rotate(float (&x)[N]) {
  if constexpr (kFirst < N) {
    float first[kFirst];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < kFirst) first[i] = x[i];
      x[i] = i + kFirst < N ? x[i + kFirst] : first[i + kFirst - N];
    }
  }
}

/// How many of a fragment's scores a modifier's code is written out for.
template <class Modifier, int N>
FLEXOPS_DEVICE constexpr int scores_at_once() {
  constexpr int kAtOnce = kScoresAtOnce<Modifier> > 0 ? kScoresAtOnce<Modifier> : N;
  static_assert(N % kAtOnce == 0 && kAtOnce % 4 == 0);
  return kAtOnce;
}

/// Modified and masked scores. `row` and `key` are those of the fragment's first element.
template <class Modifier, int N>
FLEXOPS_DEVICE void modify(float (&scores)[N], const Modifier& modifier, int row, int key) {
  if constexpr (!Modifier::kPlain) {
    constexpr int kAtOnce = scores_at_once<Modifier, N>();
#pragma unroll 1
    for (int first = 0; first < N; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        scores[i] =
            modifier.value(scores[i], row + i / 2 % 2 * 8, key + 2 * first + i / 4 * 8 + i % 2);
      }
      rotate<kAtOnce>(scores);
    }
  }
}
/// The same, while `gradient`, dP, becomes that of the product. `delta`: of the two rows.
template <class Modifier, int N>
FLEXOPS_DEVICE void modify(float (&scores)[N], float (&gradient)[N], const float (&delta)[2],
                           const Modifier& modifier, int row, int key) {
  constexpr int kAtOnce = scores_at_once<Modifier, N>();
#pragma unroll 1
  for (int first = 0; first < N; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float slope;
      scores[i] =
          modifier(scores[i], row + i / 2 % 2 * 8, key + 2 * first + i / 4 * 8 + i % 2, slope);
      gradient[i] = (gradient[i] - delta[i / 2 % 2]) * slope;
    }
    rotate<kAtOnce>(scores), rotate<kAtOnce>(gradient);
  }
}
template <int N>
FLEXOPS_DEVICE void mask(float (&scores)[N], const Problem& p, const Sequence& s, int row,
                         int key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Visible visible(p, s, row + 8 * r);
    const int lowest = visible.lowest - key, highest = visible.highest - key;
#pragma unroll
    for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
      const int column = i / 4 * 8 + i % 2;
      if (column < lowest || column >= highest) scores[i] = -infinity();
    }
  }
}

/// The same for scores that are transposed, rows being keys. `gradient`, dP - delta, becomes that
/// of the product.
template <class Modifier, int N>
FLEXOPS_DEVICE void modify_transposed(float (&scores)[N], float (&gradient)[N], const Problem& p,
                                      int batch, int head, int key, int query) {
  if constexpr (!Modifier::kPlain) {
    const Sequence s(p, batch, head);
    const Modifier modifier(p, s);
    constexpr int kAtOnce = scores_at_once<Modifier, N>();
#pragma unroll 1
    for (int first = 0; first < N; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float slope;
        scores[i] =
            modifier(scores[i], query + 2 * first + i / 4 * 8 + i % 2, key + i / 2 % 2 * 8, slope);
        gradient[i] *= slope;
      }
      rotate<kAtOnce>(scores), rotate<kAtOnce>(gradient);
    }
  }
}
template <int N>
FLEXOPS_DEVICE void mask_transposed(float (&scores)[N], const Problem& p, const Sequence& s,
                                    int key, int query) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int diagonal = key + 8 * r - s.offset - query,
              lowest = diagonal - p.window_right;  // queries, from `query` on
    const int highest = key + 8 * r < s.length_k ? diagonal + p.window_left + 1 : 0;
#pragma unroll
    for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) {
      const int column = i / 4 * 8 + i % 2;
      if (column < lowest || column >= highest) scores[i] = -infinity();
    }
  }
}

FLEXOPS_DEVICE float2 load_shared_pair(u32 address) {
  float2 out;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(out.x), "=f"(out.y)
               : "r"(address)
               : "memory");
  return out;
}
/// Backward: transposed scores become weights, 2^(scale score - exponent of the query).
/// `exponents`: those of the lane's first column on.
template <int N>
FLEXOPS_DEVICE void weigh(float (&scores)[N], float scale, u32 exponents) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const float2 exponent = load_shared_pair(exponents + 32 * j);
#pragma unroll
    for (int r = 0; r < 4; ++r)
      scores[4 * j + r] =
          exp2_approx(fmaf(scores[4 * j + r], scale, -(r % 2 ? exponent.y : exponent.x)));
  }
}
/// dP - delta, transposed. `deltas`: those of the lane's first column on.
template <int N>
FLEXOPS_DEVICE void subtract(float (&dp)[N], u32 deltas) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const float2 delta = load_shared_pair(deltas + 32 * j);
#pragma unroll
    for (int r = 0; r < 4; ++r) dp[4 * j + r] -= r % 2 ? delta.y : delta.x;
  }
}
/// dP - delta becomes dS.
template <int N>
FLEXOPS_DEVICE void multiply(float (&gradient)[N], const float (&weights)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) gradient[i] *= weights[i];
}

/// The running maximum and sum of a lane's two rows; the sum is of the lane's own columns until the
/// end.
struct Rows {
  float max[2] = {-infinity(), -infinity()}, sum[2] = {0, 0};

  /// Scores become 2^(scale (score - max)), and what was summed before has to be multiplied by
  /// `correction`.
  template <int N>
  FLEXOPS_DEVICE void update(float (&scores)[N], float scale, float (&correction)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float best = max[r], other = scores[2 * r];
#pragma unroll
      for (int i = 2 * r; i < N; i += 4)
        best = fmaxf(best, scores[i]), other = fmaxf(other, scores[i + 1]);
      best = quad_max(fmaxf(best, other));
      const float shift = best == -infinity() ? 0.0f : best * scale;  // a row that saw nothing yet
      correction[r] = exp2_approx(fmaf(max[r], scale, -shift));
      max[r] = best;
      float low = 0, high = 0;
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) {
        scores[i] = exp2_approx(fmaf(scores[i], scale, -shift)),
        scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale, -shift));
        low += scores[i], high += scores[i + 1];
      }
      sum[r] = fmaf(sum[r], correction[r], low + high);
    }
  }

  /// At the end: what the output is multiplied by, and log sum exp, of row r. `sink`: a further
  /// score that has no value, or null.
  FLEXOPS_DEVICE float finish(int r, float scale, const float* sink, float& log_sum_exp) const {
    float total = quad_sum(sum[r]), shift = max[r] == -infinity() ? 0.0f : max[r] * scale,
          factor = 1.0f;
    if (sink) {
      const float with = fmaxf(*sink * kLog2E, max[r] * scale);
      factor = exp2_approx(shift - with);
      total = fmaf(total, factor, exp2_approx(*sink * kLog2E - with)), shift = with;
    }
    log_sum_exp = total > 0 ? fmaf(log2f(total), kLn2, shift * kLn2) : -infinity();
    return total > 0 ? factor / total : total == total ? 0.0f : total;
  }
};

/// Fragments as the next product's left operand.
template <class T, int N>
FLEXOPS_DEVICE void pack(u32 (&out)[N / 2], const float (&in)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[i] = pack2<T>(in[2 * i], in[2 * i + 1]);
}

template <int N>
FLEXOPS_DEVICE void scale_rows(float (&fragment)[N], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) fragment[i] *= factor[i / 2 % 2];
}

/// Four words of four lanes as a matrix, transposed: lane i's word j becomes lane j's word i.
FLEXOPS_DEVICE void transpose_quad(u32 (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane_id() & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 got = shuffle_xor(upper ? word[i] : word[i | bit], bit);
      (upper ? word[i] : word[i | bit]) = got;
    }
  }
}

/// A fragment's two rows to memory in type T, 16 bytes at a time: row r if `inside[r]`, of it
/// `columns` columns, a multiple of 8.
template <class T, int N>
FLEXOPS_DEVICE void store_rows(T* const (&row)[2], const bool (&inside)[2],
                               const float (&fragment)[N], int columns) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {  // 32 columns
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = pack2<T>(fragment[16 * j + 4 * i + 2 * r], fragment[16 * j + 4 * i + 2 * r + 1]);
      transpose_quad(word);
      const int column = 32 * j + lane_id() % 4 * 8;
      if (inside[r] && column < columns)
        *reinterpret_cast<uint4*>(row[r] + column) = uint4{word[0], word[1], word[2], word[3]};
    }
  }
}

/// A forward tile's end: O and log sum exp of a fragment whose first row is `row`.
template <class T, int N>
FLEXOPS_DEVICE void store_output(const ForwardParams& p, const Sequence& s, const Rows& rows,
                                 float scale, int row, float (&out)[N]) {
  T* to[2];
  bool inside[2];
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row + 8 * r;
    float log_sum_exp;
    factor[r] = rows.finish(r, scale, p.sinks ? p.sinks + s.head : nullptr, log_sum_exp);
    inside[r] = at < s.length_q;
    to[r] = s.rows_q<T>(p.o, at);
    if (p.lse && inside[r] && lane_id() % 4 == 0)
      p.lse[s.coordinate * p.lse_batch + s.head * p.lse_head + s.first_q + at] = log_sum_exp;
  }
  scale_rows(out, factor);
  store_rows<T>(to, inside, out, p.problem.head_dim_v);
}

/// A backward tile's end: a gradient of keys or values, from its fragment, whose first element is
/// (key, column), to head `head`.
template <class T, int N>
FLEXOPS_DEVICE void store_key_gradient(const Tensor& to, const Sequence& s, int head, int key,
                                       float (&gradient)[N], float scale, int columns, int column) {
  Sequence there = s;
  there.head_k = head;
  T* const rows[2] = {there.rows_k<T>(to, key) + column, there.rows_k<T>(to, key + 8) + column};
  const bool inside[2] = {key < s.length_k, key + 8 < s.length_k};
  scale_rows(gradient, {scale, scale});
  store_rows<T>(rows, inside, gradient, columns - column);
}
/// The same of queries.
template <class T, int N>
FLEXOPS_DEVICE void store_query_gradient(const Tensor& to, const Sequence& s, int query,
                                         const float (&gradient)[N], int columns, int column) {
  T* const rows[2] = {s.rows_q<T>(to, query) + column, s.rows_q<T>(to, query + 8) + column};
  const bool inside[2] = {query < s.length_q, query + 8 < s.length_q};
  store_rows<T>(rows, inside, gradient, columns - column);
}

}  // namespace flexops::attention
