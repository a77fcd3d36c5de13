// The launcher of recurrences whose state is a matrix.

#include "common/launch.h"
#include "state_scan/state_scan.cuh"
#include "state_scan/state_scan.h"

namespace flexops {
namespace {

using state_scan::Params;

/// The kernel of one step, or of more.
template <int Pieces, int C, bool Delta>
KernelOf<Params> choose(ElementType type, bool one) {
  using state_scan::scan;
  using state_scan::step;
  constexpr bool kCommon = Pieces == 4 || Pieces == 2;
  if (type == ElementType::bf16) {
    if constexpr (kCommon)
      return one ? kernel<step<bf16, Pieces, C, Delta>> : kernel<scan<bf16, Pieces, C, Delta>>;
    return one ? rare_kernel<step<bf16, Pieces, C, Delta>>
               : rare_kernel<scan<bf16, Pieces, C, Delta>>;
  }
  if (type == ElementType::f16)
    return one ? rare_kernel<step<f16, Pieces, C, Delta>>
               : rare_kernel<scan<f16, Pieces, C, Delta>>;
  return one ? rare_kernel<step<float, Pieces, C, Delta>>
             : rare_kernel<scan<float, Pieces, C, Delta>>;
}

template <int Pieces, int C>
void start(const StateScan& scan, void* stream) {
  const int64_t parts = ceil_div(scan.columns, state_scan::kSets * C);
  const bool one = scan.length == 1;
  LaunchConfig config{blocks(parts * scan.heads * scan.batch), {state_scan::kThreads}, stream};
  config.early = one && config.grid.x <= kFewBlocks;
  const Params p{scan, static_cast<int>(parts), config.early};
  launch(scan.delta ? choose<Pieces, C, true>(scan.type, one)
                    : choose<Pieces, C, false>(scan.type, one),
         config, p);
}

/// Four columns of a thread need fewer instructions for each, and half as many blocks, of which
/// each multiprocessor then must have two, at least.
template <int Pieces>
void start_pieces(const StateScan& scan, void* stream) {
  if constexpr (Pieces <= 4) {
    const int64_t blocks = scan.batch * scan.heads * ceil_div(scan.columns, state_scan::kSets * 4);
    if (blocks >= 2 * gpu_facts().processors) return start<Pieces, 4>(scan, stream);
  }
  start<Pieces, 2>(scan, stream);
}

}  // namespace

const char* state_scan_cuda(const StateScan& scan, void* stream) {
  const int64_t pieces = ceil_div(scan.rows, 32);
  if (pieces == 1) {
    start_pieces<1>(scan, stream);
  } else if (pieces == 2) {
    start_pieces<2>(scan, stream);
  } else if (pieces <= 4) {
    start_pieces<4>(scan, stream);
  } else {
    start_pieces<8>(scan, stream);
  }
  return last_error();
}

}  // namespace flexops
