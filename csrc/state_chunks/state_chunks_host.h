// flexops::state_chunks_: from its arguments to the launcher's.
#pragma once

#include "state_chunks/state_chunks.h"
#include "state_scan/state_scan_arguments.h"

namespace flexops {

/// Of the work of chunks, in bytes, unless one chunk of all states needs more.
constexpr int64_t kMostChunkWork = int64_t{128} << 20;

inline void state_chunks__host(Host& host, const TensorView& state, const TensorView& q,
                               const TensorView& k, const TensorView& v, const TensorView& decay,
                               const TensorView& rate, const TensorView& a, const TensorView& bias,
                               const TensorView& skip, int64_t gates, bool delta, bool normalize,
                               double scale, double low, double high, const TensorView& out) {
  const StateScan scan = scan_of(host, state, q, k, v, decay, rate, a, bias, skip, gates, delta,
                                 normalize, scale, low, high, out);
  const int most = delta ? kMostDeltaRows : kMostChunkRows;
  FLEXOPS_CHECK(scan.rows <= most && scan.rows % kStateVector == 0, host.op,
                ": k must have at most ", most, " columns, and a multiple of ", kStateVector,
                ", got ", scan.rows);
  FLEXOPS_CHECK(scan.columns % kStateVector == 0, host.op, ": v must have a multiple of ",
                kStateVector, " columns, got ", scan.columns);
  if (out.numel == 0) return;
  const int64_t chunks = ceil_div(scan.length, kChunkSteps), states = scan.batch * scan.heads,
                fitting = kMostChunkWork / (states * kChunkBytes),
                together = least(chunks, fitting < 1 ? 1 : fitting);
  void* const work = host.workspace<uint8_t>(states * together * kChunkBytes);
  host.check(state_chunks_cuda(scan, work, together, host.stream()));
}

}  // namespace flexops
