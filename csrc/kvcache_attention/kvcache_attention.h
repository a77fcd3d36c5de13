// The launchers of attention over a cache: raw pointers and numbers, no torch. Formulas:
// flexops/ops/kvcache_attention.py.
#pragma once

#include "attention/attention.h"

namespace flexops {

struct CacheAttention {
  AttentionForward attend;       // k and v: the caches. problem: length_k and rows_k the tokens
                                 // that one sequence can have; batch that of the queries
  AttentionTensor new_k, new_v;  // [batch, added, heads_k, columns]; data null: nothing is added
  int64_t added;                 // tokens of each sequence
  const int32_t* seqlens;        // [batch]: tokens cached before; or null: `length` of each
  int64_t length;
  const int32_t *batch_idx, *leftpad;         // [batch]; or null
  const int32_t* table;                       // [batch, pages], of stride table_row; or null
  int64_t table_row, page, rows;              // tokens of a page; of the caches' first dimension
  const void *cos, *sin;                      // [positions, half]
  int64_t cos_row, sin_row, half, positions;  // half 0: nothing is rotated
  ElementType rotary_type;
  bool interleaved, from_leftpad;  // positions count from the first token, leftpad
  int64_t splits;                  // 0: chosen
  bool early;  // the cache and lengths may be read before the kernel ahead has ended
};

/// As attention_workspace() and attention_cuda().
FLEXOPS_CUDA_DECLARE(int64_t kvcache_attention_workspace(const CacheAttention& call))
FLEXOPS_CUDA_DECLARE(const char* kvcache_attention_cuda(const CacheAttention& call, void* workspace,
                                                        void* stream))

/// The same over codes (kvcache_codes.cuh). attend's caches: k and v are rings, of `residual` +
/// `group` tokens; problem.length_k: the tokens that codes have room for.
struct CodesAttention {
  CacheAttention cache;
  void *k_codes, *v_codes, *k_steps, *v_steps;
  int64_t bits, group, value_group, residual;
};
FLEXOPS_CUDA_DECLARE(int64_t kvcache_codes_workspace(const CodesAttention& call))
FLEXOPS_CUDA_DECLARE(const char* kvcache_codes_cuda(const CodesAttention& call, void* workspace,
                                                    void* stream))
/// Quantizes groups: cache.new_k and new_v, whose first token is token `first`.
FLEXOPS_CUDA_DECLARE(const char* kvcache_compress_cuda(const CodesAttention& call, int64_t first,
                                                       void* stream))

}  // namespace flexops
