// The launchers of recurrences over long sequences.

#include "common/launch.h"
#include "state_chunks/chunk_gradients.cuh"
#include "state_chunks/state_chunks.cuh"
#include "state_chunks/state_chunks.h"

namespace flexops {
namespace {

using state_chunks::Params;
using state_chunks::Way;
static_assert(state_chunks::Work::kBytes == kChunkBytes && state_chunks::kChunk == kChunkSteps);

template <int Rows, bool Delta>
constexpr bool is_rare() {
  return Rows == 64 && Delta;  // few models have such states
}

template <int Rows, bool Delta>
void prepare(const Params& p, void* stream) {
  using namespace state_chunks;
  const auto function = is_rare<Rows, Delta>() ? rare_kernel<prepare_chunks<Rows, Delta>>
                                               : kernel<prepare_chunks<Rows, Delta>>;
  const int64_t states = p.scan.batch * p.scan.heads;
  launch(function, {blocks(states * p.chunks), {kPrepareThreads}, stream, prepare_bytes<Rows>()},
         p);
}

/// A block of so many warps that compute has 16 columns of a state for each.
template <int Rows, int Warps, bool Delta, Way way>
void scan_columns(Params p, void* stream) {
  using namespace state_chunks;
  constexpr int64_t kStage = Stage<Rows, Warps>::kBytes;
  const StateScan& s = p.scan;
  p.parts = static_cast<int>(ceil_div(s.columns, 16 * Warps));
  p.stages = 2 * kStage <= gpu_facts().shared_of_block ? 2 : 1;
  const auto function = is_rare<Rows, Delta>() || way != Way::results
                            ? rare_kernel<scan_chunks<Rows, Warps, Delta, way>>
                            : kernel<scan_chunks<Rows, Warps, Delta, way>>;
  launch(function, {blocks(s.batch * s.heads * p.parts), {64 * Warps}, stream, p.stages * kStage},
         p);
}

/// Blocks of more columns read what is prepared, q and k less often; with fewer there are more of
/// them.
template <int Rows, bool Delta, Way way>
void scan_rows(const Params& p, void* stream) {
  const int64_t blocks = p.scan.batch * p.scan.heads * ceil_div(p.scan.columns, 64);
  blocks >= gpu_facts().processors ? scan_columns<Rows, 4, Delta, way>(p, stream)
                                   : scan_columns<Rows, 2, Delta, way>(p, stream);
}

template <int Rows, bool Delta>
struct Forward {
  static void run(Params p, int64_t together, void* stream) {
    const int64_t chunks = ceil_div(p.scan.length, kChunkSteps);
    for (; p.first < chunks; p.first += together, p.initial = p.scan.state) {
      p.chunks = static_cast<int>(least(together, chunks - p.first));
      prepare<Rows, Delta>(p, stream);
      scan_rows<Rows, Delta, Way::results>(p, stream);
    }
  }
};

template <int Rows, bool Delta>
struct Backward {
  static void run(Params p, const ChunkGradients& of, void* stream) {
    using namespace state_chunks;
    StateScan& s = p.scan;
    const auto* const grad = static_cast<const bf16*>(of.grad);
    p.chunks = static_cast<int>(ceil_div(s.length, kChunkSteps));
    prepare<Rows, Delta>(p, stream);

    p.initial = of.initial, p.states = static_cast<bf16*>(of.states), s.out = of.values;
    scan_rows<Rows, Delta, Way::keeping>(p, stream);
    GradientParams gradients = {s,
                                grad,
                                static_cast<const bf16*>(of.v),
                                p.states,
                                static_cast<const bf16*>(of.changes),
                                static_cast<bf16*>(of.q),
                                static_cast<bf16*>(of.k),
                                of.decay,
                                of.rate,
                                of.skip,
                                p.chunks};

    p.initial = of.last, p.states = static_cast<bf16*>(of.changes);
    s.v = of.grad, s.out = of.v;
    const int64_t step = int64_t{s.heads} * s.columns;
    s.of_v = {s.length * step, step, s.columns};
    scan_rows<Rows, Delta, Way::backward>(p, stream);
    launch(rare_kernel<chunk_gradients<Rows, Delta>>,
           {blocks(s.batch * s.heads * p.chunks),
            {Gradients<Rows>::kThreads},
            stream,
            Gradients<Rows>::kBytes},
           gradients);
  }
};

template <template <int, bool> class Of, class... Arguments>
void start(const Params& p, Arguments... arguments) {
  const StateScan& s = p.scan;
  if (s.rows <= 64) {
    s.delta ? Of<64, true>::run(p, arguments...) : Of<64, false>::run(p, arguments...);
  } else if (s.rows <= 128) {
    s.delta ? Of<128, true>::run(p, arguments...) : Of<128, false>::run(p, arguments...);
  } else {
    Of<256, false>::run(p, arguments...);
  }
}

}  // namespace

const char* state_chunks_cuda(const StateScan& scan, const float* initial, void* work,
                              int64_t together, void* stream) {
  const Params p = {scan, initial, static_cast<uint8_t*>(work), nullptr, 0, 0, 0, 0};
  start<Forward>(p, together, stream);
  return last_error();
}

const char* state_chunks_backward_cuda(const StateScan& scan, const ChunkGradients& gradients,
                                       void* stream) {
  const Params p = {scan, nullptr, static_cast<uint8_t*>(gradients.work), nullptr, 0, 0, 0, 0};
  start<Backward>(p, gradients, stream);
  return last_error();
}

}  // namespace flexops
