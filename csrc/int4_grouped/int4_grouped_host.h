// From the arguments of grouped products with 4-bit weights to the launcher's.
#pragma once

#include "int4_grouped/int4_grouped.h"
#include "int4_linear/int4_linear_host.h"

namespace flexops {

inline void int4_grouped_rows_host(Host& host, const TensorView& x, const TensorView& packed,
                                   const TensorView& scales, const TensorView& zeros,
                                   const TensorView& offsets, int64_t n, int64_t k,
                                   int64_t group_size, bool mxfp4, int64_t plan,
                                   const TensorView& out) {
  FLEXOPS_CHECK(offsets.numel > 0 && n % kInt4TileN == 0, host.op,
                ": N must be a multiple of 16, for one group or more, got ", n, " for ",
                offsets.numel);
  Int4Grouped c;
  c.weight = make_int4(host, packed, scales, zeros, n * offsets.numel, k, group_size, mxfp4);
  c.groups = offsets.numel;
  FLEXOPS_CHECK(x.dim == 2 && x.size(1) == k && aligned(x.data), host.op, ": x must have ", k,
                " columns, got shape ", shape_text(x));
  FLEXOPS_CHECK(aligned(packed.data) && aligned(scales.data) && (!zeros || aligned(zeros.data)),
                host.op, ": the tensors of weight must be aligned to 16 bytes");
  if (out.numel == 0) return;
  c.offsets = offsets.as<int>(), c.x = x.data, c.out = out.data;
  c.type = element_type(x), c.m = x.size(0);
  host.check(int4_grouped_cuda(c, plan, host.stream()));
}

}  // namespace flexops
