// The norms' forward launcher: which kernel, and how many threads a row.

#include "norm/norm_forward.cuh"
#include "norm/norm_forward_codes.cuh"
#include "norm/norm_forward_held.cuh"
#include "norm/norm_forward_layer.cuh"
#include "norm/norm_forward_long.cuh"
#include "norm/norm_forward_ragged.cuh"
#include "norm/norm_forward_ring.cuh"
#include "norm/norm_forward_rows.cuh"
#include "norm/norm_forward_short.cuh"
#include "norm/norm_launch.h"

namespace flexops {
namespace {

using norm::Forward;

constexpr int64_t kBusy =
    100000;  // threads that are enough for any GPU: with fewer, a row gets more of them
constexpr int64_t kPiece = 4;    // elements of forward_ragged's pieces
constexpr int64_t kPieces = 12;  // that a thread takes of a row

/// Whether all that a vector of the row's type goes with is aligned.
bool has_vectors(const NormForward& a, int64_t vector) {
  const auto fits = [&](const void* pointer, int64_t stride, int size) {
    return aligned(pointer, least(vector * size, 16)) && stride % vector == 0;
  };
  const int size = element_size(a.type), row = element_size(a.row_type),
            weight = element_size(a.weight_type);
  return a.columns % vector == 0 && fits(a.x, a.x_stride, size) &&
         fits(a.residual, a.residual_stride, row) && fits(a.weight, 0, weight) &&
         fits(a.bias, 0, weight) && fits(a.y, 0, a.codes == Dtype::none ? size : 1) &&
         fits(a.new_residual, 0, row);
}

/// A kernel for each type.
using Kernels = KernelOf<Forward>[3];
const Kernels kFew = FLEXOPS_EACH_TYPE(kernel, norm::forward_held, false, false, norm::kFewItems);
const Kernels kMany = FLEXOPS_EACH_TYPE(kernel, norm::forward_held, false, true, norm::kManyItems);
const Kernels kAdding = FLEXOPS_EACH_TYPE(kernel, norm::forward_held, true, true, norm::kItems);
const Kernels kRows = FLEXOPS_EACH_TYPE(rare_kernel, norm::forward_rows);
const Kernels kShort = FLEXOPS_EACH_TYPE(rare_kernel, norm::forward_short);
const Kernels kRagged = FLEXOPS_EACH_TYPE(rare_kernel, norm::forward_ragged);
// What is quantized next comes in bfloat16.
const Kernels kCodes = {rare_kernel<norm::forward_codes<float, norm::kItems>>,
                        rare_kernel<norm::forward_codes<f16, norm::kItems>>,
                        kernel<norm::forward_codes<bf16, norm::kItems>>};
const Kernels kManyCodes = {rare_kernel<norm::forward_codes<float, norm::kManyItems>>,
                            rare_kernel<norm::forward_codes<f16, norm::kManyItems>>,
                            kernel<norm::forward_codes<bf16, norm::kManyItems>>};
// Layer norm, for few rows and for many.
const auto kLayerF32 = kernel<norm::forward_held<float, false, true, norm::kFewItems>>;
const auto kLayerF16 = kernel<norm::forward_layer<f16, norm::kItems>>;
const KernelOf<Forward> kLayer[3][2] = {{kLayerF32, kLayerF32},
                                        {kLayerF16, kLayerF16},
                                        {kernel<norm::forward_layer<bf16, norm::kFewItems>>,
                                         kernel<norm::forward_layer<bf16, norm::kItems>>}};
constexpr int kLayerItems[3][2] = {{norm::kFewItems, norm::kFewItems},
                                   {norm::kItems, norm::kItems},
                                   {norm::kFewItems, norm::kItems}};

/// A kernel, the elements of its vectors, how many of these its threads hold.
struct KernelChoice {
  KernelOf<Forward> kernel;
  int64_t vector, items;
  int64_t slot = 0;  // bytes of shared memory that hold a vector; 0: registers do
  int resident = 0;  // threads of which a multiprocessor has registers
  bool ragged =
      false;  // vectors begin where the result has aligned ones, so a row may have one more
  /// Of norm::forward_held, which waits for the kernel before it itself.
  static KernelChoice held(const KernelOf<Forward>& kernel, int64_t vector, int64_t items) {
    KernelChoice made = {kernel, vector, items};
    made.waits = true;
    return made;
  }
  bool waits = false;
};

/// Whether rows cut into that many parts are too few to fill a GPU.
bool has_few_rows(const NormForward& a, int64_t parts) { return a.rows * parts < kBusy; }

KernelChoice choose_kernel(const NormForward& a) {
  const auto type = static_cast<int>(a.row_type);
  const int64_t vector = 16 / element_size(a.row_type), vectors = a.columns / vector;
  const bool codes = a.codes != Dtype::none, parameters = a.weight || a.bias,
             same = a.weight && a.weight_type == a.row_type;
  const bool aligned = has_vectors(a, vector),
             regular = aligned && a.type == a.row_type &&
                       (!parameters || same || a.weight_type == ElementType::f32);
  const auto fits = [&](int64_t items) { return regular && vectors <= items * norm::kHeldThreads; };
  if (codes && same && fits(norm::kManyItems)) {
    // Short rows are read better by more lanes, as are few.
    const bool few = vectors <= norm::kItems * norm::kNarrowWarp ||
                     has_few_rows(a, ceil_div(vectors, norm::kManyItems));
    const int items = few && fits(norm::kItems) ? norm::kItems : norm::kManyItems;
    return {(items == norm::kItems ? kCodes : kManyCodes)[type], vector, items};
  }
  if (!codes && a.residual && fits(norm::kItems))
    return KernelChoice::held(kAdding[type], vector, norm::kItems);
  if (!codes && !a.residual) {
    // Arithmetic decides in layer norm's own kernels, so these add no offset.
    if (same && a.centered && a.offset == 0.0f) {
      const bool many = !has_few_rows(a, ceil_div(vectors, norm::kItems));
      const int items = kLayerItems[type][many];
      if (fits(items)) return {kLayer[type][many], vector, items};
    } else if (same && !a.centered && fits(norm::kFewItems)) {
      return KernelChoice::held(kFew[type], vector, norm::kFewItems);
    }
    if (fits(norm::kManyItems)) return KernelChoice::held(kMany[type], vector, norm::kManyItems);
  }
  if (aligned && a.row_type == ElementType::f32 && !codes && !a.residual &&
      vectors > norm::kManyItems * norm::kHeldThreads)
    return {rare_kernel<norm::forward_long<float>>, vector, norm::kItems, 16, 1024};
  if (aligned)
    return {kRows[type], vector, norm::kItems, 16, a.row_type == ElementType::f32 ? 2048 : 1024};
  const bool mixed = a.type != a.row_type || a.type != a.weight_type;
  // Where few elements have a place in a vector, single ones are no slower.
  if (a.columns <= norm::kItems * norm::kNarrowWarp / (a.residual ? 1 : 2))
    return {mixed ? rare_kernel<norm::forward_short<norm::Any>> : kShort[type], 1, norm::kItems};
  const int64_t piece =
      kPiece * (element_size(a.row_type) + (a.residual ? element_size(a.type) : 0));
  return {mixed ? rare_kernel<norm::forward_ragged<norm::Any>> : kRagged[type],
          kPiece,
          kPieces,
          piece,
          1024,
          true};
}

/// How many vectors a thread holds in registers at least where rows are few.
int64_t least_vectors(const KernelChoice& choice, Dtype codes) {
  if (choice.items != norm::kManyItems) return 1;
  return codes == Dtype::none ? norm::kFewItems : norm::kManyItems;
}

/// The threads of a row that shared memory holds, where rows are few: no more than multiprocessors
/// have room for at once, nor than make a difference.
int64_t few_threads(const KernelChoice& choice, int64_t rows, int64_t vectors) {
  constexpr int64_t kWarp = norm::kNarrowWarp, kMostWarps = norm::kMostThreads / kWarp;
  const int64_t room = choice.resident / kWarp / ceil_div(rows, gpu_facts().processors);
  int64_t warps = room < 2 ? 2 : room < kMostWarps ? room : kMostWarps;
  if (room < 3 && vectors <= 5 * kWarp) warps = 1;  // which needs no barriers
  return ceil_div(vectors, ceil_div(vectors, warps * kWarp));
}

/// The threads of a row, and the bytes of shared memory that they may have.
struct Share {
  int threads;
  int64_t bytes;

  /// Two blocks share a multiprocessor, so that one loads while the other stores; a row has it
  /// alone if it is one of few, or if it does not fit into half of the shared memory while half of
  /// the threads are too few for the rest.
  Share(const KernelChoice& choice, int64_t vectors, bool few) {
    constexpr int64_t kReserved = 2048;  // a kernel's own shared memory, and the driver's
    const Gpu& gpu = gpu_facts();
    const int64_t all = gpu.shared_of_block - kReserved,
                  half = gpu.shared_of_processor / 2 - kReserved;
    const bool alone =
        few || (choice.resident < 2 * norm::kMostThreads && vectors * choice.slot > half);
    threads = alone ? norm::kMostThreads : choice.resident / 2;
    bytes = alone || all < half ? all : half;
  }
};

/// Launches the kernel that streams long rows through clusters' shared memory, if it takes these
/// rows and the GPU has clusters. More rows on their way in smaller parts are 15 % faster for RMS
/// norm of 65536 columns, and 1 % slower for layer norm. In float32 and float16 it was slower than
/// the others. It adds no offset to the weight.
template <bool kCentered, class Shape>
bool launch_ring(const NormForward& a, Forward& p, void* stream) {
#if FLEXOPS_HIP
  (void)a, (void)p, (void)stream;
  return false;
#else
  const int64_t vector = 16 / element_size(a.type), vectors = a.columns / vector,
                most = Shape::kPart / (a.residual ? 2 : 1);
  if (a.codes != Dtype::none || a.type != ElementType::bf16 || a.row_type != a.type ||
      !has_vectors(a, vector) || a.offset != 0.0f)
    return false;
  if ((a.weight || a.bias) && a.weight_type != a.type) return false;
  int64_t size = 2;
  while (size < hopper::kMostClusterBlocks && vectors > size * most) size *= 2;
  if (vectors > size * most || gpu_facts().capability < 90) return false;
  constexpr int64_t kLine = 8;  // vectors
  p.blocks = static_cast<int>(size), p.vectors = static_cast<int>(vectors);
  p.held = static_cast<int>(ceil_div(ceil_div(vectors, size), kLine) * kLine);
  const auto& ring = rare_kernel<norm::forward_ring<bf16, kCentered, Shape>>;
  LaunchConfig config{blocks(size), {Shape::kThreads + norm::kNarrowWarp}, stream, Shape::kBytes};
  config.cluster = static_cast<unsigned>(size);
  const int64_t clusters = least(resident_clusters(ring, config), a.rows);
  if (clusters <= 0) return false;
  config.grid = blocks(clusters * size);
  launch(ring, config, p);
  return true;
#endif
}

}  // namespace

const char* norm_forward_cuda(const NormForward& a, void* stream) {
  if (a.rows == 0) return nullptr;
  const KernelChoice choice = choose_kernel(a);
  const int64_t vectors = choice.ragged ? ceil_div(a.columns + choice.vector - 1, choice.vector)
                                        : a.columns / choice.vector,
                parts = ceil_div(vectors, choice.items);
  const bool few = has_few_rows(a, parts);
  Forward p;
  p.x = a.x, p.residual = a.residual, p.weight = a.weight, p.bias = a.bias;
  p.y = a.y, p.new_residual = a.new_residual, p.mean = a.mean, p.rstd = a.rstd, p.scales = a.scales;
  p.rows = a.rows, p.x_stride = a.x_stride, p.residual_stride = a.residual_stride;
  p.columns = static_cast<int>(a.columns), p.vectors = static_cast<int>(vectors);
  p.eps = a.eps, p.offset = a.offset, p.inverse = 1.0f / static_cast<float>(a.columns);
  p.type = a.type, p.row_type = a.row_type;
  p.weight_type = a.weight_type, p.codes = a.codes, p.centered = a.centered;
  p.early = false, p.nothing = 0, p.keep_in_l2 = norm::is_large(a.rows * a.columns, a.row_type);
  if (choice.slot != 0 &&
      (a.centered ? launch_ring<true, hopper::RowShape<8, 3, 1>>(a, p, stream)
                  : launch_ring<false, hopper::RowShape<4, 6, 1>>(a, p, stream)))
    return last_error();
  // With few rows, each gets more threads than it needs; but where a thread may have many vectors,
  // it has two.
  int64_t shared_bytes = 0;
  if (choice.slot == 0) {
    p.lanes = norm::lanes_for(few ? ceil_div(vectors, least_vectors(choice, a.codes)) : parts,
                              norm::kHeldThreads);
  } else {
    const Share share(choice, vectors, few);
    p.lanes = norm::lanes_for(few ? few_threads(choice, a.rows, vectors) : parts, share.threads);
    const int64_t slots = norm::Grid(p.lanes, a.rows).threads * choice.slot,
                  room = share.bytes / slots;
    const int64_t needed = ceil_div(vectors, p.lanes);
    p.held = static_cast<int>(needed < room ? needed : room), shared_bytes = p.held * slots;
  }
  const norm::Grid grid(p.lanes, a.rows);
  LaunchConfig config{blocks(grid.blocks), blocks(grid.threads), stream, shared_bytes};
  p.early = config.early = choice.waits && grid.blocks <= kFewBlocks;
  launch(choice.kernel, config, p);
  return last_error();
}

}  // namespace flexops
