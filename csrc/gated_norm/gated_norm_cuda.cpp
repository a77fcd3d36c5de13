// The launchers of the gated RMS norm.

#include <type_traits>

#include "common/dispatch.cuh"
#include "common/launch.h"
#include "gated_norm/gated_norm.cuh"

namespace flexops {
namespace {

using gated_norm::Shape;

Shape shape_of(const TensorView& x, double eps, int64_t groups, bool norm_first, bool sigmoid) {
  return {x.size(0),
          static_cast<int>(x.size(1) / groups),
          static_cast<int>(groups),
          static_cast<float>(eps),
          norm_first,
          sigmoid};
}

/// Whether every group's columns are whole vectors of 16 bytes.
template <typename... Views>
bool has_vectors(int width, const TensorView& x, const TensorView& weight, const Views&... others) {
  const bool whole = width % (16 / dtype_size(x.dtype)) == 0 && aligned(weight.data);
  return whole && aligned(x.data) && (aligned(others.data) && ...);
}

template <int N>
using Count = std::integral_constant<int, N>;

/// Calls body(T, W, Count of the threads of a row, Count of the elements of a vector). A thread
/// holds so many vectors.
template <typename F>
void with_teams(const TensorView& x, const TensorView& weight, int width, int held, bool vectors,
                const F& body) {
  with_floats(x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto with_lanes = [&](auto w) {
      constexpr int N = kPerVector<T>;
      if (!vectors) return body(type, w, Count<256>{}, Count<1>{});
      const auto fits = [&](auto lanes) { return width <= lanes * held * N; };
      if (fits(Count<8>{})) return body(type, w, Count<8>{}, Count<N>{});
      if (fits(Count<16>{})) return body(type, w, Count<16>{}, Count<N>{});
      if (fits(Count<64>{})) return body(type, w, Count<64>{}, Count<N>{});
      if (fits(Count<128>{})) return body(type, w, Count<128>{}, Count<N>{});
      if (fits(Count<256>{})) return body(type, w, Count<256>{}, Count<N>{});
      return body(type, w, Count<512>{}, Count<N>{});
    };
    if (weight && weight.dtype != x.dtype) return with_lanes(float{});
    return with_lanes(T{});
  });
}

}  // namespace

const char* gated_rms_norm_cuda(const TensorView& x, const TensorView& gate,
                                const TensorView& weight, double eps, int64_t groups,
                                bool norm_first, bool sigmoid, const TensorView& out,
                                void* stream) {
  if (x.numel == 0) return nullptr;
  const Shape shape = shape_of(x, eps, groups, norm_first, sigmoid);
  const bool vectors = has_vectors(shape.width, x, weight, gate, out);
  with_teams(x, weight, shape.width, gated_norm::kHeld, vectors,
             [&](auto type, auto w, auto lanes, auto n) {
               using T = decltype(type);
               using W = decltype(w);
               constexpr int kThreads = gated_norm::kThreads<lanes>;
               const LaunchConfig config{
                   {blocks(ceil_div(shape.tokens * groups, kThreads / lanes))}, {kThreads}, stream};
               launch(kernel<gated_norm::gated_norm_forward<T, W, lanes, n>>, config, x.as<T>(),
                      gate.as<T>(), weight.as<W>(), out.as<T>(), shape);
             });
  return last_error();
}

const char* gated_rms_norm_backward_cuda(const TensorView& grad, const TensorView& x,
                                         const TensorView& gate, const TensorView& weight,
                                         double eps, int64_t groups, bool norm_first, bool sigmoid,
                                         const TensorView& partial, const TensorView& x_grad,
                                         const TensorView& gate_grad, void* stream) {
  if (x.numel == 0) return nullptr;
  const Shape shape = shape_of(x, eps, groups, norm_first, sigmoid);
  const bool vectors = has_vectors(shape.width, x, weight, gate, grad, x_grad, gate_grad);
  with_teams(x, weight, shape.width, 1, vectors, [&](auto type, auto w, auto lanes, auto n) {
    using T = decltype(type);
    using W = decltype(w);
    constexpr int kThreads = gated_norm::kThreads<lanes>;
    const int64_t teams = partial.size(0) * groups;
    const LaunchConfig config{{blocks(ceil_div(teams, kThreads / lanes))}, {kThreads}, stream};
    launch(kernel<gated_norm::gated_norm_backward<T, W, lanes, n>>, config, grad.as<T>(), x.as<T>(),
           gate.as<T>(), weight.as<W>(), partial.as<float>(), x_grad.as<T>(), gate_grad.as<T>(),
           shape);
  });
  return last_error();
}

}  // namespace flexops
