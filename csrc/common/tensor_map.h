// Encoding the copy engine's tensor maps, in launchers for Hopper.
#pragma once

#include "common/element_type.h"
#include "common/launch.h"
#include "common/wgmma.cuh"

namespace flexops {

/// A map of matrices[i][row][column] of 16-bit elements, from which boxes of 64 columns and
/// `box_rows` rows are loaded with the 128-byte swizzle. What lies outside is zeros. Strides count
/// elements and, like the address, are multiples of 16 bytes; sizes are not 0.
inline hopper::TensorMap map_matrices(Dtype type, const void* data, int64_t matrices, int64_t rows,
                                      int64_t columns, int64_t row_stride, int64_t matrix_stride,
                                      unsigned box_rows) {
  hopper::TensorMap map = {};
  const uint64_t sizes[4] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                             static_cast<uint64_t>(matrices), 1};
  // The stride of a dimension with one entry has no effect, but must be a multiple of 16 bytes.
  const uint64_t row_bytes = static_cast<uint64_t>(rows > 1 ? row_stride : 8) * 2,
                 matrix_bytes = static_cast<uint64_t>(matrices > 1 ? matrix_stride : 8) * 2;
  const uint64_t strides[3] = {row_bytes, matrix_bytes, matrix_bytes};
  const unsigned box[4] = {64, box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle128 = 3, kPromote256 = 3;  // CU_TENSOR_MAP_...
  detail::note(detail::in_context([&] {
    return detail::Driver::get().cuTensorMapEncodeTiled(
        &map, type == Dtype::bf16 ? kBfloat16 : kFloat16, 4, const_cast<void*>(data), sizes,
        strides, box, steps, 0, kSwizzle128, kPromote256, 0);
  }));
  return map;
}

}  // namespace flexops
