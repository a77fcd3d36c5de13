// torch's view of attention over a cache: checks, shapes and registration (schema:
// flexops/ops/kvcache_attention.py, which repeats the checks in more words).

#include "common/binding.h"
#include "kvcache_attention/kvcache_attention.h"

namespace flexops {
namespace {

constexpr const char* kOp = "flexops::kvcache_attention_";

void check_shape(const char* argument, const Tensor& x, std::initializer_list<int64_t> sizes) {
  bool same = x.dim() == static_cast<int64_t>(sizes.size());
  int64_t d = 0;
  for (int64_t size : sizes) same = same && x.sizes()[d++] == size;
  FLEXOPS_CHECK(same, kOp, ": ", argument, " has the wrong shape, ", shape_text(x));
}
void check(const char* argument, const Tensor& x, const Tensor& like, Dtype dtype) {
  check_device(kOp, argument, x, "q", like);
  FLEXOPS_CHECK(x.dtype() == dtype, kOp, ": ", argument, " must be ", dtype_name(dtype), ", got ",
                dtype_name(x.dtype()));
}

/// Whether columns are neighbours, and rows begin at multiples of 16 bytes.
bool is_readable(const Tensor& x) {
  bool fine = x.strides()[x.dim() - 1] == 1 && aligned(x.data());
  for (int64_t d = 0; d < x.dim() - 1; ++d)
    fine = fine && (x.size(d) <= 1 || x.strides()[d] % 8 == 0);
  return fine;
}
AttentionTensor view(const Tensor& x) {
  return {x.data(), x.strides()[0], x.strides()[1], x.strides()[2]};
}

const int32_t* integers(const char* argument, std::optional<Tensor>& x, const Tensor& q) {
  if (!x) return nullptr;
  check(argument, *x, q, Dtype::i32);
  check_shape(argument, *x, {q.size(0)});
  *x = contiguous(*x);
  return x->data<int32_t>();
}
const float* of_heads(const char* argument, std::optional<Tensor>& x, const Tensor& q,
                      bool of_batch) {
  if (!x) return nullptr;
  check(argument, *x, q, Dtype::f32);
  if (x->dim() == 2 && of_batch) {
    check_shape(argument, *x, {q.size(0), q.size(2)});
  } else {
    check_shape(argument, *x, {q.size(2)});
  }
  *x = contiguous(*x);
  return x->data<float>();
}

std::tuple<Tensor, Tensor> kvcache_attention_(
    Tensor q, Tensor k_cache, Tensor v_cache, std::optional<Tensor> k, std::optional<Tensor> v,
    std::optional<Tensor> cos, std::optional<Tensor> sin, std::optional<Tensor> seqlens,
    int64_t length, std::optional<Tensor> batch_idx, std::optional<Tensor> leftpad,
    std::optional<Tensor> table, std::optional<double> scale, int64_t left, int64_t right,
    double softcap, bool interleaved, std::optional<Tensor> alibi, int64_t splits,
    std::optional<Tensor> sinks) {
  DeviceGuard guard(q);
  const Dtype dtype = q.dtype();
  FLEXOPS_CHECK(dtype == Dtype::f16 || dtype == Dtype::bf16, kOp,
                ": q must be float16 or bfloat16, got ", dtype_name(dtype));
  FLEXOPS_CHECK(q.dim() == 4, kOp, ": q must have 4 dimensions, got ", shape_text(q));
  CacheAttention c = {};
  Attention& a = c.attend.problem;
  a.type = element_type(kOp, "q", dtype);
  a.batch = q.size(0), a.length_q = a.rows_q = q.size(1), a.heads_q = q.size(2),
  a.head_dim = q.size(3);

  check("k_cache", k_cache, q, dtype), check("v_cache", v_cache, q, dtype);
  FLEXOPS_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4, kOp,
                ": k_cache and v_cache must have 4 dimensions, got ", shape_text(k_cache));
  c.rows = k_cache.size(0), a.heads_k = k_cache.size(2), a.head_dim_v = v_cache.size(3);
  check_shape("k_cache", k_cache, {c.rows, k_cache.size(1), a.heads_k, a.head_dim});
  check_shape("v_cache", v_cache, {c.rows, k_cache.size(1), a.heads_k, a.head_dim_v});
  FLEXOPS_CHECK(a.heads_q == 0 || (a.heads_k > 0 && a.heads_q % a.heads_k == 0), kOp,
                ": k_cache must have a number of heads that divides q's ", a.heads_q, ", got ",
                shape_text(k_cache));
  FLEXOPS_CHECK(a.head_dim % 8 == 0 && a.head_dim_v % 8 == 0 && a.head_dim > 0 &&
                    a.head_dim_v > 0 && a.head_dim <= 256 && a.head_dim_v <= 256,
                kOp, ": q must have a head_dim that is a multiple of 8, up to 256, got ",
                a.head_dim, " and v_cache's ", a.head_dim_v);
  FLEXOPS_CHECK(is_readable(k_cache) && is_readable(v_cache), kOp,
                ": k_cache and v_cache must have rows that begin at multiples of 16 bytes");
  c.page = k_cache.size(1), a.length_k = c.page;
  if (table) {
    check("block_table", *table, q, Dtype::i32);
    FLEXOPS_CHECK(table->dim() == 2, kOp, ": block_table must have 2 dimensions, got ",
                  shape_text(*table));
    check_shape("block_table", *table, {a.batch, table->size(1)});
    if (table->strides()[1] != 1) *table = contiguous(*table);
    c.table = table->data<int32_t>(), c.table_row = table->strides()[0];
    a.length_k = c.page * table->size(1);
    FLEXOPS_CHECK(c.page > 0 && !batch_idx, kOp,
                  ": pages must have tokens, and cache_batch_idx must not be given with them");
  }
  a.rows_k = a.length_k;
  FLEXOPS_CHECK(a.length_k < (int64_t{1} << 29) && a.rows_q < (int64_t{1} << 29) &&
                    length < (int64_t{1} << 29),
                kOp, ": a sequence must have fewer than 2^29 tokens");

  FLEXOPS_CHECK(k.has_value() == v.has_value(), kOp, ": k and v must both be given, or neither");
  if (k) {
    check("k", *k, q, dtype), check("v", *v, q, dtype);
    FLEXOPS_CHECK(k->dim() == 4 && (seqlens || length >= 0), kOp,
                  ": k must have 4 dimensions, and cache_seqlens be given with it");
    c.added = k->size(1);
    FLEXOPS_CHECK(c.added < (int64_t{1} << 29), kOp, ": k must have fewer than 2^29 tokens");
    check_shape("k", *k, {a.batch, c.added, a.heads_k, a.head_dim});
    check_shape("v", *v, {a.batch, c.added, a.heads_k, a.head_dim_v});
    for (Tensor* x : {&*k, &*v})
      if (!is_readable(*x)) *x = contiguous_copy(*x);
    c.new_k = view(*k), c.new_v = view(*v);
  }
  FLEXOPS_CHECK(cos.has_value() == sin.has_value() && (!cos || k), kOp,
                ": rotary_cos and rotary_sin must both be given, with k, or neither");
  if (cos) {
    c.rotary_type = element_type(kOp, "rotary_cos", cos->dtype());
    check("rotary_sin", *sin, q, cos->dtype()), check_device(kOp, "rotary_cos", *cos, "q", q);
    FLEXOPS_CHECK(cos->dim() == 2 && 2 * cos->size(1) <= a.head_dim, kOp,
                  ": rotary_cos must have shape [positions, rotary_dim / 2], got ",
                  shape_text(*cos));
    check_shape("rotary_sin", *sin, {cos->size(0), cos->size(1)});
    for (Tensor* x : {&*cos, &*sin})
      if (x->strides()[1] != 1) *x = contiguous(*x);
    c.cos = cos->data(), c.sin = sin->data(), c.cos_row = cos->strides()[0],
    c.sin_row = sin->strides()[0];
    c.positions = cos->size(0), c.half = cos->size(1), c.interleaved = interleaved;
  }
  c.seqlens = integers("cache_seqlens", seqlens, q), c.length = length < 0 ? a.length_k : length;
  c.batch_idx = integers("cache_batch_idx", batch_idx, q);
  c.leftpad = integers("cache_leftpad", leftpad, q);
  a.alibi = of_heads("alibi_slopes", alibi, q, true), a.sinks = of_heads("sinks", sinks, q, false);
  if (alibi) a.alibi_strides[0] = alibi->dim() == 2 ? a.heads_q : 0, a.alibi_strides[1] = 1;
  a.scale =
      scale ? static_cast<float>(*scale) : 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim));
  a.window_left = left, a.window_right = right, a.softcap = static_cast<float>(softcap);
  c.splits = splits;

  if (!is_readable(q)) q = contiguous_copy(q);
  const int64_t sizes[4] = {a.batch, a.length_q, a.heads_q, a.head_dim_v},
                of_rows[3] = {a.batch, a.heads_q, a.length_q};
  Tensor out = empty(sizes, 4, dtype, q), lse = empty(of_rows, 3, Dtype::f32, q);
  c.attend.q = view(q), c.attend.k = view(k_cache), c.attend.v = view(v_cache),
  c.attend.o = view(out);
  c.attend.lse = lse.data<float>(), c.attend.lse_batch = a.heads_q * a.length_q,
  c.attend.lse_head = a.length_q;
  const int64_t bytes = kvcache_attention_workspace(c);
  Tensor workspace;
  if (bytes > 0) workspace = empty(&bytes, 1, Dtype::u8, q);
  check_launch(
      kOp, kvcache_attention_cuda(c, bytes > 0 ? workspace.data() : nullptr, current_stream(q)));
  return {std::move(out), std::move(lse)};
}

}  // namespace

FLEXOPS_REGISTER(m) { FLEXOPS_IMPL(m, "kvcache_attention_", kvcache_attention_); }

}  // namespace flexops
