// The kernels of the gated RMS norm. What they compute: flexops/ops/gated_norm.py.
//
// Memory bandwidth bounds them. A team of threads has a part of the tokens, and goes from row to
// row; a row is a group of a token's columns. Each thread copies its vectors of the next rows into
// slots of shared memory of its own, so that loads are in flight at all times and no thread waits
// for another one's. What a row has beyond a vector for each thread is read twice, from cache.
#pragma once

#include "common/async.cuh"
#include "common/elements.cuh"
#include "common/reduce.cuh"

namespace flexops::gated_norm {

inline constexpr int kThreads = 256;       // of a block whose rows are short
inline constexpr int kMostThreads = 1024;  // of a block that has a row
inline constexpr int kSlots = 2;           // rows that a thread holds or waits for
inline constexpr int kRowLanes = 32;       // lanes that find a sum without shared memory, at most

struct Params {
  const void *grad, *x, *gate, *weight;
  void *out, *gate_grad;  // out: of the forward pass, or x's gradient
  float* partial;         // [parts, columns]: the weight's gradient of each part
  i64 tokens;
  // Of a block: its first token is block_step after that of the block before, its next tokens
  // row_step after these, and its last one less than `part` after its first one.
  i64 block_step, row_step, part;
  int width, groups;   // columns of a group; groups of a token
  int lanes;           // threads of a team
  int rows, together;  // a block's teams: so many tokens, by so many groups
  int group_blocks;    // blocks that share a part's tokens
  int nothing;         // 0, which the compiler does not know
  float eps;
  int norm_first;
  int sigmoid;  // of the gate, not silu
  int early;    // few blocks: the kernel starts before the one ahead has ended
};

FLEXOPS_DEVICE float sigmoid(float x) {
  return quick_reciprocal(1.0f + quick_exp2(-1.44269504088896341f * x));
}

/// What the gate's sigmoid is multiplied with.
FLEXOPS_DEVICE float factor(float gate, const Params& p) { return p.sigmoid ? 1.0f : gate; }

/// N elements of a row, which are all in it; zeros if `there` is false.
template <typename T, int N>
struct Part : Raw<T, N> {
  FLEXOPS_DEVICE Part() {}
  FLEXOPS_DEVICE Part(const void* from, i64 at, bool there = true) {
    if (there) this->read(static_cast<const T*>(from) + at);
  }
};

/// The weight's; ones if there is none.
template <typename W, int N>
FLEXOPS_DEVICE Part<W, N> weight_at(const W* weight, int at, bool there = true) {
  if (weight) return {weight, at, there};
  float ones[N];
#pragma unroll
  for (int i = 0; i < N; ++i) ones[i] = 1.0f;
  Part<W, N> out;
  static_cast<Raw<W, N>&>(out) = bit_cast<Raw<W, N>>(round<W>(ones));
  return out;
}

/// Threads of a team: up to a warp; or as many warps as p.lanes say, whose threads hold a row; or
/// such that do not.
inline constexpr int kWarps = 0, kWide = -1;
template <int Lanes>
inline constexpr int kBound = Lanes == kWide ? 512 : kMostThreads;

/// Where a thread works.
template <int Lanes, int N>
struct Place {
  int lanes, team, at, step, group;
  bool useful, mine;  // the team has rows; the thread's vector is in them
  int turns, all;     // the team's rows, and as many as any of the block's teams has
  i64 here, apart;    // the row's first element; elements from its next row to this one

  FLEXOPS_DEVICE explicit Place(const Params& p)
      : lanes(Lanes > 0 ? Lanes : p.lanes),
        team(static_cast<int>(threadIdx.x) / lanes),
        at(static_cast<int>(threadIdx.x) % lanes * N),
        step(lanes * N),
        group(static_cast<int>(blockIdx.x % static_cast<u32>(p.group_blocks)) * p.together +
              team % p.together),
        useful(team < p.rows * p.together && group < p.groups),
        mine(useful && at < p.width) {
    const i64 columns = static_cast<i64>(p.groups) * p.width;
    const i64 begin =
        static_cast<i64>(blockIdx.x / static_cast<u32>(p.group_blocks)) * p.block_step;
    const i64 limit = p.tokens - begin < p.part ? p.tokens - begin : p.part;
    const int index = team / p.together;
    all = static_cast<int>((limit + p.row_step - 1) / p.row_step);
    turns = static_cast<int>((limit - index + p.row_step - 1) / p.row_step);
    here = (begin + index) * columns + static_cast<i64>(group) * p.width;
    apart = p.row_step * columns;
  }
  FLEXOPS_DEVICE i64 first_column(const Params& p) const {
    return static_cast<i64>(group) * p.width;
  }
};

/// A thread's slots, for vectors of `Streams` tensors: those of a warp lie together.
template <typename T, int N, int Streams>
struct Slots {
  uint4* own;

  FLEXOPS_DEVICE explicit Slots(uint4* storage)
      : own(storage + threadIdx.x / 32 * (kSlots * Streams * 32) + threadIdx.x % 32) {}
  FLEXOPS_DEVICE uint4* slot(int turn, int stream) const {
    return own + (turn * Streams + stream) * 32;
  }
  /// Starts the copies; zeros if not valid.
  FLEXOPS_DEVICE void fetch(const void* const (&from)[Streams], i64 at, int turn,
                            bool valid) const {
#pragma unroll
    for (int i = 0; i < Streams; ++i) {
      const T* const one = static_cast<const T*>(from[i]) + at;
      if constexpr (N > 1) {
        async_copy16(slot(turn, i), one, valid);
      } else {
        *reinterpret_cast<Part<T, N>*>(slot(turn, i)) = Part<T, N>(one, 0, valid);
      }
    }
    async_commit();
  }
  FLEXOPS_DEVICE void get(Part<T, N> (&out)[Streams], int turn) const {
#pragma unroll
    for (int i = 0; i < Streams; ++i) out[i] = *reinterpret_cast<const Part<T, N>*>(slot(turn, i));
  }
};

/// The sums over a team, for all of it. `shared` holds what each warp has; the next call needs
/// another one.
template <int Lanes, int N>
FLEXOPS_DEVICE void add_up(float (&sums)[N], int lanes, float (*shared)[N]) {
  constexpr int kMask = Lanes > 0 ? Lanes : kRowLanes;
#pragma unroll
  for (int mask = kMask / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += shuffle_xor(sums[i], mask, kRowLanes);
  }
  if (Lanes > 0 || lanes == kRowLanes) return;
  const int warp = static_cast<int>(threadIdx.x) / kRowLanes, warps = lanes / kRowLanes,
            lane = static_cast<int>(threadIdx.x) % kRowLanes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (lane == 0) shared[warp][i] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i)
    sums[i] =
        warp_reduce<kRowLanes>(lane < warps ? shared[warp / warps * warps + lane][i] : 0.0f, Sum{});
}

/// Vectors have N elements: 16 bytes of T, or 1 where rows do not allow that.
template <bool NormFirst, typename T, typename W, int Lanes, int N>
FLEXOPS_DEVICE void forward_of(const Params& p, uint4* storage, float (*shared)[32][1]) {
  Place<Lanes, N> team(p);
  const Slots<T, N, 2> slots(storage);
  const void* const from[2] = {p.x, p.gate};
  const W* const weight =
      p.weight ? static_cast<const W*>(p.weight) + team.first_column(p) : nullptr;
  const auto weights = weight_at<W, N>(weight, team.at, team.mine);
  const auto activated = [&](float gate) { return factor(gate, p) * sigmoid(gate); };
#pragma unroll
  for (int k = 0; k < kSlots; ++k)
    slots.fetch(from, team.here + k * team.apart + team.at, k, team.mine && k < team.turns);
  const float part_of_width = 1.0f / static_cast<float>(p.width);
  int turn = 0, other = 0;
#pragma unroll 1
  for (int k = 0; k < team.all; ++k, team.here += team.apart) {
    // First, the sum of squares. A slot is filled again once it has been read.
    async_wait<kSlots - 1>();
    Part<T, N> in[2];
    slots.get(in, turn);
    slots.fetch(from, team.here + kSlots * team.apart + team.at, turn,
                team.mine && k + kSlots < team.turns);
    const bool live = team.useful && k < team.turns;
    float sum[1] = {}, u[N];
    const auto square = [&](const Part<T, N>(&one)[2], float (&made)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        made[i] = NormFirst ? one[0][i] : one[0][i] * activated(one[1][i]);
        sum[0] = __fmaf_rn(made[i], made[i], sum[0]);
      }
    };
    square(in, u);
    for (int at = team.at + team.step; Lanes == kWide && live && at < p.width; at += team.step) {
      float made[N];
      square({{p.x, team.here + at}, {p.gate, team.here + at}}, made);
    }
    add_up<Lanes>(sum, team.lanes, shared[other]);
    const float scale = rsqrtf(sum[0] * part_of_width + p.eps);
    // Then, scale and store.
    const auto finish = [&](int at, const float (&made)[N], const Part<T, N>& gates,
                            const Part<W, N>& w) {
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[i] = made[i] * scale * w[i];
        if (NormFirst) y[i] *= activated(gates[i]);
      }
      store<T>(p.out, team.here + at, y);
    };
    if (live && team.mine) finish(team.at, u, in[1], weights);
    for (int at = team.at + team.step; Lanes == kWide && live && at < p.width; at += team.step) {
      const Part<T, N> again[2] = {{p.x, team.here + at}, {p.gate, team.here + at}};
      float made[N];
      square(again, made);
      finish(at, made, again[1], weight_at<W, N>(weight, at));
    }
    turn = turn + 1 == kSlots ? 0 : turn + 1, other ^= 1;
  }
}

template <typename T, typename W, int Lanes, int N>
__global__ void __launch_bounds__(kBound<Lanes>)
    gated_norm_forward(const FLEXOPS_GRID_CONSTANT Params p) {
  extern __shared__ uint4 storage[];
  __shared__ float shared[2][32][1];
  if (p.early) wait_for_previous(), let_next_start();
  if (p.norm_first) return forward_of<true, T, W, Lanes, N>(p, storage, shared);
  forward_of<false, T, W, Lanes, N>(p, storage, shared);
}

/// What the backward pass computes of one element.
template <bool NormFirst>
struct Element {
  float grad, x, gate, half, act, u, weighted, of_norm;  // of_norm: of u's normalized form

  FLEXOPS_DEVICE Element(float grad, float x, float gate, float half, float weight, const Params& p)
      : grad(grad),
        x(x),
        gate(p.sigmoid ? 0.0f : gate),
        half(half),
        act(factor(gate, p) * half),
        u(NormFirst ? x : x * act),
        weighted(grad * weight),
        of_norm(NormFirst ? weighted * act : weighted) {}
  FLEXOPS_DEVICE void gradients(float scale, float mean, float& of_x, float& of_gate,
                                float& of_weight) const {
    const float n = u * scale, of_u = __fmaf_rn(-n, mean, of_norm * scale);
    const float slope = __fmaf_rn(half, gate - act, half);
    of_x = NormFirst ? of_u : of_u * act;
    of_gate = slope * (NormFirst ? weighted * n : of_u * x);
    of_weight = __fmaf_rn(NormFirst ? grad * act : grad, n, of_weight);
  }
};

template <bool NormFirst, typename T, typename W, int Lanes, int N>
FLEXOPS_DEVICE void backward_of(const Params& p, uint4* storage, float (*shared)[32][2]) {
  Place<Lanes, N> team(p);
  const Slots<T, N, 3> slots(storage);
  const void* const from[3] = {p.grad, p.x, p.gate};
  const W* const weight =
      p.weight ? static_cast<const W*>(p.weight) + team.first_column(p) : nullptr;
  const auto weights = weight_at<W, N>(weight, team.at, team.mine);
  const auto partial_of = [&] {
    return p.partial +
           static_cast<i64>(blockIdx.x / static_cast<u32>(p.group_blocks)) * p.groups * p.width +
           team.first_column(p);
  };
#pragma unroll
  for (int k = 0; k < kSlots; ++k)
    slots.fetch(from, team.here + k * team.apart + team.at, k, team.mine && k < team.turns);
  const float part_of_width = 1.0f / static_cast<float>(p.width);
  float of_weight[N] = {};
  int turn = 0, other = 0;
#pragma unroll 1
  for (int k = 0; k < team.all; ++k, team.here += team.apart) {
    const bool live = team.useful && k < team.turns;
    // First, the sums of u * u and of u * (its normalized form's gradient).
    float sums[2] = {}, halves[N];
    const auto add = [&](const Part<T, N>(&in)[3], const Part<W, N>& w, float (&half)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        half[i] = sigmoid(in[2][i]);
        const Element<NormFirst> one(in[0][i], in[1][i], in[2][i], half[i], w[i], p);
        sums[0] = __fmaf_rn(one.u, one.u, sums[0]);
        sums[1] = __fmaf_rn(one.u, one.of_norm, sums[1]);
      }
    };
    async_wait<kSlots - 1>();
    Part<T, N> in[3];
    slots.get(in, turn);
    add(in, weights, halves);
    for (int at = team.at + team.step; Lanes == kWide && live && at < p.width; at += team.step) {
      float half[N];
      const i64 i = team.here + at;
      add({{p.grad, i}, {p.x, i}, {p.gate, i}}, weight_at<W, N>(weight, at), half);
    }
    add_up<Lanes>(sums, team.lanes, shared[other]);
    const float scale = rsqrtf(sums[0] * part_of_width + p.eps);
    const float mean = sums[1] * scale * scale * part_of_width;
    // Then, the gradients; the weight's is added to `of_one`.
    const auto finish = [&](int at, const Part<T, N>(&in)[3], const Part<W, N>& w,
                            const float (&half)[N], float (&of_one)[N]) {
      float of_x[N], of_gate[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Element<NormFirst> one(in[0][i], in[1][i], in[2][i], half[i], w[i], p);
        one.gradients(scale, mean, of_x[i], of_gate[i], of_one[i]);
      }
      store<T>(p.out, team.here + at, of_x);
      store<T>(p.gate_grad, team.here + at, of_gate);
    };
    slots.get(in, turn + p.nothing);  // read again: registers hold none of it meanwhile
    slots.fetch(from, team.here + kSlots * team.apart + team.at, turn,
                team.mine && k + kSlots < team.turns);
    if (live && team.mine) finish(team.at, in, weights, halves, of_weight);
    for (int at = team.at + team.step; Lanes == kWide && live && at < p.width; at += team.step) {
      const i64 place = team.here + at;
      float* const partial = partial_of();
      const Part<T, N> again[3] = {{p.grad, place}, {p.x, place}, {p.gate, place}};
      float of_one[N], half[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        half[i] = sigmoid(again[2][i]);
        of_one[i] = weight && k > 0 ? partial[at + i] : 0.0f;
      }
      finish(at, again, weight_at<W, N>(weight, at), half, of_one);
      if (weight) store<float>(partial, at, of_one);
    }
    turn = turn + 1 == kSlots ? 0 : turn + 1, other ^= 1;
  }
  async_wait<0>();
  if (weight == nullptr) return;
  float* const partial = partial_of();
  // The part's sums. Those of the teams of a group are added up in order.
  if (p.rows == 1) {
    if (team.mine) store<float>(partial, team.at, of_weight);
    return;
  }
  float* const lines = reinterpret_cast<float*>(storage);
  __syncthreads();
  store<float>(lines, static_cast<i64>(threadIdx.x) * N, of_weight);
  __syncthreads();
  if (!team.mine || team.team >= p.together) return;
  for (int k = 1; k < p.rows; ++k) {
    const float* const line = lines + (threadIdx.x + k * p.together * team.lanes) * N;
#pragma unroll
    for (int i = 0; i < N; ++i) of_weight[i] += line[i];
  }
  store<float>(partial, team.at, of_weight);
}

template <typename T, typename W, int Lanes, int N>
__global__ void __launch_bounds__(kBound<Lanes>)
    gated_norm_backward(const FLEXOPS_GRID_CONSTANT Params p) {
  extern __shared__ uint4 storage[];
  __shared__ float shared[2][32][2];
  if (p.norm_first) return backward_of<true, T, W, Lanes, N>(p, storage, shared);
  backward_of<false, T, W, Lanes, N>(p, storage, shared);
}

}  // namespace flexops::gated_norm
