// What attention's kernels for sm_80 and newer are made of: products by mma.sync, tiles loaded by
// cp.async.
#pragma once

#include "attention/attention_softmax.cuh"
#include "common/mma.cuh"
