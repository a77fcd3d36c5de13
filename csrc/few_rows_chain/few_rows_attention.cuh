// Attention of one new token over a cache, as a phase of a chain: so the weights of the products
// behind it arrive meanwhile. The token's queries and key are normalized and rotated, and key and
// value appended. Of two sequences it was slower than a kernel of its own.
//
// A block has an item: some of the keys (a split) of a key head, for kHeads of its queries. A key's
// columns are 8 for each of some lanes; a lane has the sums of its columns over its own keys. The
// block that finishes an item's last split puts them together.
//
// Registers decide: one that is spilled goes to the second-level cache, since the ring leaves the
// first-level one little room, and waits there behind all copies.
#pragma once

#include "few_rows_chain/few_rows_phases.cuh"

namespace flexops::chain {

/// Bytes of shared memory.
FLEXOPS_DEVICE constexpr int attention_bytes(int dim) {
  return (kHeads + 2) * dim * 2 + kWarps * kHeads * (dim + 2) * 4 + 16;
}

/// What a block has of every attention of a launch.
struct Item {
  int number, split;  // which item, and which split of it
  int head_k, first_head, heads;
  int from, to, cached;  // its tokens; how many had been cached before
  int line;              // of the tables; -1: they have none
  bool appends;
  FLEXOPS_DEVICE Item(const Attended& a, int block) {
    const int group = a.heads / a.heads_k, head_groups = (group + kHeads - 1) / kHeads;
    number = block / a.splits, split = block - number * a.splits;
    head_k = number / head_groups;
    const int of_group = (number - head_k * head_groups) * kHeads;
    first_head = head_k * group + of_group, heads = min(kHeads, group - of_group);
    cached = max(0, *a.seqlens);
    const int padding = a.leftpad ? max(0, *a.leftpad) : 0, end = min(cached + 1, a.capacity),
              begin = min(max(padding, end - 1 - a.window_left), end),
              each = (end - begin + a.splits - 1) / a.splits;
    from = begin + split * each, to = min(from + each, end);
    const bool hidden = cached < begin;  // the padding hides the new token
    appends = of_group == 0 && cached < a.capacity &&
              (hidden ? split == 0 : from <= cached && cached < to);
    line = max(0, cached - padding);
    if (line >= a.positions) line = -1;
  }
};

/// Of one query, a lane's sums over keys: of 2^(score - most) times the values, and of it alone.
struct Online {
  float out[8] = {}, most = -infinity(), sum = 0.0f;
};
/// What scores are reduced by: 0 where there is none.
FLEXOPS_DEVICE float shift_of(float most) { return most == -infinity() ? 0.0f : most; }

/// Two columns of a row, rotated: `x` and those of the other half.
template <class T>
FLEXOPS_DEVICE u32 rotated(u32 x, u32 other, u32 cos, u32 sin, bool second) {
  float both[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float turned = half_of<T>(other, i) * half_of<T>(sin, i);
    both[i] = half_of<T>(x, i) * half_of<T>(cos, i) + (second ? turned : -turned);
  }
  return pack2<T>(both[0], both[1]);
}

/// Two columns of a row, normalized: `factor` is of the row.
template <class T>
FLEXOPS_DEVICE u32 normalized(u32 x, u32 gain, float factor, float offset) {
  float both[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) both[i] = half_of<T>(x, i) * factor * (half_of<T>(gain, i) + offset);
  return pack2<T>(both[0], both[1]);
}

/// Counts a block's parts, which it has written, and gives how many were before. What those blocks
/// have written can be read then, behind a barrier of the block.
FLEXOPS_DEVICE u32 count(u32* counter) {
  u32 before = 0;
  FLEXOPS_SM90(
      "atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

/// `meet`: waits for the phase before; what has been cached before the launch does not wait for it.
/// `memory`: attention_bytes.
template <class T, class Meet>
FLEXOPS_DEVICE void attend(const Launch& p, const Phase& phase, u8* memory, const Item& item,
                           const Meet& meet) {
  const Attended& a = p.attended;
  constexpr int kThreads = 32 * (kWarps + 1);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int lanes = 1 << a.lanes_log, dim = 8 * lanes, of_warp = 32 >> a.lanes_log;
  const auto together = [] { barrier(1, kThreads); };

  T* const staged = reinterpret_cast<T*>(memory);  // queries, the new key, its value
  float* const sums = reinterpret_cast<float*>(staged + (kHeads + 2) * dim);
  float2* const totals = reinterpret_cast<float2*>(sums + kWarps * kHeads * dim);
  volatile bool* const last = reinterpret_cast<volatile bool*>(totals + kWarps * kHeads);

  T* const keys = static_cast<T*>(phase.caches.k) + item.head_k * dim;
  T* const values = static_cast<T*>(phase.caches.v) + item.head_k * dim;
  const int column = (lane & (lanes - 1)) * 8;
  int token = item.from + warp * of_warp + (lane >> a.lanes_log);
  uint4 key, value;
  const auto load = [&] {
    key = value = {0, 0, 0, 0};
    if (token >= item.to || token == item.cached) return;
    const i64 at = token * phase.caches.row + column;
    key = load_shared_by_all(reinterpret_cast<const uint4*>(keys + at));
    value = load_shared_by_all(reinterpret_cast<const uint4*>(values + at));
  };
  if (warp < kWarps) load();

  // The new token's rows: 8 columns for each thread.
  const int row = thread >> a.lanes_log, at = (thread & (lanes - 1)) * 8;
  const bool there = row < item.heads || (row >= kHeads && row < kHeads + 2),
             turns = there && row <= kHeads && at < 2 * a.half, second = at >= a.half;
  constexpr u32 kNan = 0x7fff7fff;
  uint4 cos = {kNan, kNan, kNan, kNan}, sin = cos;
  if (turns && item.line >= 0) {
    const auto read = [&](const void* table, i64 line) {
      return *reinterpret_cast<const uint4*>(static_cast<const T*>(table) + item.line * line +
                                             (second ? at - a.half : at));
    };
    cos = read(a.cos, a.cos_row), sin = read(a.sin, a.sin_row);
  }
  meet();
  uint4 vector = {0, 0, 0, 0}, gain = vector;
  if (phase.norm && row <= kHeads)
    gain = reinterpret_cast<const uint4*>(row < kHeads ? phase.norm : phase.residual)[at / 8];
  if (there) {
    const int head =
        row < kHeads ? item.first_head + row : a.heads + (row - kHeads) * a.heads_k + item.head_k;
    const T* const whole = static_cast<const T*>(phase.x) + head * dim;
    vector = load_shared_by_all(reinterpret_cast<const uint4*>(whole + at));
  }
  if (phase.norm) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = half_of<T>(words[i / 2], i % 2);
      squares += x * x;
    }
#pragma unroll 1
    for (int other = 1; other < lanes; other *= 2) squares += shuffle_xor(squares, other);
    const float factor = rsqrtf(squares / static_cast<float>(dim) + p.eps);
    if (row <= kHeads)
      vector = {normalized<T>(vector.x, gain.x, factor, p.offset),
                normalized<T>(vector.y, gain.y, factor, p.offset),
                normalized<T>(vector.z, gain.z, factor, p.offset),
                normalized<T>(vector.w, gain.w, factor, p.offset)};
  }
  const int from = lane + (second ? -a.half : a.half) / 8;
  const uint4 other = {shuffle(vector.x, from), shuffle(vector.y, from), shuffle(vector.z, from),
                       shuffle(vector.w, from)};
  if (turns)
    vector = {rotated<T>(vector.x, other.x, cos.x, sin.x, second),
              rotated<T>(vector.y, other.y, cos.y, sin.y, second),
              rotated<T>(vector.z, other.z, cos.z, sin.z, second),
              rotated<T>(vector.w, other.w, cos.w, sin.w, second)};
  if (there && row >= kHeads && item.appends)
    *reinterpret_cast<uint4*>((row == kHeads ? keys : values) + item.cached * phase.caches.row +
                              at) = vector;
  if (row < kHeads + 2) *reinterpret_cast<uint4*>(staged + row * dim + at) = vector;
  together();

  if (warp < kWarps) {
    Online online[kHeads];
    float query[kHeads][8];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const uint4 read = *reinterpret_cast<const uint4*>(staged + h * dim + column);
      const u32 words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) query[h][i] = half_of<T>(words[i / 2], i % 2) * a.scale;
    }
#pragma unroll 1
    for (int first = item.from + warp * of_warp; first < item.to; first += kWarps * of_warp) {
      if (token == item.cached) {
        key = *reinterpret_cast<const uint4*>(staged + kHeads * dim + column);
        value = *reinterpret_cast<const uint4*>(staged + (kHeads + 1) * dim + column);
      }
      const bool seen = token < item.to;
      const u32 of_key[4] = {key.x, key.y, key.z, key.w},
                of_value[4] = {value.x, value.y, value.z, value.w};
      token += kWarps * of_warp;
      load();
      float score[kHeads] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float k = half_of<T>(of_key[i / 2], i % 2);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) score[h] = fmaf(query[h][i], k, score[h]);
      }
#pragma unroll 1
      for (int other = 1; other < lanes; other *= 2) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) score[h] += shuffle_xor(score[h], other);
      }
      float weight[kHeads], before[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        Online& own = online[h];
        if (!seen) score[h] = -infinity();
        const float most = fmaxf(own.most, score[h]), shift = shift_of(most);
        before[h] = quick_exp2(own.most - shift), weight[h] = quick_exp2(score[h] - shift);
        own.most = most, own.sum = own.sum * before[h] + weight[h];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float v = half_of<T>(of_value[i / 2], i % 2);
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          online[h].out[i] = fmaf(weight[h], v, online[h].out[i] * before[h]);
      }
    }
    // Lanes that have the same columns.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      Online& own = online[h];
#pragma unroll 1
      for (int other = lanes; other < 32; other *= 2) {
        const float theirs = shuffle_xor(own.most, other), most = fmaxf(own.most, theirs),
                    shift = shift_of(most), weight = quick_exp2(own.most - shift),
                    their_weight = quick_exp2(theirs - shift);
        own.most = most;
        own.sum = own.sum * weight + shuffle_xor(own.sum, other) * their_weight;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          own.out[i] = own.out[i] * weight + shuffle_xor(own.out[i], other) * their_weight;
      }
      if (lane >= lanes) continue;
      float4* const to = reinterpret_cast<float4*>(sums + (warp * kHeads + h) * dim + column);
      to[0] = {own.out[0], own.out[1], own.out[2], own.out[3]};
      to[1] = {own.out[4], own.out[5], own.out[6], own.out[7]};
      if (lane == 0) totals[warp * kHeads + h] = {own.most, own.sum};
    }
  }
  together();

  // The block's warps, then the item's splits.
  const auto write = [&](int h, int column, float out, float sum) {
    static_cast<T*>(phase.out)[(item.first_head + h) * dim + column] =
        from_float<T>(sum > 0.0f ? out / sum : 0.0f);
  };
  float* const parts = a.parts + item.number * a.splits * kHeads * (dim + 2);
  float2* const part_totals = reinterpret_cast<float2*>(parts + a.splits * kHeads * dim);
#pragma unroll 1
  for (int i = thread; i < item.heads * dim; i += kThreads) {
    const int h = i >> (a.lanes_log + 3), of_head = i & (dim - 1);
    float most = -infinity(), sum = 0.0f, out = 0.0f;
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, totals[w * kHeads + h].x);
    const float shift = shift_of(most);
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      const float2 total = totals[w * kHeads + h];
      const float weight = quick_exp2(total.x - shift);
      sum = fmaf(weight, total.y, sum);
      out = fmaf(weight, sums[(w * kHeads + h) * dim + of_head], out);
    }
    if (a.splits == 1) {
      write(h, of_head, out, sum);
      continue;
    }
    parts[(item.split * kHeads + h) * dim + of_head] = out;
    if (of_head == 0) part_totals[item.split * kHeads + h] = {most, sum};
  }
  together();
  if (a.splits == 1) return;
  if (thread == 32 * kWarps) {
    u32* const counter = a.counters + item.number;
    const bool all = count(counter) == static_cast<u32>(a.splits - 1);
    if (all) *counter = 0;
    *last = all;
  }
  together();
  if (!*last) return;
#pragma unroll 1
  for (int i = thread; i < item.heads * dim; i += kThreads) {
    const int h = i >> (a.lanes_log + 3), of_head = i & (dim - 1);
    float2 total[kMostSplits];
    float part[kMostSplits], most = -infinity(), sum = 0.0f, out = 0.0f;
#pragma unroll
    for (int s = 0; s < kMostSplits; ++s) {
      total[s] = {-infinity(), 0.0f}, part[s] = 0.0f;
      if (s >= a.splits) continue;
      total[s] = load_shared_by_all(part_totals + s * kHeads + h);
      part[s] = load_shared_by_all(parts + (s * kHeads + h) * dim + of_head);
    }
#pragma unroll
    for (int s = 0; s < kMostSplits; ++s) most = fmaxf(most, total[s].x);
    const float shift = shift_of(most);
#pragma unroll
    for (int s = 0; s < kMostSplits; ++s) {
      const float weight = quick_exp2(total[s].x - shift);
      sum = fmaf(weight, total[s].y, sum), out = fmaf(weight, part[s], out);
    }
    write(h, of_head, out, sum);
  }
  together();
}

}  // namespace flexops::chain
