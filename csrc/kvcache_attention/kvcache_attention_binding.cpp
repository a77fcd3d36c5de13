// torch's view of attention over a cache: checks, shapes and registration (schemas:
// flexops/ops/kvcache_*.py, which repeat the checks in more words).

#include "common/binding.h"

#include "common/arithmetic.h"
#include "kvcache_attention/kvcache_attention.h"

namespace flexops {
namespace {

constexpr const char* kOp = "flexops::kvcache_attention";

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

/// Queries, and what of the problem they say.
void put_queries(CacheAttention& c, Tensor& q) {
  const Dtype dtype = q.dtype();
  FLEXOPS_CHECK(dtype == Dtype::f16 || dtype == Dtype::bf16, kOp,
                ": q must be float16 or bfloat16, got ", dtype_name(dtype));
  FLEXOPS_CHECK(q.dim() == 4, kOp, ": q must have 4 dimensions, got ", shape_text(q));
  Attention& a = c.attend.problem;
  a.type = element_type(kOp, "q", dtype);
  a.batch = q.size(0), a.length_q = a.rows_q = q.size(1), a.heads_q = q.size(2),
  a.head_dim = q.size(3);
  FLEXOPS_CHECK(a.rows_q < (int64_t{1} << 29), kOp, ": q must have fewer than 2^29 tokens");
  if (!is_readable(q)) q = contiguous_copy(q);
  c.attend.q = view(q);
}

/// Two tensors of rows, [rows, tokens, heads, columns], whose memory is used as it is.
void put_caches(CacheAttention& c, const Tensor& k, const Tensor& v, const Tensor& q) {
  Attention& a = c.attend.problem;
  check("k_cache", k, q, q.dtype()), check("v_cache", v, q, q.dtype());
  FLEXOPS_CHECK(k.dim() == 4 && v.dim() == 4, kOp,
                ": k_cache and v_cache must have 4 dimensions, got ", shape_text(k));
  c.rows = k.size(0), c.page = k.size(1), a.heads_k = k.size(2), a.head_dim_v = v.size(3);
  check_shape("k_cache", k, {c.rows, c.page, a.heads_k, a.head_dim});
  check_shape("v_cache", v, {c.rows, c.page, a.heads_k, a.head_dim_v});
  FLEXOPS_CHECK(a.heads_q == 0 || (a.heads_k > 0 && a.heads_q % a.heads_k == 0), kOp,
                ": k_cache must have a number of heads that divides q's ", a.heads_q, ", got ",
                shape_text(k));
  FLEXOPS_CHECK(a.head_dim % 8 == 0 && a.head_dim_v % 8 == 0 && a.head_dim > 0 &&
                    a.head_dim_v > 0 && a.head_dim <= 256 && a.head_dim_v <= 256,
                kOp, ": q must have a head_dim that is a multiple of 8, up to 256, got ",
                a.head_dim, " and v_cache's ", a.head_dim_v);
  FLEXOPS_CHECK(is_readable(k) && is_readable(v), kOp,
                ": k_cache and v_cache must have rows that begin at multiples of 16 bytes");
  c.attend.k = view(k), c.attend.v = view(v);
}
void put_capacity(CacheAttention& c, int64_t tokens) {
  FLEXOPS_CHECK(tokens < (int64_t{1} << 29), kOp, ": a sequence must have fewer than 2^29 tokens");
  c.attend.problem.length_k = c.attend.problem.rows_k = tokens;
}

void put_new(CacheAttention& c, Tensor& k, Tensor& v, const Tensor& like) {
  const Attention& a = c.attend.problem;
  check("k", k, like, like.dtype()), check("v", v, like, like.dtype());
  FLEXOPS_CHECK(k.dim() == 4, kOp, ": k must have 4 dimensions, got ", shape_text(k));
  c.added = k.size(1);
  FLEXOPS_CHECK(c.added < (int64_t{1} << 29), kOp, ": k must have fewer than 2^29 tokens");
  check_shape("k", k, {a.batch, c.added, a.heads_k, a.head_dim});
  check_shape("v", v, {a.batch, c.added, a.heads_k, a.head_dim_v});
  for (Tensor* x : {&k, &v})
    if (!is_readable(*x)) *x = contiguous_copy(*x);
  c.new_k = view(k), c.new_v = view(v);
}

void put_rotary(CacheAttention& c, std::optional<Tensor>& cos, std::optional<Tensor>& sin,
                const Tensor& q, bool interleaved, bool from_leftpad) {
  FLEXOPS_CHECK(cos.has_value() == sin.has_value(), kOp,
                ": rotary_cos and rotary_sin must both be given, or neither");
  if (!cos) return;
  c.rotary_type = element_type(kOp, "rotary_cos", cos->dtype());
  check("rotary_sin", *sin, q, cos->dtype()), check_device(kOp, "rotary_cos", *cos, "q", q);
  FLEXOPS_CHECK(cos->dim() == 2 && 2 * cos->size(1) <= q.size(3), kOp,
                ": rotary_cos must have shape [positions, rotary_dim / 2], got ", shape_text(*cos));
  check_shape("rotary_sin", *sin, {cos->size(0), cos->size(1)});
  for (Tensor* x : {&*cos, &*sin})
    if (x->strides()[1] != 1) *x = contiguous(*x);
  c.cos = cos->data(), c.sin = sin->data(), c.cos_row = cos->strides()[0],
  c.sin_row = sin->strides()[0];
  c.positions = cos->size(0), c.half = cos->size(1), c.interleaved = interleaved;
  c.from_leftpad = from_leftpad;
}

/// The rest, and the call. `launcher` and its workspace.
struct Options {
  std::optional<Tensor>&seqlens, &leftpad, &alibi, &sinks;
  int64_t length;
  std::optional<double> scale;
  int64_t left, right;
  double softcap;
  int64_t splits;
  bool early;
};
template <class Call, class Workspace, class Launcher>
std::tuple<Tensor, Tensor> attend(Call& call, CacheAttention& c, const Tensor& q, const Options& o,
                                  const Workspace& workspace_of, const Launcher& launcher) {
  Attention& a = c.attend.problem;
  c.seqlens = integers("cache_seqlens", o.seqlens, q),
  c.length = o.length < 0 ? a.length_k : least(o.length, a.length_k);
  c.leftpad = integers("cache_leftpad", o.leftpad, q);
  a.alibi = of_heads("alibi_slopes", o.alibi, q, true),
  a.sinks = of_heads("sinks", o.sinks, q, false);
  if (o.alibi) {
    a.alibi_strides[0] = o.alibi->dim() == 2 ? a.heads_q : 0, a.alibi_strides[1] = 1;
  }
  a.scale = o.scale ? static_cast<float>(*o.scale)
                    : 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim));
  a.window_left = o.left, a.window_right = o.right, a.softcap = static_cast<float>(o.softcap);
  c.splits = o.splits, c.early = o.early;
  const int64_t sizes[4] = {a.batch, a.length_q, a.heads_q, a.head_dim_v},
                of_rows[3] = {a.batch, a.heads_q, a.length_q};
  Tensor out = empty(sizes, 4, q.dtype(), q), lse = empty(of_rows, 3, Dtype::f32, q);
  c.attend.o = view(out);
  c.attend.lse = lse.data<float>(), c.attend.lse_batch = a.heads_q * a.length_q,
  c.attend.lse_head = a.length_q;
  const int64_t bytes = workspace_of(call);
  Tensor workspace;
  if (bytes > 0) workspace = empty(&bytes, 1, Dtype::u8, q);
  check_launch(kOp, launcher(call, bytes > 0 ? workspace.data() : nullptr, current_stream(q)));
  return {std::move(out), std::move(lse)};
}

std::tuple<Tensor, Tensor> kvcache_attention_(
    Tensor q, Tensor k_cache, Tensor v_cache, std::optional<Tensor> k, std::optional<Tensor> v,
    std::optional<Tensor> cos, std::optional<Tensor> sin, std::optional<Tensor> seqlens,
    int64_t length, std::optional<Tensor> batch_idx, std::optional<Tensor> leftpad,
    std::optional<Tensor> table, std::optional<double> scale, int64_t left, int64_t right,
    double softcap, bool interleaved, std::optional<Tensor> alibi, int64_t splits,
    std::optional<Tensor> sinks, bool from_leftpad, bool early) {
  DeviceGuard guard(q);
  CacheAttention c = {};
  put_queries(c, q);
  put_caches(c, k_cache, v_cache, q);
  if (table) {
    check("block_table", *table, q, Dtype::i32);
    FLEXOPS_CHECK(table->dim() == 2 && table->size(0) == q.size(0), kOp,
                  ": block_table must have shape [batch, pages], got ", shape_text(*table));
    if (table->strides()[1] != 1) *table = contiguous(*table);
    c.table = table->data<int32_t>(), c.table_row = table->strides()[0];
    FLEXOPS_CHECK(c.page > 0 && !batch_idx, kOp,
                  ": pages must have tokens, and cache_batch_idx must not be given with them");
  }
  put_capacity(c, c.page * (table ? table->size(1) : 1));
  FLEXOPS_CHECK(k.has_value() == v.has_value() && (!k || seqlens || length >= 0) && (!cos || k),
                kOp,
                ": k and v must both be given, with cache_seqlens, or neither; rotary_cos requires "
                "them");
  if (k) put_new(c, *k, *v, q);
  put_rotary(c, cos, sin, q, interleaved, from_leftpad);
  c.batch_idx = integers("cache_batch_idx", batch_idx, q);
  return attend(
      c, c, q, {seqlens, leftpad, alibi, sinks, length, scale, left, right, softcap, splits, early},
      kvcache_attention_workspace, kvcache_attention_cuda);
}

// ---- codes ----

struct Codes {
  Tensor &k_codes, &k_steps, &v_codes, &v_steps;
  int64_t bits, group;
};
/// Shapes of kvcache_codes.cuh; c.cache has heads and columns.
void put_codes(CodesAttention& c, const Codes& codes, const Tensor& like) {
  const Attention& a = c.cache.attend.problem;
  FLEXOPS_CHECK(codes.bits == 8 || codes.bits == 4, kOp, ": bits must be 8 or 4, got ", codes.bits);
  FLEXOPS_CHECK(codes.group == 32 || codes.group == 64 || codes.group == 128, kOp,
                ": group_size must be 32, 64 or 128, got ", codes.group);
  c.bits = codes.bits, c.group = codes.group, c.value_group = least(codes.group, a.head_dim_v);
  check("k_codes", codes.k_codes, like, Dtype::u8),
      check("v_codes", codes.v_codes, like, Dtype::u8);
  check("k_steps", codes.k_steps, like, Dtype::f16),
      check("v_steps", codes.v_steps, like, Dtype::f16);
  FLEXOPS_CHECK(codes.k_codes.dim() == 4, kOp, ": k_codes must have 4 dimensions, got ",
                shape_text(codes.k_codes));
  const int64_t tokens = codes.k_codes.size(2);
  FLEXOPS_CHECK(
      tokens % c.group == 0 && a.head_dim == a.head_dim_v && a.head_dim_v % c.value_group == 0, kOp,
      ": k_codes must have a multiple of ", c.group, " tokens, got ", shape_text(codes.k_codes));
  put_capacity(c.cache, tokens);
  check_shape("k_codes", codes.k_codes, {a.batch, a.heads_k, tokens, a.head_dim * c.bits / 8});
  check_shape("v_codes", codes.v_codes, {a.batch, a.heads_k, tokens, a.head_dim_v * c.bits / 8});
  check_shape("k_steps", codes.k_steps, {a.batch, a.heads_k, tokens / c.group, 2, a.head_dim});
  check_shape("v_steps", codes.v_steps,
              {a.batch, a.heads_k, tokens / 32, a.head_dim_v / c.value_group, 2, 32});
  for (const Tensor* x : {&codes.k_codes, &codes.k_steps, &codes.v_codes, &codes.v_steps})
    FLEXOPS_CHECK(x->is_contiguous() && aligned(x->data()), kOp,
                  ": codes and steps must be contiguous");
  c.k_codes = codes.k_codes.data(), c.k_steps = codes.k_steps.data(),
  c.v_codes = codes.v_codes.data(), c.v_steps = codes.v_steps.data();
}

std::tuple<Tensor, Tensor> kvcache_codes_attention_(
    Tensor q, Tensor k, Tensor v, Tensor k_codes, Tensor k_steps, Tensor v_codes, Tensor v_steps,
    Tensor recent_k, Tensor recent_v, std::optional<Tensor> cos, std::optional<Tensor> sin,
    std::optional<Tensor> seqlens, int64_t length, std::optional<Tensor> leftpad, int64_t bits,
    int64_t group_size, std::optional<double> scale, int64_t left, int64_t right, double softcap,
    bool interleaved, std::optional<Tensor> alibi, int64_t splits, std::optional<Tensor> sinks,
    bool from_leftpad, bool early) {
  DeviceGuard guard(q);
  CodesAttention c = {};
  put_queries(c.cache, q);
  put_caches(c.cache, recent_k, recent_v, q);
  put_codes(c, {k_codes, k_steps, v_codes, v_steps, bits, group_size}, q);
  put_new(c.cache, k, v, q);
  c.residual = c.cache.page - group_size;
  FLEXOPS_CHECK(
      c.cache.added == 1 && c.residual > 0 && c.cache.rows == q.size(0) && (seqlens || length >= 0),
      kOp,
      ": k must have one new token of each sequence, and recent_k more tokens than "
      "group_size");
  put_rotary(c.cache, cos, sin, q, interleaved, from_leftpad);
  return attend(
      c, c.cache, q,
      {seqlens, leftpad, alibi, sinks, length, scale, left, right, softcap, splits, early},
      kvcache_codes_workspace, kvcache_codes_cuda);
}

void kvcache_compress_(Tensor k, Tensor v, Tensor k_codes, Tensor k_steps, Tensor v_codes,
                       Tensor v_steps, int64_t first, int64_t bits, int64_t group_size) {
  DeviceGuard guard(k);
  CodesAttention c = {};
  Attention& a = c.cache.attend.problem;
  FLEXOPS_CHECK(
      k.dim() == 4 && v.dim() == 4 && (k.dtype() == Dtype::f16 || k.dtype() == Dtype::bf16), kOp,
      ": k must be float16 or bfloat16 of 4 dimensions, got ", shape_text(k));
  a.type = element_type(kOp, "k", k.dtype());
  a.batch = k.size(0), a.heads_q = a.heads_k = k.size(2), a.head_dim = k.size(3),
  a.head_dim_v = v.size(3), a.length_q = a.rows_q = 1;
  put_codes(c, {k_codes, k_steps, v_codes, v_steps, bits, group_size}, k);
  const Tensor like = k;
  put_new(c.cache, k, v, like);
  c.cache.rows = a.batch;
  FLEXOPS_CHECK(first >= 0 && first % group_size == 0 && c.cache.added % group_size == 0 &&
                    first + c.cache.added <= a.length_k,
                kOp, ": k must have whole groups of tokens that fit the cache, got ",
                shape_text(like), " from token ", first);
  check_launch(kOp, kvcache_compress_cuda(c, first, current_stream(k)));
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "kvcache_attention_", kvcache_attention_);
  FLEXOPS_IMPL(m, "kvcache_codes_attention_", kvcache_codes_attention_);
  FLEXOPS_IMPL(m, "kvcache_compress_", kvcache_compress_);
}

}  // namespace flexops
