// Launchers of the experts' kernels.

#include "activation/activation_launch.h"
#include "common/dispatch.cuh"
#include "common/launch.h"
#include "experts/experts.cuh"
#include "experts/experts.h"
#include "experts/experts_route.cuh"

namespace flexops {
namespace experts {
namespace {

static_assert(kSortChunk == kSortedChoices, "the workspace is for blocks of that size");

template <class I>
void sort(const I* ids, int choices, int count, int* workspace, int* order, int* inverse,
          int* offsets, void* stream) {
  const int parts = static_cast<int>(ceil_div(choices, kSortChunk));
  const int64_t buckets = count + 1;
  int *counts = workspace, *begins = workspace + buckets * parts;
  const Dim3 grid = blocks(parts);
  if (parts > 0)
    launch(kernel<count_choices<I>>, {grid, {kSortThreads}, stream, buckets * 4}, ids, choices,
           count, counts);
  launch(kernel<scan_counts>, {{1}, {kScanThreads}, stream, buckets * 4}, counts, parts, count,
         begins, offsets);
  if (parts > 0)
    launch(kernel<place_choices<I>>, {grid, {kSortThreads}, stream, kSortWarps * buckets * 4}, ids,
           choices, count, counts, begins, order, inverse);
}

/// Of tensors [tokens, k] and [slots, columns].
MoveParams make_move(const TensorView& rows, const TensorView& inverse, const TensorView& offsets,
                     const TensorView& weights) {
  MoveParams p = {};
  p.rows = rows.data, p.inverse = inverse.as<int>(), p.offsets = offsets.as<int>();
  p.weights = weights ? weights.as<float>() : nullptr;
  p.k = static_cast<int>(inverse.size(1)), p.slots = static_cast<int>(rows.size(0));
  p.experts = static_cast<int>(offsets.numel);
  p.vectors = static_cast<int>(rows.columns() * dtype_size(rows.dtype) / 16);
  return p;
}

/// The kernels for up to 128, 512 and 1024 experts.
constexpr KernelOf<RouteParams> kRoute[] = {kernel<route<4>>, kernel<route<16>>, kernel<route<32>>};
constexpr KernelOf<RouteParams> kRouteBackward[] = {
    kernel<route_backward<4>>, kernel<route_backward<16>>, kernel<route_backward<32>>};

const char* launch_routes(const KernelOf<RouteParams> (&kernels)[3], RouteParams& p,
                          const TensorView& logits, int64_t k, bool sigmoid, bool normalize,
                          double scale, void* stream) {
  p.logits = logits.data, p.type = static_cast<ElementType>(logits.dtype);
  p.tokens = static_cast<int>(logits.size(0)), p.experts = static_cast<int>(logits.size(1));
  p.k = static_cast<int>(k);
  p.sigmoid = sigmoid, p.normalize = normalize, p.scale = static_cast<float>(scale);
  launch(kernels[p.experts <= 128   ? 0
                 : p.experts <= 512 ? 1
                                    : 2],
         {blocks(ceil_div(p.tokens, kRouteThreads / 32)), {kRouteThreads}, stream}, p);
  return last_error();
}

}  // namespace
}  // namespace experts

const char* expert_routes_cuda(const TensorView& logits, const TensorView& bias, int64_t k,
                               bool sigmoid, bool normalize, double scale,
                               const TensorView& weights, const TensorView& choices, void* stream) {
  experts::RouteParams p = {};
  p.bias = bias ? bias.data : nullptr;
  p.weights = weights.as<float>(), p.choices = choices.as<i64>();
  return experts::launch_routes(experts::kRoute, p, logits, k, sigmoid, normalize, scale, stream);
}

const char* expert_routes_backward_cuda(const TensorView& grad, const TensorView& logits,
                                        const TensorView& weights, const TensorView& choices,
                                        bool sigmoid, bool normalize, double scale,
                                        const TensorView& out, void* stream) {
  experts::RouteParams p = {};
  p.grad = grad.as<float>(), p.known = weights.as<float>(), p.choices = choices.as<i64>();
  p.out = out.data;
  return experts::launch_routes(experts::kRouteBackward, p, logits, choices.size(1), sigmoid,
                                normalize, scale, stream);
}

const char* expert_order_cuda(const void* ids, bool wide, int64_t choices, int64_t count,
                              int* workspace, int* order, int* inverse, int* offsets,
                              void* stream) {
  const int total = static_cast<int>(choices), experts = static_cast<int>(count);
  if (wide) {
    experts::sort(static_cast<const i64*>(ids), total, experts, workspace, order, inverse, offsets,
                  stream);
  } else {
    experts::sort(static_cast<const int*>(ids), total, experts, workspace, order, inverse, offsets,
                  stream);
  }
  return last_error();
}

const char* spread_rows_cuda(const TensorView& x, const TensorView& inverse,
                             const TensorView& offsets, int64_t slots, const TensorView& out,
                             void* stream) {
  const int vectors = static_cast<int>(x.columns() * dtype_size(x.dtype) / 16);
  launch(kernel<experts::spread_rows>, {blocks(x.size(0)), {experts::kRowThreads}, stream},
         x.as<uint4>(), x.row_stride() * dtype_size(x.dtype) / 16, inverse.as<int>(),
         offsets.as<int>() + offsets.numel - 1, out.as<uint4>(), static_cast<int>(inverse.size(1)),
         static_cast<int>(slots), vectors);
  return last_error();
}

const char* combine_rows_cuda(const TensorView& rows, const TensorView& inverse,
                              const TensorView& offsets, const TensorView& weights,
                              const TensorView& out, void* stream) {
  experts::MoveParams p = experts::make_move(rows, inverse, offsets, weights);
  p.out = out.data;
  with_floats(rows.dtype, [&](auto type) {
    launch(kernel<experts::combine_rows<decltype(type)>>,
           {blocks(inverse.size(0)), {experts::kRowThreads}, stream}, p);
  });
  return last_error();
}

const char* combine_rows_backward_cuda(const TensorView& grad, const TensorView& rows,
                                       const TensorView& inverse, const TensorView& offsets,
                                       const TensorView& weights, const TensorView& out,
                                       const TensorView& weight_grad, void* stream) {
  experts::MoveParams p = experts::make_move(rows, inverse, offsets, weights);
  p.grad = grad.data, p.out = out.data, p.weight_grad = weight_grad.as<float>();
  with_floats(rows.dtype, [&](auto type) {
    launch(kernel<experts::combine_rows_backward<decltype(type)>>,
           {blocks(inverse.size(0)), {experts::kRowThreads}, stream}, p);
  });
  return last_error();
}

const char* expert_gate_backward__cuda(const TensorView& grad, const TensorView& packed,
                                       const TensorView& weights, const TensorView& order,
                                       const TensorView& offsets, int64_t which,
                                       const TensorView& packed_grad, const TensorView& weight_grad,
                                       void* stream) {
  experts::GateParams p = {};
  p.grad = grad.data, p.packed = packed.data, p.packed_grad = packed_grad.data;
  p.weights = weights.as<float>(), p.weight_grad = weight_grad.as<float>();
  p.order = order.as<int>(), p.offsets = offsets.as<int>();
  p.slots = static_cast<int>(grad.size(0)), p.experts = static_cast<int>(offsets.numel),
  p.columns = static_cast<int>(grad.size(1));
  p.function = activation::function_of(which);
  constexpr int kSlots = experts::kRowThreads / kWarpSize;
  with_floats(grad.dtype, [&](auto type) {
    launch(kernel<experts::gate_backward<decltype(type)>>,
           {blocks(ceil_div(p.slots, kSlots)), {experts::kRowThreads}, stream}, p);
  });
  return last_error();
}

}  // namespace flexops
