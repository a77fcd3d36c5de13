// What host functions of losses and log-probabilities do with their logits.
#pragma once

#include "common/host.h"
#include "common/logit_rows.h"

namespace flexops {

inline LogitRows make_logit_rows(const Host& host, const TensorView& logits, int64_t ignore_index) {
  constexpr int64_t kLongest = int64_t{1} << 30;
  FLEXOPS_CHECK(logits.dim == 2, host.op, ": logits must be [N, V], got shape ",
                shape_text(logits));
  FLEXOPS_CHECK(1 <= logits.columns() && logits.columns() <= kLongest, host.op,
                ": logits must have 1 to ", kLongest, " classes, got shape ", shape_text(logits));
  return {logits.size(0), logits.columns(), logits.row_stride(), element_type(logits),
          ignore_index};
}

/// Calls f(begin, end) for the rows in parts that are worth a thread.
template <typename F>
void for_rows(int64_t rows, int64_t length, const F& f) {
  parallel_for(0, rows, 8192 / least(length, 8192), f);
}

}  // namespace flexops
