// Attention on the CPU: O = softmax(score(scale Q K^T)) V, and its gradients, without the matrix of
// scores in memory; compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/attention.py; after Dao, "FlashAttention-2" (2023).
//
//   attention_products_cpu.cpp   the product of two small matrices: all that takes long
//   attention_cpu.h              what both directions share: loads of tiles, scores and their mask
//   attention_cpu.cpp            forward
//   attention_backward_cpu.cpp   backward
//
// A tile is kTile queries of a head, a block kKeys keys. Scores are transposed, a row a key, so
// that the lanes of a register are neighbouring queries: softmax's maxima and sums need no
// reduction across lanes, and each of the five products
//
//   forward    S^T = K Q^T    O^T += V^T P^T
//   backward   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ^T += K^T dS^T
//
// is out[row][column] (+)= sum over steps of left[row, step] right[step][column], where `left` is
// read a number at a time, from anywhere, and `right` in whole registers. So K and V serve as they
// lie, in either direction; only Q and dO are transposed, once per tile.
//
// A tile's matrices (16 KiB each for 64 columns) are in the first-level cache or come from the
// second. 16-bit tensors are widened on their way in. Where the processor has AVX512-BF16, bfloat16
// stays so: a word then holds two numbers of neighbouring steps, and takes one instruction
// (kPairs).
#pragma once

#include "attention/attention.h"
#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

constexpr int64_t kTile = kAttentionRows, kKeys = kAttentionKeys;
constexpr int64_t kStride =
    kTile +
    16;  // of a tile's transposed matrices: rows 256 bytes apart would share few sets of the cache
constexpr float kAttentionInfinity = __builtin_inff();

inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
/// Words that hold `count` numbers.
template <bool kPairs>
inline int64_t words_of(int64_t count) {
  return kPairs ? (count + 1) / 2 : count;
}

/// Whether bfloat16 is multiplied as it is.
bool multiplies_bf16();

/// out[row][column] = sum of left[row * left_row + step * left_step] * right[step * right_step +
/// column] (+ out[row][column], if `add`). `columns` is a multiple of kLanes. A step is a word: a
/// float, or a pair of bfloat16 numbers.
struct Product {
  const float* left;
  int64_t left_row, left_step;
  const float* right;
  int64_t right_step;
  float* out;
  int64_t out_row;
  int64_t rows, columns, steps;
  bool add;
};
template <bool kPairs>
void multiply(const Product& product);

// ---- memory ----

/// One piece of memory, and parts of it that begin at lines of the cache.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : memory_(static_cast<char*>(malloc(static_cast<size_t>(floats) * 4 + 64))),
        next_(reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_) + 63) &
                                       ~uintptr_t{63})) {}
  ~Scratch() { free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  explicit operator bool() const { return memory_ != nullptr; }
  float* take(int64_t floats) {
    float* out = next_;
    next_ += rounded_up(floats, 16);
    return out;
  }

 private:
  char* memory_;
  float* next_;
};

/// One sequence and head.
struct AttentionSequence {
  int64_t batch, head, head_k, first_q, first_k, length_q, length_k, offset;

  AttentionSequence(const Attention& p, int64_t batch_, int64_t head_)
      : batch(batch_), head(head_), head_k(head_ / (p.heads_q / p.heads_k)) {
    place(p.cumulative_q, p.rows_q, p.length_q, first_q, length_q);
    place(p.cumulative_k, p.rows_k, p.length_k, first_k, length_k);
    offset = length_k - length_q;
  }

  /// Where row `row` begins, in elements.
  int64_t row_q(const AttentionTensor& x, int64_t row) const {
    return batch * x.batch + (first_q + row) * x.row + head * x.head;
  }
  int64_t row_k(const AttentionTensor& x, int64_t row) const {
    return batch * x.batch + (first_k + row) * x.row + head_k * x.head;
  }

 private:
  /// Whatever the cumulative lengths say, within the tensor, and no longer than the longest.
  void place(const int32_t* cumulative, int64_t rows, int64_t longest, int64_t& first,
             int64_t& length) const {
    first = cumulative ? least(most(cumulative[batch], 0), rows) : 0;
    length = cumulative
                 ? least(least(most(cumulative[batch + 1] - first, 0), rows - first), longest)
                 : longest;
  }
};

/// The next item that no thread has taken.
inline int64_t take_item(int64_t* taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

/// The keys [begin, end) that some of the queries [first, first + count) see.
struct KeyRange {
  int64_t begin, end;
  KeyRange(const Attention& p, const AttentionSequence& s, int64_t first, int64_t count)
      : begin(p.window_left < 0 ? 0 : most(0, first + s.offset - p.window_left)),
        end(p.window_right < 0 ? s.length_k
                               : least(s.length_k, first + count + s.offset + p.window_right)) {}
};

/// [rows][columns] words become [columns][to_row] words.
void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to,
               int64_t to_row);

/// `rows` rows of `columns` elements as words [rows][stride], zeros behind them: neighbouring steps
/// are neighbours.
template <bool kPairs>
void load_rows(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
               ElementType type, float* to, int64_t stride);

/// The same as words [words_of(rows)][stride], where rows are the steps; zeros beside and below
/// them.
template <bool kPairs>
void load_steps(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                ElementType type, float* to, int64_t stride);

/// The same transposed: words [words_of(columns)][kStride], a column for each row of memory and
/// zeros in what is left of whole registers. `buffer` has room for the rows.
template <bool kPairs>
void load_transposed(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                     ElementType type, float* to, float* buffer);

/// A tile's way back: `columns` rows of [kStride] become rows of memory, the queries', which are
/// `rows`.
void store_transposed(const float* from, int64_t rows, int64_t columns, void* to, int64_t offset,
                      int64_t row, ElementType type, float* buffer);

// ---- scores ----

/// What makes scores of products. Plain: nothing but the scale, which softmax applies.
class Scores {
 public:
  Scores(const Attention& p, const AttentionSequence& s, int64_t first, int64_t rows);

  /// What the block's scores are to be multiplied by.
  float factor() const { return plain_ ? p_.scale : 1.0f; }
  bool plain() const { return plain_; }

  /// Products [keys][kStride] become scores, those that a query does not see -infinity. `slopes`,
  /// unless null: d score / (scale d product), not written if there is no soft cap. `buffer` has
  /// room for two tiles.
  void apply(float* s, float* slopes, int64_t key, int64_t keys, float* buffer) const;
  bool has_slopes() const { return p_.softcap > 0.0f; }

 private:
  void add_bias(float* s, int64_t key, int64_t keys, float* buffer) const;
  void mask(float* s, int64_t key, int64_t keys) const;

  const Attention& p_;
  const AttentionSequence& s_;
  int64_t first_, rows_, columns_;
  float alibi_;
  bool plain_;
};

/// exp(x) for x that is at most 0, or NaN, which stays so; 0 below -87.6.
inline Floats weight_of(Floats x) {
  const detail::Exponential<127> e(greater(floats_of(-88.0f), x));
  return e.part * e.power;
}

}  // namespace flexops::FLEXOPS_ISA
