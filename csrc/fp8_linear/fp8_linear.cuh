// Operands of fp8 matrix products: e4m3 codes of rows, and of columns in a transposed copy, with
// scales that are powers of two. Formulas: flexops/ops/fp8_linear.py.
//
// A product reads both operands along the dimension that it sums over. A layer's input, its weight
// and the gradient of its result are each summed over both of their dimensions, in different
// products; so each has rows and columns quantized.
#pragma once

#include "activation/activation.cuh"
#include "fp8/fp8_quantize.cuh"

namespace flexops::fp8_linear {

using rows::Packed;

inline constexpr int kRowThreads = 1024, kRowVectors = 4,
                     kGatedVectors = 2;  // of a row, which a thread keeps
inline constexpr int kGatedThreads = 512, kGatedWideThreads = 896;  // of long rows
inline constexpr int kColumnThreads = 256;
inline constexpr int kTileRows = 128, kTileColumns = 64;  // that a block transposes
inline constexpr int kScanRows = 64, kScanColumns = 256;  // that a block reads at once

struct RowParams {
  const void* x;
  i64 stride;
  u8* codes;
  float* scales;
  int columns;  // a multiple of 16
};

struct GatedParams {
  const void *packed, *grad;  // gates and ups side by side; grad: of their product, or null
  i64 packed_stride, grad_stride;
  u8 *codes, *grad_codes;
  float *scales, *grad_scales;
  int columns;  // of the product, a multiple of 16
  activation::Function function;
};

struct ColumnParams {
  const void* x;
  const float* row_scales;  // of codes; else null
  i64 stride;
  u32* largest;  // of each column, as bits
  u8* codes;     // [columns, total]
  float* scales;
  int rows, columns;  // columns: a multiple of 16
  int first, end;     // where the rows go in a row of `codes`; zeros from first + rows to end
  int total;          // a multiple of 16
  int scan;           // rows whose largest a block finds
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

/// A block for each row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    quantize_rows(const FLEXOPS_GRID_CONSTANT RowParams p) {
  constexpr int N = kPerVector<T>;
  __shared__ u32 shared[kRowThreads / rows::kNarrowWarp];
  const T* row = static_cast<const T*>(p.x) + blockIdx.x * p.stride;
  const int vectors = p.columns / N, step = static_cast<int>(blockDim.x);
  // Load what is kept, and find the largest magnitude.
  Packed kept[kRowVectors];
  u32 largest = 0;
#pragma unroll
  for (int k = 0; k < kRowVectors; ++k) {
    const int vector = threadIdx.x + k * step;
    kept[k] = {};
    if (vector < vectors) kept[k] = rows::load_vector<T, Cache::normal>(row, vector * N);
  }
#pragma unroll
  for (int k = 0; k < kRowVectors; ++k) largest = scaled::add_largest<T>(largest, kept[k]);
  for (int vector = threadIdx.x + kRowVectors * step; vector < vectors; vector += step)
    largest = scaled::add_largest<T>(largest, rows::load_vector<T, Cache::normal>(row, vector * N));
  largest = rows::group_reduce(scaled::widen_bits<T>(scaled::one_of<T>(largest)), Max(), 0u, step,
                               shared);
  // Encode and write.
  const scaled::Scaling scaling = power_of_two(largest);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scaling.scale;
  u8* codes = p.codes + static_cast<i64>(blockIdx.x) * p.columns;
#pragma unroll
  for (int k = 0; k < kRowVectors; ++k) {
    const int vector = threadIdx.x + k * step;
    if (vector < vectors) write_row_codes<T>(codes, vector * N, kept[k], scaling);
  }
  for (int vector = threadIdx.x + kRowVectors * step; vector < vectors; vector += step)
    write_row_codes<T>(codes, vector * N, rows::load_vector<T, Cache::normal>(row, vector * N),
                       scaling);
}

// ---- rows of act(gate) * up ----

/// A vector of act(gate) * up; and with a gradient of it, those of gate and up. Rounded to T, as
/// the activation's own kernels do.
template <typename T, bool kBackward>
struct GatedVector {
  static constexpr int N = kPerVector<T>;
  Packed product, gate, up;

  FLEXOPS_DEVICE void load(const GatedParams& p, int vector) {
    const i64 row = blockIdx.x;
    const T* packed = static_cast<const T*>(p.packed) + row * p.packed_stride + vector * N;
    gate = flexops::load<Cache::normal>(reinterpret_cast<const Packed*>(packed));
    up = flexops::load<Cache::normal>(reinterpret_cast<const Packed*>(packed + p.columns));
    if constexpr (kBackward)
      product = flexops::load<Cache::normal>(reinterpret_cast<const Packed*>(
          static_cast<const T*>(p.grad) + row * p.grad_stride + vector * N));
  }
  FLEXOPS_DEVICE void compute(const activation::Function& function) {
    constexpr bool kAccurate = activation::kIsAccurate<T>;
    float gates[N], ups[N];
    rows::widen<T>(gates, gate);
    rows::widen<T>(ups, up);
    if constexpr (kBackward) {
      float outer[N], values[N];
      rows::widen<T>(outer, product);
      activation::differentiate_all<kAccurate>(gates, function, values);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        gates[i] *= outer[i] * ups[i];
        ups[i] *= values[i];
        values[i] *= outer[i];
      }
      gate = rows::packed<T>(gates), up = rows::packed<T>(values);
      product = rows::packed<T>(ups);
    } else {
      activation::activate_all<kAccurate>(gates, function);
#pragma unroll
      for (int i = 0; i < N; ++i) gates[i] *= ups[i];
      product = rows::packed<T>(gates);
    }
  }
  FLEXOPS_DEVICE void find(u32& largest, u32& grad_largest) const {
    largest = scaled::add_largest<T>(largest, product);
    if constexpr (kBackward)
      grad_largest = scaled::add_largest<T>(scaled::add_largest<T>(grad_largest, gate), up);
  }
  FLEXOPS_DEVICE void write(const GatedParams& p, int vector, const scaled::Scaling& scaling,
                            const scaled::Scaling& grad_scaling) const {
    const i64 row = static_cast<i64>(blockIdx.x) * p.columns;
    write_row_codes<T>(p.codes + row, vector * N, product, scaling);
    if constexpr (kBackward) {
      write_row_codes<T>(p.grad_codes + 2 * row, vector * N, gate, grad_scaling);
      write_row_codes<T>(p.grad_codes + 2 * row + p.columns, vector * N, up, grad_scaling);
    }
  }
};

/// A block for each row, as quantize_rows.
template <typename T, bool kBackward, int kThreads>
__global__ void __launch_bounds__(kThreads, (kBackward || sizeof(T) == 4 ? 1 : 2) *
                                                (kThreads == kGatedThreads ? 2 : 1))
    quantize_gated(const FLEXOPS_GRID_CONSTANT GatedParams p) {
  using Vector = GatedVector<T, kBackward>;
  __shared__ u32 shared[2][kThreads / rows::kNarrowWarp];
  const int vectors = p.columns / Vector::N, step = static_cast<int>(blockDim.x);
  // Compute what is kept, and find the largest magnitudes.
  Vector kept[kGatedVectors];
  u32 largest = 0, grad_largest = 0;
#pragma unroll
  for (int k = 0; k < kGatedVectors; ++k) {
    const int vector = threadIdx.x + k * step;
    kept[k] = {};
    if (vector < vectors) kept[k].load(p, vector);
  }
#pragma unroll
  for (int k = 0; k < kGatedVectors; ++k) {
    kept[k].compute(p.function);
    kept[k].find(largest, grad_largest);
  }
  for (int vector = threadIdx.x + kGatedVectors * step; vector < vectors; vector += step) {
    Vector one;
    one.load(p, vector);
    one.compute(p.function);
    one.find(largest, grad_largest);
  }
  const auto scaling_of = [&](u32 found, u32* room) {
    return power_of_two(
        rows::group_reduce(scaled::widen_bits<T>(scaled::one_of<T>(found)), Max(), 0u, step, room));
  };
  const scaled::Scaling scaling = scaling_of(largest, shared[0]);
  scaled::Scaling grad_scaling = scaling;
  if constexpr (kBackward) grad_scaling = scaling_of(grad_largest, shared[1]);
  if (threadIdx.x == 0) {
    p.scales[blockIdx.x] = scaling.scale;
    if (kBackward) p.grad_scales[blockIdx.x] = grad_scaling.scale;
  }
  // Encode and write.
#pragma unroll
  for (int k = 0; k < kGatedVectors; ++k) {
    const int vector = threadIdx.x + k * step;
    if (vector < vectors) kept[k].write(p, vector, scaling, grad_scaling);
  }
  for (int vector = threadIdx.x + kGatedVectors * step; vector < vectors; vector += step) {
    Vector one;
    one.load(p, vector);
    one.compute(p.function);
    one.write(p, vector, scaling, grad_scaling);
  }
}

// ---- columns ----

/// Eight neighbours of a row, as they are loaded.
template <typename T>
struct Eight {
  static constexpr int kBytes = 8 * sizeof(T) < 16 ? 8 : 16, kParts = 8 * sizeof(T) / kBytes;
  Vec<u32, kBytes / 4> part[kParts];

  FLEXOPS_DEVICE void load(const void* x, i64 at) {
    const u8* from = static_cast<const u8*>(x) + at * static_cast<i64>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      part[i] = flexops::load<Cache::normal>(
          reinterpret_cast<const Vec<u32, kBytes / 4>*>(from + i * kBytes));
  }
  /// `scale`: of the row, which floats have none of.
  FLEXOPS_DEVICE void widen(float (&out)[8], [[maybe_unused]] float scale) const {
    if constexpr (sizeof(T) == 1) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        float four[4];
        unpack4<T>(four, part[0].at[w]);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[4 * w + i] = four[i] * scale;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kParts; ++i) rows::widen<T>(out + i * 8 / kParts, part[i]);
    }
  }
};

/// The largest magnitude of each column, into p.largest, which is 0 before. A lane has eight
/// columns, a warp every eighth of a block's rows.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    find_largest(const FLEXOPS_GRID_CONSTANT ColumnParams p) {
  constexpr int kWarps = kColumnThreads / 32, kRows = kScanRows / kWarps;
  __shared__ u32 shared[kWarps][8 * 33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.y * kScanColumns + lane * 8;
  const int first = blockIdx.x * p.scan, end = first + p.scan < p.rows ? first + p.scan : p.rows;
  u32 largest[8] = {};
  for (int start = first + warp; start < end; start += kScanRows) {
    // Load rows; beyond the last one that one again, so that no load waits for a branch.
    Eight<T> data[kRows];
    float scale[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int next = start + k * kWarps, row = next < end ? next : end - 1;
      data[k].load(p.x, row * p.stride + (column < p.columns ? column : 0));
      scale[k] = sizeof(T) == 1 ? p.row_scales[row] : 1.0f;
    }
    // Reduce in the warp's rows.
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      float value[8];
      data[k].widen(value, scale[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        largest[i] = Max()(largest[i], bit_cast<u32>(value[i]) & 0x7fffffffu);
    }
  }
  // Reduce over the warps, then over the blocks: neighbouring threads have neighbouring columns.
#pragma unroll
  for (int i = 0; i < 8; ++i) shared[warp][i * 33 + lane] = largest[i];
  __syncthreads();
  u32 most = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    most = Max()(most, shared[w][threadIdx.x % 8 * 33 + threadIdx.x / 8]);
  const int its = blockIdx.y * kScanColumns + threadIdx.x;
  if (its < p.columns) atomicMax(p.largest + its, most);
}

/// A tile of codes, transposed through shared memory. A thread has four rows of eight columns,
/// which become a word of each column.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    transpose(const FLEXOPS_GRID_CONSTANT ColumnParams p) {
  __shared__ alignas(16) u32 tile[kTileColumns * kTileRows / 4];
  const int group = threadIdx.x % 8, four = threadIdx.x / 8;
  const int column = blockIdx.y * kTileColumns + group * 8;
  const int row = blockIdx.x * kTileRows + four * 4;
  const bool has = column < p.columns;
  // Load.
  Eight<T> data[4];
  float scale[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    data[r] = {};
    scale[r] = 0.0f;
    if (row + r >= p.rows || !has) continue;
    data[r].load(p.x, (row + r) * p.stride + column);
    scale[r] = sizeof(T) == 1 ? p.row_scales[row + r] : 1.0f;
  }
  scaled::Scaling scaling[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!has) continue;
    scaling[i] = power_of_two(p.largest[column + i]);
    if (four == i && blockIdx.x == 0 && p.first == 0) p.scales[column + i] = scaling[i].scale;
  }
  // Encode: four rows are a word of a column. Groups of four words are exchanged so that both
  // accesses to shared memory are free of conflicts.
  float value[4][8];
#pragma unroll
  for (int r = 0; r < 4; ++r) data[r].widen(value[r], scale[r]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float inverse = scaling[i].inverse;
    const u32 word = pack4<e4m3>(value[0][i] * inverse, value[1][i] * inverse,
                                 value[2][i] * inverse, value[3][i] * inverse);
    tile[(group * 8 + i) * (kTileRows / 4) + ((four / 4 ^ group) * 4 + four % 4)] =
        word & scaling[i].keep;
  }
  __syncthreads();
  // Write sixteen rows of a column at once.
  const Vec<u32, 4>* words = reinterpret_cast<const Vec<u32, 4>*>(tile);
#pragma unroll
  for (int k = 0; k < kTileColumns / (kColumnThreads / 8); ++k) {
    const int its = four + k * (kColumnThreads / 8);
    const int to = p.first + blockIdx.x * kTileRows + group * 16;
    const int from = blockIdx.y * kTileColumns + its;
    if (to < p.end && from < p.columns)
      store<Cache::normal>(
          reinterpret_cast<Vec<u32, 4>*>(p.codes + static_cast<i64>(from) * p.total + to),
          words[its * (kTileRows / 16) + (group ^ its / 8)]);
  }
}

}  // namespace flexops::fp8_linear
