// The gated RMS norm on the CPU: compiled once per ISA level (common/cpu.h). What it computes:
// flexops/ops/gated_norm.py.

#include "gated_norm/gated_norm.h"

#include "common/cpu_rows.h"

namespace flexops::FLEXOPS_ISA {

static Floats logistic(Floats x) {
  const Floats value = 1.0f / (exponential(-x) + 1.0f);
  return x == x ? value : x;
}

/// The gate's activation.
static Floats activated(Floats gate, bool sigmoid) {
  return sigmoid ? logistic(gate) : gate / (exponential(-gate) + 1.0f);
}

static float scale_of(double squares, int64_t width, double eps) {
  return static_cast<float>(1.0 / __builtin_sqrt(squares / static_cast<double>(width) + eps));
}

/// A block of a tensor's elements as floats: in place, or in its buffer.
struct RowBlock {
  const TensorView& tensor;
  const float* from = nullptr;
  float* to = nullptr;
  alignas(64) float buffer[kRowBlock];

  explicit RowBlock(const TensorView& of) : tensor(of) {}

  void read(int64_t offset, int64_t count) {
    from = widen(tensor.data, offset, count, type(), buffer);
  }
  Floats at(int64_t i, int64_t some) const { return load_up_to(from + i, some); }

  float* place(int64_t offset) { return to = place_in_row(tensor.data, offset, type(), buffer); }
  void write(int64_t offset, int64_t count) { narrow(to, tensor.data, offset, count, type()); }

 private:
  ElementType type() const { return static_cast<ElementType>(tensor.dtype); }
};

/// The columns' weights, or ones.
struct Weights : RowBlock {
  using RowBlock::RowBlock;

  void read(int64_t column, int64_t count) {
    if (tensor) RowBlock::read(column, count);
  }
  Floats at(int64_t i, int64_t some) const {
    return tensor ? RowBlock::at(i, some) : floats_of(1.0f);
  }
};

/// Calls f(i, some) for the registers of a block.
template <typename F>
static inline void for_registers(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, int64_t{kLanes});
  if (i < count) f(i, count - i);
}

void gated_rms_norm_cpu(const TensorView& x, const TensorView& gate, const TensorView& weight,
                        double eps, int64_t groups, bool norm_first, bool sigmoid,
                        const TensorView& out, int64_t begin, int64_t end) {
  const int64_t width = x.size(1) / groups;
  RowBlock values(x), gates(gate), results(out);
  Weights weights(weight);
  for (int64_t row = begin * groups; row < end * groups; ++row) {
    double squares = 0.0;
    for_row_blocks(width, 0, [&](int64_t at, int64_t count) {
      values.read(row * width + at, count);
      if (!norm_first) gates.read(row * width + at, count);
      Floats sum = {};
      for_registers(count, [&](int64_t i, int64_t some) {
        Floats u = values.at(i, some);
        if (!norm_first) u *= activated(gates.at(i, some), sigmoid);
        sum += u * u;
      });
      squares += static_cast<double>(sum_of_lanes(sum));
    });
    const float scale = scale_of(squares, width, eps);
    for_row_blocks(width, 0, [&](int64_t at, int64_t count) {
      values.read(row * width + at, count), gates.read(row * width + at, count);
      weights.read(row % groups * width + at, count);
      float* const to = results.place(row * width + at);
      for_registers(count, [&](int64_t i, int64_t some) {
        const Floats n = values.at(i, some) * scale * weights.at(i, some);
        store_up_to(to + i, n * activated(gates.at(i, some), sigmoid), some);
      });
      results.write(row * width + at, count);
    });
  }
}

void gated_norm_backward_cpu(const GatedNormBackward& c, int64_t begin, int64_t end) {
  const int64_t columns = c.x.size(1), width = columns / c.groups, rows = c.x.size(0) * c.groups;
  const bool norm_first = c.norm_first, sigmoid = c.sigmoid;
  RowBlock upstream(c.grad), values(c.x), gates(c.gate), of_x(c.x_grad), of_gate(c.gate_grad);
  Weights weights(c.weight);
  const auto read = [&](int64_t row, int64_t at, int64_t count) {
    upstream.read(row * width + at, count), values.read(row * width + at, count);
    gates.read(row * width + at, count), weights.read(row % c.groups * width + at, count);
  };
  const auto backward = [&](int64_t row, float* sums) {  // of a row's columns, or null
    double squares = 0.0, products = 0.0;
    for_row_blocks(width, 0, [&](int64_t at, int64_t count) {
      read(row, at, count);
      Floats square = {}, product = {};
      for_registers(count, [&](int64_t i, int64_t some) {
        const Floats act = activated(gates.at(i, some), sigmoid), value = values.at(i, some);
        const Floats u = norm_first ? value : value * act,
                     weighted = upstream.at(i, some) * weights.at(i, some);
        square += u * u;
        product += u * (norm_first ? weighted * act : weighted);
      });
      squares += static_cast<double>(sum_of_lanes(square));
      products += static_cast<double>(sum_of_lanes(product));
    });
    const float scale = scale_of(squares, width, c.eps);
    const float mean = static_cast<float>(products / static_cast<double>(width)) * scale * scale;
    for_row_blocks(width, 0, [&](int64_t at, int64_t count) {
      read(row, at, count);
      float* const to_x = of_x.place(row * width + at);
      float* const to_gate = of_gate.place(row * width + at);
      for_registers(count, [&](int64_t i, int64_t some) {
        const Floats g = gates.at(i, some), half = logistic(g), act = sigmoid ? half : half * g;
        const Floats value = values.at(i, some), d = upstream.at(i, some),
                     weighted = d * weights.at(i, some);
        const Floats u = norm_first ? value : value * act;
        const Floats of_u = scale * ((norm_first ? weighted * act : weighted) - u * mean);
        const Floats slope = sigmoid ? half * (1.0f - half) : half * (1.0f + g * (1.0f - half));
        store_up_to(to_x + i, norm_first ? of_u : of_u * act, some);
        store_up_to(to_gate + i, slope * (norm_first ? weighted * (u * scale) : of_u * value),
                    some);
        if (!sums) return;
        float* const sum = sums + at + i;
        const Floats normalized = d * u * scale;
        store_up_to(sum, load_up_to(sum, some) + (norm_first ? normalized * act : normalized),
                    some);
      });
      of_x.write(row * width + at, count), of_gate.write(row * width + at, count);
    });
  };
  for (int64_t part = begin; part < end; ++part) {
    float* const sums = c.weight ? c.partial + part * columns : nullptr;
    if (sums) memset(sums, 0, static_cast<size_t>(columns) * sizeof(float));
    for (int64_t row = rows * part / c.parts; row < rows * (part + 1) / c.parts; ++row)
      backward(row, sums ? sums + row % c.groups * width : nullptr);
  }
}

void gated_norm_sum_cpu(const GatedNormBackward& c, int64_t begin, int64_t end) {
  sum_parts(c.partial, c.parts, c.x.size(1), c.weight_grad.data,
            static_cast<ElementType>(c.weight_grad.dtype), begin, end);
}

}  // namespace flexops::FLEXOPS_ISA
