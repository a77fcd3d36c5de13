"""Products of rows with the 4-bit matrix of each row's group: the linear layers of a mixture of
experts whose weights have 4 bits.

The matrices are dequantized to x's dtype, all of a layer at once, and multiplied as those of
:mod:`.grouped_linear`. The backward pass dequantizes them again: no 16-bit weight is kept for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import FLOAT_DTYPES, check_tensor
from ._declared import define
from ._register import caller, check_places
from .few_experts import check_mxfp4
from .grouped_linear import check_offsets, product
from .int4_linear import Int4Weight, check_packed


def int4_grouped_linear(
    x: Tensor, weight: Int4Weight, offsets: Tensor, *, mxfp4: bool = False
) -> Tensor:
    """``x[t] @ weight[e].T`` for the rows ``t`` of each group ``e``.

    Args:
        x: ``[rows, k]``, float32, bfloat16 or float16; the rows are sorted by group.
        weight: ``[groups * n, k]``: the matrices of the groups one behind the other.
        offsets: ``[groups]``, int32; see :func:`flexops.grouped_linear`.
        mxfp4: codes are MXFP4's numbers, in groups of 32 and without zero points; see
            :mod:`.few_experts`.

    Returns:
        ``[rows, n]`` of x's dtype. Differentiable, once, with respect to ``x``.

    Raises:
        TypeError: a tensor is not of these dtypes.
        ValueError: shapes or devices are not as above.
    """
    packed, scales, zeros, n, k, group_size = weight
    result: Tensor = _CALL(x, packed, scales, zeros, offsets, n, k, group_size, mxfp4)
    return result


def _check(x: Tensor, *rest: Any) -> None:
    op = "flexops.ops.int4_grouped_linear"
    weight, offsets, mxfp4 = _weight(rest)
    check_tensor(op, "x", x, FLOAT_DTYPES, dims=2)
    check_packed(op, weight)
    if mxfp4:
        check_mxfp4(op, weight)
    check_offsets(op, offsets, offsets.numel())
    check_places(op, {"x": x, "weight": weight.packed, "offsets": offsets})
    if weight.n % offsets.numel():
        raise ValueError(f"{op}: {weight.n} rows of weight are no {offsets.numel()} equal matrices")
    if x.shape[1] != weight.k:
        raise ValueError(f"{op}: x must have {weight.k} columns, as weight, got {x.shape[1]}")


def _weight(arguments: tuple[Any, ...]) -> tuple[Int4Weight, Tensor, bool]:
    packed, scales, zeros, offsets, *sizes, mxfp4 = arguments
    return Int4Weight(packed, scales, zeros, *sizes), offsets, mxfp4


def _dense(rest: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, offsets, mxfp4 = _weight(rest)
    if mxfp4:
        given = weight.packed, weight.scales, weight.n, weight.k
        dense: Tensor = torch.ops.flexops.mxfp4_unpack.default(*given, dtype)
    else:
        dense = torch.ops.flexops.int4_unpack.default(*weight, dtype)
    return dense.view(offsets.numel(), -1, weight.k), offsets


def _forward(x: Tensor, *rest: Any) -> Tensor:
    dense, offsets = _dense(rest, x.dtype)
    return product(x, dense, offsets)


def _forward_fake(x: Tensor, *rest: Any) -> Tensor:
    weight, offsets, _ = _weight(rest)
    return x.new_empty(x.shape[0], weight.n // offsets.numel())


def _backward(grad: Tensor, *rest: Any) -> Tensor:
    dense, offsets = _dense(rest, grad.dtype)
    return product(grad.contiguous(), dense.transpose(1, 2), offsets)


def _backward_fake(grad: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty(grad.shape[0], _weight(rest)[0].k)


def _setup(ctx: Any, args: tuple[Any, ...], _: Tensor) -> None:
    ctx.save_for_backward(*args[1:5])
    ctx.sizes = args[5:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    means = torch.ops.flexops.int4_grouped_linear_backward.default
    of_x = means(grad, *ctx.saved_tensors, *ctx.sizes) if ctx.needs_input_grad[0] else None
    return (of_x, *[None] * 8)


define(
    "int4_grouped_linear",
    _forward,
    _forward_fake,
    check=_check,
    setup_context=_setup,
    backward=_gradient,
)
define("int4_grouped_linear_backward", _backward, _backward_fake)
_CALL = caller(torch.ops.flexops.int4_grouped_linear.default)
