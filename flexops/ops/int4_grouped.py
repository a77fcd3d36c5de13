"""Products of rows with the 4-bit matrix of each row's group: the linear layers of a mixture of
experts whose weights have 4 bits.

On a GPU kernels read the packed matrices, and dequantize them in registers. With many rows, on
GPUs other than Hopper, the matrices are dequantized to x's dtype, all of a layer at once, and
multiplied as those of :mod:`.grouped_linear`. On a CPU each group that has rows is an
:func:`flexops.int4_linear`, with MXFP4's numbers, too. The backward pass dequantizes them again: no
16-bit weight is kept for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._arguments import FLOAT_DTYPES, check_tensor
from ._declared import define
from ._register import caller, check_places, has_native
from ._self_check import Make, checking
from .few_experts import check_mxfp4, unpack_mxfp4
from .grouped_linear import HALVES, check_offsets, ends_of, product
from .int4_linear import TILE_N, Int4Weight, check_packed, linear, quantize_int4, unpack_reference


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
    op = "flexops.ops.int4_grouped.int4_grouped_linear"
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


def _dense(weight: Int4Weight, mxfp4: bool, dtype: torch.dtype) -> Tensor:
    if mxfp4 and weight.device.type != "cpu":
        return unpack_mxfp4(weight, dtype)
    dense: Tensor = torch.ops.flexops.int4_unpack.default(*weight, dtype, mxfp4)
    return dense


def _by_group(
    rows: Tensor, rest: tuple[Any, ...], columns: int, compute: Callable[..., None]
) -> Tensor:
    """``compute(its rows, its matrix, where the result goes)`` of each group that has rows: a
    decode step of a mixture reads few of its matrices."""
    weight, offsets, _ = _weight(rest)
    groups = offsets.numel()
    tiles = weight.packed.shape[0] // groups
    out, begin = rows.new_zeros(rows.shape[0], columns), 0
    for group, end in enumerate(ends_of(offsets, rows.shape[0])):
        if end > begin:
            part = slice(group * tiles, (group + 1) * tiles)
            matrix = weight._replace(
                packed=weight.packed[part],
                scales=weight.scales[part],
                zeros=None if weight.zeros is None else weight.zeros[part],
                n=weight.n // groups,
            )
            compute(rows[begin:end], matrix, out[begin:end])
            begin = end
    return out


def _apart(rows: Tensor, weight: Int4Weight, groups: int) -> bool:
    """Whether groups are computed one by one: on a CPU, where each has whole tiles."""
    return rows.device.type == "cpu" and weight.n // groups % TILE_N == 0


_MOST_ROWS = 128
"""Of a group, on average, up to which mma.sync's kernels read the packed weight. They and wgmma's,
which are faster with any number of rows, were measured on an H200."""


def reads_packed(x: Tensor, weight: Int4Weight, groups: int) -> bool:
    """Whether kernels compute the products of these rows from packed matrices."""
    if not (x.is_cuda and x.dtype in HALVES and weight.dtype in HALVES and x.shape[0]):
        return False
    capability = torch.cuda.get_device_capability(x.device)
    few = capability == (9, 0) or x.shape[0] <= _MOST_ROWS * groups
    whole = weight.n // groups % TILE_N == 0
    return few and whole and capability >= (8, 0) and has_native("int4_grouped", "cuda")


def _forward(x: Tensor, *rest: Any) -> Tensor:
    weight, offsets, mxfp4 = _weight(rest)
    groups = offsets.numel()
    if reads_packed(x, weight, groups):
        sizes = weight.n // groups, weight.k, weight.group_size
        means: Any = torch.ops.flexops.int4_grouped_rows.default
        made: Tensor = means(x, *weight[:3], offsets, *sizes, mxfp4, 0)
        return made

    def compute(rows: Tensor, matrix: Int4Weight, out: Tensor) -> None:
        out.copy_(linear(rows, matrix, None, mxfp4))

    if _apart(x, weight, groups):
        return _by_group(x, rest, weight.n // groups, compute)
    return product(x, _dense(weight, mxfp4, x.dtype).view(groups, -1, weight.k), offsets)


def _rows_reference(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, offsets: Tensor,
    n: int, k: int, group_size: int, mxfp4: bool, _: int,
) -> Tensor:  # fmt: skip
    weight = Int4Weight(packed, scales, zeros, n * offsets.numel(), k, group_size)
    dense = unpack_reference(weight, torch.float32, mxfp4).view(-1, n, k)
    return product(x.float(), dense, offsets).to(x.dtype)


def _rows_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], rest[4])


def _forward_fake(x: Tensor, *rest: Any) -> Tensor:
    weight, offsets, _ = _weight(rest)
    return x.new_empty(x.shape[0], weight.n // offsets.numel())


def _backward(grad: Tensor, *rest: Any) -> Tensor:
    weight, offsets, mxfp4 = _weight(rest)
    groups = offsets.numel()

    def compute(rows: Tensor, matrix: Int4Weight, out: Tensor) -> None:
        torch.mm(rows, _dense(matrix, mxfp4, grad.dtype), out=out)

    if _apart(grad, weight, groups):
        return _by_group(grad, rest, weight.k, compute)
    dense = _dense(weight, mxfp4, grad.dtype).view(groups, -1, weight.k)
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
define("int4_grouped_rows", _rows_reference, _rows_fake)
_CALL = caller(torch.ops.flexops.int4_grouped_linear.default)


@checking(of_halves=1 / 16)
def self_check(make: Make) -> Any:
    """Products of three groups, of which one is empty; with zero points, and of MXFP4."""
    half: Any = functools.partial(make, dtype=torch.bfloat16)
    x, weight = half(70, 128), half(3 * 48, 128) / 8
    offsets = torch.tensor([20, 20, 60], dtype=torch.int32, device=x.device)
    means: Any = torch.ops.flexops.int4_grouped_rows.default
    return [
        means(x, *quantize_int4(weight, size, mxfp4)[:3], offsets, 48, 128, size, mxfp4, 0)
        for size, mxfp4 in ((64, False), (32, True))
    ]
