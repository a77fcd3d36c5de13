// The activations on the CPU: compiled once per ISA level (common/cpu.h). Formulas:
// flexops/ops/activation.py; how they are worked out, and why: activation.cuh.

#include "activation/activation.h"

#include "common/cpu_elements.h"
#include "common/cpu_exp.h"

namespace flexops::FLEXOPS_ISA {

#define FLEXOPS_INLINED inline __attribute__((always_inline))

constexpr int64_t kTile = kActivationColumns;

// ---- arithmetic ----

/// silu, gelu(tanh) and gelu(quick): x * sigmoid(x (a + b x^2)).
template <Activation kWhich>
struct Sigmoidal {
  static constexpr bool kQuick = kWhich == Activation::gelu_quick;
  static constexpr float a = kQuick ? 1.702f : 1.595769122f, b = kQuick ? 0.0f : 0.07135481627f;

  static FLEXOPS_INLINED Floats square_of(Floats x) { return lesser(x * x, floats_of(100.0f)); }
  static FLEXOPS_INLINED Floats value(Floats x) {
    if constexpr (kWhich == Activation::silu) return x / (exponential(-x) + 1.0f);
    return x / (exponential(-x * (square_of(x) * b + a)) + 1.0f);
  }
  static FLEXOPS_INLINED Floats slope(Floats x, Floats& value) {
    const Floats square = kWhich == Activation::silu ? x : square_of(x);
    const Floats t = kWhich == Activation::silu ? floats_of(1.0f) : square * b + a;
    const Floats e = exponential_of_negative(-absolute(x) * t), small = e / (e + 1.0f),
                 large = 1.0f - small;
    const Floats sigmoid = x >= 0.0f ? large : small;
    value = x * sigmoid;
    const Floats inner = kWhich == Activation::silu ? floats_of(1.0f) : square * (3.0f * b) + a;
    return x * (large * small) * inner + sigmoid;
  }
};

struct SquaredRelu {
  static FLEXOPS_INLINED Floats value(Floats x) { return x < 0.0f ? floats_of(0.0f) : x * x; }
  static FLEXOPS_INLINED Floats slope(Floats x, Floats& value) {
    const Floats positive = x < 0.0f ? floats_of(0.0f) : x;
    value = positive * positive;
    return positive + positive;
  }
};

/// gelu(erf): x * Phi(x), Phi(-|x|) = exp(p(|x|)).
struct Erf {
  /// |x|, up to where Phi(-|x|) is 0, which leaves no infinity; NaN becomes that, too.
  static FLEXOPS_INLINED Floats size_of(Floats x) { return lesser(absolute(x), floats_of(20.0f)); }
  static FLEXOPS_INLINED Floats tail(Floats z) {
    const Floats a = z * -7.978845336e-01f - 6.931471806e-01f,
                 b = z * -3.633178705e-02f - 3.183104439e-01f;
    const Floats c = z * 6.093054189e-05f + 4.769473433e-03f,
                 d = z * 7.481222887e-05f - 2.405662755e-04f;
    const Floats e = z * 1.741920406e-06f - 1.395477726e-05f,
                 f = z * 6.960221438e-09f - 1.427412781e-07f;
    const Floats z2 = z * z, z4 = z2 * z2;
    return exponential_of_negative(((f * z2 + e) + z4 * -1.531102706e-10f) * (z4 * z4) +
                                   ((d * z2 + c) * z4 + (b * z2 + a)));
  }
  static FLEXOPS_INLINED Floats value(Floats x) {
    const Floats z = size_of(x), q = tail(z);
    return x >= 0.0f ? x - z * q : x * q;
  }
  static FLEXOPS_INLINED Floats slope(Floats x, Floats& value) {
    const Floats q = tail(size_of(x)), phi = x >= 0.0f ? 1.0f - q : q;
    value = x * phi;
    return x * (exponential_of_negative(x * x * -0.5f) * 0.3989422804f) + phi;
  }
};

// ---- elements ----
// Everything works on whole registers: where a row's end makes none, its elements are in a buffer,
// which has room for the rest.

static_assert(kTile % kLanes == 0);

static bool makes_registers(int64_t count) { return count % kLanes == 0; }

/// Elements as floats, with zeros behind them up to a whole register.
[[gnu::noinline]] static const float* widen_padded(const void* from, int64_t offset, int64_t count,
                                                   ElementType type, float* buffer) {
  const float* values = widen(from, offset, count, type, buffer);
  if (makes_registers(count)) return values;
  if (values != buffer) memcpy(buffer, values, static_cast<size_t>(count) * sizeof(float));
  for (int64_t i = count; !makes_registers(i); ++i) buffer[i] = 0.0f;
  return buffer;
}

/// Where floats that become elements are put together: in place, or in `buffer`. `narrow` then
/// finishes it.
static float* place_for(void* to, int64_t offset, int64_t count, ElementType type, float* buffer) {
  return type == ElementType::f32 && makes_registers(count) ? static_cast<float*>(to) + offset
                                                            : buffer;
}

/// A tile's bias, or what changes no number.
[[gnu::noinline]] static const float* widen_bias(const BiasedActivation& c, int64_t column,
                                                 int64_t count, float* buffer) {
  if (c.bias) return widen_padded(c.bias, column, count, c.bias_type, buffer);
  for (int64_t i = 0; i < kTile; ++i) buffer[i] = -0.0f;
  return buffer;
}

/// Where bf16 comes in and goes out, element by element, their order does not matter: f(i) works on
/// pairs of registers from i on. Returns where they end. (With 16 registers, two elements'
/// arithmetic at once does not fit: there, it is not worth it.)
template <typename F>
static FLEXOPS_INLINED int64_t for_each_pair(bool possible, int64_t count, const F& f) {
  int64_t i = 0;
  if constexpr (kLanes == 16) {
    for (; possible && i + 2 * kLanes <= count; i += 2 * kLanes) f(i);
  }
  return i;
}
static const uint16_t* bf16_at(const void* data, int64_t offset) {
  return static_cast<const uint16_t*>(data) + offset;
}
static uint16_t* bf16_at(void* data, int64_t offset) {
  return static_cast<uint16_t*>(data) + offset;
}

/// Calls f with the activation's arithmetic.
template <typename F>
static void with_activation(Activation which, F f) {
  if (which == Activation::silu) return f(Sigmoidal<Activation::silu>());
  if (which == Activation::relu2) return f(SquaredRelu());
  if (which == Activation::gelu_quick) return f(Sigmoidal<Activation::gelu_quick>());
  if (which == Activation::gelu_tanh) return f(Sigmoidal<Activation::gelu_tanh>());
  f(Erf());
}

/// The tiles [begin, end) of all rows' columns: of each, where `paired`, what makes whole pairs of
/// registers by pair(row, column), the rest by others(row, column, count).
template <typename Pair, typename Others>
static FLEXOPS_INLINED void for_each_tile(int64_t columns, int64_t begin, int64_t end, bool paired,
                                          const Pair& pair, const Others& others) {
  const int64_t tiles = activation_tiles(columns);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / tiles, column = item % tiles * kTile,
                  count = least(columns - column, kTile);
    const int64_t done = for_each_pair(paired, count, [&](int64_t i) { pair(row, column + i); });
    if (done < count) others(row, column + done, count - done);
  }
}

// ---- act(x + bias) ----

void biased_activation_cpu(const BiasedActivation& c, int64_t begin, int64_t end) {
  with_activation(c.activation, [&](auto arithmetic) {
    const bool paired = c.type == ElementType::bf16 && c.bias && c.bias_type == ElementType::bf16;
    alignas(64) float x_buffer[kTile], bias_buffer[kTile], out_buffer[kTile];
    if (!c.bias) widen_bias(c, 0, 0, bias_buffer);
    const auto pair = [&](int64_t row, int64_t column) {
      const Bf16Pairs in = load_bf16_pairs(bf16_at(c.x, row * c.x_stride + column)),
                      add = load_bf16_pairs(bf16_at(c.bias, column));
      store_bf16_pairs(bf16_at(c.out, row * c.columns + column),
                       {arithmetic.value(in.even + add.even), arithmetic.value(in.odd + add.odd)});
    };
    for_each_tile(
        c.columns, begin, end, paired, pair, [&](int64_t row, int64_t column, int64_t count) {
          const float* x = widen_padded(c.x, row * c.x_stride + column, count, c.type, x_buffer);
          float* out = place_for(c.out, row * c.columns + column, count, c.type, out_buffer);
          const float* bias = c.bias ? widen_bias(c, column, count, bias_buffer) : bias_buffer;
          for (int64_t i = 0; i < count; i += kLanes)
            store_floats(out + i, arithmetic.value(load_floats(x + i) + load_floats(bias + i)));
          narrow(out, c.out, row * c.columns + column, count, c.type);
        });
  });
}

constexpr int64_t kPart = 8;  // rows that are added up by themselves first, which keeps more digits

/// sum += part; part = 0
static void add_part(float* sum, float* part, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_floats(sum + i, load_floats(sum + i) + load_floats(part + i));
    store_floats(part + i, Floats{});
  }
}

/// Neighbouring tiles that are walked together, from row to row: runs long enough for the processor
/// to fetch ahead.
constexpr int64_t kJoined = 4;

/// Whether a tile's elements, and their sums, are worked on in pairs of registers.
static bool in_pairs(const BiasedActivation& c, int64_t count) {
  const bool bf16 = c.type == ElementType::bf16 && c.bias && c.bias_type == ElementType::bf16;
  return kLanes == 16 && bf16 && count % (2 * kLanes) == 0;
}

/// Pairs of registers, the even and the odd elements, as one row. (Unrolled, the loop takes the
/// compiler two seconds.)
[[gnu::noinline]] static void put_in_order(float* values, int64_t count) {
  float pairs[2 * kLanes];
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    memcpy(pairs, values + i, sizeof pairs);
#pragma GCC unroll 1
    for (int k = 0; k < kLanes; ++k)
      values[i + 2 * k] = pairs[k], values[i + 2 * k + 1] = pairs[kLanes + k];
  }
}

/// One slice's rows in some neighbouring tiles, from `first_column` on.
template <typename Arithmetic>
static void backward_slice(const BiasedActivation& c, Arithmetic arithmetic, int64_t slice,
                           int64_t first_column, int64_t tiles) {
  const bool summed = c.bias_grad != nullptr;
  alignas(64) float x_buffer[kTile], grad_buffer[kTile], out_buffer[kTile];
  alignas(64) float bias_buffers[kJoined][kTile], sums[kJoined][kTile], parts[kJoined][kTile];
  const float* biases[kJoined];
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t column = first_column + tile * kTile;
    const int64_t count = least(c.columns - column, kTile);
    if (!in_pairs(c, count)) biases[tile] = widen_bias(c, column, count, bias_buffers[tile]);
    if (!summed) continue;
    memset(sums[tile], 0, sizeof sums[tile]);
    memset(parts[tile], 0, sizeof parts[tile]);
  }
  const int64_t last = least((slice + 1) * c.slice_rows, c.rows);
  for (int64_t row = slice * c.slice_rows; row < last; ++row) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t column = first_column + tile * kTile, count = least(c.columns - column, kTile);
      float* part = parts[tile];
      if (in_pairs(c, count)) {
        for (int64_t i = 0; i < count; i += 2 * kLanes) {
          const Bf16Pairs in = load_bf16_pairs(bf16_at(c.x, row * c.x_stride + column + i)),
                          add = load_bf16_pairs(bf16_at(c.bias, column + i));
          const Bf16Pairs outer =
              load_bf16_pairs(bf16_at(c.grad, row * c.grad_stride + column + i));
          Floats unused;
          const Bf16Pairs value = {outer.even * arithmetic.slope(in.even + add.even, unused),
                                   outer.odd * arithmetic.slope(in.odd + add.odd, unused)};
          store_bf16_pairs(bf16_at(c.out, row * c.columns + column + i), value);
          if (!summed) continue;
          store_floats(part + i, load_floats(part + i) + value.even);
          store_floats(part + i + kLanes, load_floats(part + i + kLanes) + value.odd);
        }
        if (summed && ((row + 1) % kPart == 0 || row + 1 == last))
          add_part(sums[tile], part, count);
        continue;
      }
      const float *bias = biases[tile],
                  *x = widen_padded(c.x, row * c.x_stride + column, count, c.type, x_buffer);
      const float* grad =
          widen_padded(c.grad, row * c.grad_stride + column, count, c.type, grad_buffer);
      float* out = place_for(c.out, row * c.columns + column, count, c.type, out_buffer);
      for (int64_t i = 0; i < count; i += kLanes) {
        Floats unused;
        const Floats value = load_floats(grad + i) *
                             arithmetic.slope(load_floats(x + i) + load_floats(bias + i), unused);
        store_floats(out + i, value);
        if (summed) store_floats(part + i, load_floats(part + i) + value);
      }
      narrow(out, c.out, row * c.columns + column, count, c.type);
      if (summed && ((row + 1) % kPart == 0 || row + 1 == last)) add_part(sums[tile], part, count);
    }
  }
  for (int64_t tile = 0; summed && tile < tiles; ++tile) {
    const int64_t column = first_column + tile * kTile, count = least(c.columns - column, kTile);
    if (in_pairs(c, count)) put_in_order(sums[tile], count);
    if (c.sums) {
      memcpy(c.sums + slice * c.columns + column, sums[tile],
             static_cast<size_t>(count) * sizeof(float));
    } else {
      narrow(sums[tile], c.bias_grad, column, count, c.bias_type);
    }
  }
}

void biased_activation_backward_cpu(const BiasedActivation& c, int64_t begin, int64_t end) {
  const int64_t tiles = activation_tiles(c.columns);
  with_activation(c.activation, [&](auto arithmetic) {
    for (int64_t item = begin, joined = 0; item < end; item += joined) {
      const int64_t tile = item % tiles;
      joined = least(least(end - item, tiles - tile), kJoined);
      backward_slice(c, arithmetic, item / tiles, tile * kTile, joined);
    }
  });
}

void bias_gradient_cpu(const BiasedActivation& c, int64_t begin, int64_t end) {
  float sum[kTile], part[kTile], buffer[kTile];
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t column = tile * kTile, count = least(c.columns - column, kTile);
    memset(sum, 0, sizeof sum);
    memset(part, 0, sizeof part);
    for (int64_t slice = 0; slice < c.slices; ++slice) {
      const float* from =
          widen_padded(c.sums, slice * c.columns + column, count, ElementType::f32, buffer);
      for (int64_t i = 0; i < count; i += kLanes)
        store_floats(part + i, load_floats(part + i) + load_floats(from + i));
      if ((slice + 1) % kPart == 0 || slice + 1 == c.slices) add_part(sum, part, count);
    }
    narrow(sum, c.bias_grad, column, count, c.bias_type);
  }
}

// ---- act(gate) * up ----

/// Gates and ups of a tile, wherever they are.
struct Gates {
  const float *gate, *up;
  alignas(64) float gate_buffer[kTile], up_buffer[kTile], both[2 * kTile];

  void load(const GatedActivation& c, int64_t row, int64_t column, int64_t count) {
    if (c.pairs) return load_pairs(c, row, column, count);
    gate = widen_padded(c.gate, row * c.gate_stride + column, count, c.type, gate_buffer);
    up = widen_padded(c.up, row * c.up_stride + column, count, c.type, up_buffer);
  }
  [[gnu::noinline]] void load_pairs(const GatedActivation& c, int64_t row, int64_t column,
                                    int64_t count) {
    const float* pairs =
        widen_padded(c.gate, row * c.gate_stride + 2 * column, 2 * count, c.type, both);
    for (int64_t i = 0; i < count; ++i)
      gate_buffer[i] = pairs[2 * i], up_buffer[i] = pairs[2 * i + 1];
    for (int64_t i = count; !makes_registers(i); ++i) gate_buffer[i] = up_buffer[i] = 0.0f;
    gate = gate_buffer, up = up_buffer;
  }
};

void gated_activation_cpu(const GatedActivation& c, int64_t begin, int64_t end) {
  with_activation(c.activation, [&](auto arithmetic) {
    Gates in;
    alignas(64) float out_buffer[kTile];
    const auto pair = [&](int64_t row, int64_t column) {
      const Bf16Pairs gate = load_bf16_pairs(bf16_at(c.gate, row * c.gate_stride + column));
      const Bf16Pairs up = load_bf16_pairs(bf16_at(c.up, row * c.up_stride + column));
      store_bf16_pairs(
          bf16_at(c.out, row * c.columns + column),
          {arithmetic.value(gate.even) * up.even, arithmetic.value(gate.odd) * up.odd});
    };
    for_each_tile(c.columns, begin, end, c.type == ElementType::bf16 && !c.pairs, pair,
                  [&](int64_t row, int64_t column, int64_t count) {
                    in.load(c, row, column, count);
                    float* out =
                        place_for(c.out, row * c.columns + column, count, c.type, out_buffer);
                    for (int64_t i = 0; i < count; i += kLanes)
                      store_floats(out + i, arithmetic.value(load_floats(in.gate + i)) *
                                                load_floats(in.up + i));
                    narrow(out, c.out, row * c.columns + column, count, c.type);
                  });
  });
}

[[gnu::noinline]] static void interleave(const float* FLEXOPS_RESTRICT even,
                                         const float* FLEXOPS_RESTRICT odd,
                                         float* FLEXOPS_RESTRICT pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) pairs[2 * i] = even[i], pairs[2 * i + 1] = odd[i];
}

void gated_activation_backward_cpu(const GatedActivation& c, int64_t begin, int64_t end) {
  with_activation(c.activation, [&](auto arithmetic) {
    Gates in;
    alignas(64) float grad_buffer[kTile], gate_buffer[kTile], up_buffer[kTile], out_buffer[kTile],
        both[2 * kTile];
    const auto pair = [&](int64_t row, int64_t column) {
      const Bf16Pairs gate = load_bf16_pairs(bf16_at(c.gate, row * c.gate_stride + column));
      const Bf16Pairs up = load_bf16_pairs(bf16_at(c.up, row * c.up_stride + column));
      const Bf16Pairs outer = load_bf16_pairs(bf16_at(c.grad, row * c.grad_stride + column));
      Bf16Pairs value;
      const Bf16Pairs slope = {arithmetic.slope(gate.even, value.even),
                               arithmetic.slope(gate.odd, value.odd)};
      if (c.out)
        store_bf16_pairs(bf16_at(c.out, row * c.columns + column),
                         {value.even * up.even, value.odd * up.odd});
      const int64_t to = row * c.out_stride + column;
      store_bf16_pairs(bf16_at(c.gate_grad, to),
                       {outer.even * up.even * slope.even, outer.odd * up.odd * slope.odd});
      store_bf16_pairs(bf16_at(c.up_grad, to), {outer.even * value.even, outer.odd * value.odd});
    };
    for_each_tile(
        c.columns, begin, end, c.type == ElementType::bf16 && !c.pairs, pair,
        [&](int64_t row, int64_t column, int64_t count) {
          in.load(c, row, column, count);
          const float* grad =
              widen_padded(c.grad, row * c.grad_stride + column, count, c.type, grad_buffer);
          const int64_t at = row * c.out_stride + (c.pairs ? 2 * column : column);
          float* gate_grad =
              c.pairs ? gate_buffer : place_for(c.gate_grad, at, count, c.type, gate_buffer);
          float* up_grad = c.pairs ? up_buffer : place_for(c.up_grad, at, count, c.type, up_buffer);
          float* out = c.out ? place_for(c.out, row * c.columns + column, count, c.type, out_buffer)
                             : out_buffer;
          for (int64_t i = 0; i < count; i += kLanes) {
            Floats value;
            const Floats slope = arithmetic.slope(load_floats(in.gate + i), value),
                         outer = load_floats(grad + i);
            store_floats(out + i, value * load_floats(in.up + i));
            store_floats(gate_grad + i, outer * load_floats(in.up + i) * slope);
            store_floats(up_grad + i, outer * value);
          }
          if (c.out) narrow(out, c.out, row * c.columns + column, count, c.type);
          if (c.pairs) {
            float* pairs = place_for(c.gate_grad, at, 2 * count, c.type, both);
            interleave(gate_grad, up_grad, pairs, count);
            narrow(pairs, c.gate_grad, at, 2 * count, c.type);
          } else {
            narrow(gate_grad, c.gate_grad, at, count, c.type);
            narrow(up_grad, c.up_grad, at, count, c.type);
          }
        });
  });
}

}  // namespace flexops::FLEXOPS_ISA
