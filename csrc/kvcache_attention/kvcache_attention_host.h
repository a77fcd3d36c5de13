// From the arguments of attention over a cache to its launchers' (what is declared of them:
// flexops/build/describe/families.py; flexops/ops/kvcache_*.py repeat the checks in more words).
#pragma once

#include "common/host.h"
#include "kvcache_attention/kvcache_attention.h"

namespace flexops {

using View = TensorView;

constexpr int64_t kMostTokens = int64_t{1} << 29;

inline void check_sizes(const char* op, const char* name, const View& x,
                        std::initializer_list<int64_t> sizes) {
  bool same = x.dim == static_cast<int64_t>(sizes.size());
  for (int64_t d = 0; same && d < x.dim; ++d) same = x.sizes[d] == sizes.begin()[d];
  FLEXOPS_CHECK(same, op, ": ", name, " must have shape ",
                sizes_text(sizes.begin(), static_cast<int64_t>(sizes.size())), ", got ",
                shape_text(x));
}

/// The arguments behind the tensors that are attended, as both operators have them.
struct CacheOptions {
  const View &cos, &sin, &seqlens;
  int64_t length;
  const View& leftpad;
  const double* scale;
  int64_t left, right;
  double softcap;
  bool interleaved;
  const View& alibi;
  int64_t splits;
  const View& sinks;
  bool from_leftpad, early;
};

inline AttentionTensor cache_view(const View& x) {
  return {x.data, x.strides[0], x.strides[1], x.strides[2]};
}

/// Two tensors of rows, [rows, tokens, heads, columns], whose memory is used as it is.
inline void put_caches(CacheAttention& c, const char* op, const View& k, const View& v) {
  Attention& a = c.attend.problem;
  c.rows = k.sizes[0], c.page = k.sizes[1], a.heads_k = k.sizes[2], a.head_dim_v = v.sizes[3];
  FLEXOPS_CHECK(a.heads_q == 0 || (a.heads_k > 0 && a.heads_q % a.heads_k == 0), op,
                ": k_cache must have a number of heads that divides q's ", a.heads_q, ", got ",
                shape_text(k));
  FLEXOPS_CHECK(a.head_dim % 8 == 0 && a.head_dim_v % 8 == 0 && a.head_dim > 0 &&
                    a.head_dim_v > 0 && a.head_dim <= 256 && a.head_dim_v <= 256,
                op, ": q must have a head_dim that is a multiple of 8, up to 256, got ", a.head_dim,
                " and v_cache's ", a.head_dim_v);
  bool fine = true;
  for (const View* x : {&k, &v}) {
    fine = fine && x->strides[3] == 1 && aligned(x->data);
    for (int64_t d = 0; d < 3; ++d) fine = fine && (x->sizes[d] <= 1 || x->strides[d] % 8 == 0);
  }
  FLEXOPS_CHECK(fine, op,
                ": k_cache and v_cache must have rows that begin at multiples of 16 bytes");
  c.attend.k = cache_view(k), c.attend.v = cache_view(v);
}

inline void put_capacity(CacheAttention& c, const char* op, int64_t tokens) {
  FLEXOPS_CHECK(tokens < kMostTokens, op, ": a sequence must have fewer than 2^29 tokens");
  c.attend.problem.length_k = c.attend.problem.rows_k = tokens;
}

inline void put_new(CacheAttention& c, const char* op, const View& k, const View& v) {
  const Attention& a = c.attend.problem;
  FLEXOPS_CHECK(k.dim == 4, op, ": k must have 4 dimensions, got ", shape_text(k));
  c.added = k.sizes[1];
  FLEXOPS_CHECK(c.added < kMostTokens, op, ": k must have fewer than 2^29 tokens");
  check_sizes(op, "k", k, {a.batch, c.added, a.heads_k, a.head_dim});
  check_sizes(op, "v", v, {a.batch, c.added, a.heads_k, a.head_dim_v});
  c.new_k = cache_view(k), c.new_v = cache_view(v);
}

inline void put_rotary(CacheAttention& c, const char* op, const CacheOptions& o) {
  const View &cos = o.cos, &sin = o.sin;
  FLEXOPS_CHECK(static_cast<bool>(cos) == static_cast<bool>(sin), op,
                ": rotary_cos and rotary_sin must both be given, or neither");
  if (!cos) return;
  FLEXOPS_CHECK(cos.dim == 2 && 2 * cos.sizes[1] <= c.attend.problem.head_dim, op,
                ": rotary_cos must have shape [positions, rotary_dim / 2], got ", shape_text(cos));
  FLEXOPS_CHECK(sin.dtype == cos.dtype, op, ": rotary_sin must be ", dtype_name(cos.dtype),
                ", as rotary_cos, got ", dtype_name(sin.dtype));
  check_sizes(op, "rotary_sin", sin, {cos.sizes[0], cos.sizes[1]});
  c.rotary_type = element_type(cos);
  c.cos = cos.data, c.sin = sin.data, c.cos_row = cos.strides[0], c.sin_row = sin.strides[0];
  c.positions = cos.sizes[0], c.half = cos.sizes[1];
  c.interleaved = o.interleaved, c.from_leftpad = o.from_leftpad;
}

/// Queries, caches, and the options; the capacity is `tokens`.
inline CacheAttention make_cached(const char* op, const View& q, const View& k_cache,
                                  const View& v_cache, int64_t tokens, const CacheOptions& o,
                                  const View& out, const View& lse) {
  CacheAttention c = {};
  Attention& a = c.attend.problem;
  FLEXOPS_CHECK(q.dim == 4, op, ": q must have 4 dimensions, got ", shape_text(q));
  a.type = element_type(q);
  a.batch = q.sizes[0], a.length_q = a.rows_q = q.sizes[1], a.heads_q = q.sizes[2],
  a.head_dim = q.sizes[3];
  FLEXOPS_CHECK(a.rows_q < kMostTokens, op, ": q must have fewer than 2^29 tokens");
  c.attend.q = cache_view(q);
  put_caches(c, op, k_cache, v_cache);
  put_capacity(c, op, tokens);
  put_rotary(c, op, o);
  c.seqlens = o.seqlens.as<int32_t>(), c.leftpad = o.leftpad.as<int32_t>();
  c.length = o.length < 0 ? tokens : least(o.length, tokens);
  if (o.alibi) {
    const bool of_batch = o.alibi.dim == 2;
    if (of_batch) {
      check_sizes(op, "alibi_slopes", o.alibi, {a.batch, a.heads_q});
    } else {
      check_sizes(op, "alibi_slopes", o.alibi, {a.heads_q});
    }
    a.alibi = o.alibi.as<float>();
    a.alibi_strides[0] = of_batch ? a.heads_q : 0, a.alibi_strides[1] = 1;
  }
  a.sinks = o.sinks.as<float>();
  a.scale = o.scale ? static_cast<float>(*o.scale)
                    : 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim));
  a.window_left = o.left, a.window_right = o.right, a.softcap = static_cast<float>(o.softcap);
  c.splits = o.splits, c.early = o.early;
  c.attend.o = cache_view(out);
  c.attend.lse = lse.as<float>(), c.attend.lse_batch = a.heads_q * a.length_q,
  c.attend.lse_head = a.length_q;
  return c;
}

template <class Call>
inline void run_cached(Host& host, const Call& call, int64_t bytes,
                       const char* (*launcher)(const Call&, void*, void*)) {
  host.check(launcher(call, bytes > 0 ? host.workspace<char>(bytes) : nullptr, host.stream()));
}

inline void kvcache_attention__host(Host& host, const View& q, const View& k_cache,
                                    const View& v_cache, const View& k, const View& v,
                                    const View& cos, const View& sin, const View& seqlens,
                                    int64_t length, const View& batch_idx, const View& leftpad,
                                    const View& table, const double* scale, int64_t left,
                                    int64_t right, double softcap, bool interleaved,
                                    const View& alibi, int64_t splits, const View& sinks,
                                    bool from_leftpad, bool early, const View& out,
                                    const View& lse) {
  const char* op = host.op;
  int64_t tokens = k_cache.sizes[1];
  if (table) {
    FLEXOPS_CHECK(table.dim == 2 && table.sizes[0] == q.sizes[0], op,
                  ": block_table must have shape [batch, pages], got ", shape_text(table));
    FLEXOPS_CHECK(tokens > 0 && !batch_idx, op,
                  ": pages must have tokens, and cache_batch_idx must not be given with them");
    tokens *= table.sizes[1];
  }
  FLEXOPS_CHECK(
      static_cast<bool>(k) == static_cast<bool>(v) && (!k || seqlens || length >= 0) && (!cos || k),
      op,
      ": k and v must both be given, with cache_seqlens, or neither; rotary_cos requires "
      "them");
  CacheAttention c = make_cached(op, q, k_cache, v_cache, tokens,
                                 {cos, sin, seqlens, length, leftpad, scale, left, right, softcap,
                                  interleaved, alibi, splits, sinks, from_leftpad, early},
                                 out, lse);
  if (table) c.table = table.as<int32_t>(), c.table_row = table.strides[0];
  if (k) put_new(c, op, k, v);
  c.batch_idx = batch_idx.as<int32_t>();
  run_cached(host, c, kvcache_attention_workspace(c), kvcache_attention_cuda);
}

// ---- codes ----

/// Shapes of kvcache_codes.cuh; c.cache has heads and columns.
inline void put_codes(CodesAttention& c, const char* op, const View& k_codes, const View& k_steps,
                      const View& v_codes, const View& v_steps, int64_t bits, int64_t group) {
  const Attention& a = c.cache.attend.problem;
  FLEXOPS_CHECK(bits == 8 || bits == 4, op, ": bits must be 8 or 4, got ", bits);
  FLEXOPS_CHECK(group == 32 || group == 64 || group == 128, op,
                ": group_size must be 32, 64 or 128, got ", group);
  c.bits = bits, c.group = group, c.value_group = least(group, a.head_dim_v);
  const int64_t tokens = k_codes.sizes[2];
  FLEXOPS_CHECK(
      tokens % group == 0 && a.head_dim == a.head_dim_v && a.head_dim_v % c.value_group == 0, op,
      ": k_codes must have a multiple of ", group, " tokens, got ", shape_text(k_codes));
  check_sizes(op, "k_codes", k_codes, {a.batch, a.heads_k, tokens, a.head_dim * bits / 8});
  check_sizes(op, "v_codes", v_codes, {a.batch, a.heads_k, tokens, a.head_dim_v * bits / 8});
  check_sizes(op, "k_steps", k_steps, {a.batch, a.heads_k, tokens / group, 2, a.head_dim});
  check_sizes(op, "v_steps", v_steps,
              {a.batch, a.heads_k, tokens / 32, a.head_dim_v / c.value_group, 2, 32});
  for (const View* x : {&k_codes, &k_steps, &v_codes, &v_steps})
    FLEXOPS_CHECK(x->is_contiguous() && aligned(x->data), op,
                  ": codes and steps must be contiguous");
  c.k_codes = k_codes.data, c.k_steps = k_steps.data, c.v_codes = v_codes.data,
  c.v_steps = v_steps.data;
}

inline void kvcache_codes_attention__host(
    Host& host, const View& q, const View& k, const View& v, const View& k_codes,
    const View& k_steps, const View& v_codes, const View& v_steps, const View& recent_k,
    const View& recent_v, const View& cos, const View& sin, const View& seqlens, int64_t length,
    const View& leftpad, int64_t bits, int64_t group_size, const double* scale, int64_t left,
    int64_t right, double softcap, bool interleaved, const View& alibi, int64_t splits,
    const View& sinks, bool from_leftpad, bool early, const View& out, const View& lse) {
  CodesAttention c = {};
  c.cache = make_cached(host.op, q, recent_k, recent_v, k_codes.sizes[2],
                        {cos, sin, seqlens, length, leftpad, scale, left, right, softcap,
                         interleaved, alibi, splits, sinks, from_leftpad, early},
                        out, lse);
  put_codes(c, host.op, k_codes, k_steps, v_codes, v_steps, bits, group_size);
  put_new(c.cache, host.op, k, v);
  c.residual = c.cache.page - group_size;
  FLEXOPS_CHECK(c.residual > 0, host.op, ": recent_k must have more tokens than group_size, got ",
                shape_text(recent_k));
  FLEXOPS_CHECK(seqlens || length >= 0, host.op, ": cache_seqlens must be given");
  run_cached(host, c, kvcache_codes_workspace(c), kvcache_codes_cuda);
}

inline void kvcache_compress__host(Host& host, const View& k, const View& v, const View& k_codes,
                                   const View& k_steps, const View& v_codes, const View& v_steps,
                                   int64_t first, int64_t bits, int64_t group_size) {
  CodesAttention c = {};
  Attention& a = c.cache.attend.problem;
  FLEXOPS_CHECK(k.dim == 4, host.op, ": k must have 4 dimensions, got ", shape_text(k));
  a.type = element_type(k);
  a.batch = c.cache.rows = k.sizes[0], a.heads_q = a.heads_k = k.sizes[2], a.head_dim = k.sizes[3],
  a.head_dim_v = v.sizes[3], a.length_q = a.rows_q = 1;
  put_codes(c, host.op, k_codes, k_steps, v_codes, v_steps, bits, group_size);
  put_capacity(c.cache, host.op, k_codes.sizes[2]);
  put_new(c.cache, host.op, k, v);
  FLEXOPS_CHECK(first >= 0 && first % group_size == 0 && c.cache.added % group_size == 0 &&
                    first + c.cache.added <= a.length_k,
                host.op, ": k must have whole groups of tokens that fit the cache, got ",
                shape_text(k), " from token ", first);
  host.check(kvcache_compress_cuda(c, first, host.stream()));
}

}  // namespace flexops
