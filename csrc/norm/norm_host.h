// From the norms' arguments to their launchers' (what is declared of them:
// flexops/build/describe/families.py).
#pragma once

#include "common/host.h"
#include "norm/norm.h"

namespace flexops {

using View = TensorView;

inline void check_columns(const Host& host, const View& x) {
  FLEXOPS_CHECK(x.dim > 0, host.op, ": x must have at least one dimension, got a scalar");
  FLEXOPS_CHECK(1 <= x.columns() && x.columns() <= kMostColumns, host.op,
                ": x's last dimension must be from 1 to ", kMostColumns, ", got ", x.columns());
}

struct NormResults {
  View y, new_residual, statistics, scales;
};

/// All forward operators: what is not asked for stays away.
inline void normalize(Host& host, bool centered, double eps, double offset, const View& x,
                      const View& residual, const View& weight, const View& bias,
                      const NormResults& out) {
  check_columns(host, x);
  FLEXOPS_CHECK(eps >= 0, host.op, ": eps must be at least 0");
  NormForward n{};
  n.type = n.row_type = n.weight_type = element_type(x);
  if (residual) n.row_type = element_type(residual), n.residual_stride = residual.row_stride();
  if (weight || bias) n.weight_type = element_type(weight ? weight : bias);
  n.x = x.data, n.residual = residual.data, n.weight = weight.data, n.bias = bias.data;
  n.columns = x.columns(), n.rows = x.rows(), n.x_stride = x.row_stride();
  n.eps = static_cast<float>(eps), n.offset = static_cast<float>(offset), n.centered = centered;
  n.codes = out.scales ? out.y.dtype : Dtype::none;
  n.y = out.y.data, n.new_residual = out.new_residual.data, n.scales = out.scales.as<float>();
  auto* statistics = out.statistics.as<float>();
  if (statistics && centered) n.mean = statistics, statistics += n.rows;
  n.rstd = statistics;
  if (FLEXOPS_DEVICE_CUDA) return host.check(norm_forward_cuda(n, host.stream()));
  // that many rows are not worth waking threads for
  const int64_t grain = n.columns < 12288 ? 12288 / n.columns : 1;
  parallel_for(0, n.rows, grain, [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(norm_forward_cpu)(n, begin, end);
  });
}

inline void layer_norm_host(Host& host, const View& x, const View& weight, const View& bias,
                            double eps, double offset, const View& y) {
  normalize(host, true, eps, offset, x, {}, weight, bias, {y});
}
inline void layer_norm_forward_host(Host& host, const View& x, const View& weight, const View& bias,
                                    double eps, double offset, const View& y,
                                    const View& statistics) {
  normalize(host, true, eps, offset, x, {}, weight, bias, {y, {}, statistics});
}
inline void rms_norm_host(Host& host, const View& x, const View& weight, double eps, double offset,
                          const View& y) {
  normalize(host, false, eps, offset, x, {}, weight, {}, {y});
}
inline void rms_norm_forward_host(Host& host, const View& x, const View& weight, double eps,
                                  double offset, const View& y, const View& statistics) {
  normalize(host, false, eps, offset, x, {}, weight, {}, {y, {}, statistics});
}
inline void add_layer_norm_host(Host& host, const View& x, const View& residual, const View& weight,
                                const View& bias, double eps, double offset, const View& y,
                                const View& sum) {
  normalize(host, true, eps, offset, x, residual, weight, bias, {y, sum});
}
inline void add_layer_norm_forward_host(Host& host, const View& x, const View& residual,
                                        const View& weight, const View& bias, double eps,
                                        double offset, const View& y, const View& sum,
                                        const View& statistics) {
  normalize(host, true, eps, offset, x, residual, weight, bias, {y, sum, statistics});
}
inline void add_rms_norm_host(Host& host, const View& x, const View& residual, const View& weight,
                              double eps, double offset, const View& y, const View& sum) {
  normalize(host, false, eps, offset, x, residual, weight, {}, {y, sum});
}
inline void add_rms_norm_forward_host(Host& host, const View& x, const View& residual,
                                      const View& weight, double eps, double offset, const View& y,
                                      const View& sum, const View& statistics) {
  normalize(host, false, eps, offset, x, residual, weight, {}, {y, sum, statistics});
}

inline void add_rms_norm_quantized_host(Host& host, const View& x, const View& residual,
                                        const View& weight, double eps, Dtype dtype, const View& y,
                                        const View& scales, const View& sum) {
  FLEXOPS_CHECK(dtype == Dtype::i8 || dtype == Dtype::e4m3, host.op,
                ": dtype must be int8 or float8_e4m3fn");
  normalize(host, false, eps, 0.0, x, residual, weight, {}, {y, sum, {}, scales});
}
inline void rms_norm_quantized_host(Host& host, const View& x, const View& weight, double eps,
                                    Dtype dtype, const View& y, const View& scales) {
  add_rms_norm_quantized_host(host, x, {}, weight, eps, dtype, y, scales, {});
}

}  // namespace flexops
