// torch's view of softmax: checks, broadcasting and registration.

#include "common/binding.h"
#include "softmax/softmax.h"

namespace flexops {
namespace {

constexpr int64_t kLongest = int64_t{1} << 30;

/// Elements from one row to the next if rows are evenly spaced, contiguous and at multiples of the same distance from 16 bytes as in a
/// contiguous tensor; -1 if they are not.
int64_t row_stride(const Tensor& x, int64_t length) {
  if (FLEXOPS_DEVICE_CUDA && reinterpret_cast<uintptr_t>(x.data()) % 16 != 0) return -1;
  if (x.is_contiguous()) return length;
  const int64_t dims = x.dim(), *sizes = x.sizes(), *strides = x.strides();
  if (length > 1 && strides[dims - 1] != 1) return -1;
  int64_t stride = -1, expected = -1;
  for (int64_t d = dims - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (stride == -1) stride = strides[d];
    if (expected != -1 && strides[d] != expected) return -1;
    expected = strides[d] * sizes[d];
  }
  if (stride == -1) return length;
  const int64_t vector = 16 / dtype_size(x.dtype());
  return stride >= 0 && (!FLEXOPS_DEVICE_CUDA || (stride - length) % vector == 0) ? stride : -1;
}

/// As the kernels can take it: the tensor itself, or a contiguous copy (which an allocation of its own aligns).
int64_t take_rows(Tensor& x, int64_t length) {
  const int64_t stride = row_stride(x, length);
  if (stride >= 0) return stride;
  if (x.is_contiguous()) {
    Tensor aligned = empty_like_contiguous(x, x.dtype());
    copy(aligned, x);
    x = std::move(aligned);
  } else {
    x = contiguous(x);
  }
  return length;
}

SoftmaxRows make_rows(const Tensor& x, const char* argument) {
  SoftmaxRows rows = {};
  rows.type = element_type("", argument, x.dtype());
  FLEXOPS_CHECK(x.dim() >= 1, argument, " must have at least one dimension, got a scalar");
  rows.length = x.size(-1);
  FLEXOPS_CHECK(rows.length <= kLongest, argument, " must have a last dimension of at most ", kLongest, ", got shape ", shape_text(x));
  rows.rows = rows.length > 0 ? x.numel() / rows.length : 0;
  rows.queries = x.dim() >= 2 ? x.size(-2) : 1;
  return rows;
}

/// How x's rows find theirs in the mask; mask must be broadcastable to x.
void place_mask(SoftmaxRows& rows, const Tensor& x, Tensor& mask) {
  const char* op = "flexops::scaled_masked_softmax";
  check_device(op, "mask", mask, "x", x);
  rows.mask = mask.dtype() == Dtype::boolean
                  ? SoftmaxMask::boolean
                  : static_cast<SoftmaxMask>(
                        1 + static_cast<int>(SoftmaxMask::boolean) +
                        static_cast<int>(element_type("", "flexops::scaled_masked_softmax: mask (unless bool)", mask.dtype())));
  const int64_t dims = x.dim(), missing = dims - mask.dim();
  FLEXOPS_CHECK(missing >= 0, op, ": mask must be broadcastable to x, got shape ", shape_text(mask), " for ", shape_text(x));
  for (int64_t d = missing; d < dims; ++d) {
    const int64_t size = mask.size(d - missing);
    FLEXOPS_CHECK(size == 1 || size == x.size(d), op, ": mask must be broadcastable to x, got shape ", shape_text(mask), " for ",
                  shape_text(x));
  }
  const auto stride = [&](int64_t d) { return d < missing || mask.size(d - missing) == 1 ? 0 : mask.strides()[d - missing]; };
  if (mask.dim() > 0 && stride(dims - 1) != 0 && stride(dims - 1) != 1) mask = contiguous(mask);
  rows.mask_step = mask.dim() > 0 ? static_cast<int>(stride(dims - 1)) : 0;
  int count = 0;
  for (int64_t d = dims - 2; d >= 0; --d) {  // neighbours that one stride walks through become one
    const int64_t size = x.size(d), step = stride(d);
    if (size == 1) continue;
    if (count > 0 && step == rows.mask_strides[count - 1] * rows.mask_sizes[count - 1]) {
      rows.mask_sizes[count - 1] *= size;
      continue;
    }
    FLEXOPS_CHECK(count < kSoftmaxDims, op, ": mask's dimensions are broadcast in too many turns, got shape ", shape_text(mask), " for ",
                  shape_text(x));
    rows.mask_sizes[count] = size, rows.mask_strides[count] = step;
    ++count;
  }
  if (count == 0) rows.mask_sizes[0] = 1, rows.mask_strides[0] = 0, count = 1;
  rows.mask_dims = count;
}

#if FLEXOPS_DEVICE_CPU
/// The least rows that are worth a thread.
int64_t grain(const SoftmaxRows& rows) { return 8192 / (rows.length < 8192 ? rows.length : 8192); }
#endif

Tensor forward(const char* op, Tensor& x, Tensor* mask, SoftmaxRows& rows) {
  Tensor out = empty_like_contiguous(x, x.dtype());
  if (x.numel() == 0) return out;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(x);
#endif
  if (mask) place_mask(rows, x, *mask);
  rows.stride = take_rows(x, rows.length);
  const void *from = x.data(), *mask_data = mask ? mask->data() : nullptr;
  void* to = out.data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, softmax_cuda(from, mask_data, to, rows, current_stream(x)));
#else
  (void)op;
  parallel_for(0, rows.rows, grain(rows),
               [&](int64_t begin, int64_t end) { FLEXOPS_ISA_CALL(softmax_cpu)(from, mask_data, to, rows, begin, end); });
#endif
  return out;
}

Tensor scaled_masked_softmax(Tensor x, std::optional<Tensor> mask, double scale) {
  SoftmaxRows rows = make_rows(x, "flexops::scaled_masked_softmax: x");
  rows.scale = static_cast<float>(scale);
  return forward("flexops::scaled_masked_softmax", x, mask ? &*mask : nullptr, rows);
}

Tensor causal_softmax(Tensor x, double scale) {
  SoftmaxRows rows = make_rows(x, "flexops::causal_softmax: x");
  FLEXOPS_CHECK(x.dim() >= 2, "flexops::causal_softmax: x must have at least two dimensions, queries and keys, got shape ", shape_text(x));
  rows.scale = static_cast<float>(scale);
  rows.causal = true;
  return forward("flexops::causal_softmax", x, nullptr, rows);
}

Tensor softmax_backward(Tensor grad, Tensor y, double scale, bool causal) {
  const char* op = "flexops::softmax_backward";
  SoftmaxRows rows = make_rows(y, "flexops::softmax_backward: y");
  check_device(op, "grad", grad, "y", y);
  FLEXOPS_CHECK(grad.dtype() == y.dtype() && same_shape(grad, y), op, ": grad must have y's dtype and shape, got ",
                dtype_name(grad.dtype()), " ", shape_text(grad), " for ", shape_text(y));
  FLEXOPS_CHECK(!causal || y.dim() >= 2, op, ": y must have at least two dimensions, queries and keys, got shape ", shape_text(y));
  rows.scale = static_cast<float>(scale);
  rows.causal = causal;
  Tensor out = empty_like_contiguous(y, y.dtype());
  if (y.numel() == 0) return out;
#if FLEXOPS_DEVICE_CUDA
  DeviceGuard guard(y);
#endif
  rows.stride = take_rows(y, rows.length);
  const int64_t grad_stride = take_rows(grad, rows.length);
  const void *from = grad.data(), *results = y.data();
  void* to = out.data();
#if FLEXOPS_DEVICE_CUDA
  check_launch(op, softmax_backward_cuda(from, grad_stride, results, to, rows, current_stream(y)));
#else
  parallel_for(0, rows.rows, grain(rows), [&](int64_t begin, int64_t end) {
    FLEXOPS_ISA_CALL(softmax_backward_cpu)(from, grad_stride, results, to, rows, begin, end);
  });
#endif
  return out;
}

}  // namespace

FLEXOPS_REGISTER(m) {
  FLEXOPS_IMPL(m, "scaled_masked_softmax", scaled_masked_softmax);
  FLEXOPS_IMPL(m, "scaled_masked_softmax_plain", scaled_masked_softmax);
  FLEXOPS_IMPL(m, "causal_softmax", causal_softmax);
  FLEXOPS_IMPL(m, "causal_softmax_plain", causal_softmax);
  FLEXOPS_IMPL(m, "softmax_backward", softmax_backward);
}

}  // namespace flexops
