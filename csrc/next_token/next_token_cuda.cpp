// The launcher of the choice of tokens.

#include "next_token/next_token.h"

#include "common/launch.h"
#include "next_token/next_token.cuh"

namespace flexops {

const char* next_token_cuda(const NextToken& call, void* stream) {
  next_token::Params p = {};
  p.scores = call.scores.data, p.words = call.words ? call.words.as<i64>() : nullptr;
  p.tokens = call.tokens.as<i64>(), p.last = call.last.as<i64>();
  p.at = call.at.as<i64>(), p.finished = call.finished.as<bool>();
  p.ends = call.ends.as<i64>(), p.ends_count = static_cast<int>(call.ends.numel);
  p.workspace = call.workspace.as<u64>();
  p.stride = call.scores.row_stride(), p.columns = call.tokens.size(1), p.pad = call.pad;
  p.rows = static_cast<int>(call.scores.size(0)), p.width = static_cast<int>(call.scores.size(1));
  constexpr int64_t kMostBlocks = 64;  // of a row
  const int64_t each = next_token::kThreads * 16 / dtype_size(call.scores.dtype);
  LaunchConfig config = {{static_cast<unsigned>(least(ceil_div(p.width, each), kMostBlocks)),
                          static_cast<unsigned>(p.rows)},
                         {next_token::kThreads},
                         stream};
  config.early = gpu_facts().capability >= 90;
  const KernelOf<next_token::Params> kKernels[] = FLEXOPS_EACH_COMMON_TYPE(next_token::choose);
  launch(kKernels[static_cast<int>(call.scores.dtype)], config, p);
  return last_error();
}

const char* keep_tokens_cuda(const KeepTokens& call, void* stream) {
  next_token::KeepParams p = {};
  p.chosen = call.chosen.as<i64>(), p.limit = call.limit.as<i64>(), p.ends = call.ends.as<i64>();
  p.tokens = call.tokens.as<i64>(), p.known = call.known.as<i64>();
  p.tried = call.tried.as<i64>(), p.finished = call.finished.as<bool>();
  p.lengths = call.lengths.as<int>(), p.columns = call.tokens.size(1);
  p.width = static_cast<int>(call.chosen.size(1)), p.ends_count = static_cast<int>(call.ends.numel);
  LaunchConfig config = {
      {static_cast<unsigned>(call.chosen.size(0))}, {next_token::kThreads}, stream};
  config.early = gpu_facts().capability >= 90;
  launch(kernel<next_token::keep>, config, p);
  return last_error();
}

}  // namespace flexops
