// The norms' kernel for rows that are not made of aligned vectors, of any types.
#pragma once

#include "norm/norm_codes.cuh"
#include "norm/norm_forward.cuh"

namespace flexops::norm {

/// A row's pieces: four elements each, that begin where aligned vectors of a contiguous result do.
/// The first and the last may stick out.
struct Pieces {
  int columns, shift;  // the first piece begins so many elements before the row
  int inner, inners;   // the first piece that is whole, and how many are
  int count;

  FLEXOPS_DEVICE Pieces(i64 row, const Forward& p)
      : columns(p.columns),
        shift(static_cast<int>(row * p.columns & 3)),
        inner(shift > 0),
        inners((shift + p.columns) / 4 - inner) {
    count = row < p.rows ? (shift + p.columns + 3) / 4 : 0;
  }
  /// Piece i is columns first(i), first(i) + 1, ...
  FLEXOPS_DEVICE int first(int i) const { return i * 4 - shift; }
  FLEXOPS_DEVICE bool has(int i, int e) const {
    return static_cast<u32>(first(i) + e) < static_cast<u32>(columns);
  }
  FLEXOPS_DEVICE bool whole(int i) const { return i >= inner && i - inner < inners; }
  FLEXOPS_DEVICE void mask(float (&v)[4], int i) const {
    if (whole(i)) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!has(i, e)) v[e] = 0.0f;
    }
  }
};

/// Four numbers of 16 bits.
FLEXOPS_DEVICE void widen_halves(float (&out)[4], Vec<u32, 2> words, ElementType type) {
  type == ElementType::bf16 ? widen<bf16>(out, words) : widen<f16>(out, words);
}

/// The logarithm of an element's bytes.
FLEXOPS_DEVICE int power_of(ElementType type) { return type == ElementType::f32 ? 2 : 1; }

/// Where a row's pieces are read: at any place, by the one or two aligned vectors that cover one,
/// as far as these lie within the tensor.
struct Source {
  const char* vectors;  // that the first piece begins in
  int off;              // elements, from there to the piece
  int low, high;        // pieces whose vectors lie within the tensor
  int end;              // elements from piece 0 to the tensor's end, or as many as matter
  ElementType type;

  /// A tensor's row that starts at element `begin` of `size` in all.
  FLEXOPS_DEVICE Source(const void* from, i64 begin, i64 size, ElementType type_,
                        const Pieces& pieces)
      : type(type_) {
    const int power = power_of(type);
    const i64 at = (begin - pieces.shift) << power;  // bytes
    off = static_cast<int>((reinterpret_cast<u64>(from) + static_cast<u64>(at)) >> power & 3);
    vectors =
        static_cast<const char*>(from) +
        (at -
         (off << power));  // not by way of a number, which would hide that this is global memory
    low = begin >= pieces.shift + off ? 0 : (pieces.shift + off - static_cast<int>(begin) + 3) / 4;
    const i64 left = size - begin, most = i64(pieces.columns) + 8;
    end = static_cast<int>(left < most ? left : most) + pieces.shift;
    high = (end + off - (off ? 8 : 4)) >> 2;
  }
  FLEXOPS_DEVICE bool is_aligned() const { return off == 0; }

  template <typename Bits>
  FLEXOPS_DEVICE Vec<u32, sizeof(Bits)> words(int i, const Pieces& pieces) const {
    constexpr int kWords = static_cast<int>(sizeof(Bits));
    using Vector = Vec<u32, kWords>;
    Vector out = {}, next = {};
    if (i >= low && i <= high) {
      const auto* at = reinterpret_cast<const Vector*>(vectors) + i;
      out = at[0];
      if (off) next = at[1];
      if constexpr (kWords == 2) {  // the piece begins `off` elements into the first vector
        const u64 both = bit_cast<u64>(out) >> (16 * off) | (bit_cast<u64>(next) << 1)
                                                                << (63 - 16 * off);
        out = bit_cast<Vector>(both);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w)
          out.at[w] = (off & 2) == 0 ? out.at[w] : w < 2 ? out.at[w + 2] : next.at[w - 2];
        if (off & 2) next.at[0] = next.at[2];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          out.at[w] = (off & 1) == 0 ? out.at[w] : w < 3 ? out.at[(w + 1) % 4] : next.at[0];
      }
    } else {
      const Bits* at = reinterpret_cast<const Bits*>(vectors) + off + i64(i) * 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 bits = pieces.has(i, e) ? at[e] : 0;
        out.at[e * kWords / 4] |= bits << (e * kWords % 4 * 8);
      }
    }
    return out;
  }
  /// Elements beyond the row's ends may be anything.
  FLEXOPS_DEVICE void load(float (&out)[4], int i, const Pieces& pieces) const {
    if (type == ElementType::f32) {
      widen<float>(out, words<u32>(i, pieces));
    } else {
      widen_halves(out, words<u16>(i, pieces), type);
    }
  }
  /// Starts a copy to a slot of shared memory; is_aligned().
  FLEXOPS_DEVICE void fetch(char* slot, int i) const {
    const int left = end - 4 * i < 4 ? end - 4 * i : 4;
    if (type == ElementType::f32) {
      async_copy<16>(slot, vectors + i64(i) * 16, left * 4);
    } else {
      async_copy<8>(slot, vectors + i64(i) * 8, left * 2);
    }
  }
};

/// A result's row.
struct Sink {
  char* at;  // the first piece
  ElementType type;
  FLEXOPS_DEVICE Sink(void* to, i64 begin, ElementType type_, const Pieces& pieces)
      : at(static_cast<char*>(to) + ((begin - pieces.shift) << power_of(type_))), type(type_) {}
  FLEXOPS_DEVICE void store(const float (&v)[4], int i, const Pieces& pieces) const {
    if (pieces.whole(i)) {
      store_floats(v, at, i64(i) * 4, type);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (pieces.has(i, e)) store_any(at, i64(i) * 4 + e, v[e], type);
      }
    }
  }
};

/// A thread's pieces of a row, and its slots of shared memory, one for each piece as far as these
/// go.
struct Walk {
  char *first, *end;
  int step;  // bytes
  int lane, lanes, count;

  /// `slot` is of so many bytes.
  FLEXOPS_DEVICE Walk(void* storage, int bytes, const Forward& p, const Group& g,
                      const Pieces& pieces)
      : lane(g.lane), lanes(g.lanes), count(pieces.count) {
    step = static_cast<int>(blockDim.x) * bytes;
    first = static_cast<char*>(storage) + static_cast<int>(threadIdx.x) * bytes,
    end = first + p.held * step;
  }
  /// Calls f(piece, slot) for each; slots from `end` on are not there.
  template <typename F>
  FLEXOPS_DEVICE void for_each(const F& f) const {
    char* slot = first;
#pragma unroll 1
    for (int i = lane; i < count; i += lanes, slot += step) f(i, slot);
  }
};

/// A piece of `type` in a slot.
FLEXOPS_DEVICE void take(float (&v)[4], const char* slot, ElementType type) {
  if (type == ElementType::f32) {
    widen<float>(v, *reinterpret_cast<const Packed*>(slot));
  } else {
    widen_halves(v, *reinterpret_cast<const Vec<u32, 2>*>(slot), type);
  }
}
FLEXOPS_DEVICE void keep(const float (&v)[4], char* slot, ElementType type) {
  if (type == ElementType::f32) {
    *reinterpret_cast<Packed*>(slot) = packed<float>(v);
  } else if (type == ElementType::bf16) {
    *reinterpret_cast<Vec<u32, 2>*>(slot) = packed<bf16, 2>(v);
  } else {
    *reinterpret_cast<Vec<u32, 2>*>(slot) = packed<f16, 2>(v);
  }
}

/// A row for each group of threads, which hold their first pieces in shared memory, and read the
/// others again. y and new_residual are aligned to 16 bytes.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    forward_ragged(const FLEXOPS_GRID_CONSTANT Forward p) {
  const ElementType type = type_of<T>(p.type), row_type = type_of<T>(p.row_type),
                    weight_type = type_of<T>(p.weight_type);
  extern __shared__ uint4 storage[];
  __shared__ Partial<float, 1> shared[2];
  __shared__ Partial<u32, 1> shared_codes;
  const Group g(p.lanes, true);
  const i64 row = i64(blockIdx.x) * g.count + g.index, to = row * p.columns;
  const Pieces pieces(row, p);
  const Walk walk(storage, 4 << power_of(row_type), p, g, pieces);

  // x goes to the slots; with a residual that does, and x goes behind all of these.
  Source from(p.x, row * p.x_stride, (p.rows - 1) * p.x_stride + p.columns, type, pieces);
  const Source residual(p.residual, row * p.residual_stride,
                        (p.rows - 1) * p.residual_stride + p.columns, row_type, pieces);
  const int x_bytes = 4 << power_of(type), x_step = static_cast<int>(blockDim.x) * x_bytes;
  char* const x_slots = p.residual ? reinterpret_cast<char*>(storage) + p.held * walk.step +
                                         static_cast<int>(threadIdx.x) * x_bytes
                                   : walk.first;
  const bool fetched = from.is_aligned() && (p.residual == nullptr || residual.is_aligned());
  if (fetched) {
    char* x_slot = x_slots;
    walk.for_each([&](int i, char* slot) {
      if (slot >= walk.end) return;
      if (p.residual) residual.fetch(slot, i);
      from.fetch(x_slot, i);
      x_slot += x_step;
    });
    async_commit();
    async_wait(0);
  }
  if (p.residual || !fetched) {
    const Sink sum(p.new_residual, to, row_type, pieces);
    const char* x_slot = x_slots;
    walk.for_each([&](int i, char* slot) {
      float x[4], r[4];
      if (fetched && slot < walk.end) {
        take(r, slot, row_type);
        take(x, x_slot, type);
        x_slot += x_step;
      } else {
        if (p.residual) residual.load(r, i, pieces);
        from.load(x, i, pieces);
      }
      if (p.residual) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] += r[e];
        sum.store(x, i, pieces);
      }
      if (slot < walk.end) keep(x, slot, row_type);
    });
    if (p.residual) from = Source(p.new_residual, to, p.rows * p.columns, row_type, pieces);
  }
  // Rows that are longer than shared memory are rare: what it does not hold is loaded by elements.
  const auto get = [&](float (&v)[4], int i, const char* slot) {
    if (slot < walk.end) return take(v, slot, row_type);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      v[e] = pieces.has(i, e) ? load_any(from.vectors, from.off + i64(i) * 4 + e, row_type) : 0.0f;
  };

  // Reduce to mean and deviation.
  const Moments moments = find_moments(p, g, row, shared, [&](const Deviations& deviations) {
    float total = 0.0f;
    walk.for_each([&](int i, const char* slot) {
      float v[4];
      get(v, i, slot);
      deviations(v);
      pieces.mask(v, i);
      total += sum_of(v);
    });
    return total;
  });
  const float mean = moments.mean, rstd = moments.rstd;

  // The results; before their codes, the largest of them.
  const Source weight(p.weight, 0, p.columns, weight_type, pieces),
      bias(p.bias, 0, p.columns, weight_type, pieces);
  const Sink y(p.y, to, type, pieces);
  u8* const codes = static_cast<u8*>(p.y) + (to - pieces.shift);
  Coding coding(0, p.codes);
  u32 largest[1] = {0};
#pragma unroll 1
  for (int pass = p.codes == Dtype::none ? 1 : 0; pass < 2; ++pass) {
    walk.for_each([&](int i, const char* slot) {
      float v[4], w[4];
      get(v, i, slot);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = (v[e] - mean) * rstd;
#pragma unroll 1
      for (int adds = p.weight ? 0 : 1; adds < (p.bias ? 2 : 1); ++adds) {
        Source parameter = weight;
        if (adds) parameter = bias;
        parameter.load(w, i, pieces);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = adds ? v[e] + w[e] : v[e] * (w[e] + p.offset);
      }
      if (p.codes == Dtype::none) {
        y.store(v, i, pieces);
      } else if (pass == 0) {
        pieces.mask(v, i);
        find_largest(largest[0], v);
      } else if (pieces.whole(i)) {
        coding.write(v, codes + i64(i) * 4, p.codes);
      } else {
#pragma unroll 1
        for (int e = 0; e < 4; ++e) {
          float one[1] = {e == 0 ? v[0] : e == 1 ? v[1] : e == 2 ? v[2] : v[3]};
          if (pieces.has(i, e)) coding.write(one, codes + i64(i) * 4 + e, p.codes);
        }
      }
    });
    if (pass == 1) continue;
    group_reduce<true>(largest, MaxBits{}, g, shared_codes);
    coding = Coding(largest[0], p.codes);
    if (g.lane == 0 && row < p.rows) p.scales[row] = coding.scale;
  }
}

}  // namespace flexops::norm
