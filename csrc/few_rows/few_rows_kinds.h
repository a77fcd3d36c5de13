// What products of a few rows are limited to, on host and device.
#pragma once

namespace flexops {

constexpr int kMostFewRows = 16, kMostFewWeights = 3;

enum FewRowsActivation { kFewNone, kFewSilu, kFewGelu, kFewGeluTanh, kFewActivations };

}  // namespace flexops
