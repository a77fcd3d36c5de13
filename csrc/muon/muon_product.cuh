// Products of matrices of one shape on Hopper (sm_90a), float16, whose results are known to be
// symmetric and are computed up to their diagonal:
//
//   out[i] = alpha a[i] b[i]^T + beta added[i] + diagonal I, or with kColumns alpha a[i]^T b[i]
//
// A cluster of two blocks is persistent: it takes every so many-th tile of 256 x 256 results, each
// block 128 rows of it. A block's producer thread loads its rows of A and half of the tile's
// columns of B, which goes to both blocks, into a ring of kStages stages of 64 summands; a stage is
// empty when the consumers of both blocks have read it. Two consumer warpgroups have 64 rows each.
// The copy engine brings them what is added and takes their results, 64 x 64 at a time, while the
// next tile is under way.
//
//   Shared memory: kStages times A (16 KiB) and B (32 KiB); two buffers of 8 KiB of each consumer;
//   barriers "full" and "empty" of each stage, and one of each buffer.
//   Registers of a consumer: the tile's 64 x 256 sums in float32, 128 registers.
//
// Results below the diagonal are also stored transposed. On it a consumer computes 64, 128, 192 or
// 256 columns, up to the 64 x 64 results that the diagonal divides: these are symmetric up to
// rounding.
#pragma once

#include "common/elements.cuh"
#include "common/wgmma.cuh"

namespace flexops::muon {

struct Product {
  hopper::TensorMap a, b;  // boxes of 64 columns; of 128 rows where columns are summed over, or 64
  hopper::TensorMap out, added;  // [matrices, n, n], boxes of 64 x 64
  float alpha, beta, diagonal;
  int n, k;              // results are n x n, sums of k products
  int of_matrix, tiles;  // tiles of 256 x 256 up to the diagonal; and of all matrices
  int low;               // the matrix of `out` that has what the first one's were rounded off, or 0
  bool adds;
};

using Buffer = hopper::Tile<64, 64>;

template <bool kColumns>
struct Shape {
  static constexpr int kM = 128, kN = 256, kK = 64, kStages = 4, kOut = 2, kGroups = 2, kBlocks = 2;
  using A = hopper::Tile<kColumns ? kK : kM, kColumns ? kM : kK>;
  using B = hopper::Tile<!kColumns ? kN : kK, !kColumns ? kK : kN>;
  static constexpr int kStageBytes = A::kBytes + B::kBytes;
  static constexpr int kBuffers = kStages * kStageBytes,
                       kBarriers = kBuffers + kOut * kGroups * Buffer::kBytes,
                       kBytes = kBarriers + 16 * kStages + 8 * kOut * kGroups;
  static constexpr int kThreads = (kGroups + 1) * hopper::kWarpgroup;
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");

  u32 memory;
  FLEXOPS_DEVICE explicit Shape(u32 address) : memory(address) {}
  FLEXOPS_DEVICE hopper::Ring<kStages> ring() const { return {memory + kBarriers}; }
  FLEXOPS_DEVICE u32 a(int stage) const { return memory + stage * kStageBytes; }
  FLEXOPS_DEVICE u32 b(int stage) const { return a(stage) + A::kBytes; }
  FLEXOPS_DEVICE u32 buffer(int group, int i) const {
    return memory + kBuffers + (kOut * group + i) * Buffer::kBytes;
  }
  FLEXOPS_DEVICE u32 filled(int group, int i) const {
    return memory + kBarriers + 16 * kStages + 8 * (kOut * group + i);
  }
};

/// A tile of a cluster: its matrix, and where its results begin.
struct Place {
  int matrix, row, column;

  FLEXOPS_DEVICE Place(const Product& p, int tile) {
    const int place = tile % p.of_matrix;
    int i = static_cast<int>((sqrtf(8.0f * static_cast<float>(place) + 1.0f) - 1.0f) / 2.0f);
    while (i * (i + 1) / 2 > place) --i;
    while ((i + 1) * (i + 2) / 2 <= place) ++i;
    matrix = tile / p.of_matrix, row = 256 * i, column = 256 * (place - i * (i + 1) / 2);
  }
};

/// By one thread.
template <bool kColumns>
FLEXOPS_DEVICE void produce(const Product& p, const Shape<kColumns>& shape, int rank) {
  using namespace hopper;
  using A = typename Shape<kColumns>::A;
  using B = typename Shape<kColumns>::B;
  constexpr u16 kBoth = 3;
  const int step = static_cast<int>(gridDim.x) / 2;
  RingState<Shape<kColumns>::kStages> at;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) / 2; tile < p.tiles; tile += step) {
    const Place place(p, tile);
    const int row = place.row + 128 * rank, column = place.column + 128 * rank;
#pragma unroll 1
    for (int k = 0; k < p.k; k += 64, at.next()) {
      const u32 full = shape.ring().fill(at, Shape<kColumns>::kStageBytes);
      const u32 a = shape.a(at.stage), b = shape.b(at.stage) + rank * (B::kBytes / 2);
      if constexpr (kColumns) {
#pragma unroll
        for (int panel = 0; panel < 2; ++panel)
          load_tile(a + panel * A::kPanelBytes, p.a, full, row + 64 * panel, k, place.matrix, 0);
      } else {
        load_tile(a, p.a, full, k, row, place.matrix, 0);
      }
      if constexpr (!kColumns) {
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

/// 64 x 256 sums of a consumer, from (row, column) on, and its buffers.
template <bool kColumns>
struct Results {
  static constexpr int kOut = Shape<kColumns>::kOut;
  const Product& p;
  const Shape<kColumns>& shape;
  const int group, warp = static_cast<int>(threadIdx.x) % hopper::kWarpgroup / 32;
  const bool leads = threadIdx.x % hopper::kWarpgroup == 0;
  int turn = 0;  // the buffer that is stored from next
  u32 phase = 0;
  int matrix = 0, row = 0, column = 0;

  FLEXOPS_DEVICE Results(const Product& product, const Shape<kColumns>& shared, int of)
      : p(product), shape(shared), group(of) {}

  FLEXOPS_DEVICE void sync() const { barrier(1 + group, hopper::kWarpgroup); }

  /// By the thread that leads: 64 columns of what is added, to buffer panel % kOut.
  FLEXOPS_DEVICE void load(int panel) const {
    const u32 filled = shape.filled(group, panel % kOut);
    hopper::expect(filled, Buffer::kBytes);
    hopper::load_tile(shape.buffer(group, panel % kOut), p.added, filled, column + 64 * panel, row,
                      matrix, 0);
  }
  /// While the sums are computed.
  FLEXOPS_DEVICE void begin() const {
    if (p.adds && leads) {
      hopper::stores_read<0>();
#pragma unroll
      for (int panel = 0; panel < kOut; ++panel) load(panel);
    }
    __syncwarp();
  }

  /// alpha sums + beta added + diagonal I.
  FLEXOPS_DEVICE void scale(float (&acc)[128]) {
#pragma unroll
    for (int panel = 0; panel < 4; ++panel) {
      if (p.adds) hopper::wait(shape.filled(group, panel % kOut), phase ^ panel / kOut);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 words[4] = {};
        if (p.adds) Buffer::load_left(words, shape.buffer(group, panel % kOut), 16 * warp, 16 * i);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& sum = acc[32 * panel + 8 * i + e];
          sum *= p.alpha;
          if (p.adds) sum = fmaf(p.beta, half_of<f16>(words[e / 2], e % 2), sum);
        }
      }
      if (p.adds && panel + kOut < 4) {
        sync();
        if (leads) load(panel + kOut);
        __syncwarp();
      }
    }
    phase ^= kOut == 4;
    if (p.diagonal == 0.0f || row >= column + 256 || column >= row + 64) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 16 * warp + lane / 4 + 8 * half - column - 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < 32; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (own == 8 * j + e) acc[4 * j + 2 * half + e] += p.diagonal;  // 8 j + e is on it
      }
    }
  }

  /// 64 columns through the next buffer, or as rows.
  FLEXOPS_DEVICE void store(const u32 (&words)[16], int panel, bool transposed, int to) {
    const u32 buffer = shape.buffer(group, turn);
    turn = (turn + 1) % kOut;
    if (leads) hopper::stores_read<kOut - 1>();
    sync();
    if (transposed) {
      Buffer::store_transposed(buffer, words, 16 * warp);
    } else {
      Buffer::store_matrices(buffer, 16 * warp, words);
    }
    hopper::fence_async();
    sync();
    const int at = column + 64 * panel;
    if (leads)
      hopper::store_tile(p.out, buffer, transposed ? row : at, transposed ? at : row, to, 0);
    __syncwarp();
  }

  /// What is below the diagonal also transposed; then what the results were rounded off.
  FLEXOPS_DEVICE void store(float (&acc)[128]) {
    int to = matrix;
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int panel = 0; panel < 4; ++panel) {
        u32 words[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float &one = acc[32 * panel + 2 * i], &other = acc[32 * panel + 2 * i + 1];
          words[i] = pack2<f16>(one, other);
          one -= half_of<f16>(words[i], 0), other -= half_of<f16>(words[i], 1);
        }
        const int at = column + 64 * panel;
        if (at <= row) store(words, panel, false, to);
        if (at < row) store(words, panel, true, to);
      }
      if (!p.low || to != matrix) return;
      to += p.low;
    }
  }
};

/// The first kWide columns of a tile's sums.
template <int kWide, bool kColumns>
FLEXOPS_DEVICE void multiply(const Product& p, const Shape<kColumns>& shape,
                             const Results<kColumns>& results,
                             hopper::RingState<Shape<kColumns>::kStages>& at, float (&acc)[128]) {
  using namespace hopper;
  using A = typename Shape<kColumns>::A;
  using B = typename Shape<kColumns>::B;
  const u32 lane = threadIdx.x % 32;
  // The address of a cluster's second block has its rank above what a descriptor holds.
  const Shape<kColumns> operands(shape.memory & 0x3ffff);
  auto& part = reinterpret_cast<float (&)[kWide / 2]>(acc);
  u32 before = 0;  // the stage that is read by what is under way
  pin(acc);
#pragma unroll 1
  for (int k = 0; k < p.k; k += 64, at.next()) {
    shape.ring().wait(at);
    const u32 a = operands.a(at.stage), b = operands.b(at.stage);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int row = 64 * results.group;
      const u64 left = kColumns ? A::columns(a, row, s) : A::rows(a, row, s);
      const u64 right = !kColumns ? B::rows(b, 0, s) : B::columns(b, 0, s);
      wgmma<f16, kColumns, kColumns>(part, left, right, true);
    }
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      if (lane < 2) arrive_at(before, lane);
    } else {
      results.begin();
    }
    before = shape.ring().empty(at.stage);
  }
  wgmma_wait<0>(acc);
  if (lane < 2) arrive_at(before, lane);
}

template <bool kColumns>
FLEXOPS_DEVICE void consume(const Product& p, const Shape<kColumns>& shape, int group, int rank) {
  const int step = static_cast<int>(gridDim.x) / 2;
  hopper::RingState<Shape<kColumns>::kStages> at;
  Results<kColumns> results(p, shape, group);
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x) / 2; tile < p.tiles; tile += step) {
    const Place place(p, tile);
    results.matrix = place.matrix, results.column = place.column;
    results.row = place.row + 128 * rank + 64 * group;
    float acc[128] = {};
    switch (results.row - results.column) {
      case 0:
        multiply<64>(p, shape, results, at, acc);
        break;
      case 64:
        multiply<128>(p, shape, results, at, acc);
        break;
      case 128:
        multiply<192>(p, shape, results, at, acc);
        break;
      default:
        multiply<256>(p, shape, results, at, acc);
    }
    results.scale(acc);
    results.store(acc);
  }
  if (results.leads) hopper::stores_read<0>();
}

template <bool kColumns>
__global__ void __launch_bounds__(384, 1) product_hopper(const FLEXOPS_GRID_CONSTANT Product p) {
  __align__(1024) extern __shared__ u8 memory[];
  const Shape<kColumns> shape(shuffle(hopper::shared_address(memory), 0));  // a uniform register
  const int rank = hopper::cluster_rank();
  // Set up the barriers.
  if (threadIdx.x == 0) {
    hopper::prefetch(p.a), hopper::prefetch(p.b), hopper::prefetch(p.out);
    shape.ring().init(4 * Shape<kColumns>::kGroups * Shape<kColumns>::kBlocks);
#pragma unroll
    for (int i = 0; i < Shape<kColumns>::kOut * Shape<kColumns>::kGroups; ++i)
      hopper::init(shape.filled(0, i), 1);
    hopper::fence_init(), hopper::fence_async();
  }
  __syncthreads();
  hopper::cluster_sync();
  // The producer loads; the consumers compute.
  const int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::leave_registers<40>();
    if (threadIdx.x == 0) produce<kColumns>(p, shape, rank);
    __syncwarp();
  } else {
    hopper::take_registers<232>();
    consume<kColumns>(p, shape, warpgroup - 1, rank);
  }
  // Neither block ends while the other one may write to its memory.
  hopper::cluster_sync();
}

}  // namespace flexops::muon
