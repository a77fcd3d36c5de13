// Which experts a token has: the k greatest scores, and their weights. A warp for each token; lane
// l has experts l, l + 32, ... Formulas: flexops/ops/routing.py.
#pragma once

#include "common/device.cuh"
#include "common/elements.cuh"
#include "common/reduce.cuh"

namespace flexops::experts {

inline constexpr int kRouteThreads = 128;

struct RouteParams {
  const void *logits, *bias;  // bias: float32, or null
  const float *grad, *known;  // backward: of the weights, and the weights
  float* weights;
  i64* choices;
  void* out;  // backward: the gradient of the logits
  int tokens, experts, k;
  ElementType type;
  bool sigmoid, normalize;
  float scale;
};

/// The scores of a lane's experts, 0 where there is none.
template <int kPer>
FLEXOPS_DEVICE void score(float (&score)[kPer], const RouteParams& p, i64 token, int lane) {
  float most = -infinity();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int expert = lane + 32 * i;
    score[i] =
        expert < p.experts ? load_any(p.logits, token * p.experts + expert, p.type) : -infinity();
    most = fmaxf(most, score[i]);
  }
  if (p.sigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) score[i] = 1.0f / (1.0f + expf(-score[i]));
    return;
  }
  most = warp_reduce(most, Max());
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    score[i] = lane + 32 * i < p.experts ? expf(score[i] - most) : 0.0f;
    sum += score[i];
  }
  sum = warp_reduce(sum, Sum());
#pragma unroll
  for (int i = 0; i < kPer; ++i) score[i] /= sum;
}

template <int kPer>
__global__ void __launch_bounds__(kRouteThreads) route(const FLEXOPS_GRID_CONSTANT RouteParams p) {
  constexpr float kLeast = -3.4e38f;  // of an expert whose score is not a number
  const int lane = threadIdx.x % 32;
  const i64 token = blockIdx.x * static_cast<i64>(kRouteThreads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  float scores[kPer], keys[kPer];
  score(scores, p, token, lane);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int expert = lane + 32 * i;
    const float biased = p.bias && expert < p.experts
                             ? scores[i] + static_cast<const float*>(p.bias)[expert]
                             : scores[i];
    keys[i] = expert >= p.experts ? -infinity() : biased >= kLeast ? biased : kLeast;
  }
  float weight = 0.0f, total = 0.0f;
  int choice = 0;
  for (int j = 0; j < p.k; ++j) {
    // The greatest of this lane, then of the warp; of equal ones the first expert.
    float key = -infinity(), found = 0.0f;
    int expert = p.experts;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (keys[i] > key) key = keys[i], found = scores[i], expert = lane + 32 * i;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const float other_key = shuffle_xor(key, mask), other_found = shuffle_xor(found, mask);
      const int other = shuffle_xor(expert, mask);
      if (other_key > key || (other_key == key && other < expert))
        key = other_key, found = other_found, expert = other;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (expert == lane + 32 * i) keys[i] = -infinity();
    }
    total += found;
    if (lane == j) weight = found, choice = expert;
  }
  if (lane >= p.k) return;
  p.weights[token * p.k + lane] = weight * (p.normalize ? p.scale / total : p.scale);
  p.choices[token * p.k + lane] = choice;
}

template <int kPer>
__global__ void __launch_bounds__(kRouteThreads)
    route_backward(const FLEXOPS_GRID_CONSTANT RouteParams p) {
  const int lane = threadIdx.x % 32;
  const i64 token = blockIdx.x * static_cast<i64>(kRouteThreads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  float scores[kPer], grads[kPer] = {};
  score(scores, p, token, lane);
  // The gradient of the score of choice number `lane`, times the sum that it was divided by.
  const bool chooses = lane < p.k;
  const i64 at = token * p.k + lane;
  const float upstream = chooses ? p.grad[at] : 0.0f;
  const int choice = chooses ? static_cast<int>(p.choices[at]) : -1;
  float grad = p.scale * upstream;
  if (p.normalize) grad -= warp_reduce(upstream * (chooses ? p.known[at] : 0.0f), Sum());
  float total = 0.0f;
  for (int j = 0; j < p.k; ++j) {
    const int expert = shuffle(choice, j);
    const float value = shuffle(grad, j);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (expert == lane + 32 * i) grads[i] = value, total += scores[i];
    }
  }
  if (p.normalize) {
    const float factor = 1.0f / warp_reduce(total, Sum());
#pragma unroll
    for (int i = 0; i < kPer; ++i) grads[i] *= factor;
  }
  // Through the scores.
  float mean = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) mean = fmaf(grads[i], scores[i], mean);
  mean = warp_reduce(mean, Sum());
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int expert = lane + 32 * i;
    const float slope = p.sigmoid ? grads[i] * (1.0f - scores[i]) : grads[i] - mean;
    if (expert < p.experts) store_any(p.out, token * p.experts + expert, scores[i] * slope, p.type);
  }
}

}  // namespace flexops::experts
