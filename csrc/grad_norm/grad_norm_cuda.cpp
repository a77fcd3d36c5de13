// The launchers of the gradients' norm and of clipping.

#include "grad_norm/grad_norm.h"

#include "common/multi_tensor_launch.h"
#include "grad_norm/grad_norm.cuh"

namespace flexops {
namespace {

using multi::Data;

template <bool two>
void reduce_rows(const KernelOf<multi::Launch<grad_norm::NormRule<two>>>& kernel,
                 const TensorRow* rows, int64_t count, double norm_type, float* partials,
                 void* stream) {
  using Rule = grad_norm::NormRule<two>;
  typename Rule::Shared shared = {};
  shared.power = static_cast<float>(norm_type);
  shared.infinite = norm_kind(norm_type) == NormKind::infinity;
  int64_t chunks = 0;
  multi::launch_rows<Rule>(
      kernel, rows, count, shared, [](int64_t) { return true; },
      [&](int64_t i, int) {
        const float* mine = partials + chunks;
        chunks += multi::chunks_of<Rule>(rows[i].numel);
        return mine;
      },
      stream);
}

int64_t count_chunks(const TensorRow* rows, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i)
    chunks += multi::chunks_of<grad_norm::NormRule<true>>(rows[i].numel);
  return chunks;
}

}  // namespace

int64_t grad_norm_partials(const TensorRow* rows, int64_t count) {
  return count_chunks(rows, count) + 1;
}

const char* grad_norm_cuda(const TensorRow* rows, int64_t count, double norm_type, float* partials,
                           float* norm, void* stream) {
  const NormKind kind = norm_kind(norm_type);
  if (kind == NormKind::two) {
    reduce_rows(kernel<grad_norm::norm_kernel<true>>, rows, count, norm_type, partials, stream);
  } else {
    reduce_rows(rare_kernel<grad_norm::norm_kernel<false>>, rows, count, norm_type, partials,
                stream);
  }
  grad_norm::Final final;
  final.partials = partials;
  final.count = count_chunks(rows, count);
  final.norm = norm;
  final.power = static_cast<float>(norm_type);
  final.kind = static_cast<int>(kind);
  launch(kernel<grad_norm::final_kernel>, {{1}, {grad_norm::Final::kThreads}, stream}, final);
  return last_error();
}

const char* clip_grads_cuda(const TensorRow* rows, int64_t count, const float* total_norm,
                            double max_norm, void* stream) {
  grad_norm::Clip shared = {};
  shared.total_norm = total_norm;
  shared.max_norm = static_cast<float>(max_norm);
  multi::step_rows(rows, count, multi::data_of<grad_norm::ClipRule<Data::mixed>>, shared, stream,
                   rare_kernel<grad_norm::clip_kernel<Data::mixed>>,
                   kernel<grad_norm::clip_kernel<Data::bf16>>,
                   kernel<grad_norm::clip_kernel<Data::f32>>);
  return last_error();
}

}  // namespace flexops
