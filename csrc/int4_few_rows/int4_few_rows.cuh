// Products of up to 8 rows of x: memory decides. As many blocks as fit stay for the whole product.
// Each warp streams its chunks of the weight, kChunk tiles of columns of 16 rows with their
// scales and zero points, through a ring of stages in shared memory of its own: nothing but the
// sums is shared with other warps, so no warp waits for another one before the end of a pass.
//
// Chunk number f of a block (row tile f / chunks, columns f % chunks) is warp f % warps'. The
// blocks of a cluster share the columns of the same row tiles, chunk by chunk.
//
// With one or two rows of x, six of the eight columns of an mma would be empty. There column
// 2 slot + token has the rows of x in every fourth unit (64 columns; 32 in groups of 32) only, and
// zeros elsewhere: an accumulator then holds the sums of four groups, and scales are applied once.
// With up to four rows there are two slots.
#pragma once

#include "common/async.cuh"
#include "common/fragments.cuh"
#include "common/hopper.cuh"
#include "common/reduce.cuh"
#include "few_rows/few_rows.cuh"
#include "int4_linear/int4_codes.cuh"

namespace flexops::int4 {

struct FewParams {
  struct Weight {
    const u8* packed;
    const u16 *scales, *zeros;  // float16 or bfloat16; float16 or null
    const void* bias;
    int end;             // of its tiles, beside each other
    int columns, start;  // of the result
  };
  Weight weights[few_rows::kMaxWeights];
  const void *x, *norm, *residual;
  void* out;  // [m, width]
  int m, width, k, count;
  int units;  // tiles of 16 rows of the weights, or pairs of a gate's and its product's
  int tiles_k, groups;
  int group_shift;   // log2 of the group size
  int cluster;       // blocks that share the columns of a row tile: the grid's x
  int each, longer;  // units that a cluster has at least, and how many clusters have one more
  int chunks;        // of a row tile, of a block of the cluster
  int pass_rows;     // row tiles whose sums have room
  int stages;        // of a warp's ring
  int activation;
  float eps, offset;
  bool half_scales;  // float16
};

inline constexpr int kFewWarps = 8;

/// Bytes of a stage: words, scales, zero points.
template <int kChunk, bool kSmall>
inline constexpr int kFewStage = kChunk * (512 + 2 * 32 * (kSmall ? 2 : 1));
/// Columns that are summed before a scale is applied, of a chunk.
template <int kChunk, bool kSmall>
inline constexpr int kFewUnits = kChunk * (kSmall ? 2 : 1);
inline constexpr int kZeroBytes = 1024;  // that lanes without a row of x read

/// Where the parts of a block's shared memory begin, in bytes.
struct FewLayout {
  int x_stride, sums, squares, parts, ring, barriers, bytes;
  FLEXOPS_DEVICE FewLayout(int chunk, int rows, int tokens, int chunks, int pass_rows, int stages,
                           bool small, bool norm) {
    // 8 lanes read two rows of x from different banks.
    x_stride = chunks * chunk * 128 + 64;
    sums = kZeroBytes + ((rows + (norm ? 1 : 0)) * x_stride + 127) / 128 * 128;
    squares = sums + chunks * chunk * (small ? 2 : 1) * tokens * 4;
    parts = squares + (norm ? 4 * (8 + 8 * kFewWarps) : 0);
    ring = (parts + pass_rows * kFewWarps * tokens * 64 + 127) / 128 * 128;
    barriers = ring + stages * kFewWarps * chunk * (512 + 64 * (small ? 2 : 1));
    bytes = barriers + stages * kFewWarps * 8;
  }
};

/// Of two 16-bit numbers, as float16 or bfloat16.
FLEXOPS_DEVICE float scale_of(const FewParams& p, u32 word, int half) {
  return p.half_scales ? half_of<f16>(word, half) : half_of<bf16>(word, half);
}

/// A row tile: which weight, and its tile. With a gate, a block has tiles of both weights in turn.
struct FewTile {
  int which;
  i64 tile;
  FLEXOPS_DEVICE FewTile(const FewParams& p, int row, int block, int blocks) {
    if (p.activation) {
      which = row % 2, tile = block + static_cast<i64>(row / 2) * blocks;
      return;
    }
    tile = block + static_cast<i64>(row) * blocks, which = 0;
    if (p.count > 1 && tile >= p.weights[0].end) which = tile >= p.weights[1].end ? 2 : 1;
    if (which > 0) tile -= p.weights[which - 1].end;
  }
};

/// `kSlots`: units that an accumulator keeps apart, of at most 8 / kSlots rows of x.
template <class T, int kChunk, int kSlots, bool kSmall>
__global__ void __launch_bounds__(32 * kFewWarps, 2)
    few_rows_int4(const FLEXOPS_GRID_CONSTANT FewParams p) {
  constexpr int kUnits = kFewUnits<kChunk, kSmall>, kPad = 8 / kSlots;
  constexpr int kStage = kFewStage<kChunk, kSmall>, kNumbers = kUnits * 32;
  extern __shared__ uint4 storage[];
  u8* const shared = reinterpret_cast<u8*>(storage);
  const FewLayout at(kChunk, p.m, kPad, p.chunks, p.pass_rows, p.stages, kSmall, p.norm);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  // The launcher divides: the first copies would wait for it.
  const int blocks = static_cast<int>(gridDim.y), block = static_cast<int>(blockIdx.y),
            rank = static_cast<int>(blockIdx.x);
  const int in_unit = p.activation ? 2 : 1,
            rows = (p.each + (block < p.longer ? 1 : 0)) * in_unit;  // row tiles
  const int count = rows * p.chunks;

  // The ring: the chunk to fetch next is `ahead`, in the row tile and columns that belong to it.
  u8* const ring = shared + at.ring + warp * p.stages * kStage;
  const u32 barriers = hopper::shared_address(shared + at.barriers + warp * p.stages * 8);
#if FLEXOPS_HAS_CLUSTERS
  if (lane < p.stages) hopper::init(barriers + 8 * lane, 1), hopper::fence_init();
  __syncwarp();
#endif
  const int group_shift = p.group_shift - 6;  // log2 of tiles to a group
  const auto groups_of = [&](int tiles) { return kSmall ? 2 * tiles : tiles >> group_shift; };
  int begin_row = 0, begin_chunk = warp;
  while (begin_chunk >= p.chunks) begin_chunk -= p.chunks, ++begin_row;
  int ahead = warp, ahead_row = begin_row, ahead_chunk = begin_chunk;
  // A bulk copy for the words only: the copy engine takes some 70 cycles for each copy.
  const auto fetch = [&](int stage) {
    if (ahead < count) {
      const FewTile row(p, ahead_row, block, blocks);
      const FewParams::Weight& weight = p.weights[row.which];
      const int tile = (rank + ahead_chunk * p.cluster) * kChunk;
      const int tiles = max(min(kChunk, p.tiles_k - tile), 0), vectors = 2 * groups_of(tiles);
      const u8* const words = weight.packed + (row.tile * p.tiles_k + tile) * 512;
      const i64 number = (row.tile * p.groups + groups_of(tile)) * 16;
      u8* const to = ring + stage * kStage;
#if FLEXOPS_HAS_CLUSTERS
      if (lane == 0) {
        hopper::expect(barriers + 8 * stage, tiles * 512);
        if (tiles > 0)
          hopper::load_bytes(hopper::shared_address(to), words, tiles * 512, barriers + 8 * stage);
      }
#else
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const bool inside = i < tiles;
        async_copy16(to + (32 * i + lane) * 16,
                     inside ? words + (32 * i + lane) * 16 : weight.packed, inside);
      }
#endif
      static_assert(2 * kUnits <= 32, "a warp copies all numbers at once");
      if (lane < vectors) {
        u8* const own = to + kChunk * 512 + lane * 16;
        async_copy16(own, weight.scales + number + lane * 8, true);
        if (weight.zeros) async_copy16(own + kNumbers, weight.zeros + number + lane * 8, true);
      }
    }
    ahead += kFewWarps, ahead_chunk += kFewWarps;
    while (ahead_chunk >= p.chunks) ahead_chunk -= p.chunks, ++ahead_row;
    async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) fetch(i);

  // Rows of x, as far as the block's chunks go, multiplied by the norm's weights; the sums of their
  // units, which offset and zero points are multiplied by; and the sums of squares. A thread reads
  // what it has copied itself.
  u8* const rows_of_x = shared + kZeroBytes;
  float* const sums = reinterpret_cast<float*>(shared + at.sums);
  float* const squares = reinterpret_cast<float*>(shared + at.squares);  // of rows; of warps
  const int per_row = p.chunks * kChunk * 8;                             // vectors of 16 bytes
  const auto copy_row = [&](int row, const void* of) {
#pragma unroll 2
    for (int i = thread; i < per_row; i += 32 * kFewWarps) {
      const int chunk = i / (kChunk * 8);
      const int column = (rank + chunk * p.cluster) * kChunk * 64 + i % (kChunk * 8) * 8;
      const bool inside = column < p.k;
      async_copy16(rows_of_x + row * at.x_stride + i * 16,
                   static_cast<const T*>(of) + (inside ? column : 0), inside);
    }
  };
  if (p.norm) copy_row(p.m, p.norm);
  if (thread < kZeroBytes / 16) storage[thread] = uint4{0, 0, 0, 0};
#pragma unroll 1
  for (int i = thread; i < p.chunks * kUnits * kPad; i += 32 * kFewWarps) {
    if (i % kPad >= p.m) sums[i] = 0.0f;
  }
  wait_for_previous();
  let_next_start();  // not before: a third kernel's blocks would crowd on some multiprocessors
#pragma unroll 1
  for (int row = 0; row < p.m; ++row)
    copy_row(row, static_cast<const T*>(p.x) + static_cast<i64>(row) * p.k);
  async_commit();
  async_wait(0);
#pragma unroll 1
  for (int row = 0; row < p.m; ++row) {
    float square = 0.0f;
#pragma unroll 2
    for (int i = thread; i < per_row; i += 32 * kFewWarps) {
      uint4& vector = *reinterpret_cast<uint4*>(rows_of_x + row * at.x_stride + i * 16);
      u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
      if (p.norm) {
        const uint4 gains = *reinterpret_cast<const uint4*>(rows_of_x + p.m * at.x_stride + i * 16);
        const u32 gain[4] = {gains.x, gains.y, gains.z, gains.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = few_rows::weigh<T>(words[j], gain[j], p.offset, square);
      }
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += half_of<T>(words[j], 0) + half_of<T>(words[j], 1);
      constexpr int kLanes = kSmall ? 4 : 8;
      sum = warp_reduce<kLanes>(sum, Sum());
      if (lane % kLanes == 0) sums[i / kLanes * kPad + row] = sum;
      transpose_quad(words);  // a lane's part of an mma's 32 columns, together
      vector = {words[0], words[1], words[2], words[3]};
    }
    if (p.norm) {
      square = warp_reduce(square, Sum());
      if (lane == 0) squares[8 + row * kFewWarps + warp] = square;
    }
  }
  __syncthreads();
  if (p.norm && thread < p.m) {  // read behind further barriers
    float total = 0.0f;
    for (int i = 0; i < kFewWarps; ++i) total += squares[8 + thread * kFewWarps + i];
    squares[thread] = total;
  }

  // A lane's part of x: the row and slot of column g of an mma.
  const bool valid = g % kPad < p.m;
  const u8* const x = valid ? rows_of_x + g % kPad * at.x_stride + 16 * t : shared + 16 * t;
  const int slot = g / kPad;
  const bool has_zeros = p.weights[0].zeros != nullptr;

  // Of an accumulator's columns 2 t and 2 t + 1.
  const int of_slot = 2 * t / kPad, token = 2 * t % kPad;
  float acc[4] = {};
  const auto multiply = [&](const u8* stage, int chunk) {
    const uint4* const words = reinterpret_cast<const uint4*>(stage) + lane;
    const u32* const scales = reinterpret_cast<const u32*>(stage + kChunk * 512) + g;
    const int left = p.tiles_k - (rank + chunk * p.cluster) * kChunk,
              units = kSmall ? 2 * left : left;  // that the weight has from here on
    const float* const sum = sums + chunk * kUnits * kPad;
    const int chunk_bytes = chunk * kChunk * 128;
    // Adds the sums of a unit, times its scales.
    const auto apply = [&](const float (&part)[4], int unit) {
      const int group = kSmall ? unit : unit >> group_shift;
      const bool inside = unit < units;
      const u32 scale = inside ? scales[group * 8] : 0,
                zero = inside && has_zeros ? scales[kNumbers / 4 + group * 8] : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = scale_of(p, scale, half),
                    less = -Code<T>::kOffset - (has_zeros ? half_of<f16>(zero, half) : 8.0f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          acc[2 * half + i] += factor * (part[2 * half + i] + less * sum[unit * kPad + token + i]);
        }
      }
    };
#pragma unroll
    for (int first = 0; first < kUnits; first += kSlots) {
      float part[2][4] = {};
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const int unit = first + j, tile = kSmall ? unit / 2 : unit;
        const u8* const from = valid && slot == j ? x + chunk_bytes : shared + 16 * t;
        const uint4 all = words[tile * 32];
#pragma unroll
        for (int h = kSmall ? unit % 2 : 0; h < (kSmall ? unit % 2 + 1 : 2); ++h) {
          u32 left[2][4];
          widen_codes<T>(left[0], h == 0 ? all.x : all.z);
          widen_codes<T>(left[1], h == 0 ? all.y : all.w);
          const uint4 right = *reinterpret_cast<const uint4*>(from + tile * 128 + h * 64);
          mma<T>(part[0], left[0], right.x, right.y);
          mma<T>(part[1], left[1], right.z, right.w);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) part[0][i] += part[1][i];
      apply(part[0], first + of_slot);
    }
  };

  // Passes over as many row tiles as there is room for sums of.
  float* const parts = reinterpret_cast<float*>(shared + at.parts);
  constexpr int kPart = 16 * kPad;  // floats of a warp and a row tile
  int stage = 0, row = begin_row, chunk = begin_chunk;
  u32 phase = 0;
  for (int first_row = 0; first_row < rows; first_row += p.pass_rows) {
    const int end_row = min(first_row + p.pass_rows, rows);
    while (row < end_row) {
      // Until the chunk is there.
#if FLEXOPS_HAS_CLUSTERS
      hopper::wait(barriers + 8 * stage, phase);
#endif
      async_wait(p.stages - 1);
      __syncwarp();
      multiply(ring + stage * kStage, chunk);
      // All lanes have read the stage: what they read, they have used. (A fence before the copy
      // engine would wait for the numbers of the stages that are under way, too.)
      __syncwarp();
      fetch(stage);
      if (++stage == p.stages) stage = 0, phase ^= 1;
      const int before = row;
      chunk += kFewWarps;
      while (chunk >= p.chunks) chunk -= p.chunks, ++row;
      if (row == before) continue;
      // The row tile's sums.
      float* const to = parts + ((before - first_row) * kFewWarps + warp) * kPart;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int other = kPad / 2; other < 4; other *= 2) acc[i] += shuffle_xor(acc[i], other);
      }
      if (of_slot == 0) {
        *reinterpret_cast<float2*>(to + g * kPad + token) = {acc[0], acc[1]};
        *reinterpret_cast<float2*>(to + (g + 8) * kPad + token) = {acc[2], acc[3]};
      }
      acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    }
    __syncthreads();
    // The warps' sums, in the order of their chunks; between blocks in the place of the first
    // one's.
    const int pass = end_row - first_row, sharing = min(p.chunks, kFewWarps);
    const auto of_block = [&](int of, int element) {
      const float* const own = parts + of * kFewWarps * kPart + element;
      const int begin = (first_row + of) * p.chunks;
      float total = 0.0f;
#pragma unroll 4
      for (int w = 0; w < sharing; ++w) total += own[(begin + w) % kFewWarps * kPart];
      return total;
    };
    if (p.cluster > 1) {
#pragma unroll 1
      for (int i = thread; i < pass * kPart; i += 32 * kFewWarps)
        parts[i / kPart * kFewWarps * kPart + i % kPart] = of_block(i / kPart, i % kPart);
      cluster_sync();
    }
    // Each block of the cluster writes its part of the results.
    const auto of_cluster = [&](const float* own) {
      if (p.cluster == 1) return *own;
      float total = cluster_load(own, 0);
#pragma unroll 1
      for (int other = 1; other < p.cluster; ++other) total += cluster_load(own, other);
      return total;
    };
#pragma unroll 1
    for (int i = thread + rank * 32 * kFewWarps; i < pass / in_unit * 16 * p.m;
         i += 32 * kFewWarps * p.cluster) {
      const int line = i % 16, unit = kSlots == 4 ? i / 16 >> (p.m - 1) : i / 16 / p.m,
                token = i / 16 - unit * p.m, of = unit * in_unit;
      const FewTile tile(p, first_row + of, block, blocks);
      const FewParams::Weight& weight = p.weights[tile.which];
      const int column = static_cast<int>(tile.tile) * 16 + line;
      if (column >= weight.columns) continue;
      const int element = line * kPad + token;
      const float factor =
          p.norm ? rsqrtf(of_cluster(squares + token) / static_cast<float>(p.k) + p.eps) : 1.0f;
      const auto result = [&](int of, int which) {
        const float sum = p.cluster > 1 ? of_cluster(parts + of * kFewWarps * kPart + element)
                                        : of_block(of, element);
        const float total = sum * factor;
        const void* const bias = p.weights[which].bias;
        return bias ? total + to_float(static_cast<const T*>(bias)[column]) : total;
      };
      float value = result(of, tile.which);
      if (p.activation)
        value = few_rows::activate(few_rows::round_to<T>(value), p.activation) *
                few_rows::round_to<T>(result(of + 1, 1));
      const i64 place = static_cast<i64>(token) * p.width + weight.start + column;
      if (p.residual)
        value = few_rows::round_to<T>(value) + to_float(static_cast<const T*>(p.residual)[place]);
      static_cast<T*>(p.out)[place] = from_float<T>(value);
    }
    if (p.cluster > 1) {
      cluster_leave();
    } else {
      __syncthreads();
    }
  }
}

}  // namespace flexops::int4
