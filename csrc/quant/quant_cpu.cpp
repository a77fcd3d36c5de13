// Group-wise quantization on the CPU: compiled once per ISA level (common/cpu.h). Formulas and
// format: flexops/ops/quant.py, which this reproduces bit for bit, so multiplications and additions
// must stay apart.

#include "quant/quant_cpu_vectors.h"

namespace flexops::FLEXOPS_ISA {

/// Codes of neighbouring elements of one group, a byte each.
static void encode_run(const float* FLEXOPS_RESTRICT values, uint8_t* FLEXOPS_RESTRICT codes,
                       int64_t count, const Group& g, const Coding& c) {
  if (g.is_broken()) {
    memset(codes, 0, static_cast<size_t>(count));
    return;
  }
  const float minimum = g.minimum, scale = g.scale, top = c.top;
  const uint32_t mask = c.mask;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = (values[i] - minimum) * scale;
    codes[i] = static_cast<uint8_t>(bits_of((scaled < top ? scaled : top) + kRound) & mask);
  }
}

/// The same for one row of groups that lie side by side.
static void encode_row(const float* FLEXOPS_RESTRICT values, uint8_t* FLEXOPS_RESTRICT codes,
                       int64_t count, const float* FLEXOPS_RESTRICT minimum,
                       const float* FLEXOPS_RESTRICT scale, const Coding& c) {
  const float top = c.top;
  const uint32_t mask = c.mask;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = (values[i] - minimum[i]) * scale[i];
    const uint32_t code = bits_of((scaled < top ? scaled : top) + kRound) & mask;
    codes[i] = static_cast<uint8_t>(scale[i] == scale[i] ? code : 0u);
  }
}

/// Neighbouring codes to halves of bytes; `codes` has a zero behind an odd count.
static void pack_run(const uint8_t* FLEXOPS_RESTRICT codes, uint8_t* FLEXOPS_RESTRICT packed,
                     int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    uint16_t two;
    memcpy(&two, codes + 2 * i, 2);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    packed[i] = static_cast<uint8_t>(two << 4 | two >> 8);
#else
    packed[i] = static_cast<uint8_t>(two >> 4 | two);
#endif
  }
}

static void unpack_run(const uint8_t* FLEXOPS_RESTRICT packed, uint8_t* FLEXOPS_RESTRICT codes,
                       int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    const uint16_t byte = packed[i];
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const uint16_t two = static_cast<uint16_t>(byte >> 4 | (byte & 15) << 8);
#else
    const uint16_t two = static_cast<uint16_t>((byte >> 4) << 8 | (byte & 15));
#endif
    memcpy(codes + 2 * i, &two, 2);
  }
}

// ---- a group along contiguous memory
// -------------------------------------------------------------------------------- What the vectors
// leave of it is done out of line, and by all levels' plain loops.

[[gnu::noinline]] static void scan_rest(const void* x, int64_t offset, int64_t count,
                                        ElementType type, Extremes& e) {
  float buffer[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t part = least(count - at, kBlock);
    const float* values = widen(x, offset + at, part, type, buffer);
    for (int64_t i = 0; i < part; ++i) e.add(values[i]);
  }
}

[[gnu::noinline]] static void encode_rest(const void* x, int64_t at, uint8_t* out,
                                          const QuantLayout& l, const Coding& c, const Place& p,
                                          const Group& g) {
  float buffer[kBlock];
  uint8_t codes[kBlock];
  for (; at < p.rows; at += kBlock) {
    const int64_t count = least(p.rows - at, kBlock);
    encode_run(widen(x, p.element + at, count, l.type, buffer), l.bits == 8 ? out + at : codes,
               count, g, c);
    if (l.bits == 8) continue;
    if (count % 2) codes[count] = 0;
    pack_run(codes, out + at / 2, (count + 1) / 2);
  }
}

FLEXOPS_INLINED Extremes scan_run(const void* x, int64_t offset, int64_t count, ElementType type) {
  Extremes e;
  const int64_t done = scan_fast(x, offset, count, type, e);
  if (done < count) scan_rest(x, offset + done, count - done, type, e);
  return e;
}

FLEXOPS_INLINED void encode_group(const void* x, uint8_t* packed, const QuantLayout& l,
                                  const Coding& c, const Place& p, const Group& g) {
  uint8_t* out = packed + p.packed;
  const int64_t done = encode_fast(x, p.element, p.rows, g, c, l.bits, out);
  if (done < p.rows) encode_rest(x, done, out, l, c, p, g);
  const int64_t used = l.bits == 8 ? p.rows : (p.rows + 1) / 2;
  if (used < l.group_bytes) memset(out + used, 0, static_cast<size_t>(l.group_bytes - used));
}

/// `count` groups, one behind the other.
static void quantize_runs(const void* x, uint8_t* packed, void* scales, const QuantLayout& l,
                          const Coding& c, const Place (&p)[kBatch], int64_t count) {
  Extremes e[kBatch];
  Group g[kBatch];
  float minimum[kBatch], scale[kBatch], pairs[2 * kBatch];
  for (int64_t i = 0; i < count; ++i) e[i] = scan_run(x, p[i].element, p[i].rows, l.type);
  make_batch(e, c, minimum, scale);
  const int64_t pair = l.symmetric ? 1 : 2;
  for (int64_t i = 0; i < kBatch; ++i) {
    g[i].minimum = minimum[i], g[i].scale = scale[i];
    pairs[i * pair + pair - 1] = minimum[i];
    pairs[i * pair] = scale[i];
  }
  narrow(pairs, scales, p[0].scales, count * pair, l.type);
  for (int64_t i = 0; i < count; ++i) encode_group(x, packed, l, c, p[i], g[i]);
}

[[gnu::noinline]] static void decode_rest(const uint8_t* from, int64_t at, void* out,
                                          const QuantLayout& l, const Place& p, float step,
                                          float minimum) {
  float values[kBlock];
  uint8_t unpacked[kBlock];
  const int flip = flip_of(l);
  for (; at < p.rows; at += kBlock) {
    const int64_t count = least(p.rows - at, kBlock);
    if (l.bits == 4) unpack_run(from + at / 2, unpacked, (count + 1) / 2);
    const uint8_t* codes = l.bits == 4 ? unpacked : from + at;
    for (int64_t i = 0; i < count; ++i)
      values[i] = static_cast<float>((codes[i] ^ flip) - flip) * step + minimum;
    narrow(values, out, p.element + at, count, l.type);
  }
}

static void decode_group(const uint8_t* packed, void* out, const QuantLayout& l, const Place& p,
                         float step, float minimum) {
  const uint8_t* from = packed + p.packed;
  const int64_t done =
      decode_fast(from, p.rows, l.bits, step, minimum, flip_of(l), out, p.element, l.type);
  if (done < p.rows) decode_rest(from, done, out, l, p, step, minimum);
}

static void dequantize_runs(const uint8_t* packed, const void* scales, void* out,
                            const QuantLayout& l, const Place (&p)[kBatch], int64_t count) {
  const int64_t pair = l.symmetric ? 1 : 2;
  float buffer[2 * kBatch];
  const float* pairs = widen(scales, p[0].scales, count * pair, l.scale_type, buffer);
  for (int64_t i = 0; i < count; ++i)
    decode_group(packed, out, l, p[i], 1.0f / pairs[i * pair],
                 l.symmetric ? 0.0f : pairs[i * pair + 1]);
}

// ---- groups across contiguous rows ----

/// One number for each column of a tile.
template <int64_t columns>
struct Row {
  float at[columns];
};
using QuantizeRow = Row<kQuantizeColumns>;

[[gnu::noinline]] static void find_groups(const void* x, const QuantLayout& l, const Coding& c,
                                          const Place& p, QuantizeRow& minimum,
                                          QuantizeRow& scale) {
  QuantizeRow lowest, highest, poison, buffer;
  for (int64_t i = 0; i < p.columns; ++i)
    lowest.at[i] = kInfinity, highest.at[i] = -kInfinity, poison.at[i] = 0.0f;
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* values = widen(x, p.element + row * l.length_stride, p.columns, l.type, buffer.at);
    for (int64_t i = 0; i < p.columns; ++i) {
      const float value = values[i];
      lowest.at[i] = value < lowest.at[i] ? value : lowest.at[i];
      highest.at[i] = value > highest.at[i] ? value : highest.at[i];
      poison.at[i] += value * 0.0f;
    }
  }
  for (int64_t i = 0; i < p.columns; ++i) {
    Extremes e;
    e.lowest = lowest.at[i], e.highest = highest.at[i], e.poison = poison.at[i];
    const Group g(e, c);
    minimum.at[i] = g.minimum, scale.at[i] = g.scale;
  }
}

/// One row's codes, zeros beyond the last.
[[gnu::noinline]] static void encode_columns(const void* x, int64_t row, uint8_t* codes,
                                             const QuantLayout& l, const Coding& c, const Place& p,
                                             const QuantizeRow& minimum, const QuantizeRow& scale) {
  QuantizeRow buffer;
  if (row < p.rows) {
    encode_row(widen(x, p.element + row * l.length_stride, p.columns, l.type, buffer.at), codes,
               p.columns, minimum.at, scale.at, c);
  } else {
    memset(codes, 0, static_cast<size_t>(p.columns));
  }
}

static void quantize_tile(const void* x, uint8_t* packed, void* scales, const QuantLayout& l,
                          const Coding& c, Place p) {
  p.skip(quantize_columns_fast(x, packed, scales, l, c, p));
  if (p.columns == 0) return;
  QuantizeRow minimum, scale;
  uint8_t even[kQuantizeColumns], odd[kQuantizeColumns];
  find_groups(x, l, c, p, minimum, scale);
  narrow(scale.at, scales, p.scales, p.columns, l.type);
  if (!l.symmetric) narrow(minimum.at, scales, p.scales + l.inner, p.columns, l.type);
  const auto encode = [&](int64_t row, uint8_t* codes) {
    encode_columns(x, row, codes, l, c, p, minimum, scale);
  };
  for (int64_t byte = 0; byte < l.group_bytes; ++byte) {
    uint8_t* FLEXOPS_RESTRICT out = packed + p.packed + byte * l.inner;
    if (l.bits == 8) {
      encode(byte, out);
    } else {
      encode(2 * byte, even);
      encode(2 * byte + 1, odd);
      for (int64_t i = 0; i < p.columns; ++i) out[i] = static_cast<uint8_t>(even[i] << 4 | odd[i]);
    }
  }
}

static void dequantize_tile(const uint8_t* packed, const void* scales, void* out,
                            const QuantLayout& l, const Place& p) {
  Row<kDequantizeColumns> step, minimum, buffer, values;
  const float* scale = widen(scales, p.scales, p.columns, l.scale_type, buffer.at);
  for (int64_t i = 0; i < p.columns; ++i) step.at[i] = 1.0f / scale[i], minimum.at[i] = 0.0f;
  if (!l.symmetric)
    memcpy(minimum.at, widen(scales, p.scales + l.inner, p.columns, l.scale_type, buffer.at),
           static_cast<size_t>(p.columns) * 4);
  const int flip = flip_of(l), mask = l.bits == 4 ? 15 : 255;
  for (int64_t row = 0; row < p.rows; ++row) {
    const uint8_t* codes = packed + p.packed + (l.bits == 4 ? row / 2 : row) * l.inner;
    const int shift = l.bits == 4 && row % 2 == 0 ? 4 : 0;
    const int64_t to = p.element + row * l.length_stride;
    const int64_t done = decode_columns_fast(codes, p.columns, shift, mask, flip, step.at,
                                             minimum.at, out, to, l.type);
    for (int64_t i = done; i < p.columns; ++i) {
      values.at[i] = static_cast<float>(((codes[i] >> shift & mask) ^ flip) - flip) * step.at[i] +
                     minimum.at[i];
    }
    narrow(values.at + done, out, to + done, p.columns - done, l.type);
  }
}

/// Calls one(place) for each tile of [begin, end), or batch(places, count) if the groups lie along
/// contiguous memory.
template <typename One, typename Batch>
static void for_each_tile(const QuantLayout& l, int64_t columns, int64_t begin, int64_t end,
                          const One& one, const Batch& batch) {
  Tiles tiles(l, columns, begin);
  Place places[kBatch];
  for (int64_t tile = begin; tile < end;) {
    const int64_t count = l.inner == 1 ? least(end - tile, kBatch) : 1;
    for (int64_t i = 0; i < count; ++i, tiles.next()) places[i] = tiles.place();
    l.inner == 1 ? batch(places, count) : one(places[0]);
    tile += count;
  }
}

void quantize_cpu(const void* x, uint8_t* packed, void* scales, const QuantLayout& layout,
                  int64_t begin, int64_t end) {
  const Coding c(layout);
  for_each_tile(
      layout, kQuantizeColumns, begin, end,
      [&](const Place& p) { quantize_tile(x, packed, scales, layout, c, p); },
      [&](const Place(&p)[kBatch], int64_t count) {
        quantize_runs(x, packed, scales, layout, c, p, count);
      });
}

void dequantize_cpu(const uint8_t* packed, const void* scales, void* out, const QuantLayout& layout,
                    int64_t begin, int64_t end) {
  for_each_tile(
      layout, kDequantizeColumns, begin, end,
      [&](const Place& p) { dequantize_tile(packed, scales, out, layout, p); },
      [&](const Place(&p)[kBatch], int64_t count) {
        dequantize_runs(packed, scales, out, layout, p, count);
      });
}

}  // namespace flexops::FLEXOPS_ISA
