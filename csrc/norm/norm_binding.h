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
  FLEXOPS_CHECK(1 <= columns && columns <= kMostColumns, op,
                ": x's last dimension must be from 1 to ", kMostColumns, ", got ", columns);
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
  FLEXOPS_CHECK(tensor->dim() == 1 && tensor->size(0) == x.size(-1), op, ": ", argument,
                " must have shape [", x.size(-1), "], got ", shape_text(*tensor));
  if (!tensor->is_contiguous()) tensor = contiguous(*tensor);
  return tensor->data();
}

}  // namespace flexops
