// flexops::rotary_embedding, and in place: from the operators' arguments to the launchers'.
#pragma once

#include "common/host.h"
#include "rope/rope.h"

namespace flexops {

inline RopeTensor rope_tensor(const TensorView& in, const TensorView& out) {
  RopeTensor to = {in.data, out.data, in.size(1), {}, {}};
  for (int d = 0; d < 4; ++d) to.in_strides[d] = in.stride(d), to.out_strides[d] = out.stride(d);
  return to;
}

inline void rope_host(Host& host, const TensorView& query, const TensorView& key,
                      const TensorView& cos, const TensorView& sin, const TensorView& positions,
                      bool interleaved, bool inverse, bool in_place, const TensorView& query_out,
                      const TensorView& key_out) {
  const char* op = host.op;
  FLEXOPS_CHECK(query.dim == 4, op,
                ": query must have shape [batch, heads, length, head_dim], got ",
                shape_text(query));
  Rope c = {};
  c.type = element_type(query), c.table_type = element_type(cos);
  c.interleaved = interleaved, c.inverse = inverse, c.in_place = in_place;
  c.batch = query.size(0), c.length = query.size(2), c.head_dim = query.size(3);
  FLEXOPS_CHECK(c.head_dim < (int64_t{1} << 30), op,
                ": query must have fewer elements a head, got ", shape_text(query));
  c.tensors[0] = rope_tensor(query, query_out);
  if (key) {
    FLEXOPS_CHECK(key.dim == 4 && key.size(0) == c.batch && key.size(2) == c.length &&
                      key.size(3) == c.head_dim,
                  op, ": key must have query's shape ", shape_text(query), ", heads excepted, got ",
                  shape_text(key));
    c.tensors[1] = rope_tensor(key, key_out);
  }

  // the tables: of all positions, or a row for each of query's, with each number twice
  const bool looked_up = cos.dim == 3;
  FLEXOPS_CHECK(looked_up
                    ? (cos.size(0) == 1 || cos.size(0) == c.batch) && cos.size(1) == c.length &&
                          cos.size(2) % 2 == 0 && cos.size(2) <= c.head_dim
                    : cos.dim == 2 && 2 * cos.size(1) <= c.head_dim,
                op,
                ": cos must have shape [max_positions, rotary_dim / 2] or [batch or 1, length, "
                "rotary_dim], got ",
                shape_text(cos));
  c.max_positions = cos.size(looked_up), c.half = looked_up ? cos.size(2) / 2 : cos.size(1);
  c.cos = cos.data, c.sin = sin.data;
  c.cos_stride = cos.stride(-2), c.sin_stride = sin.stride(-2);
  if (looked_up && cos.size(0) > 1) c.cos_batch = cos.stride(0), c.sin_batch = sin.stride(0);

  FLEXOPS_CHECK(!looked_up || !positions, op,
                ": positions must not be given if cos has a row for each position, got cos ",
                shape_text(cos));
  if (positions) {
    const bool shared = positions.dim == 1;
    FLEXOPS_CHECK((shared || (positions.dim == 2 && positions.size(0) == c.batch)) &&
                      positions.size(-1) == c.length,
                  op, ": positions must have shape [length] or [batch, length], got ",
                  shape_text(positions));
    c.positions = positions.data, c.wide_positions = positions.dtype == Dtype::i64;
    c.position_strides[0] = shared ? 0 : positions.stride(0),
    c.position_strides[1] = positions.stride(-1);
  } else {
    FLEXOPS_CHECK(c.length <= c.max_positions, op, ": cos must have at least query's ", c.length,
                  " positions if positions is not given, got ", shape_text(cos));
  }

  if (FLEXOPS_DEVICE_CUDA) return host.check(rope_cuda(c, host.stream()));
  constexpr int64_t kElements = 16384;  // that are worth a thread
  const int64_t items = c.batch * rope_tiles(c.length) * rope_parts(c);
  const int64_t elements =
      (c.tensors[0].heads + c.tensors[1].heads) * c.batch * c.length * c.head_dim;
  if (elements == 0) return;
  parallel_for(0, items, elements > kElements ? items * kElements / elements : items,
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(rope_cpu)(c, begin, end); });
}

inline void rotary_embedding_host(Host& host, const TensorView& query, const TensorView& key,
                                  const TensorView& cos, const TensorView& sin,
                                  const TensorView& positions, bool interleaved, bool inverse,
                                  const TensorView& query_out, const TensorView& key_out) {
  rope_host(host, query, key, cos, sin, positions, interleaved, inverse, false, query_out, key_out);
}

inline void rotary_embedding__host(Host& host, const TensorView& query, const TensorView& key,
                                   const TensorView& cos, const TensorView& sin,
                                   const TensorView& positions, bool interleaved, bool inverse) {
  for (const TensorView* x : {&query, &key}) {
    for (int64_t d = 0; d < x->dim; ++d) {
      FLEXOPS_CHECK(x->numel == 0 || x->size(d) <= 1 || x->stride(d) != 0, host.op,
                    ": query and key must not be broadcast, since they are written");
    }
  }
  rope_host(host, query, key, cos, sin, positions, interleaved, inverse, true, query, key);
}

}  // namespace flexops
