// flexops::attention and its gradient: from the operators' arguments to the launchers'.
#pragma once

#include "attention/attention.h"
#include "common/host.h"

namespace flexops {

/// The operators' arguments behind the tensors that are attended.
struct AttentionOptions {
  bool heads_first;
  int64_t right, left;
  const double* scale;
  const TensorView& bias;
  double softcap;
  const TensorView &alibi, &sinks, &cumulative_q, &cumulative_k;
  int64_t max_q, max_k, score_mod;
};

/// Which dimension has rows, and which one heads: of [batch, length, heads, columns], of [batch,
/// heads, length, columns] with `heads_first`, and, packed, of [tokens, heads, columns].
struct AttentionLayout {
  int64_t row, head;
  AttentionLayout(int64_t dim, bool heads_first)
      : row(dim - (heads_first ? 2 : 3)), head(dim - (heads_first ? 3 : 2)) {}
};

inline AttentionTensor attention_view(const TensorView& tensor, AttentionLayout at) {
  return {tensor.data, tensor.dim > 3 ? tensor.strides[0] : 0, tensor.strides[at.row],
          tensor.strides[at.head]};
}

/// Of another one's dtype and shape, `columns` excepted. In memory the heads of a row are
/// neighbours, however dimensions are named.
inline Tensor attention_rows(Host& host, const TensorView& like, int64_t columns,
                             AttentionLayout at) {
  int64_t sizes[4], strides[4], stride = 1;
  const int64_t from_within[] = {like.dim - 1, at.head, at.row, 0};
  for (int64_t i = 0; i < like.dim; ++i) {
    const int64_t d = from_within[i];
    sizes[d] = i == 0 ? columns : like.sizes[d], strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return host.empty_strided(sizes, strides, like.dim, like.dtype);
}

/// Whether dimensions [0, dim) have the same sizes.
inline bool same_sizes(const TensorView& a, const TensorView& b, int64_t dim) {
  bool same = true;
  for (int64_t d = 0; same && d < dim; ++d) same = a.sizes[d] == b.sizes[d];
  return same;
}

/// As many dimensions as a broadcast to four has, the last `dim` of them the tensor's.
inline void put_broadcast_strides(const char* op, const TensorView& bias,
                                  const int64_t (&target)[4], int64_t (&strides)[4]) {
  const int64_t missing = 4 - bias.dim;
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < 4; ++d) {
    const int64_t size = d < missing ? 1 : bias.sizes[d - missing];
    fits = size == 1 || size == target[d];
    strides[d] = size == 1 ? 0 : bias.strides[d - missing];
  }
  FLEXOPS_CHECK(fits, op, ": bias must be broadcastable to [", target[0], ", ", target[1], ", ",
                target[2], ", ", target[3], "], got ", shape_text(bias));
}

inline Attention make_attention(const char* op, const TensorView& q, const TensorView& k,
                                const TensorView& v, const AttentionOptions& o) {
  FLEXOPS_CHECK(!FLEXOPS_DEVICE_CUDA || q.dtype != Dtype::f32, op,
                ": q must be float16 or bfloat16, got float32");
  const bool packed = static_cast<bool>(o.cumulative_q);
  FLEXOPS_CHECK(packed == static_cast<bool>(o.cumulative_k), op,
                ": cu_seqlens_q and cu_seqlens_k must both be given, or neither");
  const int64_t dim = packed ? 3 : 4;
  const char* form = packed          ? "[tokens, heads, head_dim]"
                     : o.heads_first ? "[batch, heads, length, head_dim]"
                                     : "[batch, length, heads, head_dim]";
  FLEXOPS_CHECK(!(packed && o.heads_first), op,
                ": heads_first must be false with cu_seqlens_q and cu_seqlens_k");
  FLEXOPS_CHECK(q.dim == dim, op, ": q must have shape ", form, ", got ", shape_text(q));
  const AttentionLayout at(dim, o.heads_first);
  FLEXOPS_CHECK(k.dim == dim && k.size(-1) == q.size(-1) && (packed || k.size(0) == q.size(0)), op,
                ": k must have q's shape ", shape_text(q), ", length and heads excepted, got ",
                shape_text(k));
  const int64_t heads = q.size(at.head), heads_k = k.size(at.head);
  FLEXOPS_CHECK(heads == 0 || (heads_k > 0 && heads % heads_k == 0), op,
                ": k must have a number of heads that divides q's ", heads, ", got ",
                shape_text(k));
  FLEXOPS_CHECK(v.dim == dim && same_sizes(v, k, dim - 1), op, ": v must have k's shape ",
                shape_text(k), ", head_dim excepted, got ", shape_text(v));

  Attention a = {};
  a.type = element_type(q);
  a.heads_q = heads, a.heads_k = heads_k, a.head_dim = q.size(-1), a.head_dim_v = v.size(-1);
  a.rows_q = q.size(at.row), a.rows_k = k.size(at.row);
  a.batch = q.size(0), a.length_q = a.rows_q, a.length_k = a.rows_k;
  const auto fits = [](int64_t columns) {
    return columns % 8 == 0 && columns > 0 && columns <= 256;
  };
  FLEXOPS_CHECK(!FLEXOPS_DEVICE_CUDA || (fits(a.head_dim) && fits(a.head_dim_v)), op,
                ": q must have a head_dim that is a multiple of 8, up to 256, got ", a.head_dim,
                " and v's ", a.head_dim_v);
  if (packed) {
    const TensorView* both[] = {&o.cumulative_q, &o.cumulative_k};
    for (const TensorView* each : both) {
      FLEXOPS_CHECK(each->dim == 1 && each->numel >= 1 && each->numel == both[0]->numel, op, ": ",
                    each == both[0] ? "cu_seqlens_q" : "cu_seqlens_k",
                    " must have shape [sequences + 1], got ", shape_text(*each));
    }
    a.batch = both[0]->numel - 1;
    a.length_q = o.max_q < a.rows_q ? o.max_q : a.rows_q,
    a.length_k = o.max_k < a.rows_k ? o.max_k : a.rows_k;
    a.cumulative_q = both[0]->as<int32_t>(), a.cumulative_k = both[1]->as<int32_t>();
  }
  FLEXOPS_CHECK(o.max_q >= 0 && o.max_k >= 0, op,
                ": max_seqlen_q and max_seqlen_k must be numbers of tokens, got ", o.max_q, " and ",
                o.max_k);
  FLEXOPS_CHECK(a.rows_q < (int64_t{1} << 29) && a.rows_k < (int64_t{1} << 29), op,
                ": q and k must have fewer than 2^29 tokens a sequence");
  FLEXOPS_CHECK(!FLEXOPS_DEVICE_CUDA || (a.batch < 65536 && heads < 65536), op,
                ": q must have fewer than 65536 sequences and heads");

  a.scale = o.scale          ? static_cast<float>(*o.scale)
            : a.head_dim > 0 ? 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim))
                             : 1.0f;
  a.window_left = o.left, a.window_right = o.right, a.softcap = static_cast<float>(o.softcap),
  a.score_mod = static_cast<uint64_t>(o.score_mod);
  FLEXOPS_CHECK(FLEXOPS_DEVICE_CUDA || !a.score_mod, op, ": score_mod must be None on a CPU");
  FLEXOPS_CHECK(!a.score_mod || (!o.alibi && !(o.softcap > 0)), op,
                ": score_mod must come without softcap and alibi_slopes");
  if (o.bias) {
    const bool words = o.bias.dtype == Dtype::i32;  // what a score_mod looks things up in
    FLEXOPS_CHECK(words == (a.score_mod != 0), op,
                  ": bias must be int32 with a score_mod, else bool or of floats, got ",
                  dtype_name(o.bias.dtype));
    a.bias = o.bias.data;
    if (words) {
      FLEXOPS_CHECK(o.bias.dim == 1 && o.bias.is_contiguous(), op,
                    ": bias must be the score_mod's words, got ", shape_text(o.bias));
    } else {
      const int64_t target[4] = {a.batch, heads, packed ? o.max_q : a.length_q,
                                 packed ? o.max_k : a.length_k};
      put_broadcast_strides(op, o.bias, target, a.bias_strides);
      a.bias_type = o.bias.dtype;
    }
  }
  if (o.alibi) {
    const int64_t d = o.alibi.dim;
    FLEXOPS_CHECK((d == 1 || (d == 2 && o.alibi.size(0) == a.batch)) && o.alibi.size(-1) == heads,
                  op, ": alibi_slopes must have shape [heads] or [batch, heads], got ",
                  shape_text(o.alibi));
    a.alibi = o.alibi.as<float>();
    a.alibi_strides[0] = d == 2 ? o.alibi.stride(0) : 0, a.alibi_strides[1] = o.alibi.stride(-1);
  }
  if (o.sinks) {
    FLEXOPS_CHECK(o.sinks.dim == 1 && o.sinks.numel == heads, op,
                  ": sinks must have shape [heads], got ", shape_text(o.sinks));
    a.sinks = o.sinks.as<float>();
  }
  return a;
}

template <class Call>
inline void run_attention(Host& host, const Call& call,
                          const char* (*launcher)(const Call&, void*, void*)) {
  const int64_t bytes = attention_workspace(call);
  host.check(launcher(call, bytes > 0 ? host.workspace<char>(bytes) : nullptr, host.stream()));
}

/// No kernel writes rows of packed tensors that belong to no sequence.
inline void clear_attention(const Tensor& tensor, float value) {
  if (tensor.dtype() != Dtype::f32) {
    memset(tensor.data(), 0, static_cast<size_t>(tensor.numel() * dtype_size(tensor.dtype())));
    return;
  }
  float* numbers = tensor.data<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) numbers[i] = value;
}

/// Calls `kernel` once for each of torch's threads, at most for each `grain` items; together they
/// take all of the items.
template <class Kernel>
inline void share_out(const char* op, int64_t items, int64_t grain, const Kernel& kernel) {
  int64_t taken = 0, failed = 0;
  parallel_for(0, items, grain, [&](int64_t, int64_t) {
    if (!kernel(&taken)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  });
  FLEXOPS_CHECK(failed == 0, op, ": there is no memory for its tiles");
}

inline void attention_host(Host& host, const TensorView& q, const TensorView& k,
                           const TensorView& v, bool heads_first, int64_t right, int64_t left,
                           const double* scale, bool, const TensorView& bias, double softcap,
                           const TensorView& alibi, const TensorView& sinks,
                           const TensorView& cumulative_q, const TensorView& cumulative_k,
                           int64_t max_q, int64_t max_k, int64_t score_mod, Tensor& out,
                           Tensor& lse) {
  AttentionForward c = {};
  c.problem = make_attention(host.op, q, k, v,
                             {heads_first, right, left, scale, bias, softcap, alibi, sinks,
                              cumulative_q, cumulative_k, max_q, max_k, score_mod});
  const Attention& a = c.problem;
  const AttentionLayout at(q.dim, heads_first);
  const int64_t lse_shape[3] = {a.packed() ? a.heads_q : a.batch, a.packed() ? a.rows_q : a.heads_q,
                                a.rows_q};
  out = attention_rows(host, q, a.head_dim_v, at);
  lse = host.empty(lse_shape, q.dim - 1, Dtype::f32);
  c.q = attention_view(q, at), c.k = attention_view(k, at), c.v = attention_view(v, at);
  c.o = attention_view(view_of(out), at);
  c.lse = lse.data<float>(), c.lse_batch = a.packed() ? 0 : a.heads_q * a.rows_q,
  c.lse_head = a.rows_q;
  if (FLEXOPS_DEVICE_CUDA) return run_attention(host, c, attention_cuda);
  if (a.packed()) clear_attention(out, 0.0f), clear_attention(lse, -__builtin_inff());
  constexpr int64_t kProducts = 1 << 16;  // that are worth a thread
  const int64_t items = attention_cpu_items(c),
                each = kAttentionRows * (a.length_k + 1) * (a.head_dim + a.head_dim_v + 1);
  share_out(host.op, items, kProducts / each,
            [&](int64_t* taken) { return FLEXOPS_ISA_CALL(attention_cpu)(c, taken); });
}

inline void attention_backward_host(Host& host, const TensorView& grad, const TensorView& grad_lse,
                                    const TensorView& q, const TensorView& k, const TensorView& v,
                                    const TensorView& out, const TensorView& lse, bool heads_first,
                                    int64_t right, int64_t left, const double* scale,
                                    bool deterministic, const TensorView& bias, double softcap,
                                    const TensorView& alibi, const TensorView& sinks,
                                    const TensorView& cumulative_q, const TensorView& cumulative_k,
                                    int64_t max_q, int64_t max_k, int64_t score_mod, Tensor& dq,
                                    Tensor& dk, Tensor& dv) {
  AttentionBackward c = {};
  c.problem = make_attention(host.op, q, k, v,
                             {heads_first, right, left, scale, bias, softcap, alibi, sinks,
                              cumulative_q, cumulative_k, max_q, max_k, score_mod});
  const Attention& a = c.problem;
  for (const TensorView* each : {&grad, &out}) {
    FLEXOPS_CHECK(
        each->dim == q.dim && each->size(-1) == a.head_dim_v && same_sizes(*each, q, q.dim - 1),
        host.op, ": ", each == &grad ? "grad" : "out", " must have q's shape ", shape_text(q),
        " with v's head_dim, got ", shape_text(*each));
  }
  for (const TensorView* each : {&lse, grad_lse ? &grad_lse : &lse}) {
    FLEXOPS_CHECK(each->dim == q.dim - 1 && each->size(-1) == a.rows_q &&
                      each->size(-2) == a.heads_q && (each->dim < 3 || each->size(0) == q.size(0)),
                  host.op, ": ", each == &lse ? "lse" : "grad_lse",
                  " must have a number for each row of q, ", shape_text(q), ", got ",
                  shape_text(*each));
  }
  const AttentionLayout at(q.dim, heads_first);
  dq = attention_rows(host, q, a.head_dim, at), dk = attention_rows(host, k, a.head_dim, at),
  dv = attention_rows(host, v, a.head_dim_v, at);
  c.q = attention_view(q, at), c.k = attention_view(k, at), c.v = attention_view(v, at),
  c.o = attention_view(out, at), c.d_o = attention_view(grad, at);
  c.dq = attention_view(view_of(dq), at), c.dk = attention_view(view_of(dk), at),
  c.dv = attention_view(view_of(dv), at);
  c.lse = lse.as<float>(), c.d_lse = grad_lse ? grad_lse.as<float>() : nullptr;
  c.lse_batch = a.packed() ? 0 : a.heads_q * a.rows_q, c.lse_head = a.rows_q;
  c.deterministic = deterministic;
  if (FLEXOPS_DEVICE_CUDA) return run_attention(host, c, attention_backward_cuda);
  const bool none = a.batch == 0 || a.heads_q == 0 || a.rows_q == 0;
  if (a.packed() || none)
    clear_attention(dq, 0.0f), clear_attention(dk, 0.0f), clear_attention(dv, 0.0f);
  if (none) return;
  float* parts = host.workspace<float>(attention_cpu_workspace(c));
  share_out(host.op, attention_cpu_items(c), 1, [&](int64_t* taken) {
    return FLEXOPS_ISA_CALL(attention_backward_cpu)(c, parts, taken);
  });
  parallel_for(0, attention_cpu_sums(c), 4, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(attention_add_parts_cpu)(c, parts, begin, end);
  });
}

}  // namespace flexops
