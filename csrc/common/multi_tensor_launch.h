// The host's side of multi_tensor.cuh, for .cu files: packs rows into as few launches as the kernel's parameters hold.
#pragma once

#include <stdint.h>

#include "common/multi_tensor.cuh"
#include "common/multi_tensor.h"

namespace flexops::multi {

constexpr uint32_t kMostBlocks = 1u << 30;  // of one launch

template <class Rule>
int64_t chunks_of(int64_t numel) {
  return (numel + kChunk<Rule> - 1) / kChunk<Rule>;
}

/// Whether a row needs the general kernel: `Rule` is the general one.
template <class Rule>
bool needs_general(const TensorRow& row) {
  for (int k = 0; k < Rule::kArrays; ++k) {
    if ((Rule::kOptional >> k & 1) != 0 && row.array[k]) return true;
    if ((Rule::kTyped >> k & 1) != 0 && !row.is_f32(k)) return true;
  }
  return false;
}

template <class Rule>
uint8_t make_flags(const TensorRow& row) {
  bool aligned = true;  // 16-bit data is read 8 bytes at a time, fp32 16 bytes; null is aligned
  int flags = 0;
  for (int k = 0; k < Rule::kArrays; ++k) {
    const bool typed = (Rule::kTyped >> k & 1) != 0, wide = !typed || row.is_f32(k);
    aligned = aligned && (reinterpret_cast<uintptr_t>(row.array[k]) & (wide ? 15 : 7)) == 0;
    if (typed) flags |= (wide ? kFloat : row.type[k] == Real::bf16 ? kBf16 : 0) << type_shift<Rule>(k);
  }
  return static_cast<uint8_t>(flags | (aligned ? kAligned : 0));
}

/// Where to begin the search for a block's tensor.
template <class Rule>
void make_hints(Launch<Rule>& launch) {
  const uint32_t blocks = launch.first_chunk[launch.count];
  launch.hint_shift = 0;
  while ((blocks - 1) >> launch.hint_shift >= Launch<Rule>::kHints) ++launch.hint_shift;
  int tensor = 0;
  for (int slot = 0; slot <= Launch<Rule>::kHints; ++slot) {
    const uint64_t block = static_cast<uint64_t>(slot) << launch.hint_shift;
    while (tensor < launch.count - 1 && launch.first_chunk[tensor + 1] <= block) ++tensor;
    launch.hint[slot] = static_cast<u16>(tensor);
  }
}

/// Calls start(launch, blocks) for every launch that the rows in [0, count) for which chosen(i) holds need, in order, or the last first if
/// the rule is a reverse one. extra(i, e) tells where row i's extra input e lies.
template <class Rule, class Chosen, class Extra, class Start>
void for_each_launch(const TensorRow* rows, int64_t count, const typename Rule::Shared& shared, const Chosen& chosen, const Extra& extra,
                     const Start& start) {
  static_assert(sizeof(Launch<Rule>) <= FLEXOPS_KERNEL_PARAMETER_BYTES);
  Launch<Rule> launch;
  launch.shared = shared;
  launch.count = 0;
  launch.first_chunk[0] = 0;
  const auto flush = [&] {
    if (launch.count > 0) {
      make_hints(launch);
      start(launch, launch.first_chunk[launch.count]);
    }
    launch.count = 0;
  };
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = Rule::kReverse ? count - 1 - n : n;
    const TensorRow& row = rows[i];
    if (row.numel == 0 || !chosen(i)) continue;
    const auto chunks = static_cast<uint32_t>(chunks_of<Rule>(row.numel));
    if (launch.count == Launch<Rule>::kCapacity || launch.first_chunk[launch.count] + chunks > kMostBlocks) flush();
    const int at = launch.count++;
    launch.first_chunk[at + 1] = launch.first_chunk[at] + chunks;
    launch.row[at].numel_and_flags = static_cast<u64>(row.numel) << 8 | make_flags<Rule>(row);
    for (int k = 0; k < Rule::kArrays; ++k) launch.row[at].array[k] = row.array[k];
    for (int e = 0; e < Rule::kExtras; ++e) launch.row[at].extra[e] = extra(i, e);
  }
  flush();
}

/// The launches that increment every row's step: start(steps, blocks).
template <class Start>
void for_each_steps(const TensorRow* rows, int64_t count, const float* found_inf, const Start& start) {
  Steps steps;
  steps.found_inf = found_inf;
  for (int64_t done = 0; done < count; done += steps.count) {
    steps.count = static_cast<int>(count - done < Steps::kCapacity ? count - done : Steps::kCapacity);
    for (int i = 0; i < steps.count; ++i) steps.step[i] = rows[done + i].step;
    start(steps, (steps.count + Steps::kThreads - 1) / Steps::kThreads);
  }
}

/// What a launcher returns: nullptr, or CUDA's error text.
inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flexops::multi
