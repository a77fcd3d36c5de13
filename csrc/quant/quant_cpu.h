// What group-wise quantization's CPU kernels share: numbers, a group's parameters, and where groups
// lie. Once per ISA level (common/cpu.h).
#pragma once

#include "quant/quant.h"

#include "common/cpu_elements.h"

namespace flexops::FLEXOPS_ISA {

// Elements are widened to float buffers of this many, which stay in the first-level cache. Even, so
// that no byte is cut.
constexpr int64_t kBlock = 1024;
static_assert(kBlock % 2 == 0);

// Groups along contiguous memory are handled so many at a time, to hide the latency of finding
// their parameters.
constexpr int64_t kBatch = 8;

constexpr float kFloatMax = 3.40282347e38f;
constexpr float kRound =
    12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, half to even, in the sum's low bits
static const float kInfinity = __builtin_inff();

// A group of 64 takes some 40 cycles, of which calls with so many arguments would be a good part.
#define FLEXOPS_INLINED static inline __attribute__((always_inline))

static float largest_of(ElementType type) {
  return type == ElementType::f16    ? 65504.0f
         : type == ElementType::bf16 ? 3.38953139e38f
                                     : kFloatMax;
}

static float round_to(float value, ElementType type) {
  if (type == ElementType::f16) return f16_to_float(float_to_f16(value));
  if (type == ElementType::bf16) return bf16_to_float(float_to_bf16(value));
  return value;
}

/// What all groups of a tensor share.
struct Coding {
  float top;   // the largest code
  float most;  // the largest scale
  uint32_t mask;
  bool symmetric;
  ElementType type;

  explicit Coding(const QuantLayout& l)
      : most(largest_of(l.type)),
        mask(l.bits == 4 ? 15 : 255),
        symmetric(l.symmetric),
        type(l.type) {
    top = l.bits == 4 ? (l.symmetric ? 7.0f : 15.0f) : (l.symmetric ? 127.0f : 255.0f);
  }
};

/// Extremes of a set of elements. NaN is kept apart, since the comparisons skip it.
struct Extremes {
  float lowest = kInfinity, highest = -kInfinity, poison = 0.0f;

  void add(float value) {
    lowest = value < lowest ? value : lowest;
    highest = value > highest ? value : highest;
    poison += value * 0.0f;  // NaN if the value is NaN or infinite
  }
};

/// A group's parameters, exactly as its dtype holds them. NaN if the group is broken: its codes
/// must then be 0.
struct Group {
  float minimum, scale;

  Group() = default;
  Group(const Extremes& e, const Coding& c) {
    minimum = c.symmetric ? 0.0f : e.lowest + 0.0f;
    const float low = __builtin_fabsf(e.lowest), high = __builtin_fabsf(e.highest);
    const float span = c.symmetric ? (low > high ? low : high) : e.highest - minimum;
    const float unrounded = 1.0f / span * c.top;
    scale = span == 0.0f ? 1.0f : round_to(unrounded < c.most ? unrounded : c.most, c.type);
    if (!(span <= kFloatMax) || e.poison != e.poison) minimum = scale = __builtin_nanf("");
  }
  bool is_broken() const { return scale != scale; }
};

/// What makes symmetric codes positive: code ^ flip - flip undoes two's complement.
static int flip_of(const QuantLayout& l) { return !l.symmetric ? 0 : l.bits == 4 ? 8 : 128; }

/// Where a group's elements, codes and scales begin.
struct Place {
  int64_t element, packed, scales;
  int64_t rows;     // of the group, not counting what pads a short one
  int64_t columns;  // of the tile

  /// Columns that are done.
  void skip(int64_t count) { element += count, packed += count, scales += count, columns -= count; }
};

/// Walks the tiles in order, adding up: dividing and multiplying for each would take as long as a
/// small group's work.
class Tiles {
 public:
  Tiles(const QuantLayout& layout, int64_t columns, int64_t tile)
      : l_(layout), columns_(columns), pair_(layout.symmetric ? 1 : 2) {
    const int64_t tiles = quant_tiles(layout, columns), line = tile / tiles;
    column_ = tile % tiles * columns;
    outer_ = line / layout.groups;
    group_ = line % layout.groups;
    find();
  }

  const Place& place() const { return place_; }

  void next() {
    if (l_.inner == 1 && group_ + 1 < l_.groups) {
      ++group_;
      place_.element += l_.group_size * l_.length_stride;
      place_.packed += l_.group_bytes;
      place_.scales += pair_;
      place_.rows = least(l_.length - group_ * l_.group_size, l_.group_size);
      return;
    }
    column_ += columns_;
    if (column_ >= l_.inner) {
      column_ = 0;
      if (++group_ == l_.groups) group_ = 0, ++outer_;
    }
    find();
  }

 private:
  void find() {
    const int64_t line = outer_ * l_.groups + group_, first = group_ * l_.group_size;
    place_.element =
        outer_ * l_.outer_stride + first * l_.length_stride + column_ * l_.inner_stride;
    place_.packed = line * l_.group_bytes * l_.inner + column_;
    place_.scales = line * pair_ * l_.inner + column_;
    place_.rows = least(l_.length - first, l_.group_size);
    place_.columns = least(l_.inner - column_, columns_);
  }

  const QuantLayout& l_;
  int64_t columns_, pair_, outer_, group_, column_;
  Place place_;
};

}  // namespace flexops::FLEXOPS_ISA
