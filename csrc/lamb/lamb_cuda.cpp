// LAMB's launchers.

#include "lamb/lamb.h"

#include "adam/adam_launch.h"
#include "common/multi_tensor_launch.h"
#include "lamb/lamb.cuh"

namespace flexops {
namespace {

lamb::Shared make_shared(const LambOptions& o) {
  lamb::Shared s;
  static_cast<adam::Numbers&>(s) = adam::make_numbers(o);
  s.adapt = o.adapt;
  return s;
}

int64_t chunks_of(const TensorRow& row) { return multi::chunks_of<lamb::Moments<false>>(row.numel); }
static_assert(multi::kChunk<lamb::Moments<false>> == multi::kChunk<lamb::Moments<true>>, "their sums lie in one array");

template <bool general>
void measure_rows(const TensorRow* rows, int64_t count, const LambOptions& options, float* partials, void* stream) {
  using Rule = lamb::Moments<general>;
  int64_t counted = 0, chunks = 0;  // of the rows before `counted`
  const auto find = [&](int64_t i) {
    for (; counted < i; ++counted) chunks += chunks_of(rows[counted]);
    return partials + 2 * chunks;
  };
  multi::launch_rows<Rule>(
      kernel<lamb::moments_kernel<general>>, rows, count, make_shared(options),
      [&](int64_t i) { return multi::needs_general<Rule>(rows[i]) == general; },
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

template <bool general>
void apply_rows(const TensorRow* rows, int64_t count, const LambOptions& options, const float* norms, void* stream) {
  using Rule = lamb::Apply<general>;
  multi::launch_rows<Rule>(
      kernel<lamb::apply_kernel<general>>, rows, count, make_shared(options),
      [&](int64_t i) { return multi::needs_general<Rule>(rows[i]) == general; },
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
  multi::launch_steps(rows, count, options.found_inf, stream);
  measure_rows<false>(rows, count, options, partials, stream);
  measure_rows<true>(rows, count, options, partials, stream);
  add_norms(rows, count, options.found_inf, partials, norms, stream);
  return last_error();
}

const char* lamb_apply_cuda(const TensorRow* rows, int64_t count, const LambOptions& options, const float* norms, void* stream) {
  apply_rows<true>(rows, count, options, norms, stream);
  apply_rows<false>(rows, count, options, norms, stream);
  return last_error();
}

}  // namespace flexops
