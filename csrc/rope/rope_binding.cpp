// torch's view of rotary embedding: checks, shapes and registration (schemas: flexops/ops/rope.py).

#include "common/binding.h"
#include "rope/rope.h"

namespace flexops {
namespace {

/// Dense, in the order of dimensions that `like` has: batch, length, heads, head_dim, if its heads
/// are nearer to each other than its positions are; else batch, heads, length, head_dim.
Tensor make_result(const Tensor& like) {
  const int64_t *sizes = like.sizes(), *from = like.strides();
  const auto size = [&](int d) { return sizes[d] > 1 ? sizes[d] : 1; };
  const bool by_length = from[1] < from[2];
  const int64_t head = by_length ? size(3) : size(3) * size(2),
                length = by_length ? size(3) * size(1) : size(3);
  const int64_t strides[4] = {size(3) * size(2) * size(1), head, length, 1};
  return empty_strided(sizes, strides, 4, like.dtype(), like);
}

void put_strides(int64_t (&to)[4], const Tensor& tensor) {
  for (int d = 0; d < 4; ++d) to[d] = tensor.strides()[d];
}

/// Everything but where results go. `cos` and `sin` are replaced by what the kernels can take.
Rope make_call(const char* op, const Tensor& query, const std::optional<Tensor>& key, Tensor& cos,
               Tensor& sin, const std::optional<Tensor>& positions, bool interleaved,
               bool inverse) {
  Rope c = {};
  c.type = element_type(op, "query", query.dtype());
  FLEXOPS_CHECK(query.dim() == 4, op,
                ": query must have shape [batch, heads, length, head_dim], got ",
                shape_text(query));
  c.batch = query.size(0), c.length = query.size(2), c.head_dim = query.size(3);
  c.interleaved = interleaved, c.inverse = inverse;
  c.table_type = element_type(op, "cos", cos.dtype());
  check_device(op, "cos", cos, "query", query);
  check_device(op, "sin", sin, "query", query);
  const bool looked_up = cos.dim() == 3;  // a row for each position, with each number twice
  FLEXOPS_CHECK(looked_up
                    ? (cos.size(0) == 1 || cos.size(0) == c.batch) && cos.size(1) == c.length &&
                          cos.size(2) % 2 == 0 && cos.size(2) <= c.head_dim
                    : cos.dim() == 2 && 2 * cos.size(1) <= c.head_dim,
                op,
                ": cos must have shape [max_positions, rotary_dim / 2] or [batch or 1, length, "
                "rotary_dim], got ",
                shape_text(cos));
  FLEXOPS_CHECK(sin.dtype() == cos.dtype() && same_shape(sin, cos), op,
                ": sin must have cos's dtype and shape ", shape_text(cos), ", got ",
                dtype_name(sin.dtype()), " ", shape_text(sin));
  FLEXOPS_CHECK(c.head_dim < (int64_t{1} << 30), op,
                ": query must have fewer elements a head, got ", shape_text(query));
  c.max_positions = cos.size(looked_up), c.half = looked_up ? cos.size(2) / 2 : cos.size(1);
  for (Tensor* table : {&cos, &sin}) {
    if (c.half > 1 && table->strides()[1 + looked_up] != 1) *table = contiguous(*table);
  }
  c.cos = cos.data(), c.sin = sin.data();
  c.cos_stride = cos.strides()[looked_up], c.sin_stride = sin.strides()[looked_up];
  if (looked_up && cos.size(0) > 1) c.cos_batch = cos.strides()[0], c.sin_batch = sin.strides()[0];
  c.tensors[0].heads = query.size(1);
  c.tensors[0].in = query.data();
  put_strides(c.tensors[0].in_strides, query);
  if (key) {
    check_device(op, "key", *key, "query", query);
    FLEXOPS_CHECK(key->dtype() == query.dtype(), op, ": key must be ", dtype_name(query.dtype()),
                  ", as query, got ", dtype_name(key->dtype()));
    FLEXOPS_CHECK(key->dim() == 4 && key->size(0) == c.batch && key->size(2) == c.length &&
                      key->size(3) == c.head_dim,
                  op, ": key must have query's shape ", shape_text(query), ", heads excepted, got ",
                  shape_text(*key));
    c.tensors[1].heads = key->size(1);
    c.tensors[1].in = key->data();
    put_strides(c.tensors[1].in_strides, *key);
  }
  FLEXOPS_CHECK(!looked_up || !positions, op,
                ": positions must not be given if cos has a row for each position, got cos ",
                shape_text(cos));
  if (positions) {
    const Tensor& p = *positions;
    check_device(op, "positions", p, "query", query);
    FLEXOPS_CHECK(p.dtype() == Dtype::i64 || p.dtype() == Dtype::i32, op,
                  ": positions must be int64 or int32, got ", dtype_name(p.dtype()));
    const bool shared = p.dim() == 1 && p.size(0) == c.length;
    FLEXOPS_CHECK(shared || (p.dim() == 2 && p.size(0) == c.batch && p.size(1) == c.length), op,
                  ": positions must have shape [length] or [batch, length], got ", shape_text(p));
    c.positions = p.data();
    c.wide_positions = p.dtype() == Dtype::i64;
    c.position_strides[0] = shared ? 0 : p.strides()[0],
    c.position_strides[1] = p.strides()[shared ? 0 : 1];
  } else {
    FLEXOPS_CHECK(c.length <= c.max_positions, op, ": cos must have at least query's ", c.length,
                  " positions if positions is not given, got ", shape_text(cos));
  }
  return c;
}

void run(const char* op, const Rope& c, const Tensor& where) {
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, rope_cuda(c, current_stream(where)));
#else
  (void)op, (void)where;
  constexpr int64_t kElements = 16384;  // that are worth a thread
  const int64_t items = c.batch * rope_tiles(c.length) * rope_parts(c);
  const int64_t elements =
      (c.tensors[0].heads + c.tensors[1].heads) * c.batch * c.length * c.head_dim;
  if (elements == 0) return;
  parallel_for(0, items, elements > kElements ? items * kElements / elements : items,
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(rope_cpu)(c, begin, end); });
#endif
}

std::tuple<Tensor, Tensor> rotary_embedding(Tensor query, std::optional<Tensor> key, Tensor cos,
                                            Tensor sin, std::optional<Tensor> positions,
                                            bool interleaved, bool inverse) {
  const char* op = "flexops::rotary_embedding";
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(query);
#endif
  Rope c = make_call(op, query, key, cos, sin, positions, interleaved, inverse);
  const int64_t nothing = 0;
  Tensor query_out = make_result(query),
         key_out = key ? make_result(*key) : empty(&nothing, 1, query.dtype(), query);
  c.tensors[0].out = query_out.data();
  put_strides(c.tensors[0].out_strides, query_out);
  if (key) {
    c.tensors[1].out = key_out.data();
    put_strides(c.tensors[1].out_strides, key_out);
  }
  run(op, c, query);
  return {std::move(query_out), std::move(key_out)};
}

/// In place.
void rotary_embedding_(Tensor query, std::optional<Tensor> key, Tensor cos, Tensor sin,
                       std::optional<Tensor> positions, bool interleaved, bool inverse) {
  const char* op = "flexops::rotary_embedding_";
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(query);
#endif
  Rope c = make_call(op, query, key, cos, sin, positions, interleaved, inverse);
  c.in_place = true;
  for (RopeTensor& t : c.tensors) {
    t.out = const_cast<void*>(t.in);
    const int64_t sizes[4] = {c.batch, t.heads, c.length, c.head_dim};
    for (int d = 0; d < 4; ++d) {
      FLEXOPS_CHECK(t.heads == 0 || sizes[d] <= 1 || t.in_strides[d] != 0, op,
                    ": query and key must not be broadcast, since they are written");
      t.out_strides[d] = t.in_strides[d];
    }
  }
  run(op, c, query);
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "rotary_embedding", rotary_embedding);
  FLEXOPS_IMPL(m, "rotary_embedding_plain", rotary_embedding);
  FLEXOPS_IMPL(m, "rotary_embedding_", rotary_embedding_);
}

}  // namespace flexops
