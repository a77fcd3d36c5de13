// Hopper's own instructions (sm_90a, on no other GPU): tiles by the tensor copy engine, registers
// that warpgroups (128 threads, four warps from a multiple of four on) hand to one another, and
// products of a warpgroup by wgmma. PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Operations".
//
//   Producer (one thread):    Tile::load(stage, map, ring.fill(at, Tile::kBytes), row, head,
//   batch); Consumer (a warpgroup):   ring.wait(at);
//                             wgmma_fence(); wgmma<T, ...>(acc, a, b, accumulate); ...
//                             wgmma_commit(); wgmma_wait<0>(acc); arrive(ring.empty(at.stage));
#pragma once

#include "common/dtypes.cuh"
#include "common/hopper.cuh"
#include "common/panels.cuh"

namespace flexops::hopper {

constexpr int kWarpgroup = 128;

/// A CUtensorMap, which the launcher encodes; in a kernel's __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 words[16];
};

FLEXOPS_DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(&map)) : "memory");
}
/// The map's box from (column, row, head, batch) on; what lies outside of the tensor is zeros.
/// `barrier` counts its bytes.
FLEXOPS_DEVICE void load_tile(u32 to, const TensorMap& map, u32 barrier, int column, int row,
                              int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(reinterpret_cast<u64>(&map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

/// The same to all blocks of the cluster whose bits `blocks` has, at the same address in each; each
/// one's own barrier counts the bytes.
FLEXOPS_DEVICE void multicast_tile(u32 to, const TensorMap& map, u32 barrier, int column, int row,
                                   int head, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(reinterpret_cast<u64>(&map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(0),
      "h"(blocks)
      : "memory");
}

/// Stores a box from shared memory, where the map has one; what lies outside of the tensor is left
/// out. The thread that calls it waits for it by stores_read().
FLEXOPS_DEVICE void store_tile(const TensorMap& map, u32 from, int column, int row, int head,
                               int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(reinterpret_cast<u64>(&map)),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
/// Until all but the last kPending of this thread's stores have read shared memory.
template <int kPending>
FLEXOPS_DEVICE void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Arrives at the named barrier of `threads` threads for this thread's warp, without waiting (see
/// barrier() in device.cuh).
FLEXOPS_DEVICE void barrier_pass(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Registers. A kernel's threads start with as many; its roles hand them to one another. ----

template <int kRegisters>
FLEXOPS_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FLEXOPS_DEVICE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Tiles as wgmma's operands ----

/// A tile in shared memory, laid out as the copy engine and wgmma have it.
template <int kRows, int kColumns>
struct Tile : Panels<kRows, kColumns> {
  using Layout = Panels<kRows, kColumns>;
  using Layout::kPanel, Layout::kPanels, Layout::kRowBytes, Layout::kPanelBytes;

  /// Of the tile's part `offset` bytes on. Offsets are known when compiling (a row group aside), so
  /// that steps differ by one addition.
  static FLEXOPS_DEVICE u64 descriptor(u32 tile, u32 offset, u32 leading) {
    constexpr u32 kSwizzle = kPanel == 64 ? 1 : 2, kStride = 8 * kRowBytes / 16;
    const u32 low = (tile >> 4) + (offset >> 4) + (leading >> 4 << 16);
    return static_cast<u64>(kStride | kSwizzle << 30) << 32 | low;
  }
  /// Rows from `row` (a multiple of 8) on, whose columns [16 step, 16 step + 16) are summed over.
  static FLEXOPS_DEVICE u64 rows(u32 tile, int row, int step) {
    return descriptor(
        tile, row * kRowBytes + step / (kPanel / 16) * kPanelBytes + step % (kPanel / 16) * 32, 16);
  }
  /// Columns from `column` (a multiple of 8; of kPanel, if they go past a panel) on, whose rows [16
  /// step, 16 step + 16) are summed over: the transposed operand.
  static FLEXOPS_DEVICE u64 columns(u32 tile, int column, int step) {
    return descriptor(tile,
                      column / kPanel * kPanelBytes + column % kPanel * 2 + step * 16 * kRowBytes,
                      kPanelBytes);
  }
  /// The copy engine's loads of the tile's panels.
  static FLEXOPS_DEVICE void load(u32 to, const TensorMap& map, u32 barrier, int row, int head,
                                  int batch) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      load_tile(to + panel * kPanelBytes, map, barrier, panel * kPanel, row, head, batch);
  }
};

// ---- wgmma ----

FLEXOPS_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FLEXOPS_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Keeps uses of registers on their side of it.
template <int N>
FLEXOPS_DEVICE void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
FLEXOPS_DEVICE void pin(u32 (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
/// Waits until at most kPending groups are under way; what the others computed may then be read.
template <int kPending, int... N>
FLEXOPS_DEVICE void wgmma_wait(float (&... done)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(done), ...);
}

/// acc[64 x kN] (+)= A[64 x 16] B[16 x kN], with A in shared memory (by rows or by columns of its
/// tile) or in registers, B in shared memory. A thread of warp w has rows 16 w + lane / 4 (+ 8) and
/// columns 8 j + lane % 4 * 2 (+ 1) as acc[4 j + 2 (+8 rows) (+ 1)].
template <class T, int kN, bool kColumnsOfA, bool kColumnsOfB>
struct Wgmma;

#define FLEXOPS_D8(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLEXOPS_D16(i) FLEXOPS_D8(i), FLEXOPS_D8(i + 8)
#define FLEXOPS_D32(i) FLEXOPS_D16(i), FLEXOPS_D16(i + 16)
#define FLEXOPS_D40(i) FLEXOPS_D32(i), FLEXOPS_D8(i + 32)
#define FLEXOPS_D48(i) FLEXOPS_D32(i), FLEXOPS_D16(i + 32)
#define FLEXOPS_D56(i) FLEXOPS_D48(i), FLEXOPS_D8(i + 48)
#define FLEXOPS_D64(i) FLEXOPS_D32(i), FLEXOPS_D32(i + 32)
#define FLEXOPS_D88(i) FLEXOPS_D64(i), FLEXOPS_D16(i + 64), FLEXOPS_D8(i + 80)
#define FLEXOPS_D96(i) FLEXOPS_D64(i), FLEXOPS_D32(i + 64)
#define FLEXOPS_D128(i) FLEXOPS_D64(i), FLEXOPS_D64(i + 64)
// The same registers in the instruction's text.
#define FLEXOPS_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FLEXOPS_L16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FLEXOPS_L32 FLEXOPS_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FLEXOPS_L40 FLEXOPS_L32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FLEXOPS_L48 FLEXOPS_L40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FLEXOPS_L56 FLEXOPS_L48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FLEXOPS_L64 FLEXOPS_L56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FLEXOPS_L88                                                                            \
  FLEXOPS_L64                                                                                  \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%" \
  "86,%87"
#define FLEXOPS_L96 FLEXOPS_L88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FLEXOPS_L128                                                                              \
  FLEXOPS_L96                                                                                     \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%" \
  "115,%116,%117,%118,%119,%120,%121,%122,%"                                                      \
  "123,"                                                                                          \
  "%124,%125,%126,%127"

#define FLEXOPS_WGMMA_BEGIN(accumulate, n, type)                                               \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" accumulate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
  "k16.f32." type "." type " {"
// i0 to i6: the numbers of the operands after the kN / 2 registers of the accumulator.
#define FLEXOPS_DEFINE_WGMMA_OF(T, type, n, registers, i0, i1, i2, i3, i4, i5, i6)           \
  template <bool kColumnsOfA, bool kColumnsOfB>                                              \
  struct Wgmma<T, n, kColumnsOfA, kColumnsOfB> {                                             \
    static FLEXOPS_DEVICE void shared(float (&d)[registers], u64 a, u64 b, int accumulate) { \
      asm volatile(FLEXOPS_WGMMA_BEGIN(i2, n, type) FLEXOPS_L##registers                     \
                   "}, %" i0 ", %" i1 ", p, 1, 1, %" i3 ", %" i4 ";\n}"                      \
                   : FLEXOPS_D##registers(0)                                                 \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kColumnsOfA ? 1 : 0),              \
                     "n"(kColumnsOfB ? 1 : 0));                                              \
    }                                                                                        \
    static FLEXOPS_DEVICE void registers_(float (&d)[registers], const u32* a, u64 b,        \
                                          int accumulate) {                                  \
      asm volatile(FLEXOPS_WGMMA_BEGIN(i5, n, type) FLEXOPS_L##registers                     \
                   "}, {%" i0 ", %" i1 ", %" i2 ", %" i3 "}, %" i4 ", p, 1, 1, %" i6 ";\n}"  \
                   : FLEXOPS_D##registers(0)                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),    \
                     "n"(kColumnsOfB ? 1 : 0));                                              \
    }                                                                                        \
  };
#define FLEXOPS_DEFINE_WGMMA(...)                    \
  FLEXOPS_DEFINE_WGMMA_OF(bf16, "bf16", __VA_ARGS__) \
  FLEXOPS_DEFINE_WGMMA_OF(f16, "f16", __VA_ARGS__)
FLEXOPS_DEFINE_WGMMA(16, 8, "8", "9", "10", "11", "12", "13", "14")
FLEXOPS_DEFINE_WGMMA(32, 16, "16", "17", "18", "19", "20", "21", "22")
FLEXOPS_DEFINE_WGMMA(64, 32, "32", "33", "34", "35", "36", "37", "38")
FLEXOPS_DEFINE_WGMMA(80, 40, "40", "41", "42", "43", "44", "45", "46")
FLEXOPS_DEFINE_WGMMA(96, 48, "48", "49", "50", "51", "52", "53", "54")
FLEXOPS_DEFINE_WGMMA(112, 56, "56", "57", "58", "59", "60", "61", "62")
FLEXOPS_DEFINE_WGMMA(128, 64, "64", "65", "66", "67", "68", "69", "70")
FLEXOPS_DEFINE_WGMMA(176, 88, "88", "89", "90", "91", "92", "93", "94")
FLEXOPS_DEFINE_WGMMA(192, 96, "96", "97", "98", "99", "100", "101", "102")
FLEXOPS_DEFINE_WGMMA(256, 128, "128", "129", "130", "131", "132", "133", "134")

template <class T, int kColumnsOfA, int kColumnsOfB, int N>
FLEXOPS_DEVICE void wgmma(float (&acc)[N], u64 a, u64 b, bool accumulate) {
  Wgmma<T, 2 * N, kColumnsOfA, kColumnsOfB>::shared(acc, a, b, accumulate);
}
template <class T, int kColumnsOfB, int N>
FLEXOPS_DEVICE void wgmma(float (&acc)[N], const u32* a, u64 b, bool accumulate) {
  Wgmma<T, 2 * N, false, kColumnsOfB>::registers_(acc, a, b, accumulate);
}

}  // namespace flexops::hopper
