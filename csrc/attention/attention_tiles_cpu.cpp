// What both directions of attention on the CPU share: tiles to and from memory, scores and their
// mask. See attention_cpu.h.

#include "attention/attention_cpu.h"

namespace flexops::FLEXOPS_ISA {

// ---- memory ----

void transpose(const float* FLEXOPS_RESTRICT from, int64_t from_row, int64_t rows, int64_t columns,
               float* FLEXOPS_RESTRICT to, int64_t to_row) {
  int64_t row = 0;
#if defined(__x86_64__)
  for (; row + 4 <= rows; row += 4) {
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4) {
      const float* a = from + row * from_row + column;
      __m128 m[4] = {_mm_loadu_ps(a), _mm_loadu_ps(a + from_row), _mm_loadu_ps(a + 2 * from_row),
                     _mm_loadu_ps(a + 3 * from_row)};
      _MM_TRANSPOSE4_PS(m[0], m[1], m[2], m[3]);
      for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (column + i) * to_row + row, m[i]);
    }
    for (; column < columns; ++column) {
      few(column);
      for (int64_t i = 0; i < 4; ++i)
        to[column * to_row + row + i] = from[(row + i) * from_row + column];
    }
  }
#endif
  for (; row < rows; ++row) {
    few(row);
    for (int64_t column = 0; column < columns; ++column)
      to[column * to_row + row] = from[row * from_row + column];
  }
}

static void clear(float* to, int64_t count) {
  memset(to, 0, static_cast<size_t>(count) * sizeof(float));
}

template <>
void load_rows<false>(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                      ElementType type, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i, to += stride) {
    const float* values = widen(from, offset + i * row, columns, type, to);
    if (values != to) memcpy(to, values, static_cast<size_t>(columns) * sizeof(float));
    clear(to + columns, stride - columns);
  }
}
template <>
void load_rows<true>(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                     ElementType, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i, to += stride) {
    if (stride > 0) clear(to + columns / 2, stride - columns / 2);
    memcpy(to, static_cast<const uint16_t*>(from) + offset + i * row,
           static_cast<size_t>(columns) * 2);
  }
}

template <>
void load_steps<false>(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                       ElementType type, float* to, int64_t stride) {
  load_rows<false>(from, offset, row, rows, columns, type, to, stride);
}
template <>
void load_steps<true>(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                      ElementType, float* to, int64_t stride) {
  for (int64_t i = 0; i < rows; i += 2, to += stride) {
    const uint16_t* even = static_cast<const uint16_t*>(from) + offset + i * row;
    const bool both = i + 1 < rows;
    const uint16_t* odd = both ? even + row : even;
    const uint32_t kept = both ? 0xffff0000u : 0;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes)
      store_floats(to + c, (Floats)(load_halves(even + c) | (load_halves(odd + c) << 16 & kept)));
    for (; c < columns; ++c)
      few(c), to[c] = float_from_bits(even[c] | (static_cast<uint32_t>(odd[c]) << 16 & kept));
    clear(to + columns, stride - columns);
  }
}

template <bool kPairs>
void load_transposed(const void* from, int64_t offset, int64_t row, int64_t rows, int64_t columns,
                     ElementType type, float* to, float* buffer) {
  const int64_t words = words_of<kPairs>(columns), padding = rounded_up(rows, kLanes) - rows;
  load_rows<kPairs>(from, offset, row, rows, columns, type, buffer, words);
  transpose(buffer, words, rows, words, to, kStride);
  if (padding > 0) {
    for (int64_t i = 0; i < words; ++i) clear(to + i * kStride + rows, padding);
  }
}
template void load_transposed<false>(const void*, int64_t, int64_t, int64_t, int64_t, ElementType,
                                     float*, float*);
template void load_transposed<true>(const void*, int64_t, int64_t, int64_t, int64_t, ElementType,
                                    float*, float*);

void store_transposed(const float* from, int64_t rows, int64_t columns, void* to, int64_t offset,
                      int64_t row, ElementType type, float* buffer) {
  if (type == ElementType::f32)
    return transpose(from, kStride, columns, rows, static_cast<float*>(to) + offset, row);
  transpose(from, kStride, columns, rows, buffer, columns);
  for (int64_t i = 0; i < rows; ++i)
    narrow(buffer + i * columns, to, offset + i * row, columns, type);
}

// ---- scores ----

constexpr int64_t kUnlimited = 1 << 29;

Scores::Scores(const Attention& p, const AttentionSequence& s, int64_t first, int64_t rows)
    : p_(p),
      s_(s),
      first_(first),
      rows_(rows),
      columns_(rounded_up(rows, kLanes)),
      alibi_(p.alibi ? p.alibi[s.batch * p.alibi_strides[0] + s.head * p.alibi_strides[1]] : 0.0f),
      plain_(p.scale > 0.0f && !(p.softcap > 0.0f) && p.bias == nullptr && p.alibi == nullptr) {}

/// tanh and its derivative.
static Floats tanh_of(Floats x, Floats& slope) {
  const Floats size = absolute(x), e = weight_of(size * -2.0f), inverse = 1.0f / (e + 1.0f),
               tanh = (1.0f - e) * inverse;
  slope = 4.0f * e * inverse * inverse;
  return x < 0.0f ? -tanh : tanh;
}

static float bias_of(const void* bias, Dtype type, int64_t at) {
  if (type == Dtype::f32) return static_cast<const float*>(bias)[at];
  if (type == Dtype::boolean)
    return static_cast<const uint8_t*>(bias)[at] ? 0.0f : -kAttentionInfinity;
  const uint16_t bits = static_cast<const uint16_t*>(bias)[at];
  return type == Dtype::f16 ? f16_to_float(bits) : bf16_to_float(bits);
}

/// One query's biases of neighbouring keys.
static void load_bias(const void* bias, Dtype type, int64_t at, int64_t step, int64_t count,
                      float* to) {
  if (type != Dtype::boolean && step == 1) {
    const float* values = widen(bias, at, count, static_cast<ElementType>(type), to);
    if (values != to) memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) to[i] = bias_of(bias, type, at + i * step);
}

void Scores::add_bias(float* s, int64_t key, int64_t keys, float* buffer) const {
  const int64_t* strides = p_.bias_strides;
  const int64_t at =
      s_.batch * strides[0] + s_.head * strides[1] + first_ * strides[2] + key * strides[3];
  if (strides[2] == 0) {  // the same for all queries
    load_bias(p_.bias, p_.bias_type, at, strides[3], keys, buffer);
    for (int64_t i = 0; i < keys; ++i) {
      for (int64_t j = 0; j < columns_; j += kLanes)
        store_floats(s + i * kStride + j, load_floats(s + i * kStride + j) + buffer[i]);
    }
    return;
  }
  float* transposed = buffer + kTile * kKeys;
  for (int64_t i = 0; i < rows_; ++i)
    load_bias(p_.bias, p_.bias_type, at + i * strides[2], strides[3], keys, buffer + i * kKeys);
  for (int64_t i = rows_; i < columns_; ++i) clear(buffer + i * kKeys, keys);
  transpose(buffer, kKeys, columns_, keys, transposed, kStride);
  for (int64_t i = 0; i < keys; ++i) {
    for (int64_t j = i * kStride; j < i * kStride + columns_; j += kLanes)
      store_floats(s + j, load_floats(s + j) + load_floats(transposed + j));
  }
}

/// Where a register's first lane is 0, the next one 1, ...
static Ints lane_numbers() {
  Ints out;
  for (int i = 0; i < kLanes; ++i) out[i] = i;
  return out;
}

void Scores::mask(float* s, int64_t key, int64_t keys) const {
  const auto left =
      static_cast<int32_t>(p_.window_left < 0 ? kUnlimited : least(p_.window_left, kUnlimited));
  const auto right =
      static_cast<int32_t>(p_.window_right < 0 ? kUnlimited : least(p_.window_right, kUnlimited));
  const Ints lanes = lane_numbers();
  for (int64_t j = 0; j < columns_; j += kLanes) {
    const Ints position = lanes + static_cast<int32_t>(first_ + s_.offset + j),
               lowest = position - left, highest = position + right;
    for (int64_t i = 0; i < keys; ++i) {
      const Ints at = Ints{} + static_cast<int32_t>(key + i);
      float* score = s + i * kStride + j;
      store_floats(score, ((at >= lowest) & (at <= highest)) != 0 ? load_floats(score)
                                                                  : floats_of(-kAttentionInfinity));
    }
  }
}

void Scores::apply(float* s, float* slopes, int64_t key, int64_t keys, float* buffer) const {
  if (!plain_) {
    const bool capped = p_.softcap > 0.0f;
    const float inverse = capped ? p_.scale / p_.softcap : 0.0f;
    const Floats lanes = __builtin_convertvector(lane_numbers(), Floats);
    for (int64_t i = 0; i < keys; ++i) {
      const auto distance = static_cast<float>(first_ + s_.offset - key - i);
      for (int64_t j = 0; j < columns_; j += kLanes) {
        float* at = s + i * kStride + j;
        Floats score = load_floats(at), slope;
        if (capped) {
          score = tanh_of(score * inverse, slope) * p_.softcap;
          if (slopes) store_floats(slopes + i * kStride + j, slope);
        } else {
          score *= p_.scale;
        }
        if (p_.alibi) score -= absolute(lanes + (distance + static_cast<float>(j))) * alibi_;
        store_floats(at, score);
      }
    }
    if (p_.bias) add_bias(s, key, keys, buffer);
  }
  const int64_t first = first_ + s_.offset, last = first + rows_ - 1;
  const bool cut_right = p_.window_right >= 0 && key + keys - 1 > first + p_.window_right;
  const bool cut_left = p_.window_left >= 0 && key < last - p_.window_left;
  if (cut_right || cut_left) mask(s, key, keys);
}

}  // namespace flexops::FLEXOPS_ISA
