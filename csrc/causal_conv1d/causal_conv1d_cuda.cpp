// The launchers of the causal convolution.

#include "causal_conv1d/causal_conv1d.cuh"
#include "causal_conv1d/causal_conv1d.h"
#include "common/launch.h"
#include "common/sum_parts.cuh"

namespace flexops {
namespace {

using causal_conv1d::Params;

static_assert(causal_conv1d::kTaps == kConvTaps);

constexpr int kForwardRun = 16;  // time steps of a thread
constexpr int kChannels = 4;     // of a thread: more would leave few threads

Params make_params(const void* x, const ConvFilter& filter, void* out, int64_t run,
                   const ConvShape& shape) {
  Params p = {};
  p.x = x, p.out = out, p.weight = filter.weight, p.bias = filter.bias;
  p.length = shape.length, p.channels = shape.channels, p.sequences = shape.sequences;
  p.run = static_cast<int>(run), p.runs = static_cast<int>(ceil_div(shape.length, run));
  return p;
}

/// Launches the forward pass, or the backward pass where parts of sums are wanted.
template <typename T, int N, bool Silu>
void launch_runs(const Params& p, int64_t batch, void* stream) {
  const LaunchConfig config{
      blocks(batch * p.runs, ceil_div(ceil_div(p.channels, N), causal_conv1d::kThreads)),
      {causal_conv1d::kThreads},
      stream};
  using namespace causal_conv1d;
  if (p.partial)
    return launch(p.sequences ? rare_kernel<causal_conv1d_gradient<T, N, Silu, true>>
                              : kernel<causal_conv1d_gradient<T, N, Silu, false>>,
                  config, p);
  launch(p.sequences ? rare_kernel<causal_conv1d_forward<T, N, Silu, true>>
                     : kernel<causal_conv1d_forward<T, N, Silu, false>>,
         config, p);
}

template <typename T>
void launch_type(const Params& p, const ConvShape& shape, void* stream) {
  constexpr int N = kChannels;
  const bool vectors = shape.channels % N == 0 && aligned(p.x) && aligned(p.out) && aligned(p.grad);
  const auto run = vectors      ? shape.silu ? launch_runs<T, N, true> : launch_runs<T, N, false>
                        : shape.silu ? launch_runs<T, 1, true>
                                : launch_runs<T, 1, false>;
  run(p, shape.batch, stream);
}

const char* launch_all(const Params& p, const ConvShape& shape, void* stream) {
  if (shape.type == ElementType::f32) launch_type<float>(p, shape, stream);
  if (shape.type == ElementType::f16) launch_type<f16>(p, shape, stream);
  if (shape.type == ElementType::bf16) launch_type<bf16>(p, shape, stream);
  return last_error();
}

template <typename T, typename W>
void update(causal_conv1d::UpdateParams& p, void* stream) {
  LaunchConfig config{
      blocks(ceil_div(p.count, causal_conv1d::kThreads)), {causal_conv1d::kThreads}, stream};
  p.early = config.early = config.grid.x <= kFewBlocks;
  launch(kernel<causal_conv1d::causal_conv1d_step<T, W>>, config, p);
}

}  // namespace

const char* causal_conv1d_cuda(const void* x, const ConvFilter& filter, void* out,
                               const ConvShape& shape, void* stream) {
  return launch_all(make_params(x, filter, out, kForwardRun, shape), shape, stream);
}

/// As long as possible, since a run reads three steps of the next one, with a thread in every
/// place.
int64_t causal_conv1d_run_cuda(const ConvShape& shape) {
  constexpr int64_t kResident = 480;  // threads of a multiprocessor, by registers: a few less
  const int64_t threads = shape.batch * shape.channels / kChannels,  // for each run
      wanted = gpu_facts().processors * kResident;
  int64_t run = 1024;
  while (run > 32 && threads * ceil_div(shape.length, run) < wanted) run /= 2;
  return run;
}

const char* causal_conv1d_backward_cuda(const void* grad, const void* x, const ConvFilter& filter,
                                        void* x_grad, float* partial, float* sums, int64_t run,
                                        const ConvShape& shape, void* stream) {
  Params p = make_params(x, filter, x_grad, run, shape);
  p.grad = grad, p.partial = partial;
  SumParts s = {};
  s.parts[0] = partial, s.out[0] = sums, s.type[0] = ElementType::f32;
  s.count = shape.batch * p.runs, s.columns = static_cast<int>(kConvSums * shape.channels);
  if (s.count > 0) launch_all(p, shape, stream);
  launch(kernel<sum_parts>, {blocks(ceil_div(s.columns, kSumColumns)), {kSumThreads}, stream}, s);
  return last_error();
}

const char* causal_conv1d_update_cuda(void* state, const void* x, void* out,
                                      const ConvUpdate& shape, void* stream) {
  causal_conv1d::UpdateParams p = {};
  p.state = state, p.x = x, p.out = out, p.weight = shape.weight, p.bias = shape.bias;
  p.count = shape.batch * shape.channels, p.channels = shape.channels;
  p.x_batch = shape.x_batch, p.x_channel = shape.x_channel, p.x_step = shape.x_step;
  p.length = static_cast<int>(shape.length), p.size = static_cast<int>(shape.size);
  p.width = static_cast<int>(shape.width), p.silu = shape.silu;
  p.whole = p.size == kConvTaps && p.width == kConvTaps && p.length == 1 && aligned(state) &&
            aligned(shape.weight);
  const bool wide = shape.weight_type == ElementType::f32;
  if (shape.type == ElementType::f32) update<float, float>(p, stream);
  if (shape.type == ElementType::f16)
    wide ? update<f16, float>(p, stream) : update<f16, f16>(p, stream);
  if (shape.type == ElementType::bf16)
    wide ? update<bf16, float>(p, stream) : update<bf16, bf16>(p, stream);
  return last_error();
}

}  // namespace flexops
