// LAMB's launchers.

#include "lamb/lamb.h"

#include "adam/adam_launch.h"
#include "common/multi_tensor_launch.h"
#include "lamb/lamb.cuh"

namespace flexops {
namespace {

using multi::Data;

lamb::Shared make_shared(const LambOptions& o) {
  lamb::Shared s;
  static_cast<adam::Numbers&>(s) = adam::make_numbers(o);
  s.adapt = o.adapt;
  return s;
}

int64_t chunks_of(const TensorRow& row) { return multi::chunks_of<lamb::Moments<Data::f32>>(row.numel); }
static_assert(multi::kChunk<lamb::Moments<Data::f32>> == multi::kChunk<lamb::Moments<Data::bf16>> &&
                  multi::kChunk<lamb::Moments<Data::f32>> == multi::kChunk<lamb::Moments<Data::mixed>>,
              "their sums lie in one array");

constexpr auto kMixedMoments = rare_kernel<lamb::moments_kernel<Data::mixed>>;
constexpr auto kMixedApply = rare_kernel<lamb::apply_kernel<Data::mixed>>;

template <Data data>
void measure_rows(const KernelOf<multi::Launch<lamb::Moments<data>>>& kernel, const TensorRow* rows, int64_t count,
                  const LambOptions& options, float* partials, void* stream) {
  using Rule = lamb::Moments<data>;
  int64_t counted = 0, chunks = 0;  // of the rows before `counted`
  const auto find = [&](int64_t i) {
    for (; counted < i; ++counted) chunks += chunks_of(rows[counted]);
    return partials + 2 * chunks;
  };
  multi::launch_rows<Rule>(
      kernel, rows, count, make_shared(options), [&](int64_t i) { return multi::data_of<lamb::Moments<Data::mixed>>(rows[i]) == data; },
      [&](int64_t i, int extra) -> const float* { return extra == Rule::kStep ? rows[i].step : find(i); }, stream);
}

void add_norms(const TensorRow* rows, int64_t count, const float* found_inf, const float* partials, float* norms, void* stream) {
  lamb::Segments segments;
  segments.found_inf = found_inf;
  for (int64_t done = 0; done < count; done += segments.count) {
    segments.partials = partials;
    segments.norms = norms + 2 * done;
    segments.first_chunk[0] = 0;
    int n = 0;
    for (; n < lamb::Segments::kCapacity && done + n < count; ++n) {
      segments.first_chunk[n + 1] = segments.first_chunk[n] + static_cast<uint32_t>(chunks_of(rows[done + n]));
    }
    segments.count = n;
    partials += 2 * static_cast<int64_t>(segments.first_chunk[n]);
    launch(kernel<lamb::norms_kernel>, {blocks(n), {lamb::Segments::kThreads}, stream}, segments);
  }
}

template <Data data>
void apply_rows(const KernelOf<multi::Launch<lamb::Apply<data>>>& kernel, const TensorRow* rows, int64_t count, const LambOptions& options,
                const float* norms, void* stream) {
  using Rule = lamb::Apply<data>;
  multi::launch_rows<Rule>(
      kernel, rows, count, make_shared(options), [&](int64_t i) { return multi::data_of<lamb::Apply<Data::mixed>>(rows[i]) == data; },
      [&](int64_t i, int extra) { return extra == Rule::kStep ? rows[i].step : norms + 2 * i; }, stream);
}

}  // namespace

int64_t lamb_partials(const TensorRow* rows, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += chunks_of(rows[i]);
  return 2 * chunks;
}

const char* lamb_moments_cuda(const TensorRow* rows, int64_t count, const LambOptions& options, float* partials, float* norms,
                              void* stream) {
  if (multi::lacks_mixed(kMixedMoments, rows, count) || multi::lacks_mixed(kMixedApply, rows, count)) return last_error();
  multi::launch_steps(rows, count, options.found_inf, stream);
  measure_rows(kernel<lamb::moments_kernel<Data::f32>>, rows, count, options, partials, stream);
  measure_rows(kernel<lamb::moments_kernel<Data::bf16>>, rows, count, options, partials, stream);
  measure_rows(kMixedMoments, rows, count, options, partials, stream);
  add_norms(rows, count, options.found_inf, partials, norms, stream);
  return last_error();
}

const char* lamb_apply_cuda(const TensorRow* rows, int64_t count, const LambOptions& options, const float* norms, void* stream) {
  apply_rows(kMixedApply, rows, count, options, norms, stream);
  apply_rows(kernel<lamb::apply_kernel<Data::bf16>>, rows, count, options, norms, stream);
  apply_rows(kernel<lamb::apply_kernel<Data::f32>>, rows, count, options, norms, stream);
  return last_error();
}

}  // namespace flexops
