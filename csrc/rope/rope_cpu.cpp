// Rotary embedding on the CPU: compiled once per ISA level (common/cpu.h). Formulas:
// flexops/ops/rope.py.

#include "rope/rope.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

// Pairs that are worked on at once: a tile's cos and sin of all its positions stay in the
// first-level cache, for every head.
constexpr int64_t kPairs = 128;

[[gnu::noinline]] static void load_strided(const void* from, int64_t offset, int64_t stride,
                                           int64_t count, ElementType type, float* buffer) {
  for (int64_t i = 0; i < count; ++i) buffer[i] = load(from, offset + i * stride, type);
}

/// `count` elements as floats: in place where that is possible, else in `buffer`.
static const float* widen_strided(const void* from, int64_t offset, int64_t stride, int64_t count,
                                  ElementType type, float* buffer) {
  if (stride != 1 && count > 1) {
    load_strided(from, offset, stride, count, type, buffer);
    return buffer;
  }
  return widen(from, offset, count, type, buffer);
}

static void narrow_strided(const float* from, void* to, int64_t offset, int64_t stride,
                           int64_t count, ElementType type) {
  if (stride != 1 && count > 1) {
    for (int64_t i = 0; i < count; ++i) store(to, offset + i * stride, from[i], type);
  } else {
    narrow(from, to, offset, count, type);
  }
}

static int64_t position_of(const Rope& c, int64_t batch, int64_t at) {
  if (!c.positions) return at;
  const int64_t index = batch * c.position_strides[0] + at * c.position_strides[1];
  return c.wide_positions ? static_cast<const int64_t*>(c.positions)[index]
                          : static_cast<const int32_t*>(c.positions)[index];
}

/// cos and sin of some pairs at the positions of a tile.
struct Angles {
  float cos[kRopePositions][kPairs], sin[kRopePositions][kPairs];

  void load(const Rope& c, int64_t batch, int64_t first, int64_t positions, int64_t pair,
            int64_t count) {
    for (int64_t l = 0; l < positions; ++l) {
      const int64_t position = position_of(c, batch, first + l);
      const bool known = position >= 0 && position < c.max_positions;
      const int64_t row = known ? position : 0;
      float buffer[kPairs];
      const float* cosines = widen_strided(c.cos, batch * c.cos_batch + row * c.cos_stride + pair,
                                           1, count, c.table_type, buffer);
      for (int64_t i = 0; i < count; ++i) cos[l][i] = known ? cosines[i] : __builtin_nanf("");
      const float* sines = widen_strided(c.sin, batch * c.sin_batch + row * c.sin_stride + pair, 1,
                                         count, c.table_type, buffer);
      for (int64_t i = 0; i < count; ++i)
        sin[l][i] = known ? (c.inverse ? -sines[i] : sines[i]) : __builtin_nanf("");
    }
  }
};

static void rotate_halves(const float* x, const float* y, const float* cos, const float* sin,
                          float* x_out, float* y_out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats a = load_floats(x + i), b = load_floats(y + i), c = load_floats(cos + i),
                 s = load_floats(sin + i);
    store_floats(x_out + i, a * c - b * s);
    store_floats(y_out + i, b * c + a * s);
  }
  for (; i < count; ++i) {
    few(i);
    const float a = x[i], b = y[i];
    x_out[i] = a * cos[i] - b * sin[i];
    y_out[i] = b * cos[i] + a * sin[i];
  }
}

static void rotate_neighbours(const float* x, const float* FLEXOPS_RESTRICT cos,
                              const float* FLEXOPS_RESTRICT sin, float* FLEXOPS_RESTRICT out,
                              int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * cos[i] - b * sin[i];
    out[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

/// One head at one position: pairs [pair, pair + count).
static void rotate(const Rope& c, const RopeTensor& t, int64_t in, int64_t out, int64_t pair,
                   int64_t count, const float* cos, const float* sin) {
  float x_buffer[2 * kPairs], y_buffer[kPairs], x_out[2 * kPairs], y_out[kPairs];
  const int64_t in_step = t.in_strides[3], out_step = t.out_strides[3];
  if (c.interleaved) {
    const float* x =
        widen_strided(t.in, in + 2 * pair * in_step, in_step, 2 * count, c.type, x_buffer);
    rotate_neighbours(x, cos, sin, x_out, count);
    narrow_strided(x_out, t.out, out + 2 * pair * out_step, out_step, 2 * count, c.type);
    return;
  }
  const float* x = widen_strided(t.in, in + pair * in_step, in_step, count, c.type, x_buffer);
  const float* y =
      widen_strided(t.in, in + (c.half + pair) * in_step, in_step, count, c.type, y_buffer);
  if (c.type == ElementType::f32 && out_step == 1) {
    float* to = static_cast<float*>(t.out) + out + pair;
    rotate_halves(x, y, cos, sin, to, to + c.half, count);
    return;
  }
  rotate_halves(x, y, cos, sin, x_out, y_out, count);
  narrow_strided(x_out, t.out, out + pair * out_step, out_step, count, c.type);
  narrow_strided(y_out, t.out, out + (c.half + pair) * out_step, out_step, count, c.type);
}

/// What is beyond the rotary dimension.
static void copy_rest(const Rope& c, const RopeTensor& t, int64_t in, int64_t out) {
  const int64_t count = c.head_dim - 2 * c.half, size = c.type == ElementType::f32 ? 4 : 2,
                in_step = t.in_strides[3];
  in += 2 * c.half * in_step, out += 2 * c.half * t.out_strides[3];
  if (in_step == 1 && t.out_strides[3] == 1) {
    memcpy(static_cast<char*>(t.out) + out * size, static_cast<const char*>(t.in) + in * size,
           static_cast<size_t>(count * size));
  } else {
    for (int64_t i = 0; i < count; ++i)
      store(t.out, out + i * t.out_strides[3], load(t.in, in + i * in_step, c.type), c.type);
  }
}

void rope_cpu(const Rope& c, int64_t begin, int64_t end) {
  const int64_t tiles = rope_tiles(c.length), parts = rope_parts(c),
                heads = c.tensors[0].heads + c.tensors[1].heads;
  Angles angles;
  for (int64_t item = begin, next; item < end; item = next) {
    const int64_t tile = item / parts, batch = tile / tiles, first = tile % tiles * kRopePositions,
                  positions = least(c.length - first, kRopePositions);
    next = least((tile + 1) * parts, end);
    const int64_t first_head = (item - tile * parts) * heads / parts,
                  last_head = (next - tile * parts) * heads / parts;
    for (int64_t pair = 0; pair == 0 || pair < c.half;
         pair += kPairs) {  // once even if nothing is rotated
      const int64_t count = least(c.half - pair, kPairs);
      angles.load(c, batch, first, positions, pair, count);
      for (int64_t either = first_head; either < last_head; ++either) {
        const bool of_key = either >= c.tensors[0].heads;
        const RopeTensor& t = c.tensors[of_key];
        const int64_t *in = t.in_strides, *out = t.out_strides,
                      head = of_key ? either - c.tensors[0].heads : either;
        for (int64_t l = 0; l < positions; ++l) {
          const int64_t from = batch * in[0] + head * in[1] + (first + l) * in[2],
                        to = batch * out[0] + head * out[1] + (first + l) * out[2];
          rotate(c, t, from, to, pair, count, angles.cos[l], angles.sin[l]);
          if (pair == 0 && !c.in_place && c.head_dim > 2 * c.half) copy_rest(c, t, from, to);
        }
      }
    }
  }
}

}  // namespace flexops::FLEXOPS_ISA
