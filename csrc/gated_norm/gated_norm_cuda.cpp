// The launchers of the gated RMS norm.

#include <type_traits>

#include "common/dispatch.cuh"
#include "common/launch.h"
#include "gated_norm/gated_norm.cuh"

namespace flexops {
namespace {

using gated_norm::Shape;

Shape shape_of(const TensorView& x, double eps, int64_t groups, bool norm_first) {
  return {x.size(0), static_cast<int>(x.size(1) / groups), static_cast<int>(groups),
          static_cast<float>(eps), norm_first};
}

/// Calls body(T, W, std::integral_constant of the threads of a row).
template <typename F>
void with_teams(const TensorView& x, const TensorView& weight, int width, const F& body) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto with_lanes = [&](auto of_weight) {
      const int64_t vectors = ceil_div(width, kPerVector<T>);
      if (vectors <= 16) return body(type, of_weight, std::integral_constant<int, 8>{});
      if (vectors <= 64) return body(type, of_weight, std::integral_constant<int, 32>{});
      return body(type, of_weight, std::integral_constant<int, 256>{});
    };
    if (weight && weight.dtype != x.dtype) return with_lanes(float{});
    return with_lanes(T{});
  });
}

}  // namespace

const char* gated_rms_norm_cuda(const TensorView& x, const TensorView& gate,
                                const TensorView& weight, double eps, int64_t groups,
                                bool norm_first, const TensorView& out, void* stream) {
  if (x.numel == 0) return nullptr;
  const Shape shape = shape_of(x, eps, groups, norm_first);
  with_teams(x, weight, shape.width, [&](auto type, auto of_weight, auto lanes) {
    using T = decltype(type);
    using W = decltype(of_weight);
    constexpr int kThreads = gated_norm::kThreads<lanes>;
    const LaunchConfig config{
        {blocks(ceil_div(shape.tokens * groups, kThreads / lanes))}, {kThreads}, stream};
    launch(kernel<gated_norm::gated_norm_forward<T, W, lanes>>, config, x.as<T>(), gate.as<T>(),
           weight.as<W>(), out.as<T>(), shape);
  });
  return last_error();
}

const char* gated_rms_norm_backward_cuda(const TensorView& grad, const TensorView& x,
                                         const TensorView& gate, const TensorView& weight,
                                         double eps, int64_t groups, bool norm_first,
                                         const TensorView& partial, const TensorView& x_grad,
                                         const TensorView& gate_grad, void* stream) {
  if (x.numel == 0) return nullptr;
  const Shape shape = shape_of(x, eps, groups, norm_first);
  with_teams(x, weight, shape.width, [&](auto type, auto of_weight, auto lanes) {
    using T = decltype(type);
    using W = decltype(of_weight);
    constexpr int kThreads = gated_norm::kThreads<lanes>;
    const int64_t teams = partial.size(0) * groups;
    const LaunchConfig config{{blocks(ceil_div(teams, kThreads / lanes))}, {kThreads}, stream};
    launch(kernel<gated_norm::gated_norm_backward<T, W, lanes>>, config, grad.as<T>(), x.as<T>(),
           gate.as<T>(), weight.as<W>(), partial.as<float>(), x_grad.as<T>(), gate_grad.as<T>(),
           shape);
  });
  return last_error();
}

}  // namespace flexops
