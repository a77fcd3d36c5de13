// torch's view of attention: checks, shapes and registration (schemas: flexops/ops/attention.py).

#include "common/binding.h"

#include "attention/attention.h"

namespace flexops {
namespace {

/// The ops' arguments behind the tensors that are attended.
struct AttentionOptions {
  bool heads_first;
  int64_t right, left;
  std::optional<double> scale;
  const std::optional<Tensor>& bias;
  double softcap;
  const std::optional<Tensor>&alibi, &sinks, &cumulative_q, &cumulative_k;
  int64_t max_q, max_k, score_mod;
};

/// Which dimension has rows, and which one heads: of [batch, length, heads, columns], of [batch,
/// heads, length, columns] with `heads_first`, and, packed, of [tokens, heads, columns].
struct Layout {
  int64_t row, head;
  Layout(int64_t dim, bool heads_first)
      : row(dim - (heads_first ? 2 : 3)), head(dim - (heads_first ? 3 : 2)) {}
};

void check_dtype(const char* op, const char* argument, const Tensor& tensor, Dtype dtype) {
  FLEXOPS_CHECK(tensor.dtype() == dtype, op, ": ", argument, " must be ", dtype_name(dtype),
                ", got ", dtype_name(tensor.dtype()));
}

/// A tensor whose columns are neighbours and, on a GPU, whose rows begin at multiples of 16 bytes:
/// itself, or a copy.
Tensor readable(const Tensor& tensor) {
  const int64_t dim = tensor.dim(), *sizes = tensor.sizes(), *strides = tensor.strides();
  bool fine = sizes[dim - 1] <= 1 || strides[dim - 1] == 1;
#if FLEXOPS_DEVICE_CUDA
  fine = fine && aligned(tensor.data());
  for (int64_t d = 0; d < dim - 1; ++d)
    fine = fine && (sizes[d] <= 1 || (strides[d] > 0 && strides[d] % 8 == 0));
#endif
  return fine ? tensor : contiguous_copy(tensor);
}

AttentionTensor view(const Tensor& tensor, Layout at) {
  const int64_t* strides = tensor.strides();
  return {tensor.data(), tensor.dim() > 3 ? strides[0] : 0, strides[at.row], strides[at.head]};
}

/// Of q's dtype, and of another one's shape, `columns` excepted. In memory the heads of a row are
/// neighbours, however dimensions are named.
Tensor empty_rows(const Tensor& like, int64_t columns, Layout at) {
  const int64_t dim = like.dim();
  int64_t sizes[4], strides[4], stride = 1;
  const int64_t from_within[] = {dim - 1, at.head, at.row, 0};
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t d = from_within[i];
    sizes[d] = i == 0 ? columns : like.sizes()[d], strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return empty_strided(sizes, strides, dim, like.dtype(), like);
}

/// As many dimensions as a broadcast to four has, the last `dim` of them the tensor's.
void put_broadcast_strides(const char* op, const Tensor& bias, const int64_t (&target)[4],
                           int64_t (&strides)[4]) {
  const int64_t missing = 4 - bias.dim();
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < 4; ++d) {
    const int64_t size = d < missing ? 1 : bias.sizes()[d - missing];
    fits = size == 1 || size == target[d];
    strides[d] = size == 1 ? 0 : bias.strides()[d - missing];
  }
  FLEXOPS_CHECK(fits, op, ": bias must be broadcastable to [", target[0], ", ", target[1], ", ",
                target[2], ", ", target[3], "], got ", shape_text(bias));
}

Attention make_problem(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                       const AttentionOptions& o) {
  const Dtype dtype = q.dtype();
  const bool narrow = dtype == Dtype::f16 || dtype == Dtype::bf16;
  FLEXOPS_CHECK(narrow || (!FLEXOPS_DEVICE_CUDA && dtype == Dtype::f32), op, ": q must be ",
                FLEXOPS_DEVICE_CUDA ? "" : "float32, ", "float16 or bfloat16, got ",
                dtype_name(dtype));
  const bool packed = o.cumulative_q.has_value();
  FLEXOPS_CHECK(packed == o.cumulative_k.has_value(), op,
                ": cu_seqlens_q and cu_seqlens_k must both be given, or neither");
  const int64_t dim = packed ? 3 : 4;
  const char* form = packed          ? "[tokens, heads, head_dim]"
                     : o.heads_first ? "[batch, heads, length, head_dim]"
                                     : "[batch, length, heads, head_dim]";
  FLEXOPS_CHECK(!(packed && o.heads_first), op,
                ": heads_first must be false with cu_seqlens_q and cu_seqlens_k");
  FLEXOPS_CHECK(q.dim() == dim, op, ": q must have shape ", form, ", got ", shape_text(q));
  check_device(op, "k", k, "q", q);
  check_device(op, "v", v, "q", q);
  check_dtype(op, "k", k, dtype);
  check_dtype(op, "v", v, dtype);
  const Layout at(dim, o.heads_first);
  const int64_t heads = q.size(at.head);
  FLEXOPS_CHECK(k.dim() == dim && k.size(-1) == q.size(-1) && (packed || k.size(0) == q.size(0)),
                op, ": k must have q's shape ", shape_text(q), ", length and heads excepted, got ",
                shape_text(k));
  FLEXOPS_CHECK(heads == 0 || (k.size(at.head) > 0 && heads % k.size(at.head) == 0), op,
                ": k must have a number of heads that divides q's ", heads, ", got ",
                shape_text(k));
  bool same = v.dim() == dim;
  for (int64_t d = 0; same && d < dim - 1; ++d) same = v.sizes()[d] == k.sizes()[d];
  FLEXOPS_CHECK(same, op, ": v must have k's shape ", shape_text(k), ", head_dim excepted, got ",
                shape_text(v));

  Attention a = {};
  a.type = element_type(op, "q", dtype);
  a.heads_q = heads, a.heads_k = k.size(at.head), a.head_dim = q.size(-1),
  a.head_dim_v = v.size(-1);
  a.rows_q = q.size(at.row), a.rows_k = k.size(at.row);
  a.batch = q.size(0), a.length_q = a.rows_q, a.length_k = a.rows_k;
#if FLEXOPS_DEVICE_CUDA
  FLEXOPS_CHECK(a.head_dim % 8 == 0 && a.head_dim_v % 8 == 0 && a.head_dim > 0 &&
                    a.head_dim_v > 0 && a.head_dim <= 256 && a.head_dim_v <= 256,
                op, ": q must have a head_dim that is a multiple of 8, up to 256, got ", a.head_dim,
                " and v's ", a.head_dim_v);
#endif
  if (packed) {
    const Tensor* both[] = {&*o.cumulative_q, &*o.cumulative_k};
    for (const Tensor* each : both) {
      const char* argument = each == both[0] ? "cu_seqlens_q" : "cu_seqlens_k";
      check_device(op, argument, *each, "q", q);
      check_dtype(op, argument, *each, Dtype::i32);
      FLEXOPS_CHECK(each->dim() == 1 && each->size(0) >= 1 && each->size(0) == both[0]->size(0) &&
                        each->is_contiguous(),
                    op, ": ", argument, " must have shape [sequences + 1], contiguous, got ",
                    shape_text(*each));
    }
    a.batch = both[0]->size(0) - 1;
    a.length_q = o.max_q < a.rows_q ? o.max_q : a.rows_q,
    a.length_k = o.max_k < a.rows_k ? o.max_k : a.rows_k;
    a.cumulative_q = both[0]->data<int32_t>(), a.cumulative_k = both[1]->data<int32_t>();
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
  if (o.bias) check_device(op, "bias", *o.bias, "q", q);
  if (o.bias && a.score_mod) {  // what it looks things up in
    check_dtype(op, "bias", *o.bias, Dtype::i32);
    FLEXOPS_CHECK(o.bias->dim() == 1 && o.bias->is_contiguous(), op,
                  ": bias must be the score_mod's words, got ", shape_text(*o.bias));
    a.bias = o.bias->data();
  } else if (o.bias) {
    const Dtype kind = o.bias->dtype();
    FLEXOPS_CHECK(
        kind == Dtype::f32 || kind == Dtype::f16 || kind == Dtype::bf16 || kind == Dtype::boolean,
        op, ": bias must be bool, float32, float16 or bfloat16, got ", dtype_name(kind));
    const int64_t target[4] = {a.batch, heads, packed ? o.max_q : a.length_q,
                               packed ? o.max_k : a.length_k};
    put_broadcast_strides(op, *o.bias, target, a.bias_strides);
    a.bias = o.bias->data();
    a.bias_type = kind;
  }
  if (o.alibi) {
    const Tensor& slopes = *o.alibi;
    check_device(op, "alibi_slopes", slopes, "q", q);
    check_dtype(op, "alibi_slopes", slopes, Dtype::f32);
    const int64_t d = slopes.dim();
    FLEXOPS_CHECK((d == 1 || (d == 2 && slopes.size(0) == a.batch)) && slopes.size(-1) == heads, op,
                  ": alibi_slopes must have shape [heads] or [batch, heads], got ",
                  shape_text(slopes));
    a.alibi = slopes.data<float>();
    a.alibi_strides[0] = d == 2 ? slopes.strides()[0] : 0,
    a.alibi_strides[1] = slopes.strides()[d - 1];
  }
  if (o.sinks) {
    check_device(op, "sinks", *o.sinks, "q", q);
    check_dtype(op, "sinks", *o.sinks, Dtype::f32);
    FLEXOPS_CHECK(o.sinks->dim() == 1 && o.sinks->size(0) == heads && o.sinks->is_contiguous(), op,
                  ": sinks must have shape [heads], contiguous, got ", shape_text(*o.sinks));
    a.sinks = o.sinks->data<float>();
  }
  return a;
}

/// Contiguous copies, whose strides kernels do not take.
std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return contiguous(*tensor);
}

#if FLEXOPS_DEVICE_CUDA
template <class Call, class Launcher>
void run(const char* op, const Call& call, const Tensor& q, const Launcher& launcher) {
  const int64_t bytes = attention_workspace(call);
  Tensor workspace;
  if (bytes > 0) workspace = empty(&bytes, 1, Dtype::u8, q);
  check_launch(op, launcher(call, bytes > 0 ? workspace.data() : nullptr, current_stream(q)));
}
#else
/// No kernel writes rows of packed tensors that belong to no sequence.
void clear(const Tensor& tensor, float value) {
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
void share_out(const char* op, int64_t items, int64_t grain, const Kernel& kernel) {
  int64_t taken = 0, failed = 0;
  parallel_for(0, items, grain, [&](int64_t, int64_t) {
    if (!kernel(&taken)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  });
  FLEXOPS_CHECK(failed == 0, op, ": there is no memory for its tiles");
}
#endif

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool heads_first, int64_t right,
                                     int64_t left, std::optional<double> scale,
                                     [[maybe_unused]] bool deterministic,
                                     std::optional<Tensor> bias, double softcap,
                                     std::optional<Tensor> alibi, std::optional<Tensor> sinks,
                                     std::optional<Tensor> cumulative_q,
                                     std::optional<Tensor> cumulative_k, int64_t max_q,
                                     int64_t max_k, int64_t score_mod) {
  const char* op = "flexops::attention";
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(q);
#endif
  sinks = dense(sinks), cumulative_q = dense(cumulative_q), cumulative_k = dense(cumulative_k);
  AttentionForward c = {};
  c.problem = make_problem(op, q, k, v,
                           {heads_first, right, left, scale, bias, softcap, alibi, sinks,
                            cumulative_q, cumulative_k, max_q, max_k, score_mod});
  const Attention& a = c.problem;
  q = readable(q), k = readable(k), v = readable(v);
  const Layout at(q.dim(), heads_first);
  const int64_t lse_shape[3] = {a.packed() ? a.heads_q : a.batch, a.packed() ? a.rows_q : a.heads_q,
                                a.rows_q};
  Tensor out = empty_rows(q, a.head_dim_v, at), lse = empty(lse_shape, q.dim() - 1, Dtype::f32, q);
  c.q = view(q, at), c.k = view(k, at), c.v = view(v, at), c.o = view(out, at);
  c.lse = lse.data<float>(), c.lse_batch = a.packed() ? 0 : a.heads_q * a.rows_q,
  c.lse_head = a.rows_q;
#if FLEXOPS_DEVICE_CUDA
  run(op, c, q, attention_cuda);
#else
  if (a.packed()) clear(out, 0.0f), clear(lse, -__builtin_inff());
  constexpr int64_t kProducts = 1 << 16;  // that are worth a thread
  const int64_t items = attention_cpu_items(c),
                each = kAttentionRows * (a.length_k + 1) * (a.head_dim + a.head_dim_v + 1);
  share_out(op, items, kProducts / each,
            [&](int64_t* taken) { return FLEXOPS_ISA_CALL(attention_cpu)(c, taken); });
#endif
  return {std::move(out), std::move(lse)};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    Tensor grad, std::optional<Tensor> grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,
    Tensor lse, bool heads_first, int64_t right, int64_t left, std::optional<double> scale,
    bool deterministic, std::optional<Tensor> bias, double softcap, std::optional<Tensor> alibi,
    std::optional<Tensor> sinks, std::optional<Tensor> cumulative_q,
    std::optional<Tensor> cumulative_k, int64_t max_q, int64_t max_k, int64_t score_mod) {
  const char* op = "flexops::attention_backward";
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(q);
#endif
  sinks = dense(sinks), cumulative_q = dense(cumulative_q), cumulative_k = dense(cumulative_k);
  AttentionBackward c = {};
  c.problem = make_problem(op, q, k, v,
                           {heads_first, right, left, scale, bias, softcap, alibi, sinks,
                            cumulative_q, cumulative_k, max_q, max_k, score_mod});
  const Attention& a = c.problem;
  const Tensor* results[] = {&grad, &out};
  for (const Tensor* each : results) {
    const char* argument = each == &grad ? "grad" : "out";
    check_device(op, argument, *each, "q", q);
    check_dtype(op, argument, *each, q.dtype());
    bool same = each->dim() == q.dim() && each->size(-1) == a.head_dim_v;
    for (int64_t d = 0; same && d < q.dim() - 1; ++d) same = each->sizes()[d] == q.sizes()[d];
    FLEXOPS_CHECK(same, op, ": ", argument, " must have q's shape ", shape_text(q),
                  " with v's head_dim, got ", shape_text(*each));
  }
  const Tensor* of_rows[] = {&lse, grad_lse ? &*grad_lse : &lse};
  for (const Tensor* each : of_rows) {
    const char* argument = each == &lse ? "lse" : "grad_lse";
    check_device(op, argument, *each, "q", q);
    check_dtype(op, argument, *each, Dtype::f32);
    FLEXOPS_CHECK(each->dim() == q.dim() - 1 && each->size(-1) == a.rows_q &&
                      each->size(-2) == a.heads_q &&
                      (each->dim() < 3 || each->size(0) == q.size(0)),
                  op, ": ", argument, " must have a number for each row of q, ", shape_text(q),
                  ", got ", shape_text(*each));
  }
  lse = contiguous(lse), grad_lse = dense(grad_lse);
  const Layout at(q.dim(), heads_first);
  Tensor dq = empty_rows(q, a.head_dim, at), dk = empty_rows(k, a.head_dim, at),
         dv = empty_rows(v, a.head_dim_v, at);
  grad = readable(grad), q = readable(q), k = readable(k), v = readable(v), out = readable(out);
  c.q = view(q, at), c.k = view(k, at), c.v = view(v, at), c.o = view(out, at),
  c.d_o = view(grad, at);
  c.dq = view(dq, at), c.dk = view(dk, at), c.dv = view(dv, at);
  c.lse = lse.data<float>(), c.d_lse = grad_lse ? grad_lse->data<float>() : nullptr;
  c.lse_batch = a.packed() ? 0 : a.heads_q * a.rows_q, c.lse_head = a.rows_q;
  c.deterministic = deterministic;
#if FLEXOPS_DEVICE_CUDA
  run(op, c, q, attention_backward_cuda);
#else
  const bool none = a.batch == 0 || a.heads_q == 0 || a.rows_q == 0;
  if (a.packed() || none) clear(dq, 0.0f), clear(dk, 0.0f), clear(dv, 0.0f);
  if (none) return {std::move(dq), std::move(dk), std::move(dv)};
  const int64_t floats = attention_cpu_workspace(c);
  const Tensor workspace = empty(&floats, 1, Dtype::f32, q);
  float* parts = workspace.data<float>();
  share_out(op, attention_cpu_items(c), 1, [&](int64_t* taken) {
    return FLEXOPS_ISA_CALL(attention_backward_cpu)(c, parts, taken);
  });
  parallel_for(0, attention_cpu_sums(c), 4, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(attention_add_parts_cpu)(c, parts, begin, end);
  });
#endif
  return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "attention", attention);
  FLEXOPS_IMPL(m, "attention_plain", attention);
  FLEXOPS_IMPL(m, "attention_backward", attention_backward);
}

}  // namespace flexops
