// The host's side of multi_tensor.cuh, for launchers: packs rows into as few launches as the
// kernel's parameters hold.
#pragma once

#include <stdint.h>

#include "common/launch.h"
#include "common/multi_tensor.cuh"
#include "common/multi_tensor.h"

namespace flexops::multi {

constexpr uint32_t kMostBlocks = 1u << 30;  // of one launch

template <class Rule>
int64_t chunks_of(int64_t numel) {
  return ceil_div(numel, kChunk<Rule>);
}

/// As kernels take the options.
template <class Numbers>
Numbers make_numbers(const StepOptions& o) {
  Numbers n;
  n.grad_scale = o.grad_scale, n.found_inf = o.found_inf, n.lr_tensor = o.lr_tensor;
  n.lr = static_cast<float>(o.lr), n.weight_decay = static_cast<float>(o.weight_decay);
  n.maximize = o.maximize;
  return n;
}
template <class Numbers>
Numbers make_average_numbers(const AverageOptions& o) {
  Numbers n = make_numbers<Numbers>(o);
  n.beta1 = static_cast<float>(o.beta1), n.beta2 = static_cast<float>(o.beta2);
  n.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  n.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  n.stochastic = o.stochastic;
  return n;
}

/// Which of a rule's kernels a row needs. `Rule` is the one of mixed data, which knows all arrays.
template <class Rule>
Data data_of(const TensorRow& row) {
  bool f32 = true, bf16 = true;
  for (int k = 0; k < Rule::kArrays; ++k) {
    if (!row.array[k] || !is_typed<Rule>(k)) continue;
    if ((Rule::kOptional >> k & 1) != 0) return Data::mixed;
    f32 = f32 && row.is_f32(k), bf16 = bf16 && row.is_bf16(k);
  }
  return f32 ? Data::f32 : bf16 ? Data::bf16 : Data::mixed;
}

template <class Rule>
uint16_t make_flags(const TensorRow& row) {
  bool vectors = true;  // 16-bit data is read 8 bytes at a time, fp32 16 bytes; null is aligned
  int flags = 0;
  for (int k = 0; k < Rule::kArrays; ++k) {
    const bool typed = is_typed<Rule>(k), wide = !typed || row.is_f32(k);
    vectors = vectors && aligned(row.array[k], wide ? 16 : 8);
    if (typed)
      flags |= (wide                               ? kFloat
                : row.type[k] == ElementType::bf16 ? kBf16
                                                   : 0)
               << type_shift<Rule>(k);
  }
  return static_cast<uint16_t>(flags | (vectors ? kAligned : 0));
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

/// Launches a rule's kernel for the rows in [0, count) for which chosen(i) holds, as often as they
/// need it, in order, or the last first if the rule is a reverse one. extra(i, e) tells where row
/// i's extra input e lies.
template <class Rule, class Chosen, class Extra>
void launch_rows(const KernelOf<Launch<Rule>>& kernel, const TensorRow* rows, int64_t count,
                 const typename Rule::Shared& shared, const Chosen& chosen, const Extra& extra,
                 void* stream) {
  static_assert(sizeof(Launch<Rule>) <= FLEXOPS_KERNEL_PARAMETER_BYTES);
  Launch<Rule> pack;
  pack.shared = shared;
  pack.count = 0;
  pack.first_chunk[0] = 0;
  const auto flush = [&] {
    if (pack.count > 0) {
      make_hints(pack);
      flexops::launch(kernel, {blocks(pack.first_chunk[pack.count]), {Rule::kThreads}, stream},
                      pack);
    }
    pack.count = 0;
  };
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = Rule::kReverse ? count - 1 - n : n;
    const TensorRow& row = rows[i];
    if (row.numel == 0 || !chosen(i)) continue;
    const auto chunks = static_cast<uint32_t>(chunks_of<Rule>(row.numel));
    if (pack.count == Launch<Rule>::kCapacity ||
        pack.first_chunk[pack.count] + chunks > kMostBlocks)
      flush();
    const int at = pack.count++;
    pack.first_chunk[at + 1] = pack.first_chunk[at] + chunks;
    pack.row[at].numel_and_flags = static_cast<u64>(row.numel) << 16 | make_flags<Rule>(row);
    for (int k = 0; k < Rule::kArrays; ++k) pack.row[at].array[k] = row.array[k];
    for (int e = 0; e < Rule::kExtras; ++e) pack.row[at].extra[e] = extra(i, e);
  }
  flush();
}

/// Increments every row's step.
inline void launch_steps(const TensorRow* rows, int64_t count, const float* found_inf,
                         void* stream) {
  Steps steps;
  steps.found_inf = found_inf;
  for (int64_t done = 0; done < count; done += steps.count) {
    steps.count =
        static_cast<int>(count - done < Steps::kCapacity ? count - done : Steps::kCapacity);
    for (int i = 0; i < steps.count; ++i) steps.step[i] = rows[done + i].step;
    launch(kernel<step_kernel>,
           {blocks(ceil_div(steps.count, Steps::kThreads)), {Steps::kThreads}, stream}, steps);
  }
}

/// Increments the rows' steps, if they count them, and launches the kernel of each kind of rows, as
/// kind_of(row) says which. A rare kernel that is needed and cannot be had is found before
/// anything is written: last_error() reports it.
template <class Kind, template <Kind> class Rule, Kind... kinds, class KindOf, class Shared>
void step_rows(const TensorRow* rows, int64_t count, const KindOf& kind_of, const Shared& shared,
               void* stream, const KernelOf<Launch<Rule<kinds>>>&... kernels) {
  unsigned needed = 0;
  for (int64_t i = 0; i < count; ++i) needed |= 1u << static_cast<int>(kind_of(rows[i]));
  const auto is_needed = [&](Kind kind) { return (needed >> static_cast<int>(kind) & 1) != 0; };
  if (((is_needed(kinds) && !ready(kernels)) || ...)) return;
  if constexpr (((Rule<kinds>::kExtras > 0) || ...)) {
    if (count > 0 && rows[0].step) launch_steps(rows, count, shared.found_inf, stream);
  }
  const auto launch_kind = [&](Kind kind, const auto& kernel) {
    if (!is_needed(kind)) return;
    launch_rows(
        kernel, rows, count, shared, [&](int64_t i) { return kind_of(rows[i]) == kind; },
        [&](int64_t i, int) -> const float* { return rows[i].step; }, stream);
  };
  (launch_kind(kinds, kernels), ...);
}

}  // namespace flexops::multi
