// Products of one or two rows of x with 4-bit weights, one after another in one kernel, as a decode
// step has them between two attentions. A block of each multiprocessor stays for all of them. Its
// warps stream their chunks of all weights, product (phase) after phase, through rings as
// int4_few_rows' do: weights depend on nothing, so they arrive while blocks wait for each other.
//
// Between phases all blocks meet at a counter in device memory, which only grows: every launch adds
// a multiple of its blocks. The launch is cooperative, so that all blocks are there.
//
// Codes are multiplied as they are, by integer tensor cores, because widening them would take
// longer than they take to arrive: x is taken apart into digits of 8 bits (write_digits).
#pragma once

#include "int4_few_rows/int4_few_rows.cuh"

namespace flexops::chain {

inline constexpr int kMostPhases = 6;
inline constexpr int kChunk = 8, kStages = 2;  // tiles of a stage, and stages of a warp's ring
/// Stages that the next phase's weights may take before this block's x is ready: all that is under
/// way delays what blocks read from each other.
inline constexpr int kEarly = 1;

struct Phase {
  int4::FewParams::Weight weights[few_rows::kMaxWeights];
  const void *x, *norm, *residual;
  void* out;  // [m, width]
  int width, k, count;
  int tiles_k, groups;
  int group_shift;   // log2 of the group size
  int each, longer;  // units that a block has at least, and how many blocks have one more
  int chunks;        // of a row tile
  int pass_rows;     // row tiles whose sums have room
  int activation;
  bool half_scales, has_zeros;
};

struct Params {
  Phase phases[kMostPhases];
  u64* counter;
  int count;
  float eps, offset;
  int x_stride, sums, squares, parts, ring,
      barriers;  // bytes: where shared memory's parts are
};

/// Memory that other blocks of this kernel have written.
FLEXOPS_DEVICE uint2 load_shared_by_all(const uint2* at) {
  uint2 out;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];"
               : "=r"(out.x), "=r"(out.y)
               : "l"(at)
               : "memory");
  return out;
}
FLEXOPS_DEVICE u32 load_shared_by_all(const u16* at) {
  u32 bits;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
  return bits;
}
/// Tells the other blocks that this one's results are written, after a barrier of the block.
FLEXOPS_DEVICE void arrive(u64* counter) {
  FLEXOPS_SM90("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
}
/// Relaxed: an acquire waits for the block's copies of numbers. What it is asked for is read from
/// the second-level cache, behind a barrier of the block.
FLEXOPS_DEVICE u64 arrived(const u64* counter) {
  u64 value = 0;
  FLEXOPS_SM90("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}

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

/// A chunk of a block: number f of all phases'. Each lane plans one of its warp's next 32.
struct Planned {
  static constexpr u32 kNone = ~0u;
  u32 where = kNone;  // phase, row tile, chunk: at most 6, 2^17 and 2^12
  int tile = 0, which = 0;

  FLEXOPS_DEVICE Planned(const Params& p, int number, int block, int blocks) {
#pragma unroll 1
    for (int at = 0; at < p.count; ++at) {
      const Phase& phase = p.phases[at];
      const int count = rows_of(phase, block) * phase.chunks;
      if (number < count) {
        const int row = number / phase.chunks;
        const Tile of_row(phase, row, block, blocks);
        where = static_cast<u32>(at) << 29 | row << 12 | (number - row * phase.chunks);
        tile = of_row.tile, which = of_row.which;
        return;
      }
      number -= count;
    }
  }
};

/// acc[16 x 8] += left[16 x 32] right[32 x 8]: codes times digits. Codes of the last 8 rows are 16
/// times as large as they should be, as they lie in their bytes.
FLEXOPS_DEVICE void mma_codes(int (&acc)[4], u32 low, u32 high, u32 right0, u32 right1) {
  constexpr u32 kMask = 0x0f0f0f0fu;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(low & kMask), "r"(low & ~kMask), "r"(high & kMask), "r"(high & ~kMask), "r"(right0),
        "r"(right1));
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

/// Writes the digits of a vector's 8 numbers, and the unit's step and sum. Vectors 2 i and 2 i + 1
/// have columns 0 to 3 and 8 to 11, and the others, of 16. By whole warps, lane after lane along
/// the columns.
template <bool kSmall>
FLEXOPS_DEVICE void write_digits(u8* row, Unit* unit, const float (&x)[8], int vector) {
  constexpr int kLanes = kSmall ? 4 : 8;
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = most_of(most, x[i]);
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) most = most_of(most, shuffle_xor(most, other));
  const bool some = most > 1e-30f;  // so that the factor is finite
  const float step = some            ? most * (1 / kMostMultiple)
                     : most < 1e-30f ? 0.0f
                                     : most,
              factor = some ? quick_reciprocal(step) : 0.0f;
  u32 digits[2][2];
  int of_first = 0, sum = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 bits[4];
    // 1.5 * 2^23 plus a whole number ends with its bits: conversions are slow. With 128 more, the
    // second byte is the first digit, and the lowest the other one, 128 too large.
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bits[i] = bit_cast<u32>(fmaf(x[4 * half + i], factor, 12582912.0f + 128));
    const u32 low = __byte_perm(bits[0], bits[1], 0x5410),
              high = __byte_perm(bits[2], bits[3], 0x5410);
    digits[0][half] = __byte_perm(low, high, 0x7531);
    digits[1][half] = __byte_perm(low, high, 0x6420) ^ 0x80808080u;
    add_bytes(of_first, digits[0][half]), add_bytes(sum, digits[1][half]);
  }
  sum += 256 * of_first;
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) sum += shuffle_xor(sum, other);
  if (vector % kLanes == 0) *unit = {step, step * static_cast<float>(sum)};
  u8* const to = row + vector / 8 * 128 + vector % 2 * 32 + vector % 8 / 2 * 4;
#pragma unroll
  for (int d = 0; d < 2; ++d) {
    *reinterpret_cast<u32*>(to + 64 * d) = __byte_perm(digits[d][0], digits[d][1], 0x5140);
    *reinterpret_cast<u32*>(to + 64 * d + 16) = __byte_perm(digits[d][0], digits[d][1], 0x7362);
  }
}

/// A lane's part of products. Column g of an mma of codes is a digit, a row of x and a slot: a unit
/// among kSlots, which an accumulator keeps apart.
template <int kRows, bool kSmall>
struct Lane {
  static constexpr int kSlots = 4 / kRows, kUnits = int4::kFewUnits<kChunk, kSmall>;
  int lane, g, t, slot, own_slot, token;
  const u8 *x, *nothing;  // digits; zeros

  FLEXOPS_DEVICE Lane(const u8* rows_of_x, int x_stride, const u8* zeros) {
    lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    slot = g / (2 * kRows), own_slot = t / kRows, token = t % kRows, nothing = zeros + 16 * t;
    x = rows_of_x + g / 2 % kRows * x_stride + g % 2 * 64 + 16 * t;
  }

  /// Adds a chunk's products of 4 bits. `left`: the weight's tiles from here on.
  FLEXOPS_DEVICE void multiply(float (&acc)[2], const u8* stage, const Unit* units,
                               const Phase& phase, int chunk, int left) const {
    const uint4* const words = reinterpret_cast<const uint4*>(stage) + lane;
    const u32* const scales = reinterpret_cast<const u32*>(stage + kChunk * 512) + g;
    const int there = kSmall ? 2 * left : left;
    units += chunk * kUnits * kRows + token;
    int parts[kUnits / kSlots][4] = {};
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
#pragma unroll
      for (int first = 0; first < kUnits; first += kSlots) {
        int (&part)[4] = parts[first / kSlots];
        const int unit = first + j, tile = kSmall ? unit / 2 : unit;
        const u8* const from = slot == j ? x + chunk * kChunk * 128 + tile * 128 : nothing;
        if constexpr (kSmall) {
          const uint2 all = reinterpret_cast<const uint2*>(words + tile * 32)[unit % 2],
                      right = reinterpret_cast<const uint2*>(from)[unit % 2];
          mma_codes(part, all.x, all.y, right.x, right.y);
        } else {
          const uint4 all = words[tile * 32], right = *reinterpret_cast<const uint4*>(from);
          mma_codes(part, all.x, all.y, right.x, right.y);
          mma_codes(part, all.z, all.w, right.z, right.w);
        }
      }
    }
#pragma unroll
    for (int first = 0; first < kUnits; first += kSlots) {
      const int (&part)[4] = parts[first / kSlots];
      const int unit = first + own_slot, group = kSmall ? unit : unit >> (phase.group_shift - 6);
      const u32 read = scales[group * 8], read_zero = scales[kUnits * 8 + group * 8];
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

template <class T, int kRows, int kWarps, bool kSmall>
__global__ void __launch_bounds__(32 * (kWarps + 1), 1)
    products(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kThreads = 32 * (kWarps + 1), kStage = int4::kFewStage<kChunk, kSmall>;
  constexpr int kUnits = int4::kFewUnits<kChunk, kSmall>, kPart = 16 * kRows;
  extern __shared__ uint4 storage[];
  u8* const shared = reinterpret_cast<u8*>(storage);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);

  // The ring, as int4_few_rows' one.
  u8* const ring = shared + p.ring + warp * kStages * kStage;
  const u32 barriers = hopper::shared_address(shared + p.barriers + warp * kStages * 8);
  // The last warp copies nothing: it meets the other blocks. A release waits for the copies of
  // numbers that its own warp has started.
  const bool streams = warp < kWarps, meets = thread == 32 * kWarps;
  if (streams && lane < kStages) hopper::init(barriers + 8 * lane, 1), hopper::fence_init();
  __syncwarp();
  Planned plan(p, warp + lane * kWarps, block, blocks);
  int copied = 0;                 // chunks; lane copied % 32 has the next one's plan
  u32 slots = Planned::kNone;     // of lane i: what is in stage i
  int stage = 0, free = kStages;  // the next one to read; so many before it are free
  const auto fetch = [&](int stage, u32 where) {
    const Phase& phase = p.phases[where >> 29];
    const int row = shuffle(plan.tile, copied);
    const int4::FewParams::Weight& weight = phase.weights[shuffle(plan.which, copied)];
    u8* const to = ring + stage * kStage;
    const int tile = static_cast<int>(where & 0xfff) * kChunk,
              tiles = min(kChunk, phase.tiles_k - tile);
    const auto groups_of = [&](int count) {
      return kSmall ? 2 * count : count >> (phase.group_shift - 6);
    };
    if (lane == 0) {
      hopper::expect(barriers + 8 * stage, tiles * 512);
      hopper::load_bytes(hopper::shared_address(to),
                         weight.packed + static_cast<i64>(row * phase.tiles_k + tile) * 512,
                         tiles * 512, barriers + 8 * stage);
    }
    if (lane < 2 * groups_of(tiles)) {
      const int number = (row * phase.groups + groups_of(tile)) * 16 + lane * 8;
      u8* const own = to + kChunk * 512 + lane * 16;
      async_copy16(own, weight.scales + number, true);
      if (weight.zeros) async_copy16(own + kUnits * 32, weight.zeros + number, true);
    }
    if (++copied % 32 == 0) plan = {p, warp + (copied + lane) * kWarps, block, blocks};
  };
  // Fills free stages up to phase `own`'s end; with what follows, until `early` are under way. All
  // stages are full when a phase's first one is read: async_wait counts those behind it.
  const auto fill = [&](int own, int early) {
    while (free > 0) {
      const u32 where = shuffle(plan.where, copied);
      if (free <= kStages - early && where >> 29 != own) break;
      const int to = stage < free ? stage + kStages - free : stage - free;
      if (where != Planned::kNone) fetch(to, where);
      async_commit();
      if (lane == to) slots = where;
      --free;
    }
  };
  if (streams) fill(0, kEarly);

  u8* const rows_of_x = shared + int4::kZeroBytes;
  Unit* const units = reinterpret_cast<Unit*>(shared + p.sums);
  float* const squares = reinterpret_cast<float*>(shared + p.squares);  // of rows; of warps
  float* const parts = reinterpret_cast<float*>(shared + p.parts);
  if (thread < int4::kZeroBytes / 16) storage[thread] = uint4{0, 0, 0, 0};
  const Lane<kRows, kSmall> own(rows_of_x, p.x_stride, shared);
  float acc[2] = {};
  u32 full = 0;

  wait_for_previous();
  let_next_start();
  u64 target = 0;
  if (meets) {
    const u64 now = arrived(p.counter);
    target = now - now % static_cast<u32>(blocks);
  }

#pragma unroll 1
  for (int number = 0; number < p.count; ++number) {
    const Phase& phase = p.phases[number];
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
    if (phase.norm) first_gain = gain_of(thread);
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
    if (number > 0) {
      if (meets) {
        target += blocks;
        while (arrived(p.counter) < target) {}
      }
      __syncthreads();
    }
    u32 first_added = added(first);
    // Rows of x, multiplied by the norm's weights; the sums of their units, and of their squares.
#pragma unroll 1
    for (int row = 0; row < kRows; ++row) {
      const T* const from = static_cast<const T*>(phase.x) + static_cast<i64>(row) * phase.k;
      float square = 0.0f;
      constexpr int kAtOnce = 4;
#pragma unroll 1
      for (int first = thread; first < per_row; first += kAtOnce * kThreads) {
        uint4 vectors[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int column = column_of(first + j * kThreads);
          vectors[j] = {};
          if (column >= phase.k) continue;
          const uint2 low = load_shared_by_all(reinterpret_cast<const uint2*>(from + column)),
                      high = load_shared_by_all(reinterpret_cast<const uint2*>(from + column) + 2);
          vectors[j] = {low.x, low.y, high.x, high.y};
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = first + j * kThreads;
          if (i >= per_row) break;  // the whole warp
          uint4 gain = first_gain;
          if (phase.norm && i >= kThreads) gain = gain_of(i);
          u32 words[4] = {vectors[j].x, vectors[j].y, vectors[j].z, vectors[j].w};
          const u32 gains[4] = {gain.x, gain.y, gain.z, gain.w};
          u8* const to = rows_of_x + row * p.x_stride;
          float numbers[8];
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            numbers[n] = half_of<T>(words[n / 2], n % 2);
            if (phase.norm) {
              square += numbers[n] * numbers[n];
              numbers[n] *= half_of<T>(gains[n / 2], n % 2) + p.offset;
            }
          }
          write_digits<kSmall>(to, units + i / (kSmall ? 4 : 8) * kRows + row, numbers, i);
        }
      }
      if (phase.norm) {
        square = warp_reduce(square, Sum());
        if (lane == 0) squares[8 + row * (kWarps + 1) + warp] = square;
      }
    }
    if (streams) fill(number, kStages);
    __syncthreads();
    if (phase.norm && !streams) {  // read behind a further barrier
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float of_warp = lane <= kWarps ? squares[8 + row * (kWarps + 1) + lane] : 0.0f;
        squares[row] = warp_reduce(of_warp, Sum());
      }
    }
    for (int first_row = 0; first_row < rows; first_row += phase.pass_rows) {
      const int end_row = min(first_row + phase.pass_rows, rows), results = results_of(first_row);
      if (first_row > 0) first = result_of(first_row, thread), first_added = added(first);
#pragma unroll 1
      while (streams) {
        const u32 now = shuffle(slots, stage);
        if (now >> 12 >= (static_cast<u32>(number) << 17 | end_row)) break;
        const int row = static_cast<int>(now >> 12 & 0x1ffff),
                  chunk = static_cast<int>(now & 0xfff);
        hopper::wait(barriers + 8 * stage, full);
        async_wait<kStages - 1>();
        __syncwarp();
        const u8* const filled = ring + stage * kStage;
        own.multiply(acc, filled, units, phase, chunk, phase.tiles_k - chunk * kChunk);
        __syncwarp();  // as in int4_few_rows
        if (++stage == kStages) stage = 0, full ^= 1;
        const int before = free++;
        fill(number, kEarly);
        if (free > before) async_commit();  // a group for each stage that is read
        if (chunk + kWarps < phase.chunks) continue;
        own.store(parts + ((row - first_row) * sharing + chunk % kWarps) * kPart, acc);
      }
      __syncthreads();
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
      __syncthreads();
    }
    if (meets && number + 1 < p.count) arrive(p.counter);
  }
}

}  // namespace flexops::chain
