// What a chain of phases consists of, and how its blocks read what others have written.
#pragma once

#include "int4_few_rows/int4_few_rows.cuh"

namespace flexops::chain {

/// Of a launch, and of one without attentions, which a step has many of: the fewer bytes of
/// parameters, the sooner a kernel starts.
inline constexpr int kMostPhases = 28, kMostProducts = 6;
inline constexpr int kWarps = 16;  // that multiply
/// Tiles of columns of a warp's chunk; chunks of a stage.
inline constexpr int kChunk = 8, kSharing = 4;
inline constexpr int kMostStages = 16;
/// Stages whose copies are under way: for memory's full speed, and while blocks meet.
inline constexpr int kUnderWay = 3, kUnderWayMeeting = 1;

/// Keys and values of an attention: [tokens, heads, dim]; elements from a token to the next.
struct Caches {
  void *k, *v;
  i64 row;
};

/// A product, or, with a count of 0, an attention: of x, [k], which has queries, keys and values of
/// all heads beside each other.
struct Phase {
  union {
    int4::FewParams::Weight weights[few_rows::kMaxWeights];
    Caches caches;
  };
  const void *x, *norm, *residual;  // of an attention: the norms of its queries and keys, [dim]
  void* out;                        // [m, width]
  int width, k, count;
  int tiles_k, groups;
  int group_shift;     // log2 of the group size
  int each, longer;    // units that a block has at least, and how many blocks have one more
  int chunks, stages;  // of a row tile
  int pass_rows;       // row tiles whose sums have room
  int activation;
  bool half_scales, has_zeros;
};

/// Queries of a key head that a block has; into how many parts keys are cut at most.
inline constexpr int kHeads = 2, kMostSplits = 8;

/// What all attentions of a launch have in common.
struct Attended {
  const void *cos, *sin;  // of the rotary embedding: [positions, half]
  i64 cos_row, sin_row;
  int half, positions;  // half is a multiple of 8; 0: nothing is rotated
  const i32 *seqlens, *leftpad;
  // Of each item: of its splits the sums, [kHeads, dim], then [kHeads] of most and sum; how many
  // splits have been written.
  float* parts;
  u32* counters;
  int blocks, splits;  // how many have an item's split; of an item
  int heads, heads_k, capacity;
  int window_left;  // tokens that are seen before the last one
  int lanes_log;    // log2 of the vectors of 8 columns of a head
  float scale;      // times log2(e)
};

/// What a launch has beside its phases.
struct Launch {
  Attended attended;
  u64* counter;
  int count;
  float eps, offset;
  // Bytes: where shared memory's parts are.
  int x_stride, sums, squares, item, parts, ring, barriers;
  int stages;  // of the ring
};
template <int kMost>
struct Params : Launch {
  Phase phases[kMost];
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
FLEXOPS_DEVICE uint4 load_shared_by_all(const uint4* at) {
  uint4 out;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(at)
               : "memory");
  return out;
}
FLEXOPS_DEVICE u32 load_shared_by_all(const u16* at) {
  u32 bits;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=r"(bits) : "l"(at) : "memory");
  return bits;
}
FLEXOPS_DEVICE float load_shared_by_all(const float* at) {
  float out;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(out) : "l"(at) : "memory");
  return out;
}
FLEXOPS_DEVICE float2 load_shared_by_all(const float2* at) {
  float2 out;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(out.x), "=f"(out.y)
               : "l"(at)
               : "memory");
  return out;
}
/// Tells the other blocks that this one's results are written, after a barrier of the block.
FLEXOPS_DEVICE void arrive(u64* counter) {
  FLEXOPS_SM90("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
}
/// Relaxed: what it is asked for is read from the second-level cache, behind a barrier of the
/// block.
FLEXOPS_DEVICE u64 arrived(const u64* counter) {
  u64 value = 0;
  FLEXOPS_SM90("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace flexops::chain
