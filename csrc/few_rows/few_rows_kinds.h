// What products of a few rows are limited to, on host and device.
#pragma once

namespace flexops {

constexpr int kMostFewRows = 16, kMostFewWeights = 3;

enum FewRowsActivation { kFewNone, kFewSilu, kFewGelu, kFewGeluTanh, kFewActivations };
/// Of experts only: (up + 1) gate sigmoid(alpha gate), both within a limit.
constexpr int kFewClamped = kFewActivations;
/// Of a token, where experts have weights of 4 bits.
constexpr int kMostChoicesOfToken = 64;

}  // namespace flexops
