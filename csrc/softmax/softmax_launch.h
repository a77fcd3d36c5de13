// What both of softmax's launchers do: parameters and the grid.
#pragma once

#include "common/launch.h"
#include "softmax/softmax.cuh"
#include "softmax/softmax.h"

namespace flexops {

namespace {

using softmax::Params;

softmax::Size make_size(int64_t by) {
  constexpr int64_t kMost = int64_t{1} << 31;  // what is below has no more than a remainder
  return {by, make_divisor(by < kMost ? by : kMost)};
}

/// Whether a tensor is too large for caches to hold it and its results until these are read.
bool is_large(const SoftmaxRows& rows) {
  return rows.rows * rows.length * element_size(rows.type) >= int64_t{1} << 24;
}

int64_t vector_elements(ElementType type) { return 16 / element_size(type); }

Params make_params(const void* x, void* out, const SoftmaxRows& rows) {
  Params p;
  p.x = x, p.out = out, p.mask = nullptr, p.grad = nullptr;
  p.rows = rows.rows, p.length = static_cast<int>(rows.length), p.stride = rows.stride,
  p.grad_stride = 0;
  p.queries = make_size(rows.causal ? rows.queries : 1);
  if (!rows.causal) p.queries.by = 0;
  p.mask_dims = p.mask_step = 0;
  p.mask_kind = Dtype::none;
  p.gridded = false;
  p.is_f16 = rows.type == ElementType::f16;
  p.lowest = rows.type == ElementType::f32 ? 0xff800000u : p.is_f16 ? 0xfc00fc00u : 0xff80ff80u;
  p.scale = rows.scale, p.flip = 0, p.keep_in_l2 = is_large(rows);
  return p;
}

struct Grid {
  int64_t blocks[3];
  int64_t threads[2];
  bool holds;  // whole rows
};

/// The grid, if a thread can hold `held` vectors of a row and a block has up to `most` threads.
Grid make_grid(Params& p, ElementType type, int64_t held, int64_t most) {
  constexpr int64_t kFew = 1 << 16, kShort = 4 * softmax::kNarrowWarp;
  const int64_t vectors = row_vectors(p.x, p.stride, p.length, vector_elements(type));
  if (vectors <= kShort && held > 4)
    held = 4;  // neighbouring threads for neighbouring vectors, as far as possible
  // Few rows leave most of the GPU idle: more threads share each.
  if (p.rows * vectors <= kFew && held >= 4 && vectors * 4 <= held * most) held /= 4;
  const int64_t warps = ceil_div(vectors, held * softmax::kNarrowWarp);
  p.lanes = 1, p.log_lanes = 0, p.chunks = 1;
  if (warps <= 1) {
    while (p.lanes * held < vectors) p.lanes *= 2, ++p.log_lanes;
    return {{ceil_div(p.rows * p.lanes, softmax::kThreads), 1, 1}, {softmax::kThreads, 1}, true};
  }
  const bool holds = warps * softmax::kNarrowWarp <= most;
  p.lanes = static_cast<int>(holds ? warps * softmax::kNarrowWarp : most);
  p.chunks = static_cast<int>(ceil_div(vectors, held * p.lanes));
  return {{p.rows, 1, 1}, {p.lanes, 1}, holds};
}

const char* launch(const KernelOf<Params>& kernel, const Params& p, const Grid& grid,
                   void* stream) {
  flexops::launch(kernel,
                  {blocks(grid.blocks[0], grid.blocks[1], grid.blocks[2]),
                   blocks(grid.threads[0], grid.threads[1]), stream},
                  p);
  return last_error();
}

}  // namespace
}  // namespace flexops
