"""Products of rows with the matrix of each row's group: the linear layers of a mixture of experts.

With the rows sorted by group, and ``offsets[e]`` where those of group ``e`` end::

    out[t] = weight[e] x[t]           for offsets[e - 1] <= t < offsets[e]
    dx[t] = weight[e]^T dout[t]       dweight[e] = sum_t dout[t] x[t]^T

Groups have any number of rows, also none. ``offsets`` is read on the device only, so that nothing
waits for the GPU, and a CUDA graph serves every distribution of the rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._torch import factors
from ._arguments import ANY_FLOAT, check_shape, check_tensor
from ._declared import define
from ._register import caller, check_places, has_native
from ._self_check import Make, checking

HALVES = (torch.bfloat16, torch.float16)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x[t] @ weight[e].T`` for the rows ``t`` of each group ``e``, in one launch.

    Args:
        x: ``[rows, k]``, float32, bfloat16 or float16; the rows are sorted by group.
        weight: ``[groups, n, k]`` of x's dtype. Contiguous, or the transpose of a contiguous
            ``[groups, k, n]``; another layout is copied.
        offsets: ``[groups]``, int32: where the rows of each group end, ascending. Rows from
            ``offsets[-1]`` on belong to no group; their results are zeros. (This is ``offs`` of
            ``torch.nn.functional.grouped_mm``.)

    Returns:
        ``[rows, n]`` of x's dtype, or of autocast's. Differentiable, once, with respect to ``x``
        and ``weight``.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes or devices are not as above; on the CPU, ``offsets`` descends or is
            outside of 0 to rows. On a GPU such offsets are clamped: results are undefined, and no
            access is out of bounds.

    On GPUs of 8.0 and newer bfloat16 and float16 run kernels of flexops, if ``k`` and ``n`` are
    multiples of 8. Everything else is a product of torch's for each group, which waits for the GPU.
    """
    x, weight = factors(x, weight)
    result: Tensor = _CALL(x, weight, offsets)
    return result


# ---- checks ----


def _check(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    op = "flexops.grouped_linear"
    check_tensor(op, "x", x, ANY_FLOAT, dims=2)
    check_tensor(op, "weight", weight, ANY_FLOAT, dims=3)
    check_offsets(op, offsets, weight.shape[0])
    if weight.dtype != x.dtype:
        raise TypeError(f"{op}: weight must be {x.dtype}, as x, got {weight.dtype}")
    check_places(op, {"x": x, "weight": weight, "offsets": offsets})
    why = f", since x has {x.shape[1]} columns"
    check_shape(op, "weight", weight, ["groups", "n", x.shape[1]], why)


def check_offsets(op: str, offsets: Tensor, groups: int) -> None:
    check_tensor(op, "offsets", offsets, (torch.int32,))
    why = ", one end for each matrix of weight"
    check_shape(op, "offsets", offsets, [max(groups, 1)], why)
    if groups < 1:
        raise ValueError(f"{op}: weight must have at least one matrix")


def ends_of(offsets: Tensor, rows: int) -> list[int]:
    """The values, which are checked; waits for a GPU."""
    ends: list[int] = offsets.tolist()
    if any(a > b for a, b in zip([0, *ends], [*ends, rows], strict=True)):
        if offsets.is_cuda:
            last, clamped = 0, []
            for end in ends:
                last = max(last, min(end, rows))
                clamped.append(last)
            return clamped
        raise ValueError(
            f"flexops.grouped_linear: offsets must ascend from 0 or more to {rows} or less, the"
            f" number of rows, got {ends[:16]}{'...' if len(ends) > 16 else ''}"
        )
    return ends


# ---- the products ----


@functools.cache
def _has_products(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes_kernels(x: Tensor, *sizes: int) -> bool:
    """Whether flexops' kernels compute products of ``x``'s rows, with matrices of these sizes."""
    return (
        x.is_cuda
        and x.dtype in HALVES
        and x.shape[0] > 0
        and all(size > 0 and size % 8 == 0 for size in (x.shape[1], *sizes))
        and _has_products(x.device)
        and has_native("grouped_linear", "cuda")
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


_GATHERS = True
"""Whether Hopper's kernels gather rows, or a sorted copy of them is made."""


def gathers_rows(x: Tensor, *sizes: int) -> bool:
    """Whether the kernels take rows by an order of choices, so that no sorted copy of them is
    needed."""
    return _GATHERS and takes_kernels(x, *sizes) and _is_hopper(x.device)


def _is_transposed(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x[t] @ weight[e].T``, by the best means there are."""
    if not takes_kernels(x, weight.shape[1]):
        return _rows_reference(x, weight, offsets)
    means = torch.ops.flexops.grouped_rows.default
    if _is_transposed(weight):
        means, weight = torch.ops.flexops.grouped_columns.default, weight.transpose(1, 2)
    result: Tensor = means(x, weight, offsets)
    return result


def outer(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """``sum_t grad[t] x[t].T`` of each group."""
    out = x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    outer_to(out, 0, grad, x, offsets)
    return out


def outer_to(out: Tensor, column: int, grad: Tensor, x: Tensor, offsets: Tensor) -> None:
    """The same into the columns of ``out`` from ``column`` on."""
    if takes_kernels(x, grad.shape[1], column or 8):
        torch.ops.flexops.grouped_outer_.default(out, grad, x, offsets, column)
    else:
        _outer_reference(out, grad, x, offsets, column)


def _rows_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out, begin = x.new_zeros(x.shape[0], weight.shape[1]), 0
    for matrix, end in zip(weight, ends_of(offsets, x.shape[0]), strict=True):
        if end > begin:
            torch.mm(x[begin:end], matrix.t(), out=out[begin:end])
        begin = end
    return out


def _outer_reference(out: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, column: int) -> None:
    begin = 0
    for matrix, end in zip(out, ends_of(offsets, x.shape[0]), strict=True):
        matrix[:, column : column + x.shape[1]] = grad[begin:end].t() @ x[begin:end]
        begin = end


def _fake(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.flexops.grouped_linear.default(grad, weight.transpose(1, 2), offsets)
    if ctx.needs_input_grad[1]:
        outer_of = torch.ops.flexops.grouped_linear_outer.default
        of_weight = (
            outer_of(x, grad, offsets).transpose(1, 2)
            if _is_transposed(weight)
            else outer_of(grad, x, offsets)
        )
    return of_x, of_weight, None


def _columns_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return _rows_reference(x, weight.transpose(1, 2), offsets)


def gated_reference(packed: Tensor, activation: int) -> Tensor:
    from .activation import gated_reference

    return gated_reference(packed, None, ("silu", "none", "tanh")[activation], False)


def _gated_reference(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    slots: int,
    activation: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    if order is not None:  # x has a row for each token, not for each slot
        x = x[order.reshape(-1).long() // (slots // x.shape[0])]
    packed = _rows_reference(x, weight, offsets)
    return gated_reference(packed, activation), packed if keep else x.new_empty(0)


define("grouped_rows", _rows_reference)
define("grouped_columns", _columns_reference)
define("grouped_outer_", _outer_reference)
define("grouped_gated", _gated_reference)
define(
    "grouped_linear",
    product,
    _fake,
    check=_check,
    setup_context=lambda ctx, args, _: ctx.save_for_backward(*args),
    backward=_backward,
)
define(
    "grouped_linear_outer",
    outer,
    lambda grad, x, offsets: x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1]),
)
_CALL = caller(torch.ops.flexops.grouped_linear.default)


@checking(of_halves=1 / 32, wide=True)
def self_check(make: Make) -> Any:
    """Each product of three groups, of which one is empty."""
    x, grad, weight = (
        make(*shape, scale=1 / 8, dtype=torch.bfloat16)
        for shape in ((200, 64), (200, 96), (3, 96, 64))
    )
    offsets = torch.tensor([70, 70, 190], dtype=torch.int32, device=make.device)
    ops, made = torch.ops.flexops, torch.empty_like(weight)
    ops.grouped_outer_(made, grad, x, offsets, 0)
    return (
        ops.grouped_rows(x, weight, offsets),
        ops.grouped_columns(grad, weight, offsets),
        ops.grouped_gated(x, weight, offsets, None, 200, 0, True),
        made,
    )
