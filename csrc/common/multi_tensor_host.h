// What host functions of optimizers share (common/host.h): a step on rows, on the CPU.
#pragma once

#include "common/host.h"

#include "common/multi_tensor_binding.h"
#include "common/stochastic.h"

namespace flexops {

inline double rate_of(const StepOptions& o) { return o.lr_tensor ? *o.lr_tensor : o.lr; }

/// `count`: the steps made, or null where none are counted.
inline AverageStep make_average_step(const AverageOptions& o, const float* count) {
  AverageStep s;
  s.beta1 = static_cast<float>(o.beta1), s.beta2 = static_cast<float>(o.beta2);
  s.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  s.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  s.decay = static_cast<float>(rate_of(o) * o.weight_decay);
  s.sign = o.maximize ? -1.0f : 1.0f;
  s.grad_scale = o.grad_scale ? *o.grad_scale : 0.0f;
  s.stochastic = o.stochastic;
  s.key = count ? scramble(static_cast<uint32_t>(*count)) : 0;
  return s;
}

/// One step of every row: the rows' step counts go up, `make_step` gives from the options and the
/// count what all elements of a row share, and `kernel` gets pieces of a row, cut at multiples of
/// `unit` elements.
template <typename Options, typename Make, typename Kernel>
void step_rows(const TensorRow* rows, int64_t count, const Options& options, const Make& make_step,
               Kernel* kernel, int64_t unit = 32) {
  if (options.found_inf && *options.found_inf != 0) return;
  std::vector<decltype(make_step(options, nullptr))> steps(count);
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i].step) *rows[i].step += 1.0f;
    steps[i] = make_step(options, rows[i].step);
  }
  for_each_piece(rows, count, unit, [&](size_t i, int64_t begin, int64_t end) {
    kernel(rows[i], steps[i], begin, end);
  });
}

/// What a kernel found out about elements [begin, end) of a row.
template <typename T>
struct Piece {
  size_t row;
  int64_t begin, end;
  T value;
};

/// body(row, its index, begin, end) of every piece. They are of one size whatever the number of
/// threads, so that the order of additions is always the same.
template <typename T, typename F>
std::vector<Piece<T>> reduce_pieces(const TensorRow* rows, int64_t count, const F& body) {
  constexpr int64_t kPiece = 32768;
  std::vector<Piece<T>> pieces;
  pieces.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t numel = rows[i].numel;
    for (int64_t at = 0; at < numel; at += kPiece)
      pieces.push_back(
          {static_cast<size_t>(i), at, at + kPiece < numel ? at + kPiece : numel, T{}});
  }
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      pieces[n].value = body(rows[pieces[n].row], pieces[n].row, pieces[n].begin, pieces[n].end);
  });
  return pieces;
}

}  // namespace flexops
