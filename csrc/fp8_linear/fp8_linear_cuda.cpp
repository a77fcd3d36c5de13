// Launchers of the quantization of fp8 products' operands.

#include "activation/activation_launch.h"
#include "common/launch.h"
#include "fp8_linear/fp8_linear.cuh"

namespace flexops {
namespace {

using fp8_linear::ColumnParams;
using fp8_linear::LargestParams;
using fp8_linear::RowParams;
using fp8_linear::Stack;

constexpr KernelOf<ColumnParams> kTranspose[] = FLEXOPS_EACH_COMMON_TYPE(fp8_linear::transpose);

/// A kernel for each type, and what its blocks are.
struct RowKernels {
  KernelOf<RowParams> kernels[3];
  int threads, blocks, vectors, rows, loads, results;
  bool gathers;
};
template <template <typename> class S, int kThreads, int kBlocks, int kVectors, int kRows>
constexpr RowKernels kRowKernels = {
    {kernel<fp8_linear::quantize_rows<S<float>, kThreads, kBlocks, kVectors, kRows, true>>,
     rare_kernel<fp8_linear::quantize_rows<S<f16>, kThreads, kBlocks, kVectors, kRows, true>>,
     kernel<fp8_linear::quantize_rows<S<bf16>, kThreads, kBlocks, kVectors, kRows, true>>},
    kThreads,
    kBlocks,
    kVectors,
    kRows,
    S<bf16>::kLoads,
    S<bf16>::kResults,
    true};
/// Of rows whose columns find no room in shared memory.
template <template <typename> class S>
constexpr RowKernels kWideKernels = {
    {rare_kernel<fp8_linear::quantize_rows<S<float>, 512, 1, 2, 1, false>>,
     rare_kernel<fp8_linear::quantize_rows<S<f16>, 512, 1, 2, 1, false>>,
     rare_kernel<fp8_linear::quantize_rows<S<bf16>, 512, 1, 2, 1, false>>},
    512,
    1,
    2,
    1,
    S<bf16>::kLoads,
    S<bf16>::kResults,
    false};
constexpr int64_t kReserved = 2048;  // a block's own shared memory, and the driver's

bool is_wide(int64_t bytes) { return bytes > gpu_facts().shared_of_block - kReserved; }

template <typename T>
using Activated = fp8_linear::Gated<T, false>;
template <typename T>
using Differentiated = fp8_linear::Gated<T, true>;

const RowKernels& rows_of(int64_t bytes) {
  using fp8_linear::Plain;
  if (is_wide(bytes)) return kWideKernels<Plain>;
  return bytes <= 16 * 512 ? kRowKernels<Plain, 512, 2, 1, 4> : kRowKernels<Plain, 1024, 1, 4, 1>;
}
const RowKernels& norm_rows_of(int64_t bytes) {
  using fp8_linear::Norm;
  return bytes <= 16 * 512 ? kRowKernels<Norm, 512, 2, 1, 4> : kRowKernels<Norm, 1024, 1, 4, 1>;
}
const RowKernels& gated_rows_of(bool backward, int64_t bytes) {
  const bool narrow = bytes <= 16 * 1024;
  if (!backward && is_wide(bytes)) return kWideKernels<Activated>;
  if (backward && is_wide(3 * bytes)) return kWideKernels<Differentiated>;
  if (backward)
    return narrow ? kRowKernels<Differentiated, 512, 2, 2, 1>
                  : kRowKernels<Differentiated, 896, 1, 2, 1>;
  return narrow ? kRowKernels<Activated, 512, 3, 2, 1> : kRowKernels<Activated, 512, 2, 4, 1>;
}

constexpr KernelOf<LargestParams> kReduceLargest[] =
    FLEXOPS_EACH_COMMON_TYPE(fp8_linear::reduce_largest);

/// What blocks find in columns: in `room`, one after another.
struct Columns {
  const TensorView& room;
  int64_t launches;  // that share the room
  int64_t bytes;     // of a block
  int blocks = 0;

  /// How many blocks more may have a place there.
  int64_t left() const { return room.numel / bytes / launches; }
};

/// Launches as many blocks as the GPU runs at once, or fewer with as many rows.
void launch_rows(const RowKernels& chosen, Dtype type, RowParams& p, Columns& columns,
                 void* stream) {
  if (p.rows == 0) return;
  const Gpu& gpu = gpu_facts();
  const int64_t vectors = p.columns * dtype_size(type) / 16,
                threads = least(ceil_div(vectors, 32 * chosen.vectors) * 32, chosen.threads);
  p.partial =
      reinterpret_cast<fp8_linear::Packed*>(columns.room.as<u8>() + columns.blocks * columns.bytes);
  const int64_t gathered = chosen.gathers ? columns.bytes : 0,
                staged = chosen.rows * chosen.loads * vectors * 16,
                tiles = ceil_div(p.rows, chosen.rows);
  const auto of_processor = [&](int64_t shared) {
    return least(chosen.threads * chosen.blocks / threads,
                 gpu.shared_of_processor / (shared + kReserved));
  };
  // The next rows have a place in shared memory if as many blocks do then.
  int64_t most = of_processor(gathered);
  p.staged = chosen.gathers && vectors <= threads * chosen.vectors && most > 0 &&
             of_processor(gathered + staged) == most;
  const int64_t shared = gathered + (p.staged ? staged : 0);
  most = least((most < 1 ? 1 : most) * gpu.processors, columns.left());
  const int64_t count = ceil_div(tiles, ceil_div(tiles, most));
  launch(chosen.kernels[static_cast<int>(type)], {blocks(count), blocks(threads), stream, shared},
         p);
  columns.blocks += static_cast<int>(count);
}

/// The largest that all of them have found.
void reduce_largest(const Columns& columns, Dtype type, int64_t width, const TensorView& largest,
                    const TensorView& grad_largest, void* stream) {
  LargestParams p = {};
  p.partial = columns.room.as<fp8_linear::Packed>(), p.blocks = columns.blocks;
  p.vectors = static_cast<int>(columns.bytes / 16);
  p.first = static_cast<int>(width * dtype_size(type) / 16);
  p.largest = largest.as<float>(),
  p.grad_largest = grad_largest ? grad_largest.as<float>() : nullptr;
  if (p.vectors == 0) return;
  LaunchConfig config = {blocks(ceil_div(p.vectors, fp8_linear::kLargestVectors)),
                         {fp8_linear::kLargestThreads},
                         stream};
  config.early = gpu_facts().capability >= 90;
  launch(kReduceLargest[static_cast<int>(type)], config, p);
}

/// The matrices from number `from` on that a launch takes, and their rows.
int64_t stack(Stack& out, const TensorView& x, const TensorViews& more, int64_t from) {
  int64_t rows = 0;
  for (int i = 0; i < fp8_linear::kMatrices; ++i) {
    const bool has = from + i <= more.count;
    const TensorView& one = has && from + i > 0 ? more[from + i - 1] : x;
    out.first[i] = has ? static_cast<int>(rows) : 0x7fffffff;
    out.x[i] = one.data, out.stride[i] = one.row_stride();
    rows += has ? one.size(0) : 0;
  }
  return rows;
}

constexpr const char* kTooWide = "rows are too wide for the room of their columns";

/// The sizes that kernels count on. Also that every matrix in the list has as many columns.
const char* wrong(const TensorView& x, const TensorViews& more, int64_t rows) {
  int64_t found = x.dim == 2 ? x.size(0) : -1;
  bool fits = x.dim == 2 && x.columns() % 16 == 0;
  for (int64_t i = 0; i < more.count; ++i) {
    fits = fits && more[i].dim == 2 && more[i].columns() == x.columns() && found % 16 == 0;
    found += more[i].dim == 2 ? more[i].size(0) : 0;
  }
  if (!fits)
    return "x and more must be matrices of one width, a multiple of 16; all but the last must have"
           " a multiple of 16 rows";
  return found == rows || (more.count == 0 && rows - found < 16 && rows % 16 == 0)
             ? nullptr
             : "rows must be the matrices' rows";
}

}  // namespace

const char* fp8_rows_cuda(const TensorView& x, const TensorViews& more, int64_t rows,
                          const TensorView& codes, const TensorView& scales,
                          const TensorView& largest, const TensorView& room, void* stream) {
  if (const char* error = wrong(x, more, rows)) return error;
  RowParams p = {};
  p.columns = static_cast<int>(x.columns());
  p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  const int64_t bytes = p.columns * dtype_size(x.dtype);
  if (bytes == 0) return nullptr;
  Columns columns = {room, more.count / fp8_linear::kMatrices + 1, bytes};
  if (columns.left() == 0) return kTooWide;
  for (int64_t i = 0; i <= more.count; i += fp8_linear::kMatrices) {
    p.rows = static_cast<int>(stack(p.x, x, more, i));
    launch_rows(rows_of(bytes), x.dtype, p, columns, stream);
    p.codes += static_cast<int64_t>(p.rows) * p.columns, p.scales += p.rows;
  }
  reduce_largest(columns, x.dtype, p.columns, largest, {}, stream);
  return last_error();
}

const char* fp8_norm_rows_cuda(const TensorView& x, const TensorView& residual,
                               const TensorView& weight, double eps, double offset,
                               const TensorView& y, const TensorView& total, const TensorView& rstd,
                               const TensorView& codes, const TensorView& scales,
                               const TensorView& largest, const TensorView& room, void* stream) {
  const int64_t bytes = x.columns() * dtype_size(x.dtype);
  if (x.dim != 2 || x.columns() % 16 != 0 || bytes > 65536)
    return "x must be a matrix of a multiple of 16 columns, of 64 KiB at most";
  if (bytes == 0) return nullptr;
  RowParams p = {};
  stack(p.x, x, {}, 0);
  p.residual = residual.data, p.residual_stride = residual.row_stride(), p.weight = weight.data;
  p.y = y.data, p.total = total.data, p.rstd = rstd.as<float>();
  p.rows = static_cast<int>(x.size(0)), p.columns = static_cast<int>(x.columns());
  p.eps = static_cast<float>(eps), p.offset = static_cast<float>(offset),
  p.inverse = 1.0f / static_cast<float>(p.columns);
  p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  Columns columns = {room, 1, bytes};
  launch_rows(norm_rows_of(bytes), x.dtype, p, columns, stream);
  reduce_largest(columns, x.dtype, p.columns, largest, {}, stream);
  return last_error();
}

const char* fp8_gated_rows_cuda(const TensorView& packed, const TensorView& grad,
                                int64_t activation, const TensorView& codes,
                                const TensorView& scales, const TensorView& largest,
                                const TensorView& grad_codes, const TensorView& grad_scales,
                                const TensorView& grad_largest, const TensorView& room,
                                void* stream) {
  if (packed.dim != 2 || packed.columns() % 32 != 0)
    return "packed must be a matrix whose width is a multiple of 32";
  RowParams p = {};
  stack(p.x, packed, {}, 0);
  p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  p.rows = static_cast<int>(packed.size(0)), p.columns = static_cast<int>(packed.columns() / 2);
  p.function = activation::function_of(activation);
  if (grad) {
    p.grad = grad.data, p.grad_stride = grad.row_stride();
    p.grad_codes = grad_codes.as<u8>(), p.grad_scales = grad_scales.as<float>();
  }
  const int64_t bytes = p.columns * dtype_size(packed.dtype);
  if (bytes == 0) return nullptr;
  const RowKernels& kernels = gated_rows_of(bool(grad), bytes);
  Columns columns = {room, 1, bytes * kernels.results};
  if (columns.left() == 0) return kTooWide;
  launch_rows(kernels, packed.dtype, p, columns, stream);
  reduce_largest(columns, packed.dtype, p.columns, largest, grad_largest, stream);
  return last_error();
}

const char* fp8_columns_cuda(const TensorView& x, const TensorViews& more,
                             const TensorView& row_scales, const TensorView& largest, int64_t rows,
                             const TensorView& codes, const TensorView& scales, void* stream) {
  if (const char* error = wrong(x, more, rows)) return error;
  if (bool(row_scales) != (x.dtype == Dtype::e4m3)) return "row_scales are those of e4m3 codes";
  ColumnParams p = {};
  p.row_scales = row_scales ? row_scales.as<float>() : nullptr;
  p.columns = static_cast<int>(x.columns()), p.total = static_cast<int>(rows);
  p.largest = largest.as<u32>(), p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  for (int64_t i = 0; i <= more.count; i += fp8_linear::kMatrices, p.first = p.end) {
    p.rows = static_cast<int>(stack(p.x, x, more, i));
    p.end = i + fp8_linear::kMatrices > more.count ? p.total : p.first + p.rows;
    if (p.end == p.first || p.columns == 0) continue;
    const int width = row_scales ? fp8_linear::kTileColumns<e4m3> : fp8_linear::kTileColumns<float>;
    const LaunchConfig config = {
        blocks(ceil_div(p.end - p.first, fp8_linear::kTileRows), ceil_div(p.columns, width)),
        {fp8_linear::kColumnThreads},
        stream};
    if (row_scales) {
      launch(kernel<fp8_linear::transpose<e4m3>>, config, p);
    } else {
      launch(kTranspose[static_cast<int>(x.dtype)], config, p);
    }
  }
  return last_error();
}

}  // namespace flexops
