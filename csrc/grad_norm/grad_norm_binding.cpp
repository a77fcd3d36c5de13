// flexops::grad_norm and flexops::clip_grads_: argument checks and registration (schemas: flexops/ops/grad_norm.py).

#include "common/binding.h"

#include "common/cpu.h"
#include "common/multi_tensor_binding.h"
#include "grad_norm/grad_norm.h"

#include <math.h>

namespace flexops {
namespace {

#if FLEXOPS_DEVICE_CUDA

void launch_norm(TensorTable& table, double norm_type, const Tensor& norm) {
  DeviceGuard guard(norm);
  const int64_t size = grad_norm_partials(table.data(), table.size());
  const Tensor partials = empty(&size, 1, Dtype::f32, norm);
  check_launch("flexops::grad_norm",
               grad_norm_cuda(table.data(), table.size(), norm_type, partials.data<float>(), norm.data<float>(), current_stream(norm)));
}

void launch_clip(TensorTable& table, const float* total_norm, double max_norm, const Tensor& where) {
  DeviceGuard guard(where);
  check_launch("flexops::clip_grads_", clip_grads_cuda(table.data(), table.size(), total_norm, max_norm, current_stream(where)));
}

#else

/// In pieces of one size whatever the number of threads, so that the order of additions is always the same.
void launch_norm(TensorTable& table, double norm_type, const Tensor& norm) {
  constexpr int64_t kPiece = 32768;
  struct Piece {
    size_t row;
    int64_t begin, end;
    double value;
  };
  const std::vector<TensorRow>& rows = table.rows();
  std::vector<Piece> pieces;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t at = 0; at < rows[i].numel; at += kPiece)
      pieces.push_back({i, at, at + kPiece < rows[i].numel ? at + kPiece : rows[i].numel, 0});
  }
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Piece& piece = pieces[static_cast<size_t>(n)];
      piece.value = FLEXOPS_ISA_CALL(grad_norm_cpu)(rows[piece.row], norm_type, piece.begin, piece.end);
    }
  });
  const NormKind kind = norm_kind(norm_type);
  double total = 0;
  for (const Piece& piece : pieces) {
    if (kind == NormKind::infinity) {
      total = piece.value <= total ? total : total != total ? total : piece.value;  // NaN stays
    } else {
      total += piece.value;
    }
  }
  if (kind == NormKind::two) total = sqrt(total);
  if (kind == NormKind::other) total = pow(total, 1 / norm_type);
  *norm.data<float>() = static_cast<float>(total);
}

void launch_clip(TensorTable& table, const float* total_norm, double max_norm, const Tensor&) {
  const float raw = static_cast<float>(max_norm) / (*total_norm + 1e-6f), factor = raw > 1.0f ? 1.0f : raw;
  if (factor == 1.0f) return;
  const std::vector<TensorRow>& rows = table.rows();
  for_each_piece(rows, 32, [&](size_t i, int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(clip_grads_cpu)(rows[i], factor, begin, end); });
}

#endif

Tensor grad_norm(TensorList grads, double norm_type) {
  FLEXOPS_CHECK(!grads.empty(), "flexops::grad_norm: grads must hold at least one tensor");
  FLEXOPS_CHECK(norm_type > 0, "flexops::grad_norm: norm_type must be positive");
  TensorTable table("flexops::grad_norm", {{"grads", grads, true, false}}, nullptr);
  const Tensor norm = empty(nullptr, 0, Dtype::f32, grads[0]);
  launch_norm(table, norm_type, norm);
  return norm;
}

void clip_grads_(TensorList grads, Tensor total_norm, double max_norm) {
  if (grads.empty()) return;
  TensorTable table("flexops::clip_grads_", {{"grads", grads, true}}, nullptr);
  launch_clip(table, table.number("total_norm", total_norm), max_norm, grads[0]);
  table.finish();
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "grad_norm", grad_norm);
  FLEXOPS_IMPL(m, "clip_grads_", clip_grads_);
}

}  // namespace flexops
