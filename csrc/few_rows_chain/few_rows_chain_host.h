// flexops::few_rows_chain_: from its arguments to the launcher's.
#pragma once

#include "common/host.h"

#include "few_rows/few_rows_kinds.h"
#include "few_rows_chain/few_rows_chain.h"

namespace flexops {

/// An attention of `x`: queries, keys and values of all heads. `first`: the keys of the first one,
/// `width` the columns of its result.
inline void check_attended(Host& host, const FewRowsChain& call, const TensorView& x,
                           const TensorView& out, const TensorView& k, const TensorView& v,
                           const TensorView& first, int64_t width) {
  const auto fits = [&](bool right, const char* what) {
    FLEXOPS_CHECK(right, host.op, ": ", what, " of an attention do not fit the others");
  };
  bool right = k.dim == 4 && v.dim == 4 && first.dim == 4 && out.rows() == 1;
  for (const TensorView* one : {&k, &v}) {
    for (int64_t d = 0; right && d < 4; ++d) right = one->size(d) == first.size(d);
    right = right && one->size(0) == 1 && one->dtype == out.dtype && one->stride(3) == 1 &&
            one->stride(2) == one->size(3) && one->stride(1) == k.stride(1) && aligned(one->data);
  }
  fits(right && k.stride(1) % 8 == 0, "caches");
  const int64_t heads_k = k.size(2), dim = k.size(3), heads = dim > 0 ? width / dim : 0;
  fits((dim == 32 || dim == 64 || dim == 128 || dim == 256) && heads_k > 0 && heads > 0 &&
           heads % heads_k == 0 && out.columns() == heads * dim && width == heads * dim &&
           x.columns() == (heads + 2 * heads_k) * dim && x.is_contiguous(),
       "heads");
  fits(call.seqlens && call.seqlens.numel == 1 && (!call.leftpad || call.leftpad.numel == 1),
       "lengths");
  const TensorView &cos = call.cos, &sin = call.sin;
  const auto turns = [&](const TensorView& one) {
    return one.dim == 2 && 2 * one.size(1) <= dim && one.size(1) % 8 == 0 &&
           one.dtype == out.dtype && one.stride(1) == 1 && one.stride(0) % 8 == 0 &&
           one.size(0) == cos.size(0) && one.size(1) == cos.size(1) && aligned(one.data);
  };
  fits(static_cast<bool>(cos) == static_cast<bool>(sin) && (!cos || (turns(cos) && turns(sin))),
       "tables");
}

inline void few_rows_chain__host(Host& host, const TensorView& x, const TensorViews& xs,
                                 const TensorViews& weights, const TensorViews& scales,
                                 const TensorViews& zeros, const TensorViews& biases,
                                 const TensorViews& norms, const TensorViews& residuals,
                                 const TensorViews& caches, const TensorViews& outs,
                                 const TensorView& cos, const TensorView& sin,
                                 const TensorView& seqlens, const TensorView& leftpad,
                                 const TensorView& workspace, double eps, double offset,
                                 double scale, int64_t window_left, int64_t kinds0, int64_t kinds1,
                                 int64_t kinds2, int64_t kinds3) {
  const int64_t most = caches.count > 0 ? kMostPhases : kMostProducts;
  FLEXOPS_CHECK(outs.count >= 1 && outs.count <= most, host.op, ": outs must be 1 to ", most,
                " tensors, got ", outs.count);
  FLEXOPS_CHECK(xs.count == outs.count - 1, host.op, ": xs must be ", outs.count - 1,
                " tensors, got ", xs.count);
  const int64_t m = x.rows();
  FLEXOPS_CHECK(m >= 1 && m <= kMostChainRows, host.op, ": x must have at most ", kMostChainRows,
                " rows, got shape ", shape_text(x));
  FLEXOPS_CHECK(workspace.numel >= 2 && aligned(workspace.data), host.op,
                ": workspace must be 2 numbers at least");
  const FewRowsChain call = {x,
                             xs,
                             weights,
                             scales,
                             zeros,
                             biases,
                             norms,
                             residuals,
                             outs,
                             caches,
                             cos,
                             sin,
                             seqlens,
                             leftpad,
                             workspace,
                             static_cast<float>(eps),
                             static_cast<float>(offset),
                             static_cast<float>(scale),
                             window_left,
                             {kinds0, kinds1, kinds2, kinds3}};
  int64_t weight = 0, zero = 0, bias = 0, norm = 0, residual = 0, cache = 0, width = 0;
  bool small = false;  // groups of 32, which one chain has all or none of
  for (int64_t i = 0; i < outs.count; ++i) {
    const PhaseKind kind(call.kinds, i);
    const TensorView &from = i == 0 ? x : xs[i - 1], &out = outs[i];
    const int64_t k = from.columns(), tiles_k = ceil_div(k, 64);
    const auto fits = [&](bool right, const char* what) {
      FLEXOPS_CHECK(right, host.op, ": ", what, " of phase ", i, " do not fit the others");
    };
    fits(from.rows() == m && out.rows() == m && aligned(from.data), "rows");
    fits(out.is_contiguous(), "outs");
    if (kind.weights == 0) {
      fits(cache + 2 <= caches.count, "caches");
      if (width == 0) width = out.columns();
      check_attended(host, call, from, out, caches[cache], caches[cache + 1], caches[0], width);
      cache += 2;
      fits(!kind.residual, "residuals");
      for (int64_t end = norm + (kind.norm ? 2 : 0); norm < end; ++norm)
        fits(norm < norms.count && norms[norm].numel == caches[0].size(3) &&
                 norms[norm].dtype == out.dtype && aligned(norms[norm].data),
             "norms");
      continue;
    }
    fits((kind.activation == kFewNone || kind.weights == 2) &&
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
  host.check(few_rows_chain_cuda(call, host.stream()));
}

}  // namespace flexops
