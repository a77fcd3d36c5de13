// Products of matrices of one shape on Hopper (sm_90a), float16, of which results that are known to
// be symmetric are computed up to their diagonal:
//
//   out[i] = alpha op(a[i]) op(b[i]) + beta added[i] + diagonal I
//
// A cluster of two blocks is persistent: it takes every so many-th tile of 256 x 256 results, each
// block 128 rows of it. A block's producer thread loads its rows of A and half of the tile's
// columns of B, which goes to both blocks, into a ring of kStages stages of 64 summands; a stage is
// empty when the consumers of both blocks have read it. Two consumer warpgroups have 64 rows each.
//
//   Shared memory: kStages times A (16 KiB) and B (32 KiB); barriers "full" and "empty" of each.
//   Registers of a consumer: the tile's 64 x 256 sums in float32, 128 registers.
//
// Of a symmetric result, tiles below the diagonal are also stored transposed. Those on the diagonal
// are computed and stored whole: they are symmetric up to rounding.
#pragma once

#include "common/fragments.cuh"
#include "common/wgmma.cuh"

namespace flexops::muon {

/// Which dimension of the operands is summed over: kRows: out = a b^T. kMixed: a b. kColumns:
/// a^T b.
enum Form : int { kRows, kMixed, kColumns };

struct Product {
  hopper::TensorMap a, b;  // boxes of 64 columns; of 128 rows where columns are summed over, or 64
  f16* out;                // [matrices, m, n]
  f16* low;                // as out, or null: what results were rounded off
  const f16* added;        // as out, or null
  float alpha, beta, diagonal;
  int m, n, k;
  int tiles_m, tiles_n;  // tiles of 256 x 256; of a symmetric result only tiles_m counts
  int tiles;             // of all matrices
  bool symmetric;
};

template <int kForm>
struct Shape {
  static constexpr int kM = 128, kN = 256, kK = 64, kStages = 4, kGroups = 2, kBlocks = 2;
  using A = hopper::Tile<kForm == kColumns ? kK : kM, kForm == kColumns ? kM : kK>;
  using B = hopper::Tile<kForm == kRows ? kN : kK, kForm == kRows ? kK : kN>;
  static constexpr int kStageBytes = A::kBytes + B::kBytes;
  static constexpr int kBarriers = kStages * kStageBytes, kBytes = kBarriers + 16 * kStages;
  static constexpr int kThreads = (kGroups + 1) * hopper::kWarpgroup;
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");

  u32 memory;
  FLEXOPS_DEVICE explicit Shape(u32 address) : memory(address) {}
  FLEXOPS_DEVICE hopper::Ring<kStages> ring() const { return {memory + kBarriers}; }
  FLEXOPS_DEVICE u32 a(int stage) const { return memory + stage * kStageBytes; }
  FLEXOPS_DEVICE u32 b(int stage) const { return a(stage) + A::kBytes; }
};

/// A tile of this cluster's: its matrix, and where its results begin.
struct Place {
  int matrix, row, column;
};
FLEXOPS_DEVICE Place place_of(const Product& p, int tile) {
  if (p.symmetric) {
    const int of_matrix = p.tiles_m * (p.tiles_m + 1) / 2, place = tile % of_matrix;
    int row = static_cast<int>((sqrtf(8.0f * static_cast<float>(place) + 1.0f) - 1.0f) / 2.0f);
    while (row * (row + 1) / 2 > place) --row;
    while ((row + 1) * (row + 2) / 2 <= place) ++row;
    return {tile / of_matrix, row * 256, (place - row * (row + 1) / 2) * 256};
  }
  // The shorter dimension first: what is under way together shares more operands.
  const int of_matrix = p.tiles_m * p.tiles_n, place = tile % of_matrix;
  const bool rows_first = p.tiles_m < p.tiles_n;
  const int row = rows_first ? place % p.tiles_m : place / p.tiles_n;
  const int column = rows_first ? place / p.tiles_m : place % p.tiles_n;
  return {tile / of_matrix, row * 256, column * 256};
}

/// By one thread.
template <int kForm>
FLEXOPS_DEVICE void produce(const Product& p, const Shape<kForm>& shape, int rank) {
  using namespace hopper;
  using A = typename Shape<kForm>::A;
  using B = typename Shape<kForm>::B;
  constexpr u16 kBoth = 3;
  const int step = static_cast<int>(gridDim.x) / 2;
  RingState<Shape<kForm>::kStages> at;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) / 2; tile < p.tiles; tile += step) {
    const Place place = place_of(p, tile);
    const int row = place.row + 128 * rank, column = place.column + 128 * rank;
#pragma unroll 1
    for (int k = 0; k < p.k; k += 64, at.next()) {
      const u32 full = shape.ring().fill(at, Shape<kForm>::kStageBytes);
      const u32 a = shape.a(at.stage), b = shape.b(at.stage) + rank * (B::kBytes / 2);
      if constexpr (kForm == kColumns) {
#pragma unroll
        for (int panel = 0; panel < 2; ++panel)
          load_tile(a + panel * A::kPanelBytes, p.a, full, row + 64 * panel, k, place.matrix, 0);
      } else {
        load_tile(a, p.a, full, k, row, place.matrix, 0);
      }
      if constexpr (kForm == kRows) {
        multicast_tile(b, p.b, full, k, column, place.matrix, kBoth);
      } else {
#pragma unroll
        for (int panel = 0; panel < 2; ++panel)
          multicast_tile(b + panel * B::kPanelBytes, p.b, full, column + 64 * panel, k,
                         place.matrix, kBoth);
      }
    }
  }
}

/// An 8 x 8 matrix of 16-bit elements, of which a lane has two of row lane / 4, transposed.
FLEXOPS_DEVICE u32 transposed(u32 word) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}

/// Stores a warp's 16 x 256 sums from (row, column) on; `mirrored` also transposed.
FLEXOPS_DEVICE void store_sums(const Product& p, f16* out, const float (&acc)[128], int row,
                               int column, bool mirrored) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
  // By rows.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + group + 8 * half;
    f16* const to = out + static_cast<i64>(at) * p.n + column;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack2<f16>(acc[4 * (j + i) + 2 * half], acc[4 * (j + i) + 2 * half + 1]);
      store_columns(to + 8 * j, words, p.n - column - 8 * j, at < p.m);
    }
  }
  if (!mirrored) return;
  // By columns: two columns of eight at a time, 16 bytes of a column in a lane.
  const int first = row + 8 * (quad % 2);
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = 4 * (j + i / 2) + 2 * (i % 2);
      words[i] = transposed(pack2<f16>(acc[from], acc[from + 1]));
    }
    transpose_quad(words);
    const int at = column + 8 * (j + quad / 2) + group;
    if (at < p.n && first < p.m)
      store<Cache::normal>(reinterpret_cast<uint4*>(out + static_cast<i64>(at) * p.n + first),
                           uint4{words[0], words[1], words[2], words[3]});
  }
}

/// Scales a warp's 16 x 256 sums from (row, column) on, adds what is added, and stores them;
/// `mirrored` also transposed.
FLEXOPS_DEVICE void store_tile(const Product& p, float (&acc)[128], int matrix, int row, int column,
                               bool mirrored) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
  const bool diagonal = p.diagonal != 0.0f && row < column + 256 && column < row + 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + group + 8 * half, left = p.n - column;
    const bool valid = at < p.m;
    const f16* const from =
        p.added + (static_cast<i64>(matrix) * p.m + at) * p.n + column + 8 * quad;
#pragma unroll
    for (int begin = 0; begin < 8; begin += 4) {
      uint4 added[4] = {};
      if (p.added) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (valid && 32 * (begin + j) + 8 * quad < left)
            added[j] = *reinterpret_cast<const uint4*>(from + 32 * (begin + j));
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 words[4] = {added[j].x, added[j].y, added[j].z, added[j].w};
        if (p.added) transpose_quad(words);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& sum = acc[4 * (4 * (begin + j) + i / 2) + 2 * half + i % 2];
          sum *= p.alpha;
          if (p.added) sum = fmaf(p.beta, half_of<f16>(words[i / 2], i % 2), sum);
        }
      }
    }
    if (diagonal) {
      const int own = at - column - 2 * quad;  // 8 j + e on the diagonal
#pragma unroll
      for (int j = 0; j < 32; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (own == 8 * j + e) acc[4 * j + 2 * half + e] += p.diagonal;
      }
    }
  }
  // Store, then what the results were rounded off.
  f16* to = p.out;
#pragma unroll 1
  while (true) {
    store_sums(p, to + static_cast<i64>(matrix) * p.m * p.n, acc, row, column, mirrored);
    if (!p.low || to == p.low) return;
    to = p.low;
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
      const u32 word = pack2<f16>(acc[i], acc[i + 1]);
      acc[i] -= half_of<f16>(word, 0), acc[i + 1] -= half_of<f16>(word, 1);
    }
  }
}

template <int kForm>
FLEXOPS_DEVICE void consume(const Product& p, const Shape<kForm>& shape, int group, int rank) {
  using namespace hopper;
  using A = typename Shape<kForm>::A;
  using B = typename Shape<kForm>::B;
  const u32 lane = threadIdx.x % 32;
  const int step = static_cast<int>(gridDim.x) / 2;
  // The address of a cluster's second block has its rank above what a descriptor holds.
  const Shape<kForm> operands(shape.memory & 0x3ffff);
  RingState<Shape<kForm>::kStages> at;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) / 2; tile < p.tiles; tile += step) {
    u32 before = 0;  // the stage that is read by what is under way
    float acc[128] = {};
    pin(acc);
#pragma unroll 1
    for (int k = 0; k < p.k; k += 64, at.next()) {
      shape.ring().wait(at);
      const u32 a = operands.a(at.stage), b = operands.b(at.stage);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const u64 left =
            kForm == kColumns ? A::columns(a, 64 * group, s) : A::rows(a, 64 * group, s);
        const u64 right = kForm == kRows ? B::rows(b, 0, s) : B::columns(b, 0, s);
        wgmma<f16, kForm == kColumns, kForm != kRows>(acc, left, right, true);
      }
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        if (lane < 2) arrive_at(before, lane);
      }
      before = shape.ring().empty(at.stage);
    }
    wgmma_wait<0>(acc);
    if (lane < 2) arrive_at(before, lane);
    const Place place = place_of(p, tile);
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    store_tile(p, acc, place.matrix, place.row + 128 * rank + 64 * group + 16 * warp, place.column,
               p.symmetric && place.column < place.row);
  }
}

template <int kForm>
__global__ void __launch_bounds__(384, 1) product_hopper(const FLEXOPS_GRID_CONSTANT Product p) {
  __align__(1024) extern __shared__ u8 memory[];
  const Shape<kForm> shape(shuffle(hopper::shared_address(memory), 0));  // a uniform register
  const int rank = hopper::cluster_rank();
  // Set up the barriers.
  if (threadIdx.x == 0) {
    hopper::prefetch(p.a), hopper::prefetch(p.b);
    shape.ring().init(4 * Shape<kForm>::kGroups * Shape<kForm>::kBlocks);
    hopper::fence_init(), hopper::fence_async();
  }
  __syncthreads();
  hopper::cluster_sync();
  // The producer loads; the consumers compute.
  const int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::leave_registers<40>();
    if (threadIdx.x == 0) produce<kForm>(p, shape, rank);
    __syncwarp();
  } else {
    hopper::take_registers<232>();
    consume<kForm>(p, shape, warpgroup - 1, rank);
  }
  // Neither block ends while the other one may write to its memory.
  hopper::cluster_sync();
}

}  // namespace flexops::muon
