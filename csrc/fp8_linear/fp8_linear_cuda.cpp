// Launchers of the quantization of fp8 products' operands.

#include "activation/activation_launch.h"
#include "common/launch.h"
#include "fp8_linear/fp8_linear.cuh"

namespace flexops {
namespace {

using fp8_linear::ColumnParams;
using fp8_linear::GatedParams;
using fp8_linear::RowParams;

constexpr KernelOf<RowParams> kQuantizeRows[] = FLEXOPS_EACH_COMMON_TYPE(fp8_linear::quantize_rows);
constexpr KernelOf<ColumnParams> kFindLargest[] =
    FLEXOPS_EACH_COMMON_TYPE(fp8_linear::find_largest);
constexpr KernelOf<ColumnParams> kTranspose[] = FLEXOPS_EACH_COMMON_TYPE(fp8_linear::transpose);

template <bool kBackward, int kThreads>
constexpr KernelOf<GatedParams> kGated[] =
    FLEXOPS_EACH_COMMON_TYPE(fp8_linear::quantize_gated, kBackward, kThreads);

/// At most `most` threads that share a row of so many bytes, of which each keeps `kept` vectors.
Dim3 threads_of(int64_t bytes, int kept, int most) {
  return blocks(least(ceil_div(bytes / 16, 32 * kept) * 32, most));
}

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
                          const TensorView& codes, const TensorView& scales, void* stream) {
  if (const char* error = wrong(x, more, rows)) return error;
  RowParams p = {};
  p.columns = static_cast<int>(x.columns());
  p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  for (int64_t i = 0; i <= more.count; ++i) {
    const TensorView& one = i ? more[i - 1] : x;
    p.x = one.data, p.stride = one.row_stride();
    if (one.numel > 0)
      launch(kQuantizeRows[static_cast<int>(x.dtype)],
             {blocks(one.size(0)),
              threads_of(one.columns() * dtype_size(one.dtype), fp8_linear::kRowVectors,
                         fp8_linear::kRowThreads),
              stream},
             p);
    p.codes += one.numel, p.scales += one.size(0);
  }
  return last_error();
}

const char* fp8_gated_rows_cuda(const TensorView& packed, const TensorView& grad,
                                int64_t activation, const TensorView& codes,
                                const TensorView& scales, const TensorView& grad_codes,
                                const TensorView& grad_scales, void* stream) {
  if (packed.dim != 2 || packed.columns() % 32 != 0)
    return "packed must be a matrix whose width is a multiple of 32";
  GatedParams p = {};
  p.packed = packed.data, p.packed_stride = packed.row_stride();
  p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  p.columns = static_cast<int>(packed.columns() / 2);
  p.function = activation::function_of(activation);
  if (grad) {
    p.grad = grad.data, p.grad_stride = grad.row_stride();
    p.grad_codes = grad_codes.as<u8>(), p.grad_scales = grad_scales.as<float>();
  }
  if (packed.numel == 0) return nullptr;
  // Rows that fewer threads hold leave room for two blocks on a multiprocessor.
  const int64_t bytes = p.columns * dtype_size(packed.dtype);
  const bool wide = bytes > 16 * fp8_linear::kGatedVectors * fp8_linear::kGatedThreads;
  constexpr int kNarrow = fp8_linear::kGatedThreads, kWide = fp8_linear::kGatedWideThreads;
  const auto& kernels = grad   ? wide ? kGated<true, kWide> : kGated<true, kNarrow>
                          : wide ? kGated<false, kWide>
                               : kGated<false, kNarrow>;
  launch(kernels[static_cast<int>(packed.dtype)],
         {blocks(packed.size(0)),
          threads_of(bytes, fp8_linear::kGatedVectors, wide ? kWide : kNarrow), stream},
         p);
  return last_error();
}

const char* fp8_columns_cuda(const TensorView& x, const TensorViews& more,
                             const TensorView& row_scales, int64_t rows, const TensorView& codes,
                             const TensorView& scales, const TensorView& largest, void* stream) {
  if (const char* error = wrong(x, more, rows)) return error;
  if (bool(row_scales) != (x.dtype == Dtype::e4m3)) return "row_scales are those of e4m3 codes";
  ColumnParams p = {};
  p.row_scales = row_scales ? row_scales.as<float>() : nullptr;
  p.columns = static_cast<int>(x.columns()), p.total = static_cast<int>(rows);
  p.largest = largest.as<u32>(), p.codes = codes.as<u8>(), p.scales = scales.as<float>();
  set_zero(reinterpret_cast<uint32_t*>(p.largest), p.columns, stream);
  const int type = static_cast<int>(x.dtype);
  const bool coded = x.dtype == Dtype::e4m3;
  for (int pass = 0; pass < 2; ++pass) {
    const bool find = pass == 0;
    p.first = 0;
    for (int64_t i = 0; i <= more.count; ++i, p.first = p.end) {
      const TensorView& one = i ? more[i - 1] : x;
      p.x = one.data, p.stride = one.row_stride(), p.rows = static_cast<int>(one.size(0));
      p.end = i == more.count ? p.total : p.first + p.rows;
      if (p.end == p.first) continue;
      // Blocks for each multiprocessor, of as many rows as that leaves.
      const int64_t across = ceil_div(p.columns, fp8_linear::kScanColumns);
      const int64_t parts = ceil_div(8 * gpu_facts().processors, across);
      p.scan = static_cast<int>(ceil_div(ceil_div(p.rows, parts), fp8_linear::kScanRows)) *
               fp8_linear::kScanRows;
      const int64_t high = find ? p.scan : fp8_linear::kTileRows;
      const int64_t wide = find ? fp8_linear::kScanColumns : fp8_linear::kTileColumns;
      const LaunchConfig config = {
          blocks(ceil_div(p.end - p.first, high), ceil_div(p.columns, wide)),
          {fp8_linear::kColumnThreads},
          stream};
      if (coded) {
        launch(find ? kernel<fp8_linear::find_largest<e4m3>> : kernel<fp8_linear::transpose<e4m3>>,
               config, p);
      } else {
        launch(find ? kFindLargest[type] : kTranspose[type], config, p);
      }
    }
  }
  return last_error();
}

}  // namespace flexops
