// The launchers of act(x + bias): flat or by rows, by vectors or by elements, and the grid.

#include "activation/activation_biased.cuh"
#include "activation/activation_launch.h"

namespace flexops {
namespace {

using namespace activation;

constexpr int64_t kDirectRows = 8;  // up to so many a block adds up a column alone

// [erf]
const Kernels<Biased> kBiased[2] = {
    {FLEXOPS_EACH_TYPE(kernel, biased, false), FLEXOPS_EACH_TYPE(rare_kernel, biased, false, 1)},
    {FLEXOPS_EACH_TYPE(kernel, biased, true), FLEXOPS_EACH_TYPE(rare_kernel, biased, true, 1)}};
const Kernels<Summed> kBiasedSums[2] = {{FLEXOPS_EACH_COMMON_TYPE(biased_sums, false),
                                         FLEXOPS_EACH_TYPE(rare_kernel, biased_sums, false, 1)},
                                        {FLEXOPS_EACH_COMMON_TYPE(biased_sums, true),
                                         FLEXOPS_EACH_TYPE(rare_kernel, biased_sums, true, 1)}};
const Kernels<Biased> kBiasedBackward = {FLEXOPS_EACH_COMMON_TYPE(biased_backward),
                                         FLEXOPS_EACH_TYPE(rare_kernel, biased_backward, 1)};

bool takes_vectors(const BiasedActivation& c) {
  const int64_t n = 16 / element_size(c.type);
  return aligned(c.x) && aligned(c.grad) && aligned(c.out) && aligned(c.bias) &&
         c.columns % n == 0 && c.x_stride % n == 0 && c.grad_stride % n == 0;
}

bool is_flat(const BiasedActivation& c) {
  return !c.bias &&
         (c.rows == 1 || (c.x_stride == c.columns && (!c.grad || c.grad_stride == c.columns)));
}

void launch_biased(const BiasedActivation& c, bool vectors, bool flat, void* stream) {
  const int64_t size = element_size(c.type), n = vectors ? 16 / size : 1,
                rows = flat ? c.rows * c.columns / n : c.rows;
  Biased p;
  p.x = c.x, p.bias = c.bias, p.grad = c.grad, p.out = c.out;
  p.columns = static_cast<u32>(flat ? n : c.columns);
  p.x_stride = flat ? p.columns : static_cast<u32>(c.x_stride),
  p.grad_stride = flat ? p.columns : static_cast<u32>(c.grad_stride);
  p.flat = flat;
  p.function = function_of(c.activation);
  p.bias_type = c.bias_type;
  const auto& kernel = (c.grad ? kBiasedBackward : kBiased[p.function.erf]).of(vectors, c.type);
  const auto move = [size](Biased& part, int64_t by) {
    advance(part.x, by * part.x_stride * size), advance(part.grad, by * part.grad_stride * size),
        advance(part.out, by * part.columns * size);
  };
  launch_rows(kernel, p, rows, c.columns / n, c.grad ? kBackwardRows : kRows, move, stream);
}

/// A contiguous tensor: whole vectors, then what is left.
void launch_flat(BiasedActivation c, void* stream) {
  const int64_t total = c.rows * c.columns, size = element_size(c.type), n = 16 / size;
  const int64_t whole = aligned(c.x) && aligned(c.grad) && aligned(c.out) ? total / n * n : 0;
  c.rows = 1;
  if (whole > 0) {
    c.columns = whole;
    launch_biased(c, true, true, stream);
  }
  if (whole < total) {
    c.columns = total - whole;
    advance(c.x, whole * size), advance(c.grad, whole * size), advance(c.out, whole * size);
    launch_biased(c, false, true, stream);
  }
}

/// Cuts the columns into chunks that fill a block, with several rows of each if they are few; and
/// the rows into as many slices as there is room for on the GPU.
Summed plan_sums(const BiasedActivation& c) {
  Summed p;
  p.x = c.x, p.bias = c.bias, p.grad = c.grad, p.out = c.out;
  p.rows = c.rows, p.columns = c.columns, p.x_stride = c.x_stride, p.grad_stride = c.grad_stride;
  p.function = function_of(c.activation);
  p.bias_type = c.bias_type;
  p.vectors = takes_vectors(c) ? c.columns * element_size(c.type) / 16 : c.columns;
  constexpr int64_t kMost = kSumThreads / 2;
  const int64_t chunks = ceil_div(p.vectors, kMost), chunk = ceil_div(p.vectors, chunks);
  p.chunks = static_cast<int>(chunks), p.chunk = static_cast<int>(chunk);
  const int64_t lanes = kSumThreads / chunk;
  p.lanes = static_cast<int>(lanes < p.rows ? lanes : p.rows);
  const int64_t room = int64_t{gpu_facts().processors} * kSumBlocks / chunks;
  const int64_t wanted = p.rows <= kDirectRows ? 1 : ceil_div(p.rows, p.lanes * kSumRows);
  p.slices = wanted < room ? wanted : room > 0 ? room : 1;
  p.bias_grad = p.slices > 1 ? nullptr : c.bias_grad;
  p.sums = p.slices > 1 ? c.sums : nullptr;
  return p;
}

/// The bias's gradient of the rows of sums; none gives zeros.
void add_sums(Summed p, const BiasedActivation& c, void* stream) {
  p.bias_grad = c.bias_grad;
  launch(kernel<bias_gradient>,
         {blocks(ceil_div(p.columns, kTotalColumns)), {kTotalThreads}, stream}, p);
}

void launch_sums(const BiasedActivation& c, void* stream) {
  Summed p = plan_sums(c);
  const auto& kernel = kBiasedSums[p.function.erf].of(takes_vectors(c), c.type);
  launch(
      kernel,
      {blocks(p.slices * p.chunks), blocks(ceil_div(int64_t{p.chunk} * p.lanes, 64) * 64), stream},
      p);
  if (p.sums) add_sums(p, c, stream);
}

const char* run(const BiasedActivation& c, void* stream) {
  if (c.rows * c.columns == 0) {
    if (!c.bias_grad || c.columns == 0) return nullptr;
    Summed none = {};
    none.columns = c.columns, none.bias_type = c.bias_type;
    add_sums(none, c, stream);
  } else if (is_flat(c)) {
    launch_flat(c, stream);
  } else if (c.columns > kLongestRow) {
    return kTooLong;
  } else if (c.bias_grad) {
    launch_sums(c, stream);
  } else {
    launch_biased(c, takes_vectors(c), false, stream);
  }
  return last_error();
}

}  // namespace

int64_t bias_slices_cuda(const BiasedActivation& c) {
  return c.rows * c.columns == 0 ? 1 : plan_sums(c).slices;
}

const char* biased_activation_cuda(const BiasedActivation& call, void* stream) {
  return run(call, stream);
}

}  // namespace flexops
