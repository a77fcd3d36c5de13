"""Log-probabilities of classes, and entropies, fused with the linear layer before them: torch's
matrix products around the ops of :mod:`.logprobs`, chunk by chunk, by the machinery of
:mod:`.linear_cross_entropy`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._torch import is_transforming, product_dtype
from ._declared import define
from ._register import caller
from .cross_entropy import check_arguments, loss_dtype
from .linear_cross_entropy import (
    Gradients,
    check_chunk_size,
    check_weights,
    flat_rows,
    gradients_fake,
    op_for,
    plan_chunks,
    wanted_gradients,
)
from .logprobs import both_gradients, check_numbers

_KEPT = 2
"""Chunks whose logits are kept for the backward pass: a third to all of a product less there."""


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: Literal[False] = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``logprobs(linear(hidden, weight, bias), target)`` without materializing all the logits.

    Rows go through in chunks. Upstream gradients are arbitrary, so the backward pass requires the
    logits again: those of the last two chunks are kept from the forward pass, and become their
    gradient in place; those of other chunks are computed again, and all of them in a second
    backward pass through the same graph.

    Args:
        hidden: ``[..., H]``, float32, float16 or bfloat16.
        weight: ``[V, H]``; of another float dtype it is converted to that of ``hidden``, as a copy.
        target: int64 ``[...]``: a class in ``[0, V)``, or ``ignore_index``, for each row.
        bias: ``[V]`` or None.
        temperature, softcap, return_entropy, ignore_index: as for :func:`flexops.logprobs`.
        chunk_size: rows per chunk; None selects it as :func:`flexops.linear_cross_entropy` does: at
            most 1 GiB of logits. Two chunks of logits are held from the forward to the backward
            pass, one without a gradient.

    Returns:
        float32 ``[...]``; with ``return_entropy`` a tuple ``(logprobs, entropy)``.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``hidden``, ``weight`` and ``bias``, from both results.
    Matrix products follow autocast. Gradients have the dtype of their tensor.
    """
    result, entropy, _ = with_statistics(
        hidden, weight, target, bias, temperature, softcap, ignore_index, chunk_size
    )
    return (result, entropy) if return_entropy else result


def with_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and ``[2, N]``: of each row its greatest scaled logit, and the
    sum of the powers of the distances to it."""
    where = "flexops.linear_logprobs"
    check_arguments("linear_logprobs", "hidden", hidden, target, 0.0, 0.0, "none")
    check_numbers(f"{where}:", temperature, softcap)
    check_chunk_size(where, chunk_size)
    check_weights(where, hidden, weight, bias, "hidden")
    shape = target.shape
    rows, targets = flat_rows(hidden, target)
    dtype, chunk, kept = product_dtype(hidden), chunk_size or 0, 0
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        chunk, kept = _kept_rows(rows, weight, bias, dtype, chunk)
    numbers = (ignore_index, temperature, softcap or 0.0)
    result, entropy, stats, _ = _FORWARD(rows, weight, bias, targets, *numbers, chunk, dtype, kept)
    if len(shape) != 1:
        result, entropy = result.view(shape), entropy.view(shape)
    return result, entropy, stats


def _kept_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk: int
) -> tuple[int, int]:
    """Rows of a chunk, and of the last chunks, whose logits the backward pass gets."""
    if not any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return chunk, 0
    chunks, _ = plan_chunks(x, weight, dtype, 1, chunk, 0)
    if not chunks:
        return chunk, 0
    return chunks[0].stop, chunks[-1].stop - chunks[-_KEPT:][0].start


# ---- operators: x, [N, H], target [N] ----


class _Layer:
    """The linear layer, in the products' dtype."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, dtype: torch.dtype
    ) -> None:
        self.dtype = torch.float64 if x.dtype == torch.float64 else dtype
        self.chunks, self.wide = plan_chunks(x, weight, self.dtype, 1, chunk, 0)
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)

    def logits(self, rows: int) -> Tensor:
        """Uninitialized."""
        return self.weight.new_empty(rows, self.weight.shape[0])

    def compute(self, part: Tensor, out: Tensor) -> None:
        if self.bias is None:
            torch.mm(part, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, part, self.weight.t(), out=out)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    chunk: int,
    dtype: torch.dtype,
    kept: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, statistics (``[2, N]``), and the last rows' logits."""
    op, layer = op_for("logprobs", x), _Layer(x, weight, bias, chunk, dtype)
    result = x.new_empty(x.shape[0], dtype=loss_dtype(x))
    entropy, stats = torch.empty_like(result), result.new_empty(2, x.shape[0])
    first = x.shape[0] - kept  # the first row whose logits are kept
    if kept and first not in [rows.start for rows in layer.chunks[-_KEPT:]]:
        raise ValueError(f"flexops.linear_logprobs: kept must be 0 or whole chunks, got {kept}")
    buffer = layer.logits(kept or (layer.chunks[0].stop if layer.chunks else 0))
    with torch.autocast(x.device.type, enabled=False):
        for rows in layer.chunks:
            begin = max(rows.start - first, 0) if kept else 0
            logits = buffer[begin : begin + rows.stop - rows.start]
            layer.compute(x[rows].to(layer.dtype), logits)
            result[rows], entropy[rows], found = op(
                logits, target[rows], ignore_index, temperature, softcap
            )
            stats[:, rows] = found.view(2, -1)
    return result, entropy, stats, buffer if kept else layer.logits(0)


def _backward_reference(
    grad: Tensor,
    grad_entropy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    stats: Tensor,
    entropy: Tensor,
    last: Tensor,
    ignore_index: int,
    temperature: float,
    softcap: float,
    chunk: int,
    dtype: torch.dtype,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kept logits become their gradient in place; then their memory is that of the others."""
    op, layer = op_for("logprobs_backward_", x), _Layer(x, weight, bias, chunk, dtype)
    chunks, kept = layer.chunks, last.shape[0]
    single, wanted = len(chunks) == 1, (x_grad, weight_grad, bias_grad)
    gradients = Gradients(x, weight, layer.weight, single, layer.wide, wanted)
    first = x.shape[0] - kept
    buffer = last if kept else layer.logits(chunks[0].stop if chunks else 0)
    with torch.autocast(x.device.type, enabled=False):
        for rows in sorted(chunks, key=lambda each: each.start < first):
            part = x[rows].to(layer.dtype)
            begin = max(rows.start - first, 0) if kept else 0
            logits = buffer[begin : begin + rows.stop - rows.start]
            if rows.start < first or not kept:
                layer.compute(part, logits)
            of_rows = (grad[rows], grad_entropy[rows])
            known = (target[rows], stats[:, rows].reshape(-1), entropy[rows])
            op(*of_rows, logits, *known, ignore_index, temperature, softcap)
            gradients.add(rows, part, logits)
    return gradients.results()


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype, kept, rows = rest[6], rest[7], x.shape[0]
    wide = loss_dtype(x)
    return (
        x.new_empty([rows], dtype=wide),
        x.new_empty([rows], dtype=wide),
        x.new_empty([2, rows], dtype=wide),
        x.new_empty([kept, weight.shape[0]], dtype=dtype),
    )


def _backward_fake(_: Tensor, __: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return gradients_fake(x, weight, rest[-3:])


def _setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    _, entropy, stats, last = results
    ctx.numbers = args[4:9]
    ctx.bias_dtype = None if args[2] is None else args[2].dtype
    ctx.save_for_backward(*args[:4], stats, entropy)
    ctx.last = last if last.shape[0] else None
    ctx.mark_non_differentiable(stats, last)


def _backward(
    ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    wanted, last, ctx.last = ctx.needs_input_grad[:3], ctx.last, None
    if last is None:  # of a compiler, or a second backward pass: all are computed again
        last = ctx.saved_tensors[0].new_empty(0, 1, dtype=ctx.numbers[-1])
    elif type(last) is not Tensor or is_transforming():  # a compiler may not write a result
        last = last.clone()
    gradients = torch.ops.flexops.linear_logprobs_backward_.default(
        *both_gradients(grad, grad_entropy), *ctx.saved_tensors, last, *ctx.numbers, *wanted
    )
    return wanted_gradients(ctx, *gradients)


define(
    "linear_logprobs",
    _reference,
    _fake,
    setup_context=_setup,
    backward=_backward,
)
define(
    "linear_logprobs_backward_",
    _backward_reference,
    _backward_fake,
)
_FORWARD = caller(torch.ops.flexops.linear_logprobs.default)
