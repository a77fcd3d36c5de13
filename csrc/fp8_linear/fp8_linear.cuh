// Operands of fp8 matrix products: e4m3 codes of rows, and of columns in a transposed copy, with
// scales that are powers of two. Formulas: flexops/ops/fp8_linear.py.
//
// A product reads both operands along the dimension that it sums over. A layer's input, its weight
// and the gradient of its result are each summed over both of their dimensions, in different
// products; so each has rows and columns quantized.
#pragma once

#include "activation/activation.cuh"
#include "common/async.cuh"
#include "fp8/fp8_quantize.cuh"
#include "norm/norm.cuh"

namespace flexops::fp8_linear {

using rows::kIsFloat;
using rows::Packed;

inline constexpr int kColumnThreads = 256;
inline constexpr int kTileRows = 128;  // that a block transposes
template <typename T>
inline constexpr int kTileColumns = sizeof(T) == 1 ? 128 : 64;  // whole lines of 16-bit and codes
inline constexpr int kLargestThreads = 512, kLargestVectors = 16;
inline constexpr int kMatrices = 4;  // of a launch

/// Matrices of one width, one below the other. All but the last have a multiple of 16 rows.
struct Stack {
  const void* x[kMatrices];
  i64 stride[kMatrices];
  int first[kMatrices];  // row; beyond all rows for those that are missing

  template <typename T>
  FLEXOPS_DEVICE const T* row(int index) const {
    int part = 0;
#pragma unroll
    for (int i = 1; i < kMatrices; ++i) part = index >= first[i] ? i : part;
    return static_cast<const T*>(x[part]) + (index - first[part]) * stride[part];
  }
};

struct RowParams {
  Stack x;  // gated: gates and ups side by side
  const void *residual, *weight, *grad;
  i64 residual_stride, grad_stride;
  void *y, *total;
  float *rstd, eps, inverse, offset;  // inverse: 1 / columns; offset: added to the weight
  u8 *codes, *grad_codes;
  float *scales, *grad_scales;
  Packed* partial;    // the largest magnitudes that each block finds in columns of its results
  int rows, columns;  // columns: of codes, a multiple of 16
  bool staged;        // the next rows are copied to shared memory while these are computed
  activation::Function function;
};

/// Of what blocks have found in columns: the largest.
struct LargestParams {
  const Packed* partial;
  float *largest, *grad_largest;  // of the first result; of others
  int blocks, vectors, first;     // vectors: of all results; first: of the first one
};

struct ColumnParams {
  Stack x;
  const float* row_scales;  // of codes; else null
  const u32* largest;       // of each column, as bits
  u8* codes;                // [columns, total]
  float* scales;
  int rows, columns;  // columns: a multiple of 16
  int first, end;     // where the rows go in a row of `codes`; zeros from first + rows to end
  int total;          // a multiple of 16
};

/// The least power of two by which `largest` becomes at most 448; see scaled::Scaling.
FLEXOPS_DEVICE scaled::Scaling power_of_two(u32 largest) {
  // 448 is 1.75 * 2^8: a fraction above .75 carries into the exponent.
  const u32 carried = (largest + 0x1fffffu) & 0x7f800000u;
  u32 bits = carried >= 9u << 23 ? carried - (8u << 23) : 1u << 23;
  if (largest == 0) bits = 127u << 23;
  scaled::Scaling out;
  out.keep = largest < 0x7f800000u ? ~0u : 0u;
  out.scale = out.keep ? bit_cast<float>(bits) : not_a_number();
  out.inverse = bit_cast<float>((254u << 23) - bits);
  return out;
}

// ---- rows ----

template <typename T>
FLEXOPS_DEVICE void write_row_codes(u8* to, int at, const Packed& in,
                                    const scaled::Scaling& scaling) {
  constexpr int N = kPerVector<T>;
  float value[N];
  Vec<u32, N / 4> words;
  rows::widen<T>(value, in);
#pragma unroll
  for (int w = 0; w < N / 4; ++w) {
    float* v = value + 4 * w;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= scaling.inverse;
    words.at[w] = pack4<e4m3>(v[0], v[1], v[2], v[3]) & scaling.keep;
  }
  store<Cache::normal>(reinterpret_cast<Vec<u32, N / 4>*>(to + at), words);
}

// What a thread keeps of a row, a vector each: `at` has what is loaded from the kLoads places
// `from`, then results, of which the first kResults are encoded. Results 1 and 2 have a scale of
// their own: those of a gradient.

template <typename T>
struct Plain {
  using Element = T;
  static constexpr int kLoads = 1, kResults = 1, kScales = 1;
  static constexpr bool kNorm = false;
  Packed at[kLoads];

  static FLEXOPS_DEVICE const T* from(const RowParams& p, int row, int) { return p.x.row<T>(row); }
  FLEXOPS_DEVICE void compute(const RowParams&) {}
};

/// RMS norm of x + residual.
template <typename T>
struct Norm {
  using Element = T;
  static constexpr int kLoads = 2, kResults = 1, kScales = 1, N = kPerVector<T>;
  static constexpr bool kNorm = true;
  Packed at[kLoads];

  static FLEXOPS_DEVICE const T* from(const RowParams& p, int row, int i) {
    return i ? static_cast<const T*>(p.residual) + row * p.residual_stride : p.x.row<T>(row);
  }
  /// Writes the rounded sum and gives the sum of its squares.
  FLEXOPS_DEVICE float add(const RowParams& p, int row, int column) {
    float value[N], more[N];
    rows::widen<T>(value, at[0]);
    rows::widen<T>(more, at[1]);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += more[i];
    at[0] = rows::packed<T>(value);
    store<Cache::normal>(reinterpret_cast<Packed*>(static_cast<T*>(p.total) +
                                                   static_cast<i64>(row) * p.columns + column),
                         at[0]);
    rows::widen<T>(value, at[0]);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] *= value[i];
    return rows::sum_tree<N>(value);
  }
  FLEXOPS_DEVICE void normalize(const RowParams& p, int row, int column, float rstd) {
    float value[N], weight[N];
    rows::widen<T>(value, at[0]);
    rows::widen<T>(weight,
                   rows::load_vector<T, Cache::constant>(static_cast<const T*>(p.weight), column));
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = value[i] * rstd * (weight[i] + p.offset);
    at[0] = rows::packed<T>(value);
    store<Cache::normal>(reinterpret_cast<Packed*>(static_cast<T*>(p.y) +
                                                   static_cast<i64>(row) * p.columns + column),
                         at[0]);
  }
  FLEXOPS_DEVICE void compute(const RowParams&) {}
};

/// act(gate) * up; and with a gradient of it, those of gate and up. Rounded to T, as the
/// activation's own kernels do.
template <typename T, bool kBackward>
struct Gated {
  using Element = T;
  static constexpr int kLoads = kBackward ? 3 : 2, kResults = kBackward ? 3 : 1,
                       kScales = kBackward ? 2 : 1, N = kPerVector<T>;
  static constexpr bool kNorm = false;
  Packed at[kLoads];

  static FLEXOPS_DEVICE const T* from(const RowParams& p, int row, int i) {
    if (kBackward && i == 0) return static_cast<const T*>(p.grad) + row * p.grad_stride;
    return p.x.row<T>(row) + (i == kLoads - 1 ? p.columns : 0);
  }
  FLEXOPS_DEVICE void compute(const RowParams& p) {
    constexpr bool kAccurate = activation::kIsAccurate<T>;
    float gates[N], ups[N];
    rows::widen<T>(gates, at[kBackward ? 1 : 0]);
    rows::widen<T>(ups, at[kBackward ? 2 : 1]);
    if constexpr (kBackward) {
      float outer[N], values[N];
      rows::widen<T>(outer, at[0]);
      activation::differentiate_all<kAccurate>(gates, p.function, values);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        gates[i] *= outer[i] * ups[i];
        ups[i] *= values[i];
        values[i] *= outer[i];
      }
      at[1] = rows::packed<T>(gates), at[2] = rows::packed<T>(values);
      at[0] = rows::packed<T>(ups);
    } else {
      activation::activate_all<kAccurate>(gates, p.function);
#pragma unroll
      for (int i = 0; i < N; ++i) gates[i] *= ups[i];
      at[0] = rows::packed<T>(gates);
    }
  }
};

template <class S>
FLEXOPS_DEVICE void load(S& own, const RowParams& p, int row, int column) {
#pragma unroll
  for (int i = 0; i < S::kLoads; ++i)
    own.at[i] = rows::load_vector<typename S::Element, Cache::normal>(S::from(p, row, i), column);
}

template <class S, int kRows>
FLEXOPS_DEVICE void load_and_compute(const RowParams& p, S (&own)[kRows], int first, int column) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    own[r] = {};
    if (first + r < p.rows) load(own[r], p, first + r, column);
    own[r].compute(p);
  }
}

template <class S, int kRows>
FLEXOPS_DEVICE void write_results(const RowParams& p, const S (&own)[kRows], int first, int column,
                                  const scaled::Scaling (&scaling)[kRows * S::kScales]) {
  using T = typename S::Element;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= p.rows) break;
    const i64 begin = static_cast<i64>(first + r) * p.columns;
    const scaled::Scaling* its = scaling + r * S::kScales;
    write_row_codes<T>(p.codes + begin, column, own[r].at[0], its[0]);
#pragma unroll
    for (int i = 1; i < S::kResults; ++i)
      write_row_codes<T>(p.grad_codes + 2 * begin + (i - 1) * p.columns, column, own[r].at[i],
                         its[S::kScales - 1]);
  }
}

/// Of kRows rows: what they find themselves and what their columns do, which `gathered` has a
/// place for.
template <class S, int kRows>
FLEXOPS_DEVICE void find_largest(const RowParams& p, const S (&own)[kRows], int vector,
                                 u32 (&largest)[kRows * S::kScales], Packed* gathered) {
  using T = typename S::Element;
  constexpr u32 kMagnitude = kIsFloat<T> ? 0x7fffffffu : 0x7fff7fffu;
  const int vectors = p.columns / kPerVector<T>;
#pragma unroll
  for (int i = 0; i < S::kResults; ++i) {
    const int at = i * vectors + vector;
    Packed most = gathered[at];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      u32& its = largest[r * S::kScales + (i ? 1 : 0)];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const u32 magnitude = own[r].at[i].at[w] & kMagnitude;
        its = scaled::greater_of<T>(its, magnitude);
        most.at[w] = scaled::greater_of<T>(most.at[w], magnitude);
      }
    }
    gathered[at] = most;
  }
}

/// Reduces K values at once over the block; `room` is another one than the call before had.
template <int K, typename V, typename Op>
FLEXOPS_DEVICE void reduce_block(V (&value)[K], Op op, V* room) {
  constexpr int kWarp = rows::kNarrowWarp;
  const auto reduce_warp = [&] {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) value[k] = op(value[k], shuffle_xor(value[k], mask, kWarp));
    }
  };
  reduce_warp();
  const int lane = threadIdx.x % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
  if (warps == 1) return;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (lane == 0) room[k * kWarp + threadIdx.x / kWarp] = value[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) value[k] = lane < warps ? room[k * kWarp + lane] : V(0);
  reduce_warp();
}

/// What a thread keeps that is in rows [from, p.rows): own[k][r], r and its column.
template <class S, int kVectors, int kRows, typename F>
FLEXOPS_DEVICE void for_kept(S (&own)[kVectors][kRows], const RowParams& p, int from,
                             const F& apply) {
  constexpr int N = kPerVector<typename S::Element>;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int column = static_cast<int>(threadIdx.x + k * blockDim.x) * N;
      if (column < p.columns && from + r < p.rows) apply(own[k][r], r, column);
    }
  }
}

/// Codes and scales of rows, and the largest magnitudes of their columns. A block takes kRows rows
/// at once, and every gridDim.x'th such tile. A thread has the same columns of all of them, and of
/// all results. What it finds in columns is in shared memory until the end, if kGathers; behind it
/// the next rows, if they are staged: each thread copies what itself will read.
template <class S, int kThreads, int kBlocks, int kVectors, int kRows, bool kGathers>
__global__ void __launch_bounds__(kThreads, kBlocks)
    quantize_rows(const FLEXOPS_GRID_CONSTANT RowParams p) {
  using T = typename S::Element;
  constexpr int N = kPerVector<T>, kValues = kRows * S::kScales;
  __align__(16) extern __shared__ u8 memory[];
  __shared__ u32 room[2][kValues * rows::kNarrowWarp];
  const int vectors = p.columns / N, step = static_cast<int>(blockDim.x);
  Packed* partial = p.partial + static_cast<i64>(blockIdx.x) * vectors * S::kResults;
  Packed* gathered = kGathers ? reinterpret_cast<Packed*>(memory) : partial;
  for (int vector = threadIdx.x; vector < vectors; vector += step) {
#pragma unroll
    for (int i = 0; i < S::kResults; ++i) gathered[i * vectors + vector] = {};
  }
  const int next = gridDim.x * kRows;
  S own[kVectors][kRows];
  const auto staged = [&](int r, int i, int column) {
    return reinterpret_cast<Packed*>(memory) +
           ((kGathers ? S::kResults : 0) + r * S::kLoads + i) * vectors + column / N;
  };
  const auto stage = [&](int first) {
    for_kept(own, p, first, [&](S&, int r, int column) {
#pragma unroll
      for (int i = 0; i < S::kLoads; ++i)
        async_copy16(staged(r, i, column), S::from(p, first + r, i) + column, true);
    });
    async_commit();
  };
  if (p.staged) stage(blockIdx.x * kRows);
  u32 turn = 0;
#pragma unroll 1
  for (int first = blockIdx.x * kRows; first < p.rows; first += next) {
    // Load what is kept.
#pragma unroll
    for (int i = 0; i < kVectors * kRows; ++i) own[i / kRows][i % kRows] = {};
    if (p.staged) {
      async_wait(0);
      for_kept(own, p, first, [&](S& its, int r, int column) {
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) its.at[i] = *staged(r, i, column);
      });
      stage(first + next);
    } else {
      for_kept(own, p, first, [&](S& its, int r, int column) { load(its, p, first + r, column); });
    }
    // Add and normalize; the launcher lets no row be longer than what is kept.
    if constexpr (S::kNorm) {
      float sum[kRows] = {};
      for_kept(own, p, first,
               [&](S& its, int r, int column) { sum[r] += its.add(p, first + r, column); });
      reduce_block(sum, Sum{}, reinterpret_cast<float*>(room[turn++ % 2]));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = norm::reciprocal_root(sum[r] * p.inverse + p.eps);
        if (threadIdx.x == 0 && first + r < p.rows) p.rstd[first + r] = sum[r];
      }
      for_kept(own, p, first,
               [&](S& its, int r, int column) { its.normalize(p, first + r, column, sum[r]); });
    }
    // Find the largest magnitudes, also of what is not kept.
    u32 largest[kValues] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = threadIdx.x + k * step;
#pragma unroll
      for (int r = 0; r < kRows; ++r) own[k][r].compute(p);
      if (vector < vectors) find_largest(p, own[k], vector, largest, gathered);
    }
    const int others = S::kNorm ? vectors : threadIdx.x + kVectors * step;
#pragma unroll 1
    for (int vector = others; vector < vectors; vector += step) {
      S one[kRows];
      load_and_compute(p, one, first, vector * N);
      find_largest(p, one, vector, largest, gathered);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      largest[i] = scaled::widen_bits<T>(scaled::one_of<T>(largest[i]));
    reduce_block(largest, Max(), room[turn++ % 2]);
    // Encode and write.
    scaled::Scaling scaling[kValues];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < S::kScales; ++i) {
        scaling[r * S::kScales + i] = power_of_two(largest[r * S::kScales + i]);
        if (threadIdx.x == 0 && first + r < p.rows)
          (i ? p.grad_scales : p.scales)[first + r] = scaling[r * S::kScales + i].scale;
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int vector = threadIdx.x + k * step;
      if (vector < vectors) write_results(p, own[k], first, vector * N, scaling);
    }
#pragma unroll 1
    for (int vector = others; vector < vectors; vector += step) {
      S one[kRows];
      load_and_compute(p, one, first, vector * N);
      write_results(p, one, first, vector * N, scaling);
    }
  }
  let_next_start();
  // Hand over what was found in columns.
  if (!kGathers) return;
  for (int vector = threadIdx.x; vector < vectors; vector += step) {
#pragma unroll
    for (int i = 0; i < S::kResults; ++i)
      store<Cache::normal>(partial + i * vectors + vector, gathered[i * vectors + vector]);
  }
}

/// A block for each kLargestVectors neighbours. It starts while quantize_rows ends.
template <typename T>
__global__ void __launch_bounds__(kLargestThreads)
    reduce_largest(const FLEXOPS_GRID_CONSTANT LargestParams p) {
  constexpr int N = kPerVector<T>, kGroups = kLargestThreads / kLargestVectors, kOnce = 4;
  __shared__ Packed shared[kGroups][kLargestVectors];
  const int own = threadIdx.x % kLargestVectors, group = threadIdx.x / kLargestVectors;
  const int vector = blockIdx.x * kLargestVectors + own;
  wait_for_previous();
  // Each group takes every so many-th block's, several at once.
  Packed most = {};
  const auto add = [&](const Packed& more) {
#pragma unroll
    for (int w = 0; w < 4; ++w) most.at[w] = scaled::greater_of<T>(most.at[w], more.at[w]);
  };
  for (int block = group; vector < p.vectors && block < p.blocks; block += kOnce * kGroups) {
    Packed found[kOnce];
#pragma unroll
    for (int k = 0; k < kOnce; ++k) {
      const int its = block + k * kGroups;
      found[k] = {};
      if (its < p.blocks)
        found[k] = load<Cache::normal>(p.partial + static_cast<i64>(its) * p.vectors + vector);
    }
#pragma unroll
    for (int k = 0; k < kOnce; ++k) add(found[k]);
  }
  shared[group][own] = most;
  __syncthreads();
  if (group > 0 || vector >= p.vectors) return;
#pragma unroll 8
  for (int g = 1; g < kGroups; ++g) add(shared[g][own]);
  float value[N];
  rows::widen<T>(value, most);
  float* to = vector < p.first ? p.largest + vector * N
                               : p.grad_largest + static_cast<i64>(vector - p.first) * N;
#pragma unroll
  for (int i = 0; i < N; i += 4)
    store<Cache::normal>(reinterpret_cast<Vec<float, 4>*>(to + i),
                         Vec<float, 4>{value[i], value[i + 1], value[i + 2], value[i + 3]});
}

// ---- columns ----

/// Neighbours of a row, as they are loaded: those of a thread.
template <typename T>
struct Piece {
  static constexpr int kWide = kTileColumns<T> / 8, kParts = kWide * sizeof(T) / 16;
  Packed part[kParts];

  FLEXOPS_DEVICE void load(const T* row, int column) {
    const Packed* from = reinterpret_cast<const Packed*>(row + column);
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i] = flexops::load<Cache::normal>(from + i);
  }
  /// Eight of them. `scale`: of the row, which floats have none of.
  FLEXOPS_DEVICE void widen(float (&out)[8], [[maybe_unused]] int eight,
                            [[maybe_unused]] float scale) const {
    if constexpr (sizeof(T) == 1) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        float four[4];
        unpack4<T>(four, part[0].at[2 * eight + w]);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[4 * w + i] = four[i] * scale;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kParts; ++i) rows::widen<T>(out + i * 8 / kParts, part[i]);
    }
  }
};

/// A tile of codes, transposed through shared memory. A thread has four rows of kWide columns,
/// which become a word of each column.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    transpose(const FLEXOPS_GRID_CONSTANT ColumnParams p) {
  constexpr int kWide = Piece<T>::kWide, kColumns = kTileColumns<T>;
  constexpr int kApart = kWide + 4;  // of threads' scales: no two in the same banks
  __shared__ alignas(16) u32 tile[kColumns * kTileRows / 4];
  __shared__ alignas(16) float inverses[8 * kApart];  // NaN: no codes
  const int group = threadIdx.x % 8, four = threadIdx.x / 8, begin = blockIdx.y * kColumns;
  const int column = begin + group * kWide, row = blockIdx.x * kTileRows + four * 4;
  // Load.
  Piece<T> data[4];
  float scale[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    data[r] = {};
    scale[r] = 0.0f;
    if (row + r >= p.rows || column >= p.columns) continue;
    data[r].load(p.x.row<T>(row + r), column);
    scale[r] = sizeof(T) == 1 ? p.row_scales[row + r] : 1.0f;
  }
  // A thread for each column's scale.
  const int own = threadIdx.x;
  if (own < kColumns && begin + own < p.columns) {
    const scaled::Scaling scaling = power_of_two(p.largest[begin + own]);
    inverses[own / kWide * kApart + own % kWide] = scaling.keep ? scaling.inverse : not_a_number();
    if (blockIdx.x == 0 && p.first == 0) p.scales[begin + own] = scaling.scale;
  }
  __syncthreads();
  // Encode: four rows are a word of a column. Groups of four words are exchanged so that both
  // accesses to shared memory are free of conflicts.
#pragma unroll
  for (int eight = 0; eight < kWide / 8; ++eight) {
    float value[4][8];
#pragma unroll
    for (int r = 0; r < 4; ++r) data[r].widen(value[r], eight, scale[r]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float inverse = inverses[group * kApart + eight * 8 + i];
      const u32 word = pack4<e4m3>(value[0][i] * inverse, value[1][i] * inverse,
                                   value[2][i] * inverse, value[3][i] * inverse);
      tile[(group * kWide + eight * 8 + i) * (kTileRows / 4) +
           ((four / 4 ^ group) * 4 + four % 4)] = inverse == inverse ? word : 0;
    }
  }
  __syncthreads();
  // Write sixteen rows of a column at once.
  const Packed* words = reinterpret_cast<const Packed*>(tile);
#pragma unroll
  for (int k = 0; k < kColumns / (kColumnThreads / 8); ++k) {
    const int its = four + k * (kColumnThreads / 8);
    const int to = p.first + blockIdx.x * kTileRows + group * 16;
    if (to < p.end && begin + its < p.columns)
      store<Cache::normal>(
          reinterpret_cast<Packed*>(p.codes + static_cast<i64>(begin + its) * p.total + to),
          words[its * (kTileRows / 16) + (group ^ its / kWide)]);
  }
}

}  // namespace flexops::fp8_linear
