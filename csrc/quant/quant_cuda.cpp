// Quantization's launchers: which of the three ways, and the grid.

#include "common/launch.h"
#include "quant/quant.h"
#include "quant/quant_any.cuh"
#include "quant/quant_columns.cuh"
#include "quant/quant_rows.cuh"

namespace flexops {
namespace {

using quant::Params;

constexpr int64_t kLongGroup =
    4096;  // a block works on each, where neighbouring lanes would not have neighbouring columns
constexpr int64_t kDivisible = int64_t{1} << 31;
constexpr int64_t kPiece =
    int64_t{1} << 27;  // rows, dequantizing: vectors of a launch, and of a group at most

/// Bytes of a 16-byte vector's codes.
int64_t code_bytes(const QuantLayout& l) { return 16 / element_size(l.type) * l.bits / 8; }

/// For what is less than 2^31, whatever it is divided by.
Divisor quick(int64_t by) { return make_divisor(by < kDivisible ? by : kDivisible); }

Params make_params(const void* in, void* out, const void* scales, const QuantLayout& l) {
  Params p;
  p.x = in, p.out = out, p.scales = const_cast<void*>(scales);
  p.outer = l.outer, p.length = l.length, p.inner = l.inner;
  p.outer_stride = l.outer_stride, p.length_stride = l.length_stride,
  p.inner_stride = l.inner_stride;
  p.groups = l.groups, p.group_size = l.group_size, p.group_bytes = l.group_bytes;
  p.total = 0;
  p.group_count = quick(l.groups), p.inner_count = p.chunks = p.parts = quick(l.inner);
  p.lanes = p.used = 1, p.log_lanes = 0;
  p.bits = l.bits, p.pair = l.symmetric ? 1 : 2;
  p.type = l.type, p.scale_type = l.scale_type;
  p.flat = p.paired = false;
  p.flip = 0, p.base = 0.0f, p.log_pair = p.codes_of_block = p.pairs_of_block = 0;
  p.code_bytes = p.pair_bytes = p.pairs_ahead = 0;
  return p;
}

/// Groups along contiguous memory, of 1 to `most` whole 16-byte vectors.
bool plan_rows(Params& p, const QuantLayout& l, const void* elements, int64_t most) {
  const int64_t vector = 16 / element_size(l.type), used = l.group_size / vector;
  if (l.inner != 1 || l.length_stride != 1 || l.group_size % vector || used > most) return false;
  if (l.length % vector || l.outer_stride % vector || !aligned(elements)) return false;
  p.log_lanes = log2_of(used);
  p.lanes = 1 << p.log_lanes;
  p.used = static_cast<int>(used);
  p.total = l.outer * l.groups * p.lanes;
  p.flat = p.lanes == used && l.length % l.group_size == 0 &&
           (l.outer_stride == l.length || l.outer == 1);
  return p.flat || p.total < kDivisible;
}

/// Groups across contiguous rows.
bool across_vectors(const QuantLayout& l, const void* elements) {
  const int64_t vector = 16 / element_size(l.type);
  return l.inner != 1 && l.inner_stride == 1 && l.inner % vector == 0 &&
         l.length_stride % vector == 0 && l.outer_stride % vector == 0 && aligned(elements);
}

bool plan_columns_to_quantize(Params& p, const QuantLayout& l, const void* elements) {
  if (!across_vectors(l, elements) || l.group_size > quant::kColumnRows * quant::kColumnSlots)
    return false;
  while (p.lanes < quant::kColumnSlots && p.lanes * quant::kColumnRows < l.group_size) p.lanes *= 2;
  p.log_lanes = log2_of(p.lanes);
  const int64_t chunks = l.inner / (16 / element_size(l.type));
  p.chunks = quick(chunks);
  p.total = l.outer * l.groups * chunks;
  return p.total < kDivisible;
}

bool plan_columns_to_dequantize(Params& p, const QuantLayout& l, const void* elements) {
  const int64_t lines = l.outer * l.groups;
  if (!across_vectors(l, elements) || lines >= kDivisible || l.group_size >= kDivisible ||
      l.inner >= kDivisible)
    return false;
  if (lines * l.group_size >= kDivisible) return false;
  const int64_t chunks = l.inner / (16 / element_size(l.type)),
                parts = ceil_div(l.group_bytes, quant::kPartCodes);
  p.chunks = quick(chunks), p.parts = quick(parts);
  p.total = lines * parts * chunks;
  p.code_bytes = (lines * l.group_bytes - quant::kPartCodes + 1) * l.inner - quant::kColumnsAhead;
  return p.total < kDivisible;
}

/// A group is one lane's where neighbouring lanes have neighbouring columns; else as many share one
/// as hold its elements.
void plan_any(Params& p, const QuantLayout& l, const void* elements, const void* codes) {
  p.total = l.outer * l.groups * l.inner;
  p.lanes = 1, p.log_lanes = 0;
  if (l.inner != 1) return;
  p.paired = l.length_stride == 1 && l.group_size % 2 == 0 &&
             (l.outer_stride % 2 == 0 || l.outer == 1) &&
             aligned(elements, 2 * element_size(l.type)) && (l.bits == 4 || aligned(codes, 2));
  while (p.lanes < quant::kNarrowWarp && p.lanes * quant::kAnyHeld < l.group_size) p.lanes *= 2;
  if (l.group_size >= kLongGroup) p.lanes = quant::kAnyThreads;
  p.log_lanes = log2_of(p.lanes);
}

/// A kernel for each type.
using Kernels = KernelOf<Params>[3];
#define FLEXOPS_BY_TYPE(name)                                                    \
  {kernel<quant::name<ElementType::f32>>, kernel<quant::name<ElementType::f16>>, \
   kernel<quant::name<ElementType::bf16>>}
const Kernels kRowQuantizers = FLEXOPS_BY_TYPE(quantize_rows),
              kRowDequantizers = FLEXOPS_BY_TYPE(dequantize_rows);
const Kernels kColumnQuantizers = FLEXOPS_BY_TYPE(quantize_columns),
              kColumnDequantizers = FLEXOPS_BY_TYPE(dequantize_columns);
#undef FLEXOPS_BY_TYPE

/// With `per_block` of p.total in a block.
void launch(const KernelOf<Params>& kernel, Params& p, int64_t per_block, unsigned threads,
            void* stream) {
  flexops::launch(kernel, {blocks(ceil_div(p.total, per_block)), {threads}, stream}, p);
}
void launch(const Kernels& kernels, Params& p, int64_t per_block, unsigned threads, void* stream) {
  launch(kernels[static_cast<int>(p.type)], p, per_block, threads, stream);
}

/// What turns codes back into numbers: see decode().
void plan_decoding(Params& p, const QuantLayout& l) {
  p.flip = !l.symmetric ? 0u : l.bits == 4 ? 0x08080808u : 0x80808080u;
  p.base = static_cast<float>((1 << 23) + (l.symmetric ? 1 << (l.bits - 1) : 0));
}

/// What has no gaps, in pieces: its vectors' numbers have 32 bits.
void launch_row_dequantizers(Params& p, const QuantLayout& l, void* stream) {
  const int64_t all = p.total, piece = p.flat ? kPiece : all,
                pair_bytes = p.pair * element_size(l.scale_type),
                pairs_of_block = (quant::kDecodeThreads >> p.log_lanes) * pair_bytes;
  p.log_pair = log2_of(pair_bytes);
  p.codes_of_block = static_cast<int>(quant::kDecodeThreads * code_bytes(l));
  p.pairs_of_block = static_cast<int>(pairs_of_block > 0 ? pairs_of_block : 1);
  p.pairs_ahead = (quant::kRowsAhead / code_bytes(l) >> p.log_lanes) * pair_bytes;
  for (int64_t begin = 0; begin < all; begin += piece) {
    p.total = all - begin < piece ? all - begin : piece;
    p.code_bytes = (p.total >> p.log_lanes) * p.group_bytes,
    p.pair_bytes = (p.total >> p.log_lanes) * pair_bytes;
    launch(kRowDequantizers, p, quant::kDecodeThreads, quant::kDecodeThreads, stream);
    p.x = static_cast<const char*>(p.x) + piece * code_bytes(l);
    p.out = static_cast<char*>(p.out) + piece * 16;
    p.scales = static_cast<char*>(p.scales) + (piece >> p.log_lanes) * pair_bytes;
  }
}

}  // namespace

const char* quantize_cuda(const void* x, uint8_t* packed, void* scales, const QuantLayout& layout,
                          void* stream) {
  if (layout.outer * layout.groups * layout.inner == 0) return nullptr;
  Params p = make_params(x, packed, scales, layout);
  if (plan_rows(p, layout, x, quant::kNarrowWarp)) {
    launch(kRowQuantizers, p, quant::kRowThreads * quant::kVectors, quant::kRowThreads, stream);
  } else if (plan_columns_to_quantize(p, layout, x)) {
    launch(kColumnQuantizers, p, quant::kColumnThreads / p.lanes, quant::kColumnThreads, stream);
  } else {
    plan_any(p, layout, x, packed);
    launch(rare_kernel<quant::quantize_any>, p, quant::kAnyThreads / p.lanes, quant::kAnyThreads,
           stream);
  }
  return last_error();
}

const char* dequantize_cuda(const uint8_t* packed, const void* scales, void* out,
                            const QuantLayout& layout, void* stream) {
  if (layout.outer * layout.length * layout.inner == 0) return nullptr;
  Params p = make_params(packed, out, scales, layout);
  plan_decoding(p, layout);
  // Views may begin anywhere.
  const bool rows = aligned(packed, code_bytes(layout)) &&
                    aligned(scales, p.pair * element_size(layout.scale_type)),
             columns = aligned(packed, 16 / element_size(layout.type)) && aligned(scales);
  if (rows && plan_rows(p, layout, out, kPiece)) {
    launch_row_dequantizers(p, layout, stream);
  } else if (columns && plan_columns_to_dequantize(p, layout, out)) {
    launch(kColumnDequantizers, p, quant::kPartThreads, quant::kPartThreads, stream);
  } else {
    plan_any(p, layout, out, packed);
    launch(rare_kernel<quant::dequantize_any>, p, quant::kAnyThreads / p.lanes, quant::kAnyThreads,
           stream);
  }
  return last_error();
}

}  // namespace flexops
