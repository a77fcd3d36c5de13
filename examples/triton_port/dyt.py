"""Liger Kernel's DyT (a Triton operator with a backward) as two CUDA kernels in strings.

``gamma * tanh(alpha * x) + beta``: Zhu, Chen, He, LeCun and Liu, "Transformers without
Normalization" (2025). docs/migrating-builders.md compares it with the original line by line.
"""

import torch

import flexops

ROWS = 64  # of a block of the backward: a thread has a column, and adds up these rows of it

FORWARD = r"""
template <typename T>
__global__ void dyt(const T* x, const T* alpha, const T* gamma, const T* beta, T* out,
                    int columns, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  int c = i % columns;
  out[i] = T(float(gamma[c]) * tanhf(float(alpha[0]) * float(x[i])) + float(beta[c]));
}
"""
BACKWARD = r"""
template <typename T>
__global__ void dyt_backward(const T* grad, const T* x, const T* alpha, const T* gamma, T* dx,
                             float* sums, int rows, int columns) {
  int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= columns) return;
  float a = float(alpha[0]), da = 0, dgamma = 0, dbeta = 0;
  for (int row = blockIdx.y * ROWS; row < min(rows, int(blockIdx.y + 1) * ROWS); ++row) {
    int64_t i = row * int64_t(columns) + c;
    float t = tanhf(a * float(x[i])), g = float(grad[i]);
    float inner = g * float(gamma[c]) * (1 - t * t);
    dx[i] = T(inner * a);
    da += inner * float(x[i]);
    dgamma += g * t;
    dbeta += g;
  }
  float* out = sums + blockIdx.y * int64_t(3 * columns) + c;  // [blocks, 3, columns]
  out[0] = da;
  out[columns] = dgamma;
  out[2 * columns] = dbeta;
}
"""


def reference(x, alpha, gamma, beta):
    return gamma * torch.tanh(alpha * x) + beta


def backward_reference(grad, x, alpha, gamma):
    t = torch.tanh(alpha * x)
    inner = grad * gamma * (1 - t * t)
    parts = torch.stack([inner * x, grad * t, grad], 1).float()  # [rows, 3, columns]
    sums = torch.stack([part.sum(0) for part in parts.split(ROWS)])
    return inner * alpha, sums


def blocks(x):
    return -(-x.shape[0] // ROWS)


backward_kernel = flexops.kernel(
    BACKWARD,
    "dyt::dyt_backward(Tensor grad, Tensor x, Tensor alpha, Tensor gamma)"
    " -> (Tensor dx, Tensor sums)",
    args={"rows": lambda x: x.shape[0], "columns": lambda x: x.shape[1]},
    grid=lambda x: (-(-x.shape[1] // 128), blocks(x)),
    block=128,
    shapes={"grad": "x", "alpha": "1", "gamma": "x[1]"},
    out=lambda x: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(blocks(x), 3, x.shape[1], dtype=torch.float32),
    ),
    defines={"ROWS": ROWS},
    reference=backward_reference,
)


def setup_context(ctx, inputs, _output):
    ctx.save_for_backward(*inputs[:3])


def backward(ctx, grad):
    x, alpha, gamma = ctx.saved_tensors
    dx, sums = backward_kernel(grad, x, alpha, gamma)
    da, dgamma, dbeta = sums.sum(0)
    return dx, da.sum().view(1).to(x.dtype), dgamma.to(x.dtype), dbeta.to(x.dtype)


dyt = flexops.kernel(
    FORWARD,
    "dyt::dyt(Tensor x, Tensor alpha, Tensor gamma, Tensor beta) -> Tensor",
    args={"columns": lambda x: x.shape[1]},
    shapes={"alpha": "1", "gamma": "x[1]", "beta": "x[1]"},
    reference=reference,
    backward=backward,
    setup_context=setup_context,
)
