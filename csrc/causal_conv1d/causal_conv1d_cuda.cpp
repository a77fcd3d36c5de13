// The launchers of the causal convolution.

#include "causal_conv1d/causal_conv1d.cuh"
#include "causal_conv1d/causal_conv1d.h"
#include "common/launch.h"

namespace flexops {
namespace {

using causal_conv1d::Params;

static_assert(causal_conv1d::kTaps == kConvTaps && causal_conv1d::kBackwardRun == kConvRun);

/// Whether every step's channels can be read in vectors of so many bytes.
bool has_vectors(const void* a, const void* b, const void* c, const ConvShape& shape,
                 int64_t bytes) {
  const int64_t row = shape.channels * element_size(shape.type);
  return aligned(a) && aligned(b) && aligned(c) && row % bytes == 0;
}

template <typename T, int W>
LaunchConfig config_of(const Params& p, int64_t batch, void* stream) {
  const int64_t vectors = ceil_div(p.channels, causal_conv1d::Channels<T, W>::N);
  return {blocks(batch * p.runs, ceil_div(vectors, causal_conv1d::kThreads)),
          {causal_conv1d::kThreads},
          stream};
}

Params make_params(const void* x, const ConvFilter& filter, void* out, const ConvShape& shape) {
  Params p = {};
  p.x = x, p.out = out, p.weight = filter.weight, p.bias = filter.bias;
  p.length = shape.length, p.channels = shape.channels, p.silu = shape.silu;
  return p;
}

template <typename T>
void forward(const Params& p, const ConvShape& shape, bool vectors, void* stream) {
  constexpr int W = static_cast<int>(sizeof(T));  // four channels: more would leave few threads
  if (vectors) {
    launch(kernel<causal_conv1d::causal_conv1d_forward<T, W>>,
           config_of<T, W>(p, shape.batch, stream), p);
  } else {
    launch(kernel<causal_conv1d::causal_conv1d_forward<T, 0>>,
           config_of<T, 0>(p, shape.batch, stream), p);
  }
}

template <typename T>
void backward(const Params& p, const ConvShape& shape, bool vectors, void* stream) {
  constexpr int W = static_cast<int>(sizeof(T));  // four channels
  if (vectors) {
    launch(kernel<causal_conv1d::causal_conv1d_gradient<T, W>>,
           config_of<T, W>(p, shape.batch, stream), p);
  } else {
    launch(kernel<causal_conv1d::causal_conv1d_gradient<T, 0>>,
           config_of<T, 0>(p, shape.batch, stream), p);
  }
}

template <typename T, typename W>
void update(const causal_conv1d::UpdateParams& p, void* stream) {
  launch(kernel<causal_conv1d::causal_conv1d_step<T, W>>,
         {blocks(ceil_div(p.count, causal_conv1d::kThreads)), {causal_conv1d::kThreads}, stream},
         p);
}

}  // namespace

const char* causal_conv1d_cuda(const void* x, const ConvFilter& filter, void* out,
                               const ConvShape& shape, void* stream) {
  Params p = make_params(x, filter, out, shape);
  p.runs = static_cast<int>(ceil_div(shape.length, causal_conv1d::kForwardRun));
  const bool vectors = has_vectors(x, out, out, shape, 4 * element_size(shape.type));
  if (shape.type == ElementType::f32) forward<float>(p, shape, vectors, stream);
  if (shape.type == ElementType::f16) forward<f16>(p, shape, vectors, stream);
  if (shape.type == ElementType::bf16) forward<bf16>(p, shape, vectors, stream);
  return last_error();
}

const char* causal_conv1d_backward_cuda(const void* grad, const void* x, const ConvFilter& filter,
                                        void* x_grad, float* partial, const ConvShape& shape,
                                        void* stream) {
  Params p = make_params(x, filter, x_grad, shape);
  p.grad = grad, p.partial = partial;
  p.runs = static_cast<int>(shape.runs());
  const bool vectors = has_vectors(x, grad, x_grad, shape, 4 * element_size(shape.type));
  if (shape.type == ElementType::f32) backward<float>(p, shape, vectors, stream);
  if (shape.type == ElementType::f16) backward<f16>(p, shape, vectors, stream);
  if (shape.type == ElementType::bf16) backward<bf16>(p, shape, vectors, stream);
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
