// Grouped products on Hopper (sm_90a).
//
// A block of threads is one per multiprocessor and stays there (persistent): it takes every
// gridDim-th tile of kM x kN results. A producer thread loads operands by the copy engine into a
// ring of kStages stages of 64 summands; two consumer warpgroups have 64 rows of the tile each. The
// producer is up to kStages stages ahead, so that the next tile's operands arrive while results are
// stored.
//
//   Shared memory: kStages times A (16 KiB) and B (32 KiB); barriers "full" and "empty" of each.
//   Registers of a consumer: the tile's 64 x 256 sums in float32, 128 registers.
//
// kOuter sums over rows, whose number is no multiple of 64: in an expert's last stage consumers
// overwrite the rows of the next expert by zeros before they multiply.
//
// With a gate B is 128 rows of the gate's weight and the same 128 of up's.
#pragma once

#include "common/async.cuh"
#include "common/wgmma.cuh"
#include "grouped_linear/grouped_linear.cuh"

namespace flexops::grouped {

namespace detail {
template <bool kFirst, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};
}  // namespace detail

struct HopperParams {
  const void* gathered;  // the operand whose rows are gathered, or null
  hopper::TensorMap a,
      b;  // boxes of 64 columns; of 128 rows where columns are summed over, else 64
  Product product;
};

template <int kForm, int kGate, int kGather>
struct HopperShape {
  static constexpr bool kGated = kGate != kNoGate;
  static constexpr int kM = 128, kN = 256, kK = 64, kStages = 4, kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * hopper::kWarpgroup;
  static constexpr int kProducerRegisters = kGather ? 72 : 40,
                       kConsumerRegisters = kGather ? 216 : 232;
  /// Stages whose gathered rows are under way.
  static constexpr int kLag = 2;
  static constexpr int kProducers = kGather ? 1 + hopper::kWarpgroup : 1;  // that arrive
  using A = hopper::Tile<kForm == kOuter ? kK : kM, kForm == kOuter ? kM : kK>;
  using B = hopper::Tile<kForm == kByRows ? kN : kK, kForm == kByRows ? kK : kN>;
  static constexpr int kStageBytes = A::kBytes + B::kBytes;
  static constexpr int kBarriers = kStages * kStageBytes;
  static constexpr int kBytes = kBarriers + 16 * kStages;
  static constexpr int kColumns = kGated ? kN / 2 : kN;  // of a tile of results
  static_assert(kBytes <= 227 * 1024, "a multiprocessor's shared memory");
  static_assert(!kGated || kForm == kByRows, "gate and up are rows of the weight");

  u32 memory;
  FLEXOPS_DEVICE explicit HopperShape(u32 address) : memory(address) {}
  FLEXOPS_DEVICE hopper::Ring<kStages> ring() const { return {memory + kBarriers}; }
  FLEXOPS_DEVICE u32 a(int stage) const { return memory + stage * kStageBytes; }
  FLEXOPS_DEVICE u32 b(int stage) const { return a(stage) + A::kBytes; }
};

/// The copy engine's loads of a stage: of both operands, or of the one that is not gathered.
template <int kForm, int kGather, class Shape>
FLEXOPS_DEVICE void load_stage(const HopperParams& p, const Shape& shape, u32 full, int stage,
                               int expert, int begin, int row, int column, int k) {
  using namespace hopper;
  using A = typename Shape::A;
  using B = typename Shape::B;
  const u32 a = shape.a(stage), b = shape.b(stage);
  if constexpr (kGather == kGatherA) {
  } else if constexpr (kForm == kOuter) {
#pragma unroll
    for (int panel = 0; panel < A::kPanels; ++panel)
      load_tile(a + panel * A::kPanelBytes, p.a, full, row + 64 * panel, begin + k, 0, 0);
  } else {
    load_tile(a, p.a, full, k, row, 0, 0);
  }
  if constexpr (kGather == kGatherB) {
  } else if constexpr (kForm == kByRows) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_tile(b + half * B::kBytes / 2, p.b, full, k,
                column + half * (Shape::kGated ? p.product.n / 2 : Shape::kN / 2), expert, 0);
  } else {
#pragma unroll
    for (int panel = 0; panel < B::kPanels; ++panel)
      load_tile(b + panel * B::kPanelBytes, p.b, full, column + 64 * panel,
                kForm == kOuter ? begin + k : k, kForm == kOuter ? 0 : expert, 0);
  }
}

/// By one thread.
template <int kForm, class Shape>
FLEXOPS_DEVICE void produce(const HopperParams& p, const Shape& shape) {
  hopper::RingState<Shape::kStages> at;
  each_tile<kForm, Shape>(p.product,
                          [&](int expert, int begin, int, int row, int column, int stages) {
#pragma unroll 1
                            for (int i = 0; i < stages; ++i, at.next()) {
                              const u32 full = shape.ring().fill(at, Shape::kStageBytes);
                              load_stage<kForm, kNoGather>(p, shape, full, at.stage, expert, begin,
                                                           row, column, i * Shape::kK);
                            }
                          });
}

/// By a warpgroup: thread 0 starts the copy engine's loads, and all gather the other operand's rows
/// by cp.async, eight threads a row of 128 bytes. What a thread has copied is complete kLag stages
/// later: then it arrives.
template <class T, int kForm, int kGather, class Shape>
FLEXOPS_DEVICE void produce_gathered(const HopperParams& p, const Shape& shape) {
  using namespace hopper;
  using A = typename Shape::A;
  using B = typename Shape::B;
  constexpr bool kOfA = kGather == kGatherA;
  using Gathered = typename detail::Either<kOfA, A, B>::type;
  constexpr int kRows = Gathered::kRows / 16, kPanels = Gathered::kPanels;  // of a thread
  const Product& product = p.product;
  const int thread = static_cast<int>(threadIdx.x), vector = thread % 8, first = thread / 8;
  // Row numbers differ by 16, so that the swizzle is the same for all of a thread's.
  const u32 place = Gathered::place(kOfA ? 0 : A::kBytes, first, vector);
  const int width = kForm != kOuter ? product.k : kOfA ? product.m : product.n;
  const T* const from = static_cast<const T*>(p.gathered) + 8 * vector;
  RingState<Shape::kStages> at, done;
  int under_way = 0;
  const auto finish = [&] {
    fence_async();
    arrive(shape.ring().full(done.stage));
    done.next(), --under_way;
  };
  each_tile<kForm, Shape>(product, [&](int expert, int begin, int end, int row, int column,
                                       int stages) {
    i64 rows[kRows];
    bool valid[kRows];
    const auto find = [&](int from_row) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int slot = from_row + first + 16 * i;
        valid[i] = slot < end;
        rows[i] =
            valid[i] ? static_cast<i64>(__ldg(product.order + slot) / product.choices) * width : 0;
      }
    };
    if (kForm != kOuter && stages > 0) find(row);
#pragma unroll 1
    for (int i = 0; i < stages; ++i, at.next()) {
      const int k = i * Shape::kK;
      if (kForm == kOuter) find(begin + k);
      shape.ring().acquire(at);
      if (thread == 0) {
        const u32 full = shape.ring().full(at.stage);
        expect(full, kOfA ? B::kBytes : A::kBytes);
        load_stage<kForm, kGather>(p, shape, full, at.stage, expert, begin, row, column, k);
      }
      const int start = kForm != kOuter ? k : kOfA ? row : column;
      const u32 to = shape.a(at.stage) + place;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const bool inside = start + 64 * panel + 8 * vector < width;
#pragma unroll
        for (int n = 0; n < kRows; ++n)
          async_copy16(to + panel * Gathered::kPanelBytes + n * 16 * Gathered::kRowBytes,
                       from + rows[n] + (inside ? start + 64 * panel : 0), valid[n] && inside);
      }
      async_commit();
      if (++under_way > Shape::kLag) async_wait(Shape::kLag), finish();
    }
  });
  async_wait(0);
  while (under_way > 0) finish();
}

/// Zeros in the rows from `rows` on of panels that are 64 rows high.
template <int kPanels>
FLEXOPS_DEVICE void clear_rows(u32 panels, int rows) {
  const int count = (64 - rows) * 8;  // vectors of a panel
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    for (int i = threadIdx.x % hopper::kWarpgroup; i < count; i += hopper::kWarpgroup)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(panels + panel * 8192 +
                                                                    rows * 128 + i * 16),
                   "r"(0)
                   : "memory");
  }
}

template <class T, int kForm, int kGate, class Shape>
FLEXOPS_DEVICE void consume(const HopperParams& p, const Shape& shape, int group) {
  using namespace hopper;
  using A = typename Shape::A;
  using B = typename Shape::B;
  const bool leader = threadIdx.x % 32 == 0;  // arrives for its warp
  RingState<Shape::kStages> at;
  each_tile<kForm, Shape>(p.product, [&](int expert, int begin, int end, int row, int column,
                                         int stages) {
    u32 before = 0;  // the stage that is read by what is under way
    float acc[128] = {};
    pin(acc);
#pragma unroll 1
    for (int i = 0; i < stages; ++i, at.next()) {
      shape.ring().wait(at);
      const u32 a = shape.a(at.stage), b = shape.b(at.stage);
      if constexpr (kForm == kOuter) {
        const int rows = end - begin - i * Shape::kK;
        if (rows < Shape::kK) {
          clear_rows<1>(a + group * A::kPanelBytes, rows);
          clear_rows<2>(b + group * 2 * B::kPanelBytes, rows);
          fence_async();
          barrier(1, Shape::kGroups * kWarpgroup);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < Shape::kK / 16; ++step) {
        const u64 left =
            kForm == kOuter ? A::columns(a, 64 * group, step) : A::rows(a, 64 * group, step);
        const u64 right = kForm == kByRows ? B::rows(b, 0, step) : B::columns(b, 0, step);
        wgmma<T, kForm == kOuter, kForm != kByRows>(acc, left, right, true);
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        if (leader) arrive(before);
      }
      before = shape.ring().empty(at.stage);
    }
    wgmma_wait<0>(acc);
    if (leader && stages > 0) arrive(before);
    const int lane_row = row + 64 * group + static_cast<int>(threadIdx.x % kWarpgroup / 32) * 16;
    store_results<T, kForm, kGate>(p.product, acc, expert, lane_row, end, column);
  });
}

template <class T, int kForm, int kGate, int kGather>
__global__ void __launch_bounds__(384, 1)
    product_hopper(const FLEXOPS_GRID_CONSTANT HopperParams p) {
  using Shape = HopperShape<kForm, kGate, kGather>;
  __align__(1024) extern __shared__ u8 memory[];
  const Shape shape(shuffle(hopper::shared_address(memory), 0));  // a uniform register
  // Set up the barriers.
  if (threadIdx.x == 0) {
    hopper::prefetch(p.a), hopper::prefetch(p.b);
    shape.ring().init(4 * Shape::kGroups, Shape::kProducers);
    hopper::fence_init(), hopper::fence_async();
  }
  __syncthreads();
  // The producer loads; the consumers compute.
  const int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (warpgroup == 0) {
    hopper::leave_registers<Shape::kProducerRegisters>();
    if constexpr (kGather != kNoGather) {
      produce_gathered<T, kForm, kGather>(p, shape);
    } else {
      if (threadIdx.x == 0) produce<kForm>(p, shape);
    }
  } else {
    hopper::take_registers<Shape::kConsumerRegisters>();
    consume<T, kForm, kGate>(p, shape, warpgroup - 1);
  }
}

}  // namespace flexops::grouped
