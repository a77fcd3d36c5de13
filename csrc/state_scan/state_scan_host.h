// flexops::state_scan_: from its arguments to the launchers'.
#pragma once

#include "common/host.h"

#include "state_scan/state_scan.h"
#include "state_scan/state_scan_arguments.h"

namespace flexops {

inline void state_scan__host(Host& host, const TensorView& state, const TensorView& q,
                             const TensorView& k, const TensorView& v, const TensorView& decay,
                             const TensorView& rate, const TensorView& a, const TensorView& bias,
                             const TensorView& skip, int64_t gates, bool delta, bool normalize,
                             double scale, double low, double high, const TensorView& out) {
  const StateScan scan = scan_of(host, state, q, k, v, decay, rate, a, bias, skip, gates, delta,
                                 normalize, scale, low, high, out);
  if (out.numel == 0) return;
  if (FLEXOPS_DEVICE_CUDA) {
    const bool by_columns = state.stride(3) == 1;
    FLEXOPS_CHECK(by_columns || state.stride(2) == 1, host.op,
                  ": state must have neighbours in memory along its rows or columns");
    bool lies_well = aligned(state.data);
    for (const int64_t stride :
         {scan.state_batch, scan.state_head, by_columns ? scan.state_row : scan.state_column})
      lies_well = lies_well && stride % 4 == 0;
    FLEXOPS_CHECK(lies_well, host.op, ": state must begin each row at a multiple of 16 bytes");
    FLEXOPS_CHECK(scan.rows % kStateVector == 0, host.op, ": k must have a multiple of ",
                  kStateVector, " columns, got ", scan.rows);
    FLEXOPS_CHECK(scan.columns % kStateVector == 0, host.op, ": v must have a multiple of ",
                  kStateVector, " columns, got ", scan.columns);
    return host.check(state_scan_cuda(scan, host.stream()));
  }
  parallel_for(
      0, scan.batch * scan.heads * ceil_div(scan.columns, kScanColumns), 1,
      [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(state_scan_cpu)(scan, begin, end); });
}

}  // namespace flexops
