// From the arguments of the choice of tokens to the launcher's.
#pragma once

#include "common/host.h"

#include "next_token/next_token.h"

namespace flexops {

inline void next_token__host(Host& host, const TensorView& scores, const TensorView& words,
                             const TensorView& tokens, const TensorView& last,
                             const TensorView& finished, const TensorView& at,
                             const TensorView& ends, int64_t pad, const TensorView& workspace) {
  FLEXOPS_CHECK(scores.dim == 2 && scores.size(1) > 0 && scores.size(1) < int64_t{1} << 31, host.op,
                ": scores must be [rows, words], got shape ", shape_text(scores));
  const int64_t rows = scores.size(0);
  FLEXOPS_CHECK(tokens.dim == 2 && tokens.size(0) == rows, host.op, ": tokens must have shape [",
                rows, ", any], got ", shape_text(tokens));
  FLEXOPS_CHECK(workspace.numel > rows, host.op, ": workspace must have ", rows + 1,
                " elements, got ", workspace.numel);
  if (rows == 0) return;
  host.check(next_token_cuda({scores, words, tokens, last, finished, at, ends, workspace, pad},
                             host.stream()));
}

inline void keep_tokens__host(Host& host, const TensorView& chosen, const TensorView& tokens,
                              const TensorView& known, const TensorView& finished,
                              const TensorView& limit, const TensorView& ends,
                              const TensorView& tried, const TensorView& lengths) {
  FLEXOPS_CHECK(chosen.dim == 2 && 1 <= chosen.size(1) && chosen.size(1) <= 32, host.op,
                ": chosen must be [rows, 1 to 32], got shape ", shape_text(chosen));
  const int64_t rows = chosen.size(0);
  FLEXOPS_CHECK(tokens.dim == 2 && tokens.size(0) == rows, host.op, ": tokens must have shape [",
                rows, ", any], got ", shape_text(tokens));
  if (rows == 0) return;
  host.check(keep_tokens_cuda({chosen, tokens, known, finished, limit, ends, tried, lengths},
                              host.stream()));
}

}  // namespace flexops
