// Experts of few tokens: each choice's products read the expert's weights where they are, in the
// order of choices, without sorting them. Formulas: flexops/ops/few_experts.py.
//
// Both kernels add up segments of weights and x: of gate and up one, a choice's expert; of down all
// of a token's experts, times their weights. The warps of a block compute the same results and
// share the units into which k is cut. A lane loads 16 bytes at once, and several units are on
// their way. Without tensor cores, for the reasons that few_rows_fma_hopper.cuh gives.
#pragma once

#include "few_rows/few_rows_fma_hopper.cuh"

namespace flexops::few_experts {

/// Lines of a warp, where weights lie by rows.
inline constexpr int kLines = 4;

/// 16 bytes of weights, in this place: past the first-level cache, and without reading ahead into
/// the second one, which costs 2 to 4 % here.
FLEXOPS_DEVICE uint4 load_weights(const u16* at) {
  uint4 out;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(at));
  return out;
}

/// Both kinds of products have this.
struct Params {
  const void *x, *weights, *bias;  // weights: [experts, lines, k]; by columns [experts, k, lines]
  const void* choices;             // [tokens, per_token]
  const void* scales;              // of the choices, where their results are added up
  void* out;                       // [tokens per_token, lines / 2], or [tokens, lines]
  int experts, per_token, lines, k;
  int blocks;              // for the results of one row
  bool wide, interleaved;  // choices are of 64 bits; see FewExperts
  bool float_scales;       // others are of x's type
  int activation;
  float alpha, limit;
};

/// A block's share: of a choice, or of a token whose choices are added up.
template <bool kAdds>
struct Share {
  int row, first;  // of the results; its first one
  int segments;

  FLEXOPS_DEVICE Share(const Params& p, int results) {
    const int block = static_cast<int>(blockIdx.x);
    row = block / p.blocks, first = (block - row * p.blocks) * results;
    segments = kAdds ? p.per_token : 1;
  }
  FLEXOPS_DEVICE int choice(const Params& p, int segment) const {
    return kAdds ? row * p.per_token + segment : row;
  }
  /// The expert of a segment; -1: it is left out.
  FLEXOPS_DEVICE int expert(const Params& p, int segment) const {
    const int at = choice(p, segment);
    const i64 chosen =
        p.wide ? static_cast<const i64*>(p.choices)[at] : static_cast<const i32*>(p.choices)[at];
    return chosen >= 0 && chosen < p.experts ? static_cast<int>(chosen) : -1;
  }
  FLEXOPS_DEVICE const u16* x(const Params& p, int segment) const {
    const int at = kAdds ? choice(p, segment) : row / p.per_token;
    return static_cast<const u16*>(p.x) + static_cast<i64>(at) * p.k;
  }
  /// Which line of the weights a block's line is: of gate and up, the gates come first.
  FLEXOPS_DEVICE int line(const Params& p, int of_block, int results) const {
    if (kAdds) return first + of_block;
    const bool up = of_block >= results;
    const int at = first + of_block - (up ? results : 0);
    return p.interleaved ? 2 * at + up : at + (up ? p.lines / 2 : 0);
  }
};

template <class T>
FLEXOPS_DEVICE float scale_of(const Params& p, int choice) {
  if (p.float_scales) return static_cast<const float*>(p.scales)[choice];
  return to_float(static_cast<const T*>(p.scales)[choice]);
}

template <class T>
FLEXOPS_DEVICE float bias_of(const Params& p, int expert, int line) {
  if (!p.bias || expert < 0) return 0.0f;
  return to_float(static_cast<const T*>(p.bias)[static_cast<i64>(expert) * p.lines + line]);
}

/// Writes result `i` of a block from its lines' sums.
template <class T, bool kAdds, int kParts, int kLines>
FLEXOPS_DEVICE void write(const Params& p, const Share<kAdds>& share,
                          const float (&sums)[kParts][kLines], int i) {
  constexpr int kResults = kAdds ? kLines : kLines / 2;
  const int width = kAdds ? p.lines : p.lines / 2;
  if (i >= kResults || share.first + i >= width) return;
  const auto total = [&](int line) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum += sums[part][line];
    return sum;
  };
  T* const to = static_cast<T*>(p.out) + static_cast<i64>(share.row) * width + share.first + i;
  if constexpr (kAdds) {
    float sum = total(i);
    for (int j = 0; p.bias && j < share.segments; ++j)
      sum +=
          scale_of<T>(p, share.choice(p, j)) * bias_of<T>(p, share.expert(p, j), share.first + i);
    *to = from_float<T>(sum);
  } else {
    const int expert = share.expert(p, 0);
    const auto rounded = [&](int line) {
      const float bias = bias_of<T>(p, expert, share.line(p, line, kResults));
      return few_rows::round_to<T>(total(line) + bias);
    };
    float gate = rounded(i), up = rounded(i + kResults);
    if (p.activation == kFewClamped) {
      // in this way NaN stays
      gate = gate > p.limit ? p.limit : gate;
      up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
      *to = from_float<T>((up + 1.0f) * gate / (1.0f + expf(-p.alpha * gate)));
    } else {
      *to = from_float<T>(few_rows::activate(gate, p.activation) * up);
    }
  }
}

/// The units of a warp, kAhead of which are on their way: `fetch` has one loaded, `multiply` adds
/// it up.
template <int kParts, int kAhead, class Held, class Fetch, class Multiply>
FLEXOPS_DEVICE void stream(int units, Held (&held)[kAhead], const Fetch& fetch,
                           const Multiply& multiply) {
  int unit = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(held[i], unit + i * kParts);
  while (unit < units) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, unit += kParts) {
      if (unit >= units) break;
      multiply(held[i]);
      fetch(held[i], unit + kAhead * kParts);
    }
  }
}

/// Weights by rows: a warp has four lines, of which a unit is 256 columns.
template <class T, bool kAdds, int kParts>
__global__ void __launch_bounds__(32 * kParts, 16 / kParts)
    by_rows(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kResults = kAdds ? kLines : kLines / 2;
  __shared__ float sums[kParts][kLines];
  wait_for_previous();
  let_next_start();
  const Share<kAdds> share(p, kResults);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int steps = (p.k + 255) / 256, units = share.segments * steps;
  i64 lines[kLines];
#pragma unroll
  for (int i = 0; i < kLines; ++i)
    lines[i] = static_cast<i64>(min(share.line(p, i, kResults), p.lines - 1)) * p.k;
  struct Held {
    uint4 weights[kLines], x;
    float scale;
  } held[4];
  float acc[kLines] = {};
  stream<kParts>(
      units, held,
      [&](Held& to, int unit) {
        const int segment = unit / steps, at = (unit - segment * steps) * 256 + 8 * lane;
        const int expert = unit < units && at < p.k ? share.expert(p, segment) : -1;
        to.scale = 0.0f;
        if (expert < 0) return;
        to.scale = kAdds ? scale_of<T>(p, share.choice(p, segment)) : 1.0f;
        const u16* const from =
            static_cast<const u16*>(p.weights) + static_cast<i64>(expert) * p.lines * p.k;
#pragma unroll
        for (int i = 0; i < kLines; ++i) to.weights[i] = load_weights(from + lines[i] + at);
        to.x = few_rows::load8<true, Cache::normal>(share.x(p, segment), at, p.k);
      },
      [&](const Held& of) {
        if (of.scale == 0.0f) return;  // also of what was not loaded
        float part[kLines] = {};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float x = few_rows::number_of<T>(of.x, n);
#pragma unroll
          for (int i = 0; i < kLines; ++i) part[i] += few_rows::number_of<T>(of.weights[i], n) * x;
        }
#pragma unroll
        for (int i = 0; i < kLines; ++i) acc[i] += of.scale * part[i];
      });
  const float sum = few_rows::sums_over_lanes(acc, lane);
  if (lane < kLines) sums[thread / 32][lane] = sum;
  __syncthreads();
  write<T>(p, share, sums, thread);
}

/// Weights by columns: kLanes lanes have 8 neighbouring lines each, and the others more of k. A
/// unit is 8 of k for each lane.
template <class T, bool kAdds, int kParts, int kLanes>
__global__ void __launch_bounds__(32 * kParts, 16 / kParts)
    by_columns(const FLEXOPS_GRID_CONSTANT Params p) {
  constexpr int kLines = 8 * kLanes, kResults = kAdds ? kLines : kLines / 2;
  constexpr int kOfK = 8 * (32 / kLanes);
  __shared__ float sums[kParts][kLines];
  wait_for_previous();
  let_next_start();
  const Share<kAdds> share(p, kResults);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int steps = (p.k + kOfK - 1) / kOfK, units = share.segments * steps;
  const int own = lane % kLanes * 8;
  const bool turns = !kAdds && p.interleaved;  // then lines are those of memory, in its order
  const int line = turns ? 2 * share.first + own : share.line(p, own, kResults);
  const bool there = kAdds || turns ? line < p.lines : share.first + own % kResults < p.lines / 2;
  struct Held {
    uint4 weights[8], x;
    float scale;
  } held[2];
  float acc[8] = {};
  const auto fetch = [&](Held& to, int unit) {
    const int segment = unit / steps, at = (unit - segment * steps) * kOfK + lane / kLanes * 8;
    const int expert = unit < units && at < p.k && there ? share.expert(p, segment) : -1;
    to.scale = 0.0f;
    if (expert < 0) return;
    to.scale = kAdds ? scale_of<T>(p, share.choice(p, segment)) : 1.0f;
    const u16* const from =
        static_cast<const u16*>(p.weights) + (static_cast<i64>(expert) * p.k + at) * p.lines + line;
#pragma unroll
    for (int i = 0; i < 8; ++i) to.weights[i] = load_weights(from + i * p.lines);
    to.x = few_rows::load8<true, Cache::normal>(share.x(p, segment), at, p.k);
  };
  const auto multiply = [&](const Held& of) {
    if (of.scale == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = of.scale * few_rows::number_of<T>(of.x, i);
#pragma unroll
      for (int n = 0; n < 8; ++n) acc[n] += few_rows::number_of<T>(of.weights[i], n) * x;
    }
  };
  stream<kParts>(units, held, fetch, multiply);
#pragma unroll
  for (int mask = kLanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int n = 0; n < 8; ++n) acc[n] += shuffle_xor(acc[n], mask);
  }
  if (lane < kLanes) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int at = own + n;
      sums[thread / 32][turns ? at / 2 + at % 2 * kResults : at] = acc[n];  // gates first
    }
  }
  __syncthreads();
  write<T>(p, share, sums, thread);
}

}  // namespace flexops::few_experts
