// What the binding of products of a few rows hands to launchers and CPU kernels.
#pragma once

#include "common/tensor_view.h"
#include "few_rows/few_rows_kinds.h"

namespace flexops {

struct FewRows {
  TensorView x;         // [rows, k]
  TensorViews weights;  // [columns, k] each
  TensorViews biases;   // none, or [columns] each
  TensorView norm;      // [k]
  TensorView residual;  // as out
  TensorView out;       // [rows, width]
  float eps, offset;    // the norm's
  int64_t activation;   // a FewRowsActivation
  bool early;           // weights may be read before the kernel ahead has ended
};

}  // namespace flexops
