"""Log-probabilities of classes, and entropies, fused with the linear layer before them: torch's
matrix products around the ops of :mod:`.logprobs`, chunk by chunk, by the machinery of
:mod:`.linear_cross_entropy`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._torch import is_transforming, product_dtype
from ._declared import define
from ._register import caller, references
from .cross_entropy import check_arguments, loss_dtype
from .linear_cross_entropy import Gradients, check_weights, gradients_fake, plan_chunks
from .logprobs import both_gradients, check_numbers


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

    Rows go through in chunks. Upstream gradients are arbitrary, so the backward pass computes the
    logits of each chunk again; only those of the last chunk are kept from the forward pass.

    Args:
        hidden: ``[..., H]``, float32, float16 or bfloat16.
        weight: ``[V, H]``; of another float dtype it is converted to that of ``hidden``, as a copy.
        target: int64 ``[...]``: a class in ``[0, V)``, or ``ignore_index``, for each row.
        bias: ``[V]`` or None.
        temperature, softcap, return_entropy, ignore_index: as for :func:`flexops.logprobs`.
        chunk_size: rows per chunk; None selects it as :func:`flexops.linear_cross_entropy` does: at
            most 1 GiB of logits. The forward pass holds the logits of one chunk, the backward pass
            of two.

    Returns:
        float32 ``[...]``; with ``return_entropy`` a tuple ``(logprobs, entropy)``.

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``hidden``, ``weight`` and ``bias``, from both results.
    Matrix products follow autocast. Gradients have the dtype of their tensor.
    """
    where = "flexops.linear_logprobs:"
    check_arguments("linear_logprobs", "hidden", hidden, target, 0.0, 0.0, "none")
    check_numbers(where, temperature, softcap)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{where} chunk_size must be at least 1, or None, got {chunk_size}")
    check_weights(where, hidden, weight, bias, "hidden")
    shape = target.shape
    rows, targets = (
        (hidden, target)
        if len(shape) == 1
        else (hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1))
    )
    dtype, chunk, kept = product_dtype(hidden), chunk_size or 0, 0
    if not is_transforming() and torch.is_grad_enabled():
        chunk, kept = _kept_rows(rows, weight, bias, dtype, chunk)
    numbers = (ignore_index, temperature, softcap or 0.0)
    result, entropy, *_ = _FORWARD(rows, weight, bias, targets, *numbers, chunk, dtype, kept)
    if len(shape) != 1:
        result, entropy = result.view(shape), entropy.view(shape)
    return (result, entropy) if return_entropy else result


def _kept_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk: int
) -> tuple[int, int]:
    """Rows of a chunk, and of the last one, whose logits the backward pass gets."""
    if not any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return chunk, 0
    chunks, _ = plan_chunks(x, weight, dtype, 1, chunk, 0)
    if not chunks:
        return chunk, 0
    return chunks[0].stop, chunks[-1].stop - chunks[-1].start


# ---- operators: x, [N, H], target [N] ------------------------------------------------------------


def _op(name: str, x: Tensor) -> Any:
    """The reference for float64, which is for checks of this function only."""
    op = getattr(torch.ops.flexops, name).default
    return references[op.name()] if x.dtype == torch.float64 else op


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
    op, dtype = _op("logprobs", x), torch.float64 if x.dtype == torch.float64 else dtype
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    chunks, _ = plan_chunks(x, weight, dtype, 1, chunk, 0)
    result = x.new_empty(x.shape[0], dtype=loss_dtype(x))
    entropy, stats = torch.empty_like(result), result.new_empty(2, x.shape[0])
    logits = x.new_empty(0, weight.shape[0], dtype=dtype)
    with torch.autocast(x.device.type, enabled=False):
        for rows in chunks:
            del logits  # before the next chunk's are allocated
            logits = torch.nn.functional.linear(x[rows].to(dtype), matrix, offset)
            result[rows], entropy[rows], found = op(
                logits, target[rows], ignore_index, temperature, softcap
            )
            stats[:, rows] = found.view(2, -1)
    return result, entropy, stats, logits if kept else logits.new_empty(0, weight.shape[0])


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
    dtype = torch.float64 if x.dtype == torch.float64 else dtype
    made, inplace = _op("logprobs_backward", x), _op("logprobs_backward_", x)
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    chunks, wide = plan_chunks(x, weight, dtype, 1, chunk, 0)
    wanted = (x_grad, weight_grad, bias_grad)
    gradients = Gradients(x, weight, matrix, len(chunks) == 1, wide, wanted)
    with torch.autocast(x.device.type, enabled=False):
        for rows in chunks:
            part = x[rows].to(dtype)
            of_rows = (grad[rows], grad_entropy[rows])
            rest = (target[rows], stats[:, rows].reshape(-1), entropy[rows])
            numbers = (ignore_index, temperature, softcap)
            if rows.stop == x.shape[0] and last.shape[0]:
                # Not in place: a retained graph needs the logits again.
                logits = made(*of_rows, last, *rest, *numbers)
            else:
                logits = torch.nn.functional.linear(part, matrix, offset)
                inplace(*of_rows, logits, *rest, *numbers)
            gradients.add(rows, part, logits)
            del logits
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
    ctx.save_for_backward(*args[:4], stats, entropy, last)
    ctx.mark_non_differentiable(stats, last)


def _backward(
    ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:3]
    of_x, of_weight, of_bias = torch.ops.flexops.linear_logprobs_backward.default(
        *both_gradients(grad, grad_entropy), *ctx.saved_tensors, *ctx.numbers, *wanted
    )
    return (
        of_x if wanted[0] else None,
        of_weight if wanted[1] else None,
        of_bias.to(ctx.bias_dtype) if wanted[2] else None,
        *[None] * 7,
    )


_NUMBERS = "int ignore_index, float temperature, float softcap, SymInt chunk, ScalarType dtype"
define(
    f"linear_logprobs(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_NUMBERS}, SymInt kept)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _reference,
    _fake,
    setup_context=_setup,
    backward=_backward,
)
define(
    "linear_logprobs_backward(Tensor grad, Tensor grad_entropy, Tensor x, Tensor weight, Tensor?"
    f" bias, Tensor target, Tensor stats, Tensor entropy, Tensor last, {_NUMBERS}, bool x_grad,"
    " bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
)
_FORWARD = caller(torch.ops.flexops.linear_logprobs.default)
