// The launcher of chains of products of a few rows.

#include "few_rows_chain/few_rows_chain.h"

#include "common/launch.h"
#include "few_rows_chain/few_rows_chain.cuh"

namespace flexops {
namespace {

using Params = chain::Params<kMostPhases>;
using Products = chain::Params<kMostProducts>;
using chain::Phase;
static_assert(chain::kMostPhases == kMostPhases && chain::kMostProducts == kMostProducts, "limits");

int64_t rounded_up(int64_t bytes) { return ceil_div(bytes, int64_t{128}) * 128; }

/// Where shared memory's parts are, with as many stages as have room; returns its bytes.
int64_t lay_out(Params& p, int64_t m, bool small, int64_t most) {
  int64_t tiles = 0, parts = 0;
  for (int i = 0; i < p.count; ++i) {
    const Phase& phase = p.phases[i];
    if (phase.count == 0) continue;
    const int64_t of_k = phase.chunks * chain::kChunk,
                  of_rows = phase.pass_rows * least(phase.chunks, chain::kWarps) * 64 * m;
    tiles = tiles < of_k ? of_k : tiles, parts = parts < of_rows ? of_rows : parts;
  }
  const int64_t units = small ? 2 : 1;
  const int64_t stride = tiles * 128, sums = rounded_up(m * stride),
                attended =
                    p.attended.blocks > 0 ? chain::attention_bytes(8 << p.attended.lanes_log) : 0,
                digits = sums + tiles * units * m * 8,
                squares = rounded_up(digits < attended ? attended : digits),
                item = squares + 4 * (8 + m * (chain::kWarps + 1)),
                at = rounded_up(item + static_cast<int64_t>(sizeof(chain::Item))),
                ring = rounded_up(at + parts),
                stage = chain::kSharing * chain::kChunk * (512 + 64 * units),
                room = least((most - ring) / (stage + 16), int64_t{chain::kMostStages});
  // A stage's barrier distinguishes a copy only from the one before. Copies end in any order, so
  // the one before must have ended when a group of warps waits for the next: it was the group's
  // own, or it had ended when the copy that the group has just multiplied began.
  constexpr int64_t groups = chain::kWarps / chain::kSharing;
  const int64_t stages = room < groups + chain::kUnderWay ? room / groups * groups : room,
                barriers = ring + stages * stage;
  p.x_stride = static_cast<int>(stride), p.sums = static_cast<int>(sums);
  p.squares = static_cast<int>(squares), p.item = static_cast<int>(item),
  p.parts = static_cast<int>(at);
  p.ring = static_cast<int>(ring), p.barriers = static_cast<int>(barriers);
  p.stages = static_cast<int>(stages);
  return barriers + 16 * stages;
}

template <class T, int kRows, bool kAttends, class P>
void launch_chain(const P& p, bool small, const LaunchConfig& config) {
  if (small) return launch(rare_kernel<chain::products<T, kRows, true, kAttends>>, config, p);
  launch(kernel<chain::products<T, kRows, false, kAttends>>, config, p);
}
template <class T>
void launch_chain(const Params& p, int64_t rows, bool small, const LaunchConfig& config) {
  if (p.attended.blocks > 0) return launch_chain<T, 1, true>(p, small, config);
  Products products = {p, {}};
  for (int i = 0; i < p.count; ++i) products.phases[i] = p.phases[i];
  rows == 1 ? launch_chain<T, 1, false>(products, small, config)
            : launch_chain<T, 2, false>(products, small, config);
}

/// What all attentions have in common, of the keys of one of them; false if there are too many.
bool set_attended(chain::Attended& a, const FewRowsChain& call, const TensorView& keys,
                  int64_t width, int processors) {
  if (a.blocks > 0) return true;
  a.heads_k = static_cast<int>(keys.size(2)), a.lanes_log = log2_of(keys.size(3) / 8);
  const int64_t dim = keys.size(3);
  a.heads = static_cast<int>(width / dim), a.capacity = static_cast<int>(keys.size(1));
  const int64_t groups = ceil_div(a.heads / a.heads_k, chain::kHeads), items = a.heads_k * groups;
  a.splits = static_cast<int>(least(processors / items, int64_t{chain::kMostSplits}));
  a.blocks = static_cast<int>(items * a.splits);
  a.scale = call.scale * 1.44269504f;
  a.window_left = static_cast<int>(
      call.window_left < 0 ? INT32_MAX : least(call.window_left, int64_t{INT32_MAX}));
  a.seqlens = call.seqlens.as<int32_t>(), a.leftpad = call.leftpad.as<int32_t>();
  auto* const words = call.workspace.as<int32_t>();
  a.counters = reinterpret_cast<uint32_t*>(words) + 32;
  a.parts = reinterpret_cast<float*>(words + kChainCounters);
  if (call.cos) {
    a.cos = call.cos.data, a.sin = call.sin.data, a.half = static_cast<int>(call.cos.size(1));
    a.positions = static_cast<int>(call.cos.size(0));
    a.cos_row = call.cos.stride(0), a.sin_row = call.sin.stride(0);
  }
  const int64_t parts = int64_t{a.blocks} * chain::kHeads * (dim + 2);
  return a.splits > 0 && items <= kChainCounters - 32 &&
         call.workspace.numel >= kChainCounters + parts;
}

}  // namespace

const char* few_rows_chain_cuda(const FewRowsChain& call, void* stream) {
  const Gpu& gpu = gpu_facts();
  Params p = {};
  p.count = static_cast<int>(call.outs.count);
  p.eps = call.eps, p.offset = call.offset, p.counter = call.workspace.as<u64>();
  bool small = false;
  int64_t weight = 0, bias = 0, zero = 0, norm = 0, residual = 0, cache = 0;
  for (int i = 0; i < p.count; ++i) {
    Phase& phase = p.phases[i];
    const PhaseKind kind(call.kinds, i);
    const TensorView &x = i == 0 ? call.x : call.xs[i - 1], &out = call.outs[i];
    phase.x = x.data, phase.out = out.data;
    phase.norm = kind.norm ? call.norms[norm++].data : nullptr;
    phase.residual = kind.residual ? call.residuals[residual++].data : nullptr;
    phase.width = static_cast<int>(out.columns()), phase.k = static_cast<int>(x.columns());
    phase.count = kind.weights, phase.activation = kind.activation;
    phase.has_zeros = kind.zeros;
    if (kind.weights == 0) {
      const TensorView &keys = call.caches[cache++], &values = call.caches[cache++];
      phase.caches = {keys.data, values.data, keys.stride(1)};
      if (kind.norm) phase.residual = call.norms[norm++].data;
      if (!set_attended(p.attended, call, keys, phase.width, gpu.processors))
        return "too many heads for this GPU, or too small a workspace";
      continue;
    }
    phase.tiles_k = static_cast<int>(ceil_div(phase.k, 64));
    phase.groups = static_cast<int>(call.scales[weight].size(1));
    phase.half_scales = call.scales[weight].dtype == Dtype::f16;
    const int per_group = 64 * phase.tiles_k / phase.groups;
    phase.group_shift = per_group == 32 ? 5 : per_group == 64 ? 6 : 7;
    small = phase.group_shift == 5;
    int units = 0;
    for (int j = 0; j < kind.weights; ++j, ++weight) {
      auto& one = phase.weights[j];
      one.packed = call.weights[weight].as<uint8_t>();
      one.scales = call.scales[weight].as<uint16_t>();
      one.zeros = kind.zeros ? call.zeros[zero++].as<uint16_t>() : nullptr;
      one.bias = kind.biases ? call.biases[bias++].data : nullptr;
      one.start = kind.activation ? 0 : 16 * units;
      const int tiles = static_cast<int>(call.weights[weight].size(0));
      one.columns = static_cast<int>(least(16 * tiles, phase.width - one.start));
      units = kind.activation ? tiles : units + tiles;
      one.end = units;
    }
    phase.each = units / gpu.processors, phase.longer = units % gpu.processors;
    phase.chunks = static_cast<int>(ceil_div(phase.tiles_k, chain::kChunk));
    phase.stages = static_cast<int>(ceil_div(phase.chunks, chain::kSharing));
    const int64_t rows = ceil_div(units, gpu.processors) * (kind.activation ? 2 : 1);
    phase.pass_rows = static_cast<int>(least(rows, 16));
  }
  const int64_t rows = call.x.rows();
  const int64_t bytes = lay_out(p, rows, small, gpu.shared_of_block);
  if (p.stages < chain::kWarps / chain::kSharing) return "these rows do not fit into shared memory";
  LaunchConfig config = {blocks(gpu.processors), {32 * (chain::kWarps + 2)}, stream, bytes};
  config.early = config.together = true;
  call.x.dtype == Dtype::bf16 ? launch_chain<bf16>(p, rows, small, config)
                              : launch_chain<f16>(p, rows, small, config);
  return last_error();
}

}  // namespace flexops
