// What a recurrence whose state is a matrix consists of, on host and device. What is computed:
// flexops/ops/state_scan.py.
#pragma once

#include "common/element_type.h"

namespace flexops {

/// How the decay and the rate of a step are said.
constexpr int kGatesGiven = 0, kGatesSoftplus = 1, kGatesDelta = 2;
/// The most rows of a state, and the divisor of its rows and columns on a GPU.
constexpr int kMostStateRows = 256, kStateVector = 8;

/// Elements between neighbours of [batch, length, heads, ...].
struct ScanStrides {
  long long batch, step, head;
};

struct ScanGate {
  const void* data;  // null: there is none
  ElementType type;
  ScanStrides strides;  // of what there is once a head, `head` only
};

struct StateScan {
  float* state;  // [batch, heads, rows, columns], of any strides
  const void *q, *k, *v;
  void* out;         // [batch, length, heads, columns], contiguous
  ElementType type;  // of q, k, v and out
  ScanStrides of_q, of_k, of_v;
  long long state_batch, state_head, state_row, state_column;
  ScanGate decay, rate, a, bias, skip;
  long long batch, length;
  int heads, groups, rows, columns;  // groups: heads of q and k
  int gates;
  bool delta, normalize;
  float scale, low, high;
};

}  // namespace flexops
