// The launchers of attention: raw pointers and numbers, no torch. Formulas:
// flexops/ops/attention.py.
#pragma once

#include <stdint.h>

#include "common/cpu.h"
#include "common/element_type.h"

namespace flexops {

/// [batch, length, heads, columns] or, packed, [tokens, heads, columns], whose batch stride is 0.
/// Strides count elements; columns are neighbours.
struct AttentionTensor {
  void* data;
  int64_t batch, row, head;
};

/// What both directions have in common. Query i of a sequence sees key j if i + offset -
/// window_left <= j <= i + offset + window_right, with offset = the sequence's keys - its queries.
/// A row that sees nothing has zeros in O, -inf in LSE, and zero gradients.
struct Attention {
  ElementType type;  // of q, k, v, o and their gradients
  int64_t batch, heads_q,
      heads_k;  // heads_q is a multiple of heads_k; packed: batch is the number of sequences
  int64_t length_q, length_k;                  // packed: of the longest
  int64_t rows_q, rows_k;                      // of the tensors: lengths, or, packed, all tokens
  int64_t head_dim, head_dim_v;                // of q and k, of v and o
  const int32_t *cumulative_q, *cumulative_k;  // packed: [batch + 1]; else null, both
  float scale;                                 // of q k
  int64_t window_left, window_right;           // -1: no limit; causal: right 0
  float softcap;             // score becomes softcap tanh(score / softcap); 0: as it is
  const void* bias;          // added to the score after that, or null
  Dtype bias_type;           // boolean: false is -inf; or of floats
  int64_t bias_strides[4];   // batch, head, query, key, in elements; 0 where it is broadcast
  const float* alibi;        // slopes, or null: score - slope |i + offset - j|
  int64_t alibi_strides[2];  // batch, head
  uint64_t score_mod;        // CUDA: number of a user's score modifier, instead of
                             // the three above; 0: none
  const float*
      sinks;  // [heads_q], neighbours: one more score of each row, without a value; or null
  bool packed() const { return cumulative_q != nullptr; }
};

struct AttentionForward {
  Attention problem;
  AttentionTensor q, k, v, o;
  float* lse;  // natural log of the sum of e^score, sinks included: [batch, heads_q, length_q] or
               // [heads_q, tokens]
  int64_t lse_batch, lse_head;  // its strides; rows are neighbours
};

struct AttentionBackward {
  Attention problem;
  AttentionTensor q, k, v, o, d_o;
  AttentionTensor dq, dk, dv;  // written, all of them
  const float *lse, *d_lse;    // of the same strides; d_lse null if LSE has no gradient
  int64_t lse_batch, lse_head;
  bool deterministic;  // CUDA: dQ's parts are added in a fixed order (the CPU's always are)
};

// ---- CUDA: queued on `stream`; the pointers are the device's. Return nullptr, or CUDA's error
// text. `workspace`: so many bytes, multiples of 256 from its beginning, whose contents do not
// matter. ----

FLEXOPS_CUDA_DECLARE(int64_t attention_workspace(const AttentionForward& call))
FLEXOPS_CUDA_DECLARE(int64_t attention_workspace(const AttentionBackward& call))
FLEXOPS_CUDA_DECLARE(const char* attention_cuda(const AttentionForward& call, void* workspace,
                                                void* stream))
FLEXOPS_CUDA_DECLARE(const char* attention_backward_cuda(const AttentionBackward& call,
                                                         void* workspace, void* stream))

// ---- CPU: the work is cut into items, none of which writes what another does: forward a tile of
// queries of a sequence and head, backward a key head of a sequence, with all query heads that
// share it. Each of torch's threads calls a function once, which takes items off `taken`, a count
// that all share, as long as there are any: under a mask, or in sequences of many lengths, they
// differ in what they cost. Returns false if there is no memory. (static: each ISA level has its
// own.) ----

constexpr int64_t kAttentionRows = 64,
                  kAttentionKeys = 64;  // of a tile of queries, and of a block of keys
static inline int64_t attention_cpu_tiles(const Attention& p) {
  return (p.length_q + kAttentionRows - 1) / kAttentionRows;
}
static inline int64_t attention_cpu_items(const AttentionForward& call) {
  return call.problem.batch * call.problem.heads_q * attention_cpu_tiles(call.problem);
}

/// Of few key heads, the queries are shared out to several items, whose dK and dV are added up
/// afterwards: in how many parts depends on the shape alone, and with it the order of the sums.
static inline int64_t attention_cpu_parts(const Attention& p) {
  constexpr int64_t kItems = 16, kLeast = 4;  // tiles that are worth a part
  const int64_t heads = p.batch * p.heads_k, wanted = heads > 0 ? (kItems + heads - 1) / heads : 1;
  const int64_t most = heads > 0 ? p.heads_q / p.heads_k * attention_cpu_tiles(p) / kLeast : 1;
  return wanted < most ? wanted : most < 1 ? 1 : most;
}
static inline int64_t attention_cpu_items(const AttentionBackward& call) {
  return call.problem.batch * call.problem.heads_k * attention_cpu_parts(call.problem);
}
static inline int64_t attention_cpu_key_blocks(const Attention& p) {
  return (p.length_k + kAttentionKeys - 1) / kAttentionKeys;
}
/// Items of adding up.
static inline int64_t attention_cpu_sums(const AttentionBackward& call) {
  return attention_cpu_parts(call.problem) > 1
             ? call.problem.batch * call.problem.heads_k * attention_cpu_key_blocks(call.problem)
             : 0;
}
/// Rows of the parts' dK and dV begin at multiples of a cache line.
static inline int64_t attention_cpu_padded(int64_t columns) { return (columns + 15) / 16 * 16; }
/// Floats for the parts: none, if there is one.
static inline int64_t attention_cpu_workspace(const AttentionBackward& call) {
  const Attention& p = call.problem;
  const int64_t parts = attention_cpu_parts(p),
                columns = attention_cpu_padded(p.head_dim) + attention_cpu_padded(p.head_dim_v);
  return parts > 1 ? parts * p.batch * p.heads_k * p.length_k * columns : 0;
}

FLEXOPS_ISA_DECLARE(bool attention_cpu(const AttentionForward& call, int64_t* taken))
FLEXOPS_ISA_DECLARE(bool attention_backward_cpu(const AttentionBackward& call, float* workspace,
                                                int64_t* taken))
FLEXOPS_ISA_DECLARE(void attention_add_parts_cpu(const AttentionBackward& call, float* workspace,
                                                 int64_t begin, int64_t end))

}  // namespace flexops
