// Softmax's forward launcher.

#include <utility>

#include "softmax/softmax_added.cuh"
#include "softmax/softmax_general.cuh"
#include "softmax/softmax_launch.h"
#include "softmax/softmax_long.cuh"
#include "softmax/softmax_rows.cuh"

namespace flexops {
namespace {

/// A kernel, and what it takes.
struct RowsKernel {
  KernelOf<Params> kernel;
  int held, most;
};

template <typename T, bool kMasked>
RowsKernel rows_kernel() {
  return {kernel<softmax::softmax_rows<T, kMasked>>, softmax::kHeld<T>,
          softmax::kMostOfRows<T, kMasked>};
}

template <bool kMasked>
RowsKernel rows_kernel(ElementType type) {
  return type == ElementType::f32 ? rows_kernel<float, true>() : rows_kernel<bf16, kMasked>();
}

/// Whether softmax_added takes this mask: it adds, and each of its rows lies as those of scores do
/// that it is for.
bool takes_added(const Params& p, ElementType type) {
  if (p.mask_kind == Dtype::none || p.mask_kind == Dtype::boolean || p.mask_step == 0 ||
      !aligned(p.mask))
    return false;
  int64_t row = 1;
  for (int d = 0; d < p.mask_dims; row *= p.mask_sizes[d].by, ++d)
    if ((row * p.stride - p.mask_strides[d]) % vector_elements(type) != 0) return false;
  return true;
}

/// Spreads rows that have a block each over a grid of the mask's dimensions, if these are few: no
/// row is looked for by division then. Where rows of the mask's own are followed by others that
/// share them, as those of heads are, the sharers become neighbours, unless the second-level cache
/// keeps what they share anyway: memory prefers rows in their order.
void spread(Params& p, Grid& grid) {
  constexpr int64_t kMost = 65535;    // of a grid's second and third dimension
  constexpr int64_t kKept = 8 << 20;  // bytes
  if (p.lanes <= softmax::kNarrowWarp || p.mask_dims > 3) return;
  int64_t sizes[3] = {p.rows, 1, 1};
  int64_t steps = 1;
  for (int d = 0; d < 3; ++d) {
    const bool there = d < p.mask_dims;
    if (there) sizes[d] = p.mask_sizes[d].by;
    p.row_steps[d] = steps, p.mask_steps[d] = there ? p.mask_strides[d] : 0;
    steps *= sizes[d];
  }
  const int64_t size = dtype_size(p.mask_kind);
  if (sizes[0] * p.mask_steps[0] * size > kKept && p.mask_steps[1] == 0 && sizes[0] <= kMost) {
    std::swap(sizes[0], sizes[1]), std::swap(p.row_steps[0], p.row_steps[1]),
        std::swap(p.mask_steps[0], p.mask_steps[1]);
  }
  if (sizes[1] > kMost || sizes[2] > kMost) return;
  p.gridded = true;
  for (int d = 0; d < 3; ++d) grid.blocks[d] = sizes[d];
}

/// The kernel for either type of 16 bits, or for float32.
const KernelOf<Params>& of_type(ElementType type, const KernelOf<Params>& f32,
                                const KernelOf<Params>& half) {
  return type == ElementType::f32 ? f32 : half;
}
#define FLEXOPS_OF_TYPE(type, which, name) \
  of_type(type, which<softmax::name<float>>, which<softmax::name<bf16>>)

/// For rows that are too long for a block to hold.
const char* softmax_long(Params& p, ElementType type, void* stream) {
  const Grid grid = make_grid(p, type, softmax::kLongHeld, softmax::kMostThreads);
  return launch(FLEXOPS_OF_TYPE(type, kernel, softmax_long), p, grid, stream);
}

const char* softmax_long_masked(Params& p, ElementType type, void* stream) {
  const Grid grid = make_grid(p, type, softmax::kMaskedLongHeld, softmax::kMostThreads);
  return launch(FLEXOPS_OF_TYPE(type, rare_kernel, softmax_long_masked), p, grid, stream);
}

}  // namespace

const char* softmax_cuda(const void* x, const void* mask, void* out, const SoftmaxRows& rows,
                         void* stream) {
  if (rows.rows * rows.length == 0) return nullptr;
  Params p = make_params(x, out, rows);
  if (mask) {
    p.mask = mask;
    p.mask_kind = rows.mask;
    p.mask_step = rows.mask_step;
    p.mask_dims = rows.mask_dims;
    for (int d = 0; d < rows.mask_dims; ++d)
      p.mask_sizes[d] = make_size(rows.mask_sizes[d]), p.mask_strides[d] = rows.mask_strides[d];
  }
  const bool f32 = rows.type == ElementType::f32, masked = p.mask_kind == Dtype::boolean;
  if ((masked || p.mask_kind == Dtype::none) && (p.scale > 0.0f || p.scale < 0.0f)) {
    const RowsKernel k =
        masked || f32 ? rows_kernel<true>(rows.type) : rows_kernel<false>(rows.type);
    Params positive = p;
    if (p.scale < 0.0f) positive.scale = -p.scale, positive.flip = f32 ? 0x80000000u : 0x80008000u;
    Grid grid = make_grid(positive, rows.type, k.held, k.most);
    if (grid.holds) {
      if (masked) spread(positive, grid);
      return launch(k.kernel, positive, grid, stream);
    }
    if (!masked) return softmax_long(positive, rows.type, stream);
  }
  if (takes_added(p, rows.type)) {
    Grid grid = make_grid(p, rows.type, softmax::kAddedHeld, softmax::kMostOfAdded);
    if (grid.holds) {
      spread(p, grid);
      return launch(FLEXOPS_OF_TYPE(rows.type, kernel, softmax_added), p, grid, stream);
    }
  }
  const Grid grid = make_grid(p, rows.type, softmax::kGeneralHeld, softmax::kMostThreads);
  if (grid.holds)
    return launch(FLEXOPS_OF_TYPE(rows.type, rare_kernel, softmax_general), p, grid, stream);
  return softmax_long_masked(p, rows.type, stream);
}

}  // namespace flexops
