// flexops::few_rows_chain_: from its arguments to the launcher's.
#pragma once

#include "common/host.h"

#include "few_rows/few_rows_kinds.h"
#include "few_rows_chain/few_rows_chain.h"

namespace flexops {

inline void few_rows_chain__host(Host& host, const TensorView& x, const TensorViews& xs,
                                 const TensorViews& weights, const TensorViews& scales,
                                 const TensorViews& zeros, const TensorViews& biases,
                                 const TensorViews& norms, const TensorViews& residuals,
                                 const TensorViews& outs, const TensorView& workspace, double eps,
                                 double offset, int64_t kinds) {
  FLEXOPS_CHECK(outs.count >= 1 && outs.count <= kMostPhases, host.op, ": outs must be 1 to ",
                kMostPhases, " tensors, got ", outs.count);
  FLEXOPS_CHECK(xs.count == outs.count - 1, host.op, ": xs must be ", outs.count - 1,
                " tensors, got ", xs.count);
  const int64_t m = x.rows();
  FLEXOPS_CHECK(m >= 1 && m <= kMostChainRows, host.op, ": x must have at most ", kMostChainRows,
                " rows, got shape ", shape_text(x));
  FLEXOPS_CHECK(workspace.numel >= 2 && aligned(workspace.data), host.op,
                ": workspace must be 2 numbers at least");
  int64_t weight = 0, zero = 0, bias = 0, norm = 0, residual = 0;
  bool small = false;  // groups of 32, which one chain has all or none of
  for (int64_t i = 0; i < outs.count; ++i) {
    const PhaseKind kind(kinds, i);
    const TensorView &from = i == 0 ? x : xs[i - 1], &out = outs[i];
    const int64_t k = from.columns(), tiles_k = ceil_div(k, 64);
    const auto fits = [&](bool right, const char* what) {
      FLEXOPS_CHECK(right, host.op, ": ", what, " of phase ", i, " do not fit the others");
    };
    fits(from.rows() == m && out.rows() == m && aligned(from.data), "rows");
    fits(out.is_contiguous(), "outs");
    fits(kind.four_bits && kind.weights >= 1 &&
             (kind.activation == kFewNone || kind.weights == 2) &&
             weight + kind.weights <= weights.count && weight + kind.weights <= scales.count,
         "weights");
    int64_t before = 0;
    for (int64_t j = 0; j < kind.weights; ++j, ++weight) {
      const TensorView &packed = weights[weight], &scale = scales[weight];
      const auto is_like = [&](const TensorView& tensor, int64_t second, int64_t third) {
        return tensor.dim == 3 && tensor.size(0) == packed.size(0) && tensor.size(1) == second &&
               tensor.size(2) == third;
      };
      fits(packed.dtype == Dtype::u8 && packed.dim == 3 && is_like(packed, tiles_k, 512) &&
               aligned(packed.data),
           "weights");
      const int64_t groups = scale.dim == 3 && scale.size(1) > 0 ? scale.size(1) : 1,
                    size = 64 * tiles_k / groups;
      fits(is_like(scale, groups, 16) && scale.dtype == scales[weight - j].dtype &&
               scale.size(1) == scales[weight - j].size(1) && aligned(scale.data) &&
               (size == 32 || size == 64 || size == 128) && size * groups == 64 * tiles_k &&
               k % size == 0 && (weight == 0 || (size == 32) == small),
           "scales");
      small = size == 32;
      if (kind.zeros) {
        fits(zero < zeros.count && is_like(zeros[zero], groups, 16) && aligned(zeros[zero].data),
             "zeros");
        ++zero;
      }
      const int64_t rows = 16 * packed.size(0),
                    columns = kind.activation != kFewNone || j == kind.weights - 1
                                  ? out.columns() - before
                                  : rows;
      fits(rows - 16 < columns && columns <= rows, "weights");
      if (kind.biases) {
        fits(bias < biases.count && biases[bias].numel == columns, "biases");
        ++bias;
      }
      if (kind.activation == kFewNone) before += rows;
    }
    if (kind.norm) {
      fits(norm < norms.count && norms[norm].numel == k && aligned(norms[norm].data), "norms");
      ++norm;
    }
    if (kind.residual) {
      fits(residual < residuals.count && residuals[residual].numel == out.numel, "residuals");
      ++residual;
    }
  }
  host.check(
      few_rows_chain_cuda({x, xs, weights, scales, zeros, biases, norms, residuals, outs, workspace,
                           static_cast<float>(eps), static_cast<float>(offset), kinds},
                          host.stream()));
}

}  // namespace flexops
