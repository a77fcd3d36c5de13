// The launchers of act(gate) * up: flat or by rows, by vectors or by elements, and the grid.

#include "activation/activation_gated.cuh"
#include "activation/activation_launch.h"

namespace flexops {
namespace {

using namespace activation;

// [pairs], which few models alternate.
const Kernels<Gated> kGated[2] = {
    {FLEXOPS_EACH_TYPE(kernel, gated, false), FLEXOPS_EACH_TYPE(rare_kernel, gated, false, 1)},
    {FLEXOPS_EACH_TYPE(rare_kernel, gated, true), FLEXOPS_EACH_TYPE(rare_kernel, gated, true, 1)}};
const Kernels<Gated> kGatedBackward[2] = {
    {FLEXOPS_EACH_COMMON_TYPE(gated_backward, false),
     FLEXOPS_EACH_TYPE(rare_kernel, gated_backward, false, 1)},
    {FLEXOPS_EACH_TYPE(rare_kernel, gated_backward, true),
     FLEXOPS_EACH_TYPE(rare_kernel, gated_backward, true, 1)}};

/// All that vectors are read from and written to.
bool all_aligned(const GatedActivation& c) {
  return aligned(c.gate) && aligned(c.up) && aligned(c.grad) && aligned(c.out) &&
         aligned(c.gate_grad) && aligned(c.up_grad);
}

/// Columns of a vector.
int64_t width(const GatedActivation& c) { return (c.pairs ? 8 : 16) / element_size(c.type); }

bool takes_vectors(const GatedActivation& c) {
  const int64_t w = width(c), n = 16 / element_size(c.type);
  return all_aligned(c) && c.columns % w == 0 && c.gate_stride % n == 0 &&
         (c.pairs || c.up_stride % n == 0) && c.grad_stride % w == 0 && c.out_stride % n == 0;
}

bool is_flat(const GatedActivation& c) {
  const int64_t row = c.pairs ? 2 * c.columns : c.columns;
  if (c.rows == 1) return true;
  if (c.gate_stride != row || (!c.pairs && c.up_stride != row)) return false;
  return !c.grad || (c.grad_stride == c.columns && c.out_stride == row);
}

void launch_gated(const GatedActivation& c, bool vectors, bool flat, void* stream) {
  const int64_t size = element_size(c.type), w = vectors ? width(c) : 1,
                rows = flat ? c.rows * c.columns / w : c.rows;
  const auto stride = [&](int64_t by_rows, bool of_inputs) {
    return static_cast<u32>(!flat ? by_rows : of_inputs && c.pairs ? 2 * w : w);
  };
  Gated p;
  p.gate = c.gate, p.up = c.up, p.grad = c.grad;
  p.out = c.out, p.gate_grad = c.gate_grad, p.up_grad = c.up_grad;
  p.columns = static_cast<u32>(flat ? w : c.columns);
  p.gate_stride = stride(c.gate_stride, true), p.up_stride = stride(c.up_stride, true);
  p.grad_stride = stride(c.grad_stride, false), p.out_stride = stride(c.out_stride, true);
  p.flat = flat;
  p.function = function_of(c.activation);
  const auto& kernels = (c.grad ? kGatedBackward : kGated)[c.pairs];
  const auto move = [size](Gated& part, int64_t by) {
    advance(part.gate, by * part.gate_stride * size), advance(part.up, by * part.up_stride * size);
    advance(part.gate_grad, by * part.out_stride * size),
        advance(part.up_grad, by * part.out_stride * size);
    advance(part.grad, by * part.grad_stride * size), advance(part.out, by * part.columns * size);
  };
  const int most = (c.grad ? kGatedBackwardRows : kGatedRows) * (c.pairs ? 2 : 1);
  launch_rows(kernels.of(vectors, c.type), p, rows, c.columns / w, most, move, stream);
}

/// Contiguous tensors: whole vectors, then what is left.
void launch_flat(GatedActivation c, void* stream) {
  const int64_t total = c.rows * c.columns,
                whole = all_aligned(c) ? total / width(c) * width(c) : 0;
  c.rows = 1;
  if (whole > 0) {
    c.columns = whole;
    launch_gated(c, true, true, stream);
  }
  if (whole < total) {
    const int64_t bytes = whole * element_size(c.type), of_inputs = c.pairs ? 2 * bytes : bytes;
    c.columns = total - whole;
    advance(c.gate, of_inputs), advance(c.up, of_inputs), advance(c.gate_grad, of_inputs),
        advance(c.up_grad, of_inputs);
    advance(c.grad, bytes), advance(c.out, bytes);
    launch_gated(c, false, true, stream);
  }
}

const char* run(const GatedActivation& c, void* stream) {
  if (c.rows * c.columns == 0) return nullptr;
  if (is_flat(c)) {
    launch_flat(c, stream);
  } else if (c.columns > kLongestRow) {
    return kTooLong;
  } else {
    launch_gated(c, takes_vectors(c), false, stream);
  }
  return last_error();
}

}  // namespace

const char* gated_activation_cuda(const GatedActivation& call, void* stream) {
  return run(call, stream);
}

}  // namespace flexops
