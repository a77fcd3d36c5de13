"""The parts of a step of ``flexops.optim.Muon`` on matrices of one shape: their averages, scaled to
one norm; the products of the iterations; and what the parameters get.

Products are ``alpha op(a[i]) op(b[i]) + beta added[i] + diagonal I``. Of large ones that are known
to be symmetric, kernels for Hopper compute the part up to the diagonal. All others are cuBLAS's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._multi_tensor import increment_versions, on_cpu, split_lr
from ._register import has_native
from ._self_check import Make, checking

ROWS, MIXED, COLUMNS = range(3)
"""Which dimensions of the operands are summed over: ``a b^T``, ``a b``, ``a^T b``."""

_LEAST = 1024
"""Rows of results that the kernels compute: at 512 cuBLAS is faster."""


def product(
    a: Tensor,
    b: Tensor,
    form: int = ROWS,
    *,
    symmetric: bool = False,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    low: bool = False,
    over: bool = False,
) -> Tensor:
    """``alpha op(a) op(b) + beta added + diagonal I``, matrix by matrix.

    Args:
        a, b: ``[matrices, rows, columns]`` of one floating dtype, contiguous.
        form: ``ROWS``, ``MIXED`` or ``COLUMNS``.
        symmetric: the result is symmetric but for rounding; ``a`` and ``b`` have one shape, and
            with ``MIXED`` both are symmetric.
        added: of the result's shape and dtype.
        low: also return what the results were rounded off.
        over: ``added`` may be written over, which spares a copy.

    Returns:
        ``[matrices, m, n]`` of a's dtype, or ``[2 matrices, m, n]`` with ``low``; sums are of
        float32.
    """
    m, n = a.shape[1 if form != COLUMNS else 2], b.shape[1 if form == ROWS else 2]
    shape = a.shape[0] * (2 if low else 1), m, n
    out = a.new_empty(shape) if added is None or not over else added
    if symmetric and _takes_kernels(a, n):
        means = torch.ops.flexops.muon_product_.default
        means(out, a, b, added, form == COLUMNS, alpha, beta, diagonal)
    else:
        _multiply(out, a, b, added, form, alpha, beta, diagonal)
    return out


def _takes_kernels(a: Tensor, n: int) -> bool:
    return (
        n >= _LEAST
        and _is_native(a)
        and a.dtype == torch.float16
        and all(size % 8 == 0 for size in a.shape[1:])
        and a.numel() > 0
        and _is_hopper(a.device)
    )


def _is_native(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_native("muon", "cuda")


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def average_(
    grads: list[Tensor],
    buffers: list[Tensor],
    averages: list[Tensor],
    *,
    momentum: float,
    nesterov: bool,
    scale: float,
    eps: float,
    grad_scale: Tensor | None = None,
) -> None:
    """``buffer <- lerp(buffer, grad, 1 - momentum)``, and ``average`` becomes that, or with
    ``nesterov`` ``lerp(grad, buffer, momentum)``, times ``scale / max(norm, eps)``.

    Args:
        grads, buffers, averages: a matrix each, all of one shape; the last two are written.
        grad_scale: one float32 element that gradients are divided by first.
    """
    native = _is_native(grads[0])
    means: Any = torch.ops.flexops.muon_average_.default if native else _average_reference
    means(grads, buffers, averages, momentum, nesterov, scale, eps, grad_scale)


def apply_(
    params: list[Tensor], steps: list[Tensor], *, lr: float | Tensor, decay: float, factor: float
) -> None:
    """``param <- param (1 - lr decay) - lr factor step``, in float32."""
    number, tensor = split_lr(lr, on_cpu(params))
    if tensor is not None:
        tensor = tensor.to(params[0].device)
    native = _is_native(params[0])
    means: Any = torch.ops.flexops.muon_apply_.default if native else _apply_reference
    means(params, steps, number, decay, factor, tensor)
    increment_versions(params)


def _average_reference(
    grads: list[Tensor], buffers: list[Tensor], averages: list[Tensor], momentum: float,
    nesterov: bool, scale: float, eps: float, grad_scale: Tensor | None,
) -> None:  # fmt: skip
    for given, buffer, out in zip(grads, buffers, averages, strict=True):
        grad = given.float() if grad_scale is None else given.float() / grad_scale
        new = torch.lerp(buffer.float(), grad, 1 - momentum)
        buffer.copy_(new)
        average = torch.lerp(grad, new, momentum) if nesterov else new
        out.copy_(average * (scale / torch.linalg.vector_norm(average).clamp(min=eps)))


def _apply_reference(
    params: list[Tensor], steps: list[Tensor], lr: float, decay: float, factor: float,
    lr_tensor: Tensor | None,
) -> None:  # fmt: skip
    rate: Any = lr if lr_tensor is None else lr_tensor.reshape(())
    for param, step in zip(params, steps, strict=True):
        param.copy_(param.float() * (1 - rate * decay) - rate * factor * step.float())


def _reference(
    out: Tensor, a: Tensor, b: Tensor, added: Tensor | None, columns: bool, alpha: float,
    beta: float, diagonal: float,
) -> None:  # fmt: skip
    _multiply(out, a, b, added, COLUMNS if columns else ROWS, alpha, beta, diagonal)


def _multiply(
    out: Tensor, a: Tensor, b: Tensor, added: Tensor | None, form: int, alpha: float, beta: float,
    diagonal: float,
) -> None:  # fmt: skip
    left, right = a.mT if form == COLUMNS else a, b.mT if form == ROWS else b
    low = None
    if out.shape[0] > a.shape[0]:
        out, low = out.chunk(2)
    given = out if added is None else added
    # without an addend beta is 0, and what is in `out` does not count
    torch.baddbmm(given, left, right, beta=beta if added is not None else 0, alpha=alpha, out=out)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    if low is not None:
        exact = torch.baddbmm(out.float(), left.float(), right.float(), beta=0, alpha=alpha)
        low.copy_(exact.sub_(out))


define("muon_product_", _reference)
define("muon_average_", _average_reference)
define("muon_apply_", _apply_reference)


@checking(of_halves=1 / 16, wide=True)
def self_check(make: Make) -> Any:
    """Products of rows and of columns. float16 rounds results of this size by 2^-12."""
    x, results = make(2, 264, 72, scale=1 / 8, dtype=torch.float16), []
    for columns in (False, True):
        out = x.new_empty(2, *[x.shape[2 if columns else 1]] * 2)
        torch.ops.flexops.muon_product_(out, x, x, None, columns, 0.5, 0.0, 0.25)
        results.append(out)
    return results
