// The launchers of Muon's passes over lists of matrices.

#include "common/multi_tensor_launch.h"
#include "muon/muon.cuh"
#include "muon/muon.h"

namespace flexops {
namespace {

template <class Rule, class Extra>
void launch_pass(const TensorRow* rows, int64_t count, const typename Rule::Shared& shared,
                 const Extra& extra, void* stream) {
  multi::launch_rows<Rule>(
      kernel<muon::pass<Rule>>, rows, count, shared, [](int64_t) { return true; }, extra, stream);
}

}  // namespace

int64_t muon_scratch(const TensorRow* rows, int64_t count) {
  return count > 0 ? count * (multi::chunks_of<muon::Measure>(rows[0].numel) + 1) : 0;
}

const char* muon_average_cuda(const TensorRow* rows, int64_t count, double momentum, bool nesterov,
                              double scale, double eps, const float* grad_scale, float* scratch,
                              void* stream) {
  if (count == 0 || rows[0].numel == 0) return nullptr;
  const muon::AverageOptions options = {grad_scale, nullptr, static_cast<float>(1 - momentum),
                                        nesterov};
  const int64_t chunks = multi::chunks_of<muon::Measure>(rows[0].numel);
  float *const factors = scratch, *const partials = scratch + count;
  launch_pass<muon::Measure>(
      rows, count, options, [&](int64_t i, int) { return partials + i * chunks; }, stream);
  const muon::Norms norms = {partials, factors, chunks, static_cast<float>(scale),
                             static_cast<float>(eps)};
  launch(kernel<muon::factor>, {blocks(count), {muon::Norms::kThreads}, stream}, norms);
  launch_pass<muon::Scale>(
      rows, count, options, [&](int64_t i, int) { return factors + i; }, stream);
  return last_error();
}

const char* muon_apply_cuda(const TensorRow* rows, int64_t count, double lr, double decay,
                            double factor, const float* lr_tensor, void* stream) {
  const muon::Apply::Shared shared = {nullptr,
                                      nullptr,
                                      lr_tensor,
                                      static_cast<float>(lr),
                                      static_cast<float>(decay),
                                      static_cast<float>(factor)};
  launch_pass<muon::Apply>(
      rows, count, shared, [](int64_t, int) -> const float* { return nullptr; }, stream);
  return last_error();
}

}  // namespace flexops
