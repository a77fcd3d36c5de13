// The launcher of recurrences over long sequences.

#include "common/launch.h"
#include "state_chunks/state_chunks.cuh"
#include "state_chunks/state_chunks.h"

namespace flexops {
namespace {

using state_chunks::Params;
static_assert(state_chunks::Work::kBytes == kChunkBytes && state_chunks::kChunk == kChunkSteps);

/// A block of so many warps that compute has 16 columns of a state for each.
template <int Rows, int Warps, bool Delta>
void start(Params p, int64_t together, void* stream) {
  using namespace state_chunks;
  constexpr int64_t kStage = Stage<Rows, Warps>::kBytes;
  constexpr bool kRare = Rows == 64 && Delta;  // few models have such states
  const StateScan& s = p.scan;
  const int64_t states = s.batch * s.heads, chunks = ceil_div(s.length, kChunk);
  p.parts = static_cast<int>(ceil_div(s.columns, 16 * Warps));
  p.stages = 2 * kStage <= gpu_facts().shared_of_block ? 2 : 1;
  const auto prepare =
      kRare ? rare_kernel<prepare_chunks<Rows, Delta>> : kernel<prepare_chunks<Rows, Delta>>;
  const auto scan = kRare ? rare_kernel<scan_chunks<Rows, Warps, Delta>>
                          : kernel<scan_chunks<Rows, Warps, Delta>>;
  for (int64_t first = 0; first < chunks; first += together) {
    p.first = first, p.chunks = static_cast<int>(least(together, chunks - first));
    launch(prepare, {blocks(states * p.chunks), {kPrepareThreads}, stream, prepare_bytes<Rows>()},
           p);
    launch(scan, {blocks(states * p.parts), {64 * Warps}, stream, p.stages * kStage}, p);
  }
}

/// Blocks of more columns read what is prepared, q and k less often; with fewer there are more of
/// them.
template <int Rows, bool Delta>
void start_rows(const Params& p, int64_t together, void* stream) {
  const int64_t blocks = p.scan.batch * p.scan.heads * ceil_div(p.scan.columns, 64);
  blocks >= gpu_facts().processors ? start<Rows, 4, Delta>(p, together, stream)
                                   : start<Rows, 2, Delta>(p, together, stream);
}

}  // namespace

const char* state_chunks_cuda(const StateScan& scan, void* work, int64_t together, void* stream) {
  const Params p = {scan, static_cast<uint8_t*>(work), 0, 0, 0, 0};
  if (scan.rows <= 64) {
    scan.delta ? start_rows<64, true>(p, together, stream)
               : start_rows<64, false>(p, together, stream);
  } else if (scan.rows <= 128) {
    scan.delta ? start_rows<128, true>(p, together, stream)
               : start_rows<128, false>(p, together, stream);
  } else {
    start_rows<256, false>(p, together, stream);
  }
  return last_error();
}

}  // namespace flexops
