// The launchers of log-probabilities: how many threads and blocks share a row.

#include "common/dispatch.cuh"
#include "common/launch.h"
#include "logprobs/logprobs.cuh"
#include "logprobs/logprobs.h"

namespace flexops {
namespace {

using logprobs::Params;

Params make_params(const void* logits, const int64_t* target, const LogprobRows& shape,
                   const LogprobResults& results) {
  Params p = {};
  p.logits = logits, p.target = reinterpret_cast<const i64*>(target);
  p.logprobs = results.logprobs, p.entropy = results.entropy, p.stats = results.stats;
  p.rows = shape.rows, p.stride = shape.stride, p.ignore_index = shape.ignore_index;
  p.length = static_cast<int>(shape.length), p.parts = 1;
  p.inverse_temperature = 1.0f / shape.temperature;
  p.softcap = shape.softcap, p.inverse_softcap = shape.softcap > 0 ? 1.0f / shape.softcap : 0.0f;
  return p;
}

/// Vectors that the longest row has, wherever it starts.
int64_t vectors_of(const void* data, const LogprobRows& shape) {
  const int64_t elements = 16 / element_size(shape.type);
  const int64_t head = aligned(data) && shape.stride % elements == 0 ? 0 : elements - 1;
  return ceil_div(shape.length + head, elements);
}

int64_t threads_of(int64_t vectors) {
  return least(ceil_div(ceil_div(vectors, logprobs::kVectors), 32) * 32, logprobs::kThreads);
}

template <typename T>
void launch_rows(const Params& p, const LaunchConfig& config) {
  p.softcap > 0 ? launch(kernel<logprobs::logprobs_rows<T, true>>, config, p)
                : launch(kernel<logprobs::logprobs_rows<T, false>>, config, p);
}

template <typename T>
void launch_gradient(const Params& p, const LaunchConfig& config) {
  p.softcap > 0 ? launch(kernel<logprobs::logprobs_gradient<T, true>>, config, p)
                : launch(kernel<logprobs::logprobs_gradient<T, false>>, config, p);
}

}  // namespace

const char* logprobs_cuda(const void* logits, const int64_t* target, const LogprobRows& shape,
                          const LogprobResults& results, void* stream) {
  const Params p = make_params(logits, target, shape, results);
  const LaunchConfig config = {blocks(p.rows), blocks(threads_of(vectors_of(logits, shape))),
                               stream};
  if (shape.type == ElementType::f32) launch_rows<float>(p, config);
  if (shape.type == ElementType::f16) launch_rows<f16>(p, config);
  if (shape.type == ElementType::bf16) launch_rows<bf16>(p, config);
  return last_error();
}

const char* logprobs_backward_cuda(const void* logits, const int64_t* target,
                                   const LogprobRows& shape, const LogprobResults& results,
                                   const LogprobGradients& gradients, void* out, int64_t out_stride,
                                   void* stream) {
  Params p = make_params(logits, target, shape, results);
  p.out = out, p.out_stride = out_stride;
  p.of_logprobs = gradients.of_logprobs, p.of_entropy = gradients.of_entropy;
  const int64_t vectors = vectors_of(logits, shape), threads = threads_of(vectors);
  p.parts = static_cast<int>(ceil_div(vectors, threads * logprobs::kVectors));
  const LaunchConfig config = {blocks(p.rows * p.parts), blocks(threads), stream};
  if (shape.type == ElementType::f32) launch_gradient<float>(p, config);
  if (shape.type == ElementType::f16) launch_gradient<f16>(p, config);
  if (shape.type == ElementType::bf16) launch_gradient<bf16>(p, config);
  return last_error();
}

}  // namespace flexops
