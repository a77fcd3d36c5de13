// What the binding of products of a few rows with 4-bit weights hands to the launcher. Formulas:
// flexops/ops/few_rows.py; the layout of the weights: flexops/ops/int4_linear.py.
#pragma once

#include "common/tensor_view.h"

namespace flexops {

/// More than eight on 9.0 only, and without a norm.
constexpr int kMostInt4Rows = 16, kMostInt4RowsAnywhere = 8;

struct Int4FewRows {
  TensorView x;                       // [rows, k]
  TensorViews packed, scales, zeros;  // of each weight; no zeros: all are 8
  TensorViews biases;                 // none, or [columns] each
  TensorView norm;                    // [k]
  TensorView residual;                // as out
  TensorView out;                     // [rows, width]
  float eps, offset;                  // the norm's
  int64_t activation;                 // a FewRowsActivation
  int64_t group_size, plan;
};

/// Queued on `stream`. Returns nullptr, or CUDA's error text. `plan`: 0, or a configuration (see
/// int4_few_rows_cuda.cpp).
const char* int4_few_rows_cuda(const Int4FewRows& call, void* stream);

}  // namespace flexops
