// What the binding of the choice of tokens hands to the launcher. Formula:
// flexops/ops/next_token.py.
#pragma once

#include "common/tensor_view.h"

namespace flexops {

struct NextToken {
  TensorView scores;                    // [rows, words], in even rows
  TensorView words;                     // [rows, words], or none
  TensorView tokens;                    // [rows, columns]
  TensorView last, finished, at, ends;  // [rows, 1], [rows], [1], any
  TensorView workspace;                 // [rows + 1]
  int64_t pad;
};

struct KeepTokens {
  TensorView chosen, tokens, known, finished;  // [rows, new], [rows, columns], [rows], [rows]
  TensorView limit, ends, tried, lengths;      // [1], any, [rows, new], [rows]
};

/// Queued on `stream`. Return nullptr, or CUDA's error text.
const char* next_token_cuda(const NextToken& call, void* stream);
const char* keep_tokens_cuda(const KeepTokens& call, void* stream);

}  // namespace flexops
