// Rows of logits, each with its class: what losses and log-probabilities read.
#pragma once

#include <stdint.h>

#include "common/arithmetic.h"
#include "common/element_type.h"

namespace flexops {

/// N rows of V logits; row r starts at element r * stride.
struct LogitRows {
  int64_t rows, length, stride;
  ElementType type;
  int64_t ignore_index;
};

FLEXOPS_INLINE int64_t row_vectors(const void* data, const LogitRows& rows) {
  return row_vectors(data, rows.stride, rows.length, 16 / element_size(rows.type));
}

}  // namespace flexops
