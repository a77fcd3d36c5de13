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

int64_t threads_of(int64_t vectors) {
  return least(ceil_div(ceil_div(vectors, logprobs::kVectors), 32) * 32, logprobs::kThreads);
}

}  // namespace

const char* logprobs_cuda(const void* logits, const int64_t* target, const LogprobRows& shape,
                          const LogprobResults& results, void* stream) {
  const Params p = make_params(logits, target, shape, results);
  const LaunchConfig config = {blocks(p.rows), blocks(threads_of(row_vectors(logits, shape))),
                               stream};
  with_floats(shape.type, [&](auto type) {
    using T = decltype(type);
    p.softcap > 0 ? launch(kernel<logprobs::logprobs_rows<T, true>>, config, p)
                  : launch(kernel<logprobs::logprobs_rows<T, false>>, config, p);
  });
  return last_error();
}

const char* logprobs_backward_cuda(const void* logits, const int64_t* target,
                                   const LogprobRows& shape, const LogprobResults& results,
                                   const LogprobGradients& gradients, void* out, int64_t out_stride,
                                   void* stream) {
  Params p = make_params(logits, target, shape, results);
  p.out = out, p.out_stride = out_stride;
  p.of_logprobs = gradients.of_logprobs, p.of_entropy = gradients.of_entropy;
  const int64_t vectors = row_vectors(logits, shape), threads = threads_of(vectors);
  p.parts = static_cast<int>(ceil_div(vectors, threads * logprobs::kVectors));
  const LaunchConfig config = {blocks(p.rows * p.parts), blocks(threads), stream};
  with_floats(shape.type, [&](auto type) {
    using T = decltype(type);
    p.softcap > 0 ? launch(kernel<logprobs::logprobs_gradient<T, true>>, config, p)
                  : launch(kernel<logprobs::logprobs_gradient<T, false>>, config, p);
  });
  return last_error();
}

}  // namespace flexops
