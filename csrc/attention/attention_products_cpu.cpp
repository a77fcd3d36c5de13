// The products of attention_cpu.h: a part of `out` stays in registers while a column of `left`
// after the other is multiplied with a row of `right`. Of 32 registers 6 x 4 are sums, of 16 (AVX2,
// SSE) 6 x 2; on a core with two units for products both take longer for the products than for the
// loads.

#include "attention/attention_cpu.h"

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 10)
#define FLEXOPS_PAIRS __attribute__((target("avx512bf16")))
#else
#define FLEXOPS_PAIRS
#endif

namespace flexops::FLEXOPS_ISA {

#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int kVectors = 2;
#else
constexpr int kVectors = 4;
#endif
constexpr int kRows = 6;

/// A word in all lanes, whose bits stay as they are.
static inline __attribute__((always_inline)) Floats broadcast(const float* word) {
  uint32_t bits;
  memcpy(&bits, word, sizeof bits);
  return (Floats)(Words{} + bits);
}

/// sum += left * right, `left` being one number or pair for all lanes.
template <bool kPairs>
static inline __attribute__((always_inline)) FLEXOPS_PAIRS void multiply_add(Floats& sum,
                                                                             Floats left,
                                                                             Floats right) {
#if defined(__AVX512F__)
  if constexpr (kPairs) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return;
  }
#endif
  sum += left * right;
}

template <bool kPairs, int kM, int kN>
FLEXOPS_PAIRS static void multiply_part(const Product& x, int64_t row, int64_t column) {
  const float* FLEXOPS_RESTRICT left = x.left + row * x.left_row;
  const float* FLEXOPS_RESTRICT right = x.right + column;
  float* FLEXOPS_RESTRICT out = x.out + row * x.out_row + column;
  const int64_t left_row = x.left_row, left_step = x.left_step, right_step = x.right_step;
  Floats sum[kM][kN] = {};
  for (int64_t step = x.steps; step > 0; --step, left += left_step, right += right_step) {
    Floats b[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) b[j] = load_floats(right + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      const Floats a = broadcast(left + i * left_row);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) multiply_add<kPairs>(sum[i][j], a, b[j]);
    }
  }
  if (x.add) {  // at last: sums of sums err less than one long sum
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) sum[i][j] += load_floats(out + i * x.out_row + j * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) store_floats(out + i * x.out_row + j * kLanes, sum[i][j]);
  }
}

/// The parts of kN registers of columns, the last of them with the rows that are left.
template <bool kPairs, int kN>
static void multiply_columns(const Product& x, int64_t column) {
  using Part = void (*)(const Product&, int64_t, int64_t);
  static constexpr Part kRest[kRows] = {nullptr,
                                        multiply_part<kPairs, 1, kN>,
                                        multiply_part<kPairs, 2, kN>,
                                        multiply_part<kPairs, 3, kN>,
                                        multiply_part<kPairs, 4, kN>,
                                        multiply_part<kPairs, 5, kN>};
  int64_t row = 0;
  for (; row + kRows <= x.rows; row += kRows) multiply_part<kPairs, kRows, kN>(x, row, column);
  if (row < x.rows) kRest[x.rows - row](x, row, column);
}

template <bool kPairs>
void multiply(const Product& x) {
  int64_t column = 0;
  for (; column + kVectors * kLanes <= x.columns; column += kVectors * kLanes)
    multiply_columns<kPairs, kVectors>(x, column);
  const int64_t left = (x.columns - column) / kLanes;
  if (left == 1) multiply_columns<kPairs, 1>(x, column);
  if constexpr (kVectors > 2) {
    if (left == 2) multiply_columns<kPairs, 2>(x, column);
    if (left == 3) multiply_columns<kPairs, 3>(x, column);
  }
}
template void multiply<false>(const Product&);

#if defined(__AVX512F__)
template void multiply<true>(const Product&);

bool multiplies_bf16() {
  uint32_t a = 7, b = 0, c = 1, d = 0;  // leaf 7, subleaf 1: EAX bit 5 (that the system keeps the
                                        // registers, the level has asked)
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (a >> 5 & 1) != 0;
}
#else
template <>
void multiply<true>(const Product&) {}
bool multiplies_bf16() { return false; }
#endif

}  // namespace flexops::FLEXOPS_ISA
