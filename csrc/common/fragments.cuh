// From the registers of mma's and wgmma's accumulators, of which each lane of a quad has two of
// every eight columns, to 16-byte accesses of memory and back.
#pragma once

#include "common/device.cuh"
#include "common/elements.cuh"

namespace flexops {

/// word i of lane q becomes word q of lane i, among each four lanes.
FLEXOPS_DEVICE void transpose_quad(u32 (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = shuffle_xor(odd ? words[i] : words[i + 1], 1);
    if (odd) words[i] = other;
    if (!odd) words[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = shuffle_xor(high ? words[i] : words[i + 2], 2);
    if (high) words[i] = other;
    if (!high) words[i + 2] = other;
  }
}

/// Stores 32 columns of a row, of which each lane of a quad has two of every eight (the layout of
/// mma's and wgmma's accumulators), 16 bytes at a time. `to` is the row's first of these columns,
/// of which `columns` (a multiple of 8) exist; nothing is stored if not `valid`.
template <class T>
FLEXOPS_DEVICE void store_columns(T* to, u32 (&words)[4], int columns, bool valid) {
  transpose_quad(words);
  const int column = static_cast<int>(threadIdx.x % 4) * 8;
  if (valid && column < columns)
    store<Cache::normal>(reinterpret_cast<uint4*>(to + column),
                         uint4{words[0], words[1], words[2], words[3]});
}

}  // namespace flexops
