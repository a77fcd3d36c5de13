// The launchers of quantization to scaled bytes: which way, and the grid.

#include "common/launch.h"
#include "fp8/fp8.h"
#include "fp8/fp8_dequantize.cuh"
#include "fp8/fp8_quantize.cuh"

namespace flexops {
namespace {

using scaled::Params;

constexpr int64_t kManyElements = 65536;  // of a single segment that many blocks share

/// A kernel for each type, of which few people quantize float16.
using Kernels = KernelOf<Params>[3];
const Kernels kQuantizeGroups = FLEXOPS_EACH_COMMON_TYPE(scaled::quantize_groups),
              kQuantizeShort = FLEXOPS_EACH_COMMON_TYPE(scaled::quantize_short);
const Kernels kFindLargest = FLEXOPS_EACH_COMMON_TYPE(scaled::find_largest),
              kCastChunk = FLEXOPS_EACH_COMMON_TYPE(scaled::cast_chunk);
const Kernels kDequantizeShort = FLEXOPS_EACH_COMMON_TYPE(scaled::dequantize_short),
              kDequantizeChunk = FLEXOPS_EACH_COMMON_TYPE(scaled::dequantize_chunk);
const Kernels kQuantizeWide = FLEXOPS_EACH_COMMON_TYPE(scaled::quantize_long, true);
const Kernels kQuantizeLong = {kernel<scaled::quantize_long<float, true>>,
                               rare_kernel<scaled::quantize_long<f16, false>>,
                               kernel<scaled::quantize_long<bf16, false>>};

int64_t elements_of(ElementType type) { return 16 / element_size(type); }

Params make_params(const void* in, void* out, const float* scales, const ScaledLayout& l) {
  Params p;
  p.in = in, p.out = out, p.scales = const_cast<float*>(scales), p.largest = nullptr;
  p.length = l.length, p.row_stride = l.row_stride, p.segment = l.segment, p.segments = l.segments;
  p.total = l.rows * l.segments;
  p.chunks = make_divisor(1);
  p.lanes = 1, p.log_lanes = 0;
  p.aligned = false;
  p.code = l.code;
  if (p.segments > 1 && p.length % p.segment == 0 &&
      p.row_stride == p.length) {  // no need to divide: every segment is a row
    p.length = p.row_stride = p.segment;
    p.segments = 1;
  }
  return p;
}

/// Whether code i is at a multiple of a vector's codes wherever element i is at a multiple of 16
/// bytes.
bool in_step(const void* elements, int64_t stride, const void* codes, const ScaledLayout& l) {
  const int64_t N = elements_of(l.type);
  return aligned(elements) && aligned(codes, N) && (stride - l.length) % N == 0;
}

/// The most vectors that a segment's elements lie in; one more than the least if segments may begin
/// within a vector.
int64_t vectors_of(const Params& p, const void* elements, int64_t stride, const ScaledLayout& l) {
  const int64_t N = elements_of(l.type);
  const bool whole =
      aligned(elements) && stride % N == 0 && (p.segments == 1 || p.segment % N == 0);
  const int64_t length = p.length < p.segment ? p.length : p.segment;
  return ceil_div(length + (whole ? 0 : N - 1), N);
}

const char* launch(const Kernels& kernels, Params& p, ElementType type, int64_t count,
                   int64_t threads, void* stream) {
  flexops::launch(kernels[static_cast<int>(type)], {blocks(count), blocks(threads), stream}, p);
  return last_error();
}

/// Lanes for a segment of up to 32 vectors.
void set_lanes(Params& p, int64_t vectors) {
  while (p.lanes < vectors) p.lanes *= 2, ++p.log_lanes;
}

const char* launch_short(const Kernels& kernels, Params& p, int64_t vectors, ElementType type,
                         void* stream) {
  set_lanes(p, vectors);
  const int64_t per_block = scaled::kThreads / p.lanes * scaled::kShortVectors;
  return launch(kernels, p, type, ceil_div(p.total, per_block), scaled::kThreads, stream);
}

/// Whether all segments are whole and lie one behind the other.
bool are_groups(const Params& p, int64_t vectors, const ScaledLayout& l) {
  return p.aligned && p.segments == 1 && p.row_stride == p.length &&
         p.length == vectors * elements_of(l.type) && (vectors & (vectors - 1)) == 0 &&
         vectors >= scaled::kGroupVectors;
}

const char* launch_groups(Params& p, int64_t vectors, ElementType type, void* stream) {
  set_lanes(p, vectors);
  return launch(kQuantizeGroups, p, type,
                ceil_div(p.total * vectors, scaled::kThreads * scaled::kGroupVectors),
                scaled::kThreads, stream);
}

const char* launch_long(Params& p, int64_t vectors, ElementType type, void* stream) {
  const int64_t threads =
      ceil_div(vectors, int64_t{scaled::kLongVectors} * scaled::kNarrowWarp) * scaled::kNarrowWarp;
  if (threads <= scaled::kThreads) return launch(kQuantizeLong, p, type, p.total, threads, stream);
  return launch(kQuantizeWide, p, type, p.total,
                threads < scaled::kWideThreads ? threads : scaled::kWideThreads, stream);
}

const char* launch_cast(Params& p, int64_t vectors, ElementType type, void* stream) {
  return launch(kCastChunk, p, type, vectors ? ceil_div(vectors, scaled::kChunk) : 1,
                scaled::kThreads, stream);
}

}  // namespace

const char* quantize_scaled_cuda(const void* x, uint8_t* codes, float* scales, uint32_t* workspace,
                                 const ScaledLayout& layout, void* stream) {
  Params p = make_params(x, codes, scales, layout);
  if (p.total == 0) return nullptr;
  p.aligned = in_step(x, layout.row_stride, codes, layout);
  const int64_t vectors = vectors_of(p, x, p.row_stride, layout);
  if (p.total == 1 && p.length > kManyElements) {
    p.largest = workspace;
    set_zero(workspace, 1, stream);
    const char* error = launch(kFindLargest, p, layout.type, ceil_div(vectors, scaled::kChunk),
                               scaled::kThreads, stream);
    return error ? error : launch_cast(p, vectors, layout.type, stream);
  }
  if (vectors > scaled::kNarrowWarp) return launch_long(p, vectors, layout.type, stream);
  if (are_groups(p, vectors, layout)) return launch_groups(p, vectors, layout.type, stream);
  return launch_short(kQuantizeShort, p, vectors, layout.type, stream);
}

const char* cast_scaled_cuda(const void* x, const float* scale, uint8_t* codes,
                             const ScaledLayout& layout, void* stream) {
  Params p = make_params(x, codes, scale, layout);
  if (p.length == 0) return nullptr;
  p.aligned = in_step(x, layout.row_stride, codes, layout);
  return launch_cast(p, vectors_of(p, x, p.row_stride, layout), layout.type, stream);
}

const char* dequantize_scaled_cuda(const uint8_t* codes, const float* scales, void* out,
                                   const ScaledLayout& layout, void* stream) {
  Params p = make_params(codes, out, scales, layout);
  if (p.total == 0 || p.length == 0) return nullptr;
  p.aligned = in_step(out, layout.length, codes, layout);
  const int64_t vectors = vectors_of(p, out, p.length, layout);
  if (vectors <= scaled::kNarrowWarp)
    return launch_short(kDequantizeShort, p, vectors, layout.type, stream);
  const int64_t chunks = ceil_div(vectors, scaled::kChunk);
  p.chunks = make_divisor(chunks);
  return launch(kDequantizeChunk, p, layout.type, p.total * chunks, scaled::kThreads, stream);
}

}  // namespace flexops
