// flexops::int4_few_rows_linear: from its arguments to the launcher's.
#pragma once

#include "common/host.h"

#include "few_rows/few_rows_kinds.h"
#include "int4_few_rows/int4_few_rows.h"

namespace flexops {

inline void int4_few_rows_linear_host(Host& host, const TensorView& x, const TensorViews& packed,
                                      const TensorViews& scales, const TensorViews& zeros,
                                      const TensorViews& biases, const TensorView& norm, double eps,
                                      double offset, const TensorView& residual, int64_t activation,
                                      int64_t width, int64_t group_size, int64_t plan,
                                      const TensorView& out) {
  const int64_t k = x.columns(), count = packed.count;
  FLEXOPS_CHECK(x.dim > 0 && x.numel <= kMostInt4Rows * k, host.op, ": x must have at most ",
                kMostInt4Rows, " rows, got shape ", shape_text(x));
  FLEXOPS_CHECK(group_size == 32 || group_size == 64 || group_size == 128, host.op,
                ": group_size must be 32, 64 or 128, got ", group_size);
  FLEXOPS_CHECK(k % group_size == 0 && k < int64_t{1} << 30, host.op,
                ": group_size must divide x's columns, got ", k);
  FLEXOPS_CHECK(activation >= 0 && activation < kFewActivations, host.op,
                ": activation must be from 0 to 3, got ", activation);
  FLEXOPS_CHECK(count > 0 && count <= kMostFewWeights && (activation == kFewNone || count == 2),
                host.op, ": packed must be ", activation == kFewNone ? "1 to 3" : "2",
                " tensors, got ", count);
  FLEXOPS_CHECK(scales.count == count, host.op, ": scales must be ", count, " tensors, got ",
                scales.count);
  FLEXOPS_CHECK(zeros.count == 0 || zeros.count == count, host.op, ": zeros must be none or ",
                count, " tensors, got ", zeros.count);
  FLEXOPS_CHECK(biases.count == 0 || biases.count == count, host.op, ": biases must be none or ",
                count, " tensors, got ", biases.count);
  const int64_t tiles_k = ceil_div(k, 64), groups = ceil_div(tiles_k * 64, group_size);
  int64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto fits = [&](const TensorView& tensor, int64_t b, int64_t c) {
      return tensor.dim == 3 && tensor.size(0) == packed[i].size(0) && tensor.size(1) == b &&
             tensor.size(2) == c;
    };
    FLEXOPS_CHECK(packed[i].dim == 3 && fits(packed[i], tiles_k, 512), host.op, ": packed[", i,
                  "] must have shape [any, ", tiles_k, ", 512], got ", shape_text(packed[i]));
    FLEXOPS_CHECK(fits(scales[i], groups, 16) && scales[i].dtype == scales[0].dtype, host.op,
                  ": scales[", i, "] must fit packed[", i, "], got shape ", shape_text(scales[i]));
    FLEXOPS_CHECK(!zeros.count || fits(zeros[i], groups, 16), host.op, ": zeros[", i,
                  "] must fit packed[", i, "], got shape ", shape_text(zeros[i]));
    // Only the last weight may have a part of a tile.
    const int64_t rows = 16 * packed[i].size(0),
                  columns = activation != kFewNone || i == count - 1 ? width - before : rows;
    FLEXOPS_CHECK(rows - 16 < columns && columns <= rows, host.op, ": packed[", i,
                  "] does not fit width ", width, ", got shape ", shape_text(packed[i]));
    FLEXOPS_CHECK(!biases.count || (biases[i].dim == 1 && biases[i].size(0) == columns), host.op,
                  ": biases[", i, "] must have shape [", columns, "]");
    if (activation == kFewNone) before += rows;
  }
  if (out.numel == 0) return;
  host.check(int4_few_rows_cuda(
      {x, packed, scales, zeros, biases, norm, residual, out, static_cast<float>(eps),
       static_cast<float>(offset), activation, group_size, plan},
      host.stream()));
}

}  // namespace flexops
