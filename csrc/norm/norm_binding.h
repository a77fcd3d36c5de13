// What the norms' bindings check and see alike.
#pragma once

#include "common/binding.h"
#include "norm/norm.h"

namespace flexops {

constexpr int64_t kMostColumns = 65536;

using Maybe = std::optional<Tensor>;

inline void check_x(const char* op, const Tensor& x) {
  FLEXOPS_CHECK(x.dim() > 0, op, ": x must have at least one dimension, got a scalar");
  const int64_t columns = x.size(-1);
  FLEXOPS_CHECK(1 <= columns && columns <= kMostColumns, op, ": x's last dimension must be from 1 to ", kMostColumns, ", got ", columns);
}

inline Tensor cast(const Tensor& tensor, Dtype dtype) {
  Tensor out = empty_like_contiguous(tensor, dtype);
  copy(out, tensor);
  return out;
}

/// A weight or a bias, contiguous.
inline const void* parameter(const char* op, const char* argument, Maybe& tensor, const Tensor& x) {
  if (!tensor) return nullptr;
  check_device(op, argument, *tensor, "x", x);
  FLEXOPS_CHECK(tensor->dim() == 1 && tensor->size(0) == x.size(-1), op, ": ", argument, " must have shape [", x.size(-1), "], got ",
                shape_text(*tensor));
  if (!tensor->is_contiguous()) tensor = contiguous(*tensor);
  return tensor->data();
}

/// Elements between rows that lie at equal distances, each of them in one piece; else makes the tensor contiguous.
inline int64_t row_stride(Tensor& tensor) {
  const int64_t dim = tensor.dim(), columns = tensor.size(-1);
  if (tensor.is_contiguous()) return columns;
  const int64_t *sizes = tensor.sizes(), *strides = tensor.strides();
  int64_t stride = -1, expected = -1;
  bool regular = columns == 1 || strides[dim - 1] == 1;
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (stride == -1) stride = strides[d];
    if (expected != -1 && strides[d] != expected) regular = false;
    expected = strides[d] * sizes[d];
  }
  if (regular) return stride == -1 ? columns : stride;
  tensor = contiguous(tensor);
  return columns;
}

}  // namespace flexops
