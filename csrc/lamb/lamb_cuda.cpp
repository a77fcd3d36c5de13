// LAMB's launchers.

#include "lamb/lamb.h"

#include "adam/adam_launch.h"
#include "common/multi_tensor_launch.h"
#include "lamb/lamb.cuh"

namespace flexops {
namespace {

using multi::Mode;

lamb::Shared make_shared(const LambOptions& o) {
  lamb::Shared s;
  static_cast<adam::Numbers&>(s) = adam::make_numbers(o);
  s.adapt = o.adapt;
  return s;
}

int64_t chunks_of(const TensorRow& row) {
  return multi::chunks_of<lamb::Moments<Mode::f32>>(row.numel);
}
static_assert(multi::kChunk<lamb::Moments<Mode::f32>> == multi::kChunk<lamb::Moments<Mode::bf16>> &&
                  multi::kChunk<lamb::Moments<Mode::f32>> ==
                      multi::kChunk<lamb::Moments<Mode::bf16_average_f32>> &&
                  multi::kChunk<lamb::Moments<Mode::f32>> ==
                      multi::kChunk<lamb::Moments<Mode::mixed>>,
              "their sums lie in one array");

template <Mode mode>
constexpr auto kRareMoments = rare_kernel<lamb::moments_kernel<mode>>;
template <Mode mode>
constexpr auto kRareApply = rare_kernel<lamb::apply_kernel<mode>>;

/// `Rule` is the one of mixed data.
template <class Rule>
Mode mode_of(const TensorRow& row) {
  const multi::Data data = multi::data_of<Rule>(row);
  if (data != multi::Data::mixed) return data == multi::Data::f32 ? Mode::f32 : Mode::bf16;
  bool bf16 = true;  // all but the averages
  for (int k = 0; k < Rule::kExpAvg; ++k) bf16 = bf16 && row.is_bf16(k);
  return bf16 && row.is_f32(Rule::kExpAvg) && row.is_f32(Rule::kExpAvgSq) ? Mode::bf16_average_f32
                                                                          : Mode::mixed;
}
Mode moments_of(const TensorRow& row) { return mode_of<lamb::Moments<Mode::mixed>>(row); }
Mode apply_of(const TensorRow& row) { return mode_of<lamb::Apply<Mode::mixed>>(row); }

template <class Average, class Mixed>
bool lacks(Mode mode, const Average& average_f32, const Mixed& mixed) {
  return mode == Mode::bf16_average_f32 ? !ready(average_f32)
                                        : mode == Mode::mixed && !ready(mixed);
}

/// Whether a rare kernel of either pass is needed and cannot be had. To be asked before anything is
/// launched that writes.
bool lacks_rare(const TensorRow* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    TensorRow second = rows[i];
    second.type[kLambApplyExpAvg] = rows[i].type[kLambExpAvg],
    second.type[kLambApplyExpAvgSq] = rows[i].type[kLambExpAvgSq];
    if (lacks(moments_of(rows[i]), kRareMoments<Mode::bf16_average_f32>, kRareMoments<Mode::mixed>))
      return true;
    if (lacks(apply_of(second), kRareApply<Mode::bf16_average_f32>, kRareApply<Mode::mixed>))
      return true;
  }
  return false;
}

template <Mode mode>
void measure_rows(const KernelOf<multi::Launch<lamb::Moments<mode>>>& kernel, const TensorRow* rows,
                  int64_t count, const LambOptions& options, float* partials, void* stream) {
  using Rule = lamb::Moments<mode>;
  int64_t counted = 0, chunks = 0;  // of the rows before `counted`
  const auto find = [&](int64_t i) {
    for (; counted < i; ++counted) chunks += chunks_of(rows[counted]);
    return partials + 2 * chunks;
  };
  multi::launch_rows<Rule>(
      kernel, rows, count, make_shared(options),
      [&](int64_t i) { return moments_of(rows[i]) == mode; },
      [&](int64_t i, int extra) -> const float* {
        return extra == Rule::kStep ? rows[i].step : find(i);
      },
      stream);
}

void add_norms(const TensorRow* rows, int64_t count, const float* found_inf, const float* partials,
               float* norms, void* stream) {
  lamb::Segments segments;
  segments.found_inf = found_inf;
  for (int64_t done = 0; done < count; done += segments.count) {
    segments.partials = partials;
    segments.norms = norms + 2 * done;
    segments.first_chunk[0] = 0;
    int n = 0;
    for (; n < lamb::Segments::kCapacity && done + n < count; ++n) {
      segments.first_chunk[n + 1] =
          segments.first_chunk[n] + static_cast<uint32_t>(chunks_of(rows[done + n]));
    }
    segments.count = n;
    partials += 2 * static_cast<int64_t>(segments.first_chunk[n]);
    launch(kernel<lamb::norms_kernel>, {blocks(n), {lamb::Segments::kThreads}, stream}, segments);
  }
}

template <Mode mode>
void apply_rows(const KernelOf<multi::Launch<lamb::Apply<mode>>>& kernel, const TensorRow* rows,
                int64_t count, const LambOptions& options, const float* norms, void* stream) {
  using Rule = lamb::Apply<mode>;
  multi::launch_rows<Rule>(
      kernel, rows, count, make_shared(options),
      [&](int64_t i) { return apply_of(rows[i]) == mode; },
      [&](int64_t i, int extra) { return extra == Rule::kStep ? rows[i].step : norms + 2 * i; },
      stream);
}

}  // namespace

int64_t lamb_partials(const TensorRow* rows, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += chunks_of(rows[i]);
  return 2 * chunks;
}

const char* lamb_moments_cuda(const TensorRow* rows, int64_t count, const LambOptions& options,
                              float* partials, float* norms, void* stream) {
  if (lacks_rare(rows, count)) return last_error();
  multi::launch_steps(rows, count, options.found_inf, stream);
  measure_rows(kernel<lamb::moments_kernel<Mode::f32>>, rows, count, options, partials, stream);
  measure_rows(kernel<lamb::moments_kernel<Mode::bf16>>, rows, count, options, partials, stream);
  measure_rows(kRareMoments<Mode::bf16_average_f32>, rows, count, options, partials, stream);
  measure_rows(kRareMoments<Mode::mixed>, rows, count, options, partials, stream);
  add_norms(rows, count, options.found_inf, partials, norms, stream);
  return last_error();
}

const char* lamb_apply_cuda(const TensorRow* rows, int64_t count, const LambOptions& options,
                            const float* norms, void* stream) {
  apply_rows(kRareApply<Mode::mixed>, rows, count, options, norms, stream);
  apply_rows(kRareApply<Mode::bf16_average_f32>, rows, count, options, norms, stream);
  apply_rows(kernel<lamb::apply_kernel<Mode::bf16>>, rows, count, options, norms, stream);
  apply_rows(kernel<lamb::apply_kernel<Mode::f32>>, rows, count, options, norms, stream);
  return last_error();
}

}  // namespace flexops
