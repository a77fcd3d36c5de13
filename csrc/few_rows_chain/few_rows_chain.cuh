// Products of one or two rows of x with 4-bit weights, and attentions, one after another in one
// kernel: the layers of a decode step. A block of each multiprocessor stays for all of them. One
// thread copies its share of all weights, product (phase) after phase, to a ring of stages: weights
// depend on nothing, so they arrive while blocks wait for each other. Four warps share a stage.
//
// Between phases all blocks meet at a counter in device memory, which only grows: every launch adds
// a multiple of its blocks. The launch is cooperative, so that all blocks are there. What blocks
// write and read meanwhile is behind all copies that are under way, so these are few then.
//
// Codes are multiplied as they are, by integer tensor cores, because widening them would take
// longer than they take to arrive: x is taken apart into digits of 8 bits (write_digits).
#pragma once

#include "few_rows_chain/few_rows_attention.cuh"

namespace flexops::chain {

/// A row tile: which weight, and its tile; as int4::FewTile.
struct Tile {
  int which, tile;
  FLEXOPS_DEVICE Tile(const Phase& p, int row, int block, int blocks) {
    if (p.activation) {
      which = row % 2, tile = block + row / 2 * blocks;
      return;
    }
    tile = block + row * blocks, which = 0;
    if (p.count > 1 && tile >= p.weights[0].end) which = tile >= p.weights[1].end ? 2 : 1;
    if (which > 0) tile -= p.weights[which - 1].end;
  }
};

/// Row tiles of a block.
FLEXOPS_DEVICE int rows_of(const Phase& phase, int block) {
  return (phase.each + (block < phase.longer ? 1 : 0)) * (phase.activation ? 2 : 1);
}

/// Copies the block's stages of all phases to the ring, by one thread. `full`, `empty`: barriers of
/// the stages; `meeting`: whether blocks meet.
template <bool kSmall, int kMost>
FLEXOPS_DEVICE void copy_stages(const Params<kMost>& p, u32 ring, u32 full, u32 empty,
                                const volatile bool* meeting, int block, int blocks) {
  constexpr int kTiles = kChunk * kSharing, kStage = int4::kFewStage<kTiles, kSmall>,
                kUnits = int4::kFewUnits<kTiles, kSmall>;
  int stage = 0, oldest = 0, under_way = 0;
  u32 round = 1, oldest_round = 0;
#pragma unroll 1
  for (int number = 0; number < p.count; ++number) {
    const Phase& phase = p.phases[number];
    const int rows = rows_of(phase, block);
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const Tile tile(phase, row, block, blocks);
      const int4::FewParams::Weight& weight = phase.weights[tile.which];
      const u8* words = weight.packed + static_cast<i64>(tile.tile) * phase.tiles_k * 512;
      int at = tile.tile * phase.groups * 16;  // of scales and zero points
#pragma unroll 1
      for (int left = phase.tiles_k; left > 0; left -= kTiles) {
        const int tiles = min(kTiles, left),
                  groups = kSmall ? 2 * tiles : tiles >> (phase.group_shift - 6);
        hopper::wait(empty + 8 * stage, round);
        for (const int most = *meeting ? kUnderWayMeeting : kUnderWay; under_way >= most;
             --under_way) {
          hopper::wait(full + 8 * oldest, oldest_round);
          if (++oldest == p.stages) oldest = 0, oldest_round ^= 1;
        }
        ++under_way;
        const u32 to = ring + stage * kStage, barrier = full + 8 * stage,
                  scales = to + kTiles * 512;
        hopper::expect(barrier, tiles * 512 + (weight.zeros ? 64 : 32) * groups);
        hopper::load_bytes(to, words, tiles * 512, barrier);
        hopper::load_bytes(scales, weight.scales + at, 32 * groups, barrier);
        if (weight.zeros)
          hopper::load_bytes(scales + 32 * kUnits, weight.zeros + at, 32 * groups, barrier);
        words += tiles * 512, at += groups * 16;
        if (++stage == p.stages) stage = 0, round ^= 1;
      }
    }
  }
}

/// acc[16 x 8] += left[16 x 32] right[32 x 8]: codes times digits. What the last 8 rows get is of
/// whole bytes: their own codes 16 times, and those of the first 8 rows.
FLEXOPS_DEVICE void mma_codes(int (&acc)[4], u32 low, u32 high, u32 right0, u32 right1) {
  constexpr u32 kMask = 0x0f0f0f0fu;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(low & kMask), "r"(low), "r"(high & kMask), "r"(high), "r"(right0), "r"(right1));
}

/// Of a unit of x, whose numbers are whole multiples of `step`: it, and it times the multiples'
/// sum.
struct Unit {
  float step, sum;
};

/// x as the products of 4 bits take it: each number of a unit (64 columns; 32 in groups of 32) is
/// 256 a + b times the unit's step, a and b of 8 bits: rounded to 2^-16 of the unit's largest. The
/// digits lie as codes do: of a tile's 64 columns 64 bytes a, then 64 bytes b, of which a lane's 16
/// lie together.
inline constexpr float kMostMultiple = 127 * 256 + 127;

/// Adds up a word's four bytes, with their signs.
FLEXOPS_DEVICE void add_bytes(int& sum, u32 bytes) {
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(bytes), "r"(0x01010101u));
}

/// The larger one's absolute value; NaN if either is.
FLEXOPS_DEVICE float most_of(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(fabsf(a)), "f"(fabsf(b)));
  return out;
}

/// Writes the digits of a vector's 8 numbers of each row of x, and the units' steps and sums.
/// Vectors 2 i and 2 i + 1 have columns 0 to 3 and 8 to 11, and the others, of 16. By whole warps,
/// lane after lane along the columns; all rows at once, because lanes wait for each other.
template <bool kSmall, int N>
FLEXOPS_DEVICE void write_digits(u8* rows, int stride, Unit* units, const float (&x)[N][8],
                                 int vector) {
  constexpr int kLanes = kSmall ? 4 : 8;
  float most[N], step[N];
  u32 digits[N][2][2];
  int sum[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    most[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most[j] = most_of(most[j], x[j][i]);
  }
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) {
#pragma unroll
    for (int j = 0; j < N; ++j) most[j] = most_of(most[j], shuffle_xor(most[j], other));
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const bool some = most[j] > 1e-30f;  // so that the factor is finite
    step[j] = some ? most[j] * (1 / kMostMultiple) : most[j] < 1e-30f ? 0.0f : most[j];
    const float factor = some ? quick_reciprocal(step[j]) : 0.0f;
    int of_first = 0;
    sum[j] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 bits[4];
      // 1.5 * 2^23 plus a whole number ends with its bits: conversions are slow. With 128 more, the
      // second byte is the first digit, and the lowest the other one, 128 too large.
#pragma unroll
      for (int i = 0; i < 4; ++i)
        bits[i] = bit_cast<u32>(fmaf(x[j][4 * half + i], factor, 12582912.0f + 128));
      const u32 low = __byte_perm(bits[0], bits[1], 0x5410),
                high = __byte_perm(bits[2], bits[3], 0x5410);
      digits[j][0][half] = __byte_perm(low, high, 0x7531);
      digits[j][1][half] = __byte_perm(low, high, 0x6420) ^ 0x80808080u;
      add_bytes(of_first, digits[j][0][half]), add_bytes(sum[j], digits[j][1][half]);
    }
    sum[j] += 256 * of_first;
  }
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) {
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += shuffle_xor(sum[j], other);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (vector % kLanes == 0)
      units[vector / kLanes * N + j] = {step[j], step[j] * static_cast<float>(sum[j])};
    u8* const to = rows + j * stride + vector / 8 * 128 + vector % 2 * 32 + vector % 8 / 2 * 4;
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      *reinterpret_cast<u32*>(to + 64 * d) = __byte_perm(digits[j][d][0], digits[j][d][1], 0x5140);
      *reinterpret_cast<u32*>(to + 64 * d + 16) =
          __byte_perm(digits[j][d][0], digits[j][d][1], 0x7362);
    }
  }
}

/// A lane's part of products. Column g of an mma of codes is a digit, a row of x and a slot: a unit
/// among kSlots, which an accumulator keeps apart.
template <int kRows, bool kSmall>
struct Lane {
  static constexpr int kSlots = 4 / kRows, kUnits = int4::kFewUnits<kChunk, kSmall>;
  int lane, g, t, slot, own_slot, token;
  const u8* x;  // digits

  FLEXOPS_DEVICE Lane(const u8* rows_of_x, int x_stride) {
    lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    slot = g / (2 * kRows), own_slot = t / kRows, token = t % kRows;
    x = rows_of_x + g / 2 % kRows * x_stride + g % 2 * 64 + 16 * t;
  }

  /// Adds a chunk's products of 4 bits. `left`: the weight's tiles from here on.
  FLEXOPS_DEVICE void multiply(float (&acc)[2], const u8* stage, const Unit* units,
                               const Phase& phase, int chunk, int left) const {
    constexpr int kZeros = kUnits * kSharing * 8;  // from a scale to its zero point
    const int of_stage = chunk % kSharing * kChunk;
    const auto group_of = [&](int unit) { return kSmall ? unit : unit >> (phase.group_shift - 6); };
    const uint4* const words = reinterpret_cast<const uint4*>(stage + of_stage * 512) + lane;
    const u32* const scales = reinterpret_cast<const u32*>(stage + kSharing * kChunk * 512) +
                              group_of(of_stage * (kSmall ? 2 : 1)) * 8 + g;
    const int there = kSmall ? 2 * left : left;
    units += chunk * kUnits * kRows + token;
    // Of a product with all slots' units, each lane keeps the sums of the slot that it is for.
    int parts[kUnits / kSlots][4];
#pragma unroll
    for (int first = 0; first < kUnits; first += kSlots) {
      int (&part)[4] = parts[first / kSlots];
      const int of_x = first + slot;
      const u8* const from = x + chunk * kChunk * 128 + (kSmall ? of_x / 2 : of_x) * 128;
      uint4 right;
      if constexpr (kSmall) {
        const uint2 read = reinterpret_cast<const uint2*>(from)[of_x % 2];
        right = {read.x, read.y, 0, 0};
      } else {
        right = *reinterpret_cast<const uint4*>(from);
      }
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const int unit = first + j, tile = kSmall ? unit / 2 : unit;
        int sum[4] = {};
        if constexpr (kSmall) {
          const uint2 all = reinterpret_cast<const uint2*>(words + tile * 32)[unit % 2];
          mma_codes(sum, all.x, all.y, right.x, right.y);
        } else {
          const uint4 all = words[tile * 32];
          mma_codes(sum, all.x, all.y, right.x, right.y);
          mma_codes(sum, all.z, all.w, right.z, right.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = j == 0 || own_slot == j ? sum[i] : part[i];
      }
      part[2] -= part[0], part[3] -= part[1];  // of the last 8 rows' codes alone
    }
#pragma unroll
    for (int first = 0; first < kUnits; first += kSlots) {
      const int (&part)[4] = parts[first / kSlots];
      const int unit = first + own_slot, group = group_of(unit);
      const u32 read = scales[group * 8], read_zero = scales[kZeros + group * 8];
      const u32 scale = unit < there ? read : 0, zero = unit < there ? read_zero : 0;
      const Unit of_x = units[unit * kRows];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float less = phase.has_zeros ? half_of<f16>(zero, half) : 8.0f,
                    step = half ? of_x.step / 16 : of_x.step,
                    sum = step * static_cast<float>(part[2 * half] * 256 + part[2 * half + 1]);
        acc[half] += int4::number_of(scale, half, phase.half_scales) * (sum - less * of_x.sum);
      }
    }
  }
  /// Writes a row tile's sums, [16][kRows], and sets them to 0.
  FLEXOPS_DEVICE void store(float* to, float (&acc)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int other = kRows; other < 4; other *= 2) acc[half] += shuffle_xor(acc[half], other);
      if (t < kRows) to[(g + 8 * half) * kRows + t] = acc[half];
      acc[half] = 0.0f;
    }
  }
};

/// kAttends: some phases are attentions, whose code costs products registers.
template <class T, int kRows, bool kSmall, bool kAttends>
__global__ void __launch_bounds__(32 * (kWarps + 2), 1)
    products(const FLEXOPS_GRID_CONSTANT Params<kAttends ? kMostPhases : kMostProducts> p) {
  constexpr int kThreads = 32 * (kWarps + 1), kPart = 16 * kRows, kGroups = kWarps / kSharing,
                kStage = int4::kFewStage<kChunk * kSharing, kSmall>;
  extern __shared__ uint4 storage[];
  u8* const shared = reinterpret_cast<u8*>(storage);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);

  // One more warp meets the other blocks, and one more copies: a release waits for what its own
  // warp has started.
  const bool multiplies = warp < kWarps, meets = thread == 32 * kWarps;
  // Of rows; the last one of 8 is the flag `meeting`; of warps.
  float* const squares = reinterpret_cast<float*>(shared + p.squares);
  volatile bool* const meeting = reinterpret_cast<volatile bool*>(squares + 7);
  const u32 full = hopper::shared_address(shared + p.barriers), empty = full + 8 * p.stages;
  if (warp == kWarps) {
    if (lane == 0) *meeting = true;
    if (lane < p.stages) hopper::init(full + 8 * lane, 1), hopper::init(empty + 8 * lane, kSharing);
    hopper::fence_init();
  }
  __syncthreads();
  u8* const ring = shared + p.ring;
  if (warp > kWarps) {
    let_next_start();
    if (lane == 0)
      copy_stages<kSmall>(p, hopper::shared_address(ring), full, empty, meeting, block, blocks);
    return;
  }

  u8* const rows_of_x = shared;
  Unit* const units = reinterpret_cast<Unit*>(shared + p.sums);
  float* const parts = reinterpret_cast<float*>(shared + p.parts);
  const Lane<kRows, kSmall> own(rows_of_x, p.x_stride);
  Item* const item = reinterpret_cast<Item*>(shared + p.item);
  float acc[2] = {};
  // Of the next stage of this warp's group: where it is, and its number within the phase.
  int stage = warp / kSharing, next = stage;
  const int own_chunk = warp % kSharing;
  u32 round = 0;
  const auto together = [] { barrier(1, kThreads); };

  wait_for_previous();
  let_next_start();
  u64 target = 0;
  if (meets) {
    const u64 now = arrived(p.counter);
    target = now - now % static_cast<u32>(blocks);
    if constexpr (kAttends) {
      if (block < p.attended.blocks) *item = Item(p.attended, block);
    }
  }
  if (kAttends && p.phases[0].count == 0) together();

#pragma unroll 1
  for (int number = 0; number < p.count; ++number) {
    const Phase& phase = p.phases[number];
    const auto meet = [&] {
      if (number == 0) return;
      if (meets) {
        target += blocks;
        while (arrived(p.counter) < target) {}
      }
      together();
    };
    if (kAttends && phase.count == 0) {
      if (block < p.attended.blocks) {
        attend<T>(p, phase, shared, *item, meet);
      } else {
        meet();
      }
      if (meets && number + 1 < p.count) arrive(p.counter);
      continue;
    }
    // Vectors of 8 numbers, in the order of write_digits.
    const int per_row = phase.chunks * kChunk * 8;
    const auto column_of = [](int vector) { return vector / 2 * 16 + vector % 2 * 4; };
    const auto gain_of = [&](int vector) {
      const int column = column_of(vector);
      if (column >= phase.k) return uint4{0, 0, 0, 0};
      const auto* const from =
          reinterpret_cast<const uint2*>(static_cast<const T*>(phase.norm) + column);
      const uint2 low = from[0], high = from[2];
      return uint4{low.x, low.y, high.x, high.y};
    };
    uint4 first_gain = {};
    u32 first_vector = static_cast<u32>(thread);
    obscure(first_vector);  // or its column has registers in all phases, which others lack
    if (phase.norm) first_gain = gain_of(static_cast<int>(first_vector));
    // What is computed here costs nothing: the other blocks' results are not there yet.
    const int in_unit = phase.activation ? 2 : 1, rows = rows_of(phase, block);
    const int sharing = min(phase.chunks, kWarps);
    struct Result {
      int column, which;  // of the weight, or -1; which one
      i64 place;
    };
    const auto results_of = [&](int first_row) {
      return (min(phase.pass_rows, rows - first_row) >> (phase.activation ? 1 : 0)) * 16 * kRows;
    };
    const auto result_of = [&](int first_row, int i) {
      const int line = i % 16, unit = i / (16 * kRows), token = i / 16 - unit * kRows;
      const Tile tile(phase, first_row + unit * in_unit, block, blocks);
      const int column = tile.tile * 16 + line;
      if (i >= results_of(first_row) || column >= phase.weights[tile.which].columns)
        return Result{-1, 0, 0};
      return Result{
          column, tile.which,
          static_cast<i64>(token) * phase.width + phase.weights[tile.which].start + column};
    };
    const auto added = [&](const Result& r) -> u32 {
      return phase.residual && r.column >= 0
                 ? load_shared_by_all(static_cast<const u16*>(phase.residual) + r.place)
                 : 0;
    };
    Result first = result_of(0, thread);
    meet();
    u32 first_added = added(first);
    // Rows of x, multiplied by the norm's weights; the sums of their units, and of their squares.
    constexpr int kAtOnce = 4 / kRows;
    float square[kRows] = {};
#pragma unroll 1
    for (int first = thread; first < per_row; first += kAtOnce * kThreads) {
      uint4 vectors[kAtOnce][kRows];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int column = column_of(first + j * kThreads);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          vectors[j][row] = {};
          if (column >= phase.k) continue;
          const auto* const from = reinterpret_cast<const uint2*>(
              static_cast<const T*>(phase.x) + static_cast<i64>(row) * phase.k + column);
          const uint2 low = load_shared_by_all(from), high = load_shared_by_all(from + 2);
          vectors[j][row] = {low.x, low.y, high.x, high.y};
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * kThreads;
        if (i >= per_row) break;  // the whole warp
        uint4 gain = first_gain;
        if (phase.norm && i >= kThreads) gain = gain_of(i);
        const u32 gains[4] = {gain.x, gain.y, gain.z, gain.w};
        float numbers[kRows][8];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const uint4& vector = vectors[j][row];
          const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            float& number = numbers[row][n];
            number = half_of<T>(words[n / 2], n % 2);
            if (phase.norm) {
              square[row] += number * number;
              number *= half_of<T>(gains[n / 2], n % 2) + p.offset;
            }
          }
        }
        write_digits<kSmall>(rows_of_x, p.x_stride, units, numbers, i);
        if (thread == 0) *meeting = false;
      }
    }
    if (phase.norm) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float total = warp_reduce(square[row], Sum());
        if (lane == 0) squares[8 + row * (kWarps + 1) + warp] = total;
      }
    }
    together();
    if (phase.norm && !multiplies) {  // read behind a further barrier
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float of_warp = lane <= kWarps ? squares[8 + row * (kWarps + 1) + lane] : 0.0f;
        squares[row] = warp_reduce(of_warp, Sum());
      }
    }
    int row = next / phase.stages, of_row = next - row * phase.stages;
    for (int first_row = 0; first_row < rows; first_row += phase.pass_rows) {
      const int end_row = min(first_row + phase.pass_rows, rows), results = results_of(first_row);
      if (first_row > 0) first = result_of(first_row, thread), first_added = added(first);
#pragma unroll 1
      while (multiplies && row < end_row) {
        hopper::wait(full + 8 * stage, round);
        const int chunk = of_row * kSharing + own_chunk, left = phase.tiles_k - chunk * kChunk;
        if (left > 0) own.multiply(acc, ring + stage * kStage, units, phase, chunk, left);
        hopper::fence_async();
        __syncwarp();
        if (lane == 0) hopper::arrive(empty + 8 * stage);
        if ((stage += kGroups) >= p.stages) stage -= p.stages, round ^= 1;
        if (left > 0 && chunk + kWarps >= phase.chunks)  // the row's last one of this warp
          own.store(parts + ((row - first_row) * sharing + chunk % kWarps) * kPart, acc);
        for (of_row += kGroups; of_row >= phase.stages; ++row) of_row -= phase.stages;
      }
      if (thread == 0 && end_row == rows) *meeting = true;
      together();
#pragma unroll 1
      for (int i = thread; i < results; i += kThreads) {
        const Result r = i < kThreads ? first : result_of(first_row, i);
        if (r.column < 0) continue;
        const int of = i / (16 * kRows) * in_unit, token = i / 16 % kRows;
        float factor = 1.0f;
        if (phase.norm) factor = rsqrtf(squares[token] / static_cast<float>(phase.k) + p.eps);
        const auto result = [&](int of, int which) {
          const float* const from = parts + of * sharing * kPart + i % 16 * kRows + token;
          float total = 0.0f;
#pragma unroll 8
          for (int w = 0; w < sharing; ++w) total += from[w * kPart];
          total *= factor;
          const void* const bias = phase.weights[which].bias;
          return bias ? total + to_float(static_cast<const T*>(bias)[r.column]) : total;
        };
        float value = result(of, r.which);
        if (phase.activation)
          value = few_rows::activate(few_rows::round_to<T>(value), phase.activation) *
                  few_rows::round_to<T>(result(of + 1, 1));
        if (phase.residual)
          value =
              few_rows::round_to<T>(value) + half_of<T>(i < kThreads ? first_added : added(r), 0);
        static_cast<T*>(phase.out)[r.place] = from_float<T>(value);
      }
      together();
    }
    next = (row - rows) * phase.stages + of_row;
    if (meets && number + 1 < p.count) arrive(p.counter);
  }
}

}  // namespace flexops::chain
