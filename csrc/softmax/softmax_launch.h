// What both of softmax's launchers do: parameters and the grid. Included by softmax*.cu.
#pragma once

#include "softmax/softmax.cuh"

#include "softmax/softmax.h"

namespace flexops {

/// softmax_long.cu's, which has a file of its own to be compiled beside the others.
const void* softmax_long_kernel(softmax::Type type);

namespace {

using softmax::Params;

Params make_params(const void* x, void* out, const SoftmaxRows& rows) {
  Params p;
  p.x = x, p.out = out, p.mask = nullptr, p.grad = nullptr;
  p.rows = rows.rows, p.length = static_cast<int>(rows.length), p.stride = rows.stride, p.grad_stride = 0;
  p.queries = rows.causal ? rows.queries : 0;
  p.mask_dims = p.mask_step = 0;
  p.mask_kind = softmax::kNoMask;
  p.lanes = 1, p.log_lanes = 0;
  p.scale = rows.scale;
  return p;
}

/// Kernels for one type: for rows that threads hold, and for longer ones.
struct Kernels {
  const void *rows, *long_rows;
};

/// `floats`: that a thread holds.
const char* launch(const Kernels& kernels, Params& p, SoftmaxType type, int floats, void* stream) {
  const int64_t elements = type == SoftmaxType::f32 ? 4 : 8, held = floats / elements;
  const bool aligned = (reinterpret_cast<uintptr_t>(p.x) & 15) == 0 && p.stride % elements == 0;
  const int64_t vectors = (int64_t{p.length} + (aligned ? 0 : elements - 1) + elements - 1) / elements;  // of the row with the longest head
  const int64_t warps = (vectors + held * softmax::kNarrowWarp - 1) / (held * softmax::kNarrowWarp);
  const void* kernel = kernels.rows;
  int64_t blocks = p.rows, threads = warps * softmax::kNarrowWarp;
  if (warps <= 1) {
    while (p.lanes * held < vectors) p.lanes *= 2, ++p.log_lanes;
    threads = softmax::kThreads;
    blocks = (p.rows * p.lanes + threads - 1) / threads;
  } else if (threads <= softmax::kMostThreads) {
    p.lanes = static_cast<int>(threads);
  } else {
    kernel = kernels.long_rows;
    threads = softmax::kMostThreads;
  }
  void* arguments[] = {&p};
  cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), arguments, 0,
                   static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace
}  // namespace flexops
