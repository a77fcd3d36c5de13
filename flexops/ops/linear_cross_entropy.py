"""Cross entropy fused with the linear layer before it: torch's matrix products around the ops of :mod:`.cross_entropy`, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._register import caller, check_places, define, is_dense, references
from ._torch import is_transforming
from .cross_entropy import FLOAT_DTYPES, REDUCTIONS, check_arguments, divisor_of, loss_dtype, scaled

_CHUNK_BYTES = (2**28, 2**30)
"""What a chunk of logits may take: as much as the weight, which its gradient's last step takes anyway, within these bounds."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(x, weight, bias), target)`` without ever holding all the logits.

    Rows go through in chunks: a matrix product gives a chunk's logits, which :func:`flexops.cross_entropy` turns into their gradient in place, from
    which matrix products at once make the chunk's part of the gradients of ``x``, ``weight`` and ``bias``. So the forward pass holds one chunk of logits
    instead of all of them and their gradient, and the backward pass has next to nothing left to do. The weight's gradient is summed over chunks in float32
    (which takes ``4 * V * H`` bytes while the forward pass runs, unless it is float32 anyway or there is one chunk).

    Args:
        x: ``[..., H]``, float32, float16 or bfloat16.
        weight: ``[V, H]``; of another float dtype it is converted to that of ``x``, as a copy.
        target: int64 ``[...]``.
        bias: ``[V]`` or None.
        ignore_index, label_smoothing, z_loss, reduction: as for :func:`flexops.cross_entropy`. With "none" the gradients cannot be made before the
            losses' own are known, so that the backward pass computes each chunk's logits once more.
        chunk_size: rows a chunk; None picks as many as give logits of the weight's size, but of 256 MiB at least and 1 GiB at most: matrix products
            of fewer rows are less efficient.

    Returns:
        float32: a scalar, or ``[...]`` with "none".

    Raises:
        TypeError: a tensor is not of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``x``, ``weight`` and ``bias``. Matrix products follow autocast: under it they run in its dtype, whatever that of
    ``x`` and ``weight``. Gradients have the dtype of what they belong to.
    """
    check_arguments("linear_cross_entropy", "x", x, target, label_smoothing, z_loss, reduction)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"flexops.linear_cross_entropy: chunk_size must be at least 1, or None, got {chunk_size}")
    _check_weights("flexops.linear_cross_entropy:", x, weight, bias)
    shape, code = target.shape, REDUCTIONS[reduction]
    needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    rows, targets = (x, target) if len(shape) == 1 else (x.reshape(-1, x.shape[-1]), target.reshape(-1))
    numbers = (ignore_index, label_smoothing, z_loss, code, chunk_size or 0, _product_dtype(x))
    loss: Tensor = _FORWARD(rows, weight, bias, targets, *numbers, *needs)[0]
    return loss.view(shape) if code == 0 and len(shape) != 1 else loss


def _check_weights(where: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOAT_DTYPES:
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{where} {name} must be a float32, float16 or bfloat16 tensor, got {found}")
        if not is_dense(tensor):
            check_places(where[:-1], {name: tensor})
        if tensor.device != x.device:
            raise ValueError(f"{where} {name} must be on x's device, {x.device}, got {tensor.device}")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{where} weight must have shape [V, {x.shape[-1]}] with at least one class, got {tuple(weight.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(f"{where} bias must have shape [{weight.shape[0]}], got {tuple(bias.shape)}")


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type  # of others, such as meta, autocast knows nothing; torch.amp.is_autocast_available would say so, but not every compiler traces it
    return torch.get_autocast_dtype(device) if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) else x.dtype


# ---- chunks of the rows of x, [N, H] -----------------------------------------------------------------------------------------------------------


def _chunks(rows: int, row_bytes: int, chunk: int, weight_bytes: int) -> list[slice]:
    if chunk < 1:
        least, most = _CHUNK_BYTES
        fitting = max(min(max(weight_bytes, least), most) // row_bytes, 64)
        count = max((rows + fitting - 1) // fitting, 1)
        chunk = max((((rows + count - 1) // count + 63) // 64) * 64, 1)
    return [slice(begin, min(begin + chunk, rows)) for begin in range(0, rows, chunk)]


class _Gradients:
    """Of ``x``, ``weight`` and ``bias``, summed over chunks; those that nobody wants stay empty. The bias's, which is small, stays in float32."""

    def __init__(self, x: Tensor, weight: Tensor, product: Tensor, chunks: int, wanted: tuple[bool, bool, bool]) -> None:
        self.x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else x.new_empty(0)
        self.product, self.single, self.wanted = product, chunks == 1, wanted
        self.weight_dtype, self.wide = weight.dtype, loss_dtype(x)
        self.weight = weight.new_zeros(weight.shape if wanted[1] and not self.single else [0], dtype=self.wide)
        self.bias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=torch.float64)

    def add(self, rows: slice, x: Tensor, of_logits: Tensor) -> None:
        if self.wanted[0]:
            self.x[rows] = of_logits @ self.product
        if self.wanted[1]:
            if self.single:
                self.weight = of_logits.t() @ x
            else:
                _add_product(self.weight, of_logits.t(), x)
        if self.wanted[2]:
            self.bias += of_logits.sum(0, dtype=self.wide)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.weight.to(self.weight_dtype), self.bias.to(self.wide)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, rounded to nothing less than ``total``'s dtype where torch can."""
    if a.dtype == total.dtype or not total.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


def _run_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factors: Tensor | None,
    numbers: tuple[int, float, float], chunk: int, dtype: torch.dtype, wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, _Gradients]:  # fmt: skip
    """Each row's loss, and the gradients times ``factors``."""
    forward: Any = torch.ops.flexops.cross_entropy.default
    inplace: Any = torch.ops.flexops.cross_entropy_.default
    if x.dtype == torch.float64:  # which is for checks of this function only
        forward, inplace, dtype = references[forward], references[inplace], torch.float64
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    chunks = _chunks(x.shape[0], weight.shape[0] * dtype.itemsize, chunk, weight.numel() * dtype.itemsize)
    gradients = _Gradients(x, weight, matrix, len(chunks), wanted)
    losses = x.new_empty(x.shape[0], dtype=loss_dtype(x))
    with torch.autocast(x.device.type, enabled=False):
        for rows in chunks:
            part = x[rows].to(dtype)
            logits = torch.nn.functional.linear(part, matrix, offset)
            if any(wanted):
                by = factors if factors is None or factors.dim() == 0 else factors[rows]
                losses[rows] = inplace(logits, target[rows], by, *numbers, 0)
                gradients.add(rows, part, logits)
            else:
                losses[rows] = forward(logits, target[rows], *numbers, 0)[0]
    return losses, gradients


# ---- operators ---------------------------------------------------------------------------------------------------------------------------------


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: int,
    chunk: int, dtype: torch.dtype, x_grad: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, the gradients of ``x``, ``weight`` and ``bias``, and what these are still to be divided by."""
    numbers = (ignore_index, label_smoothing, z_loss)
    wanted = (x_grad, weight_grad, bias_grad) if reduction != 0 else (False, False, False)
    divisor = divisor_of(target, ignore_index, reduction, loss_dtype(x))
    # A mean's gradients are divided by the number of rows together with those of the logits, if bfloat16 rounds these more than the reciprocal is
    # rounded; in float32, where that would tell, at the end; and in float16, where they may be too small then, in the backward pass.
    factor = divisor.reciprocal() if reduction == 2 and dtype == torch.bfloat16 else None
    losses, gradients = _run_chunks(x, weight, bias, target, factor, numbers, chunk, dtype, wanted)
    loss, rest = losses if reduction == 0 else losses.sum() / divisor, divisor.clamp(min=1)  # where there are no rows, gradients are 0
    results = gradients.results()
    if reduction == 2 and dtype not in (torch.bfloat16, torch.float16):
        for gradient in results:
            gradient.div_(rest)
    return loss, *results, rest if dtype == torch.float16 else torch.ones_like(rest)


def _backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    chunk: int, dtype: torch.dtype, x_grad: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    numbers = (ignore_index, label_smoothing, z_loss)
    return _run_chunks(x, weight, bias, target, grad, numbers, chunk, dtype, (x_grad, weight_grad, bias_grad))[1].results()


def _gradients_fake(x: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor, Tensor, Tensor]:
    of_x = x.new_empty(x.shape if wanted[0] else [0])
    of_weight = weight.new_empty(weight.shape if wanted[1] else [0])
    return of_x, of_weight, weight.new_empty([weight.shape[0]] if wanted[2] else [0], dtype=loss_dtype(x))


def _fake(x: Tensor, weight: Tensor, _: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    reduction, wanted = rest[4], rest[7:] if rest[4] != 0 else (False, False, False)
    dtype = loss_dtype(x)
    loss = x.new_empty([x.shape[0]] if reduction == 0 else [], dtype=dtype)
    return loss, *_gradients_fake(x, weight, wanted), x.new_empty([], dtype=dtype)


def _backward_fake(_: Tensor, x: Tensor, weight: Tensor, __: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(x, weight, rest[6:])


def _setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    ctx.reduction, ctx.numbers = args[7], (*args[4:7], *args[8:])
    ctx.bias_dtype = None if args[2] is None else args[2].dtype
    inputs = args[:3] if is_transforming() else ()  # kept so that a second derivative is noticed
    ctx.save_for_backward(*(args[:4] if ctx.reduction == 0 else (*results[1:], *inputs)))
    ctx.mark_non_differentiable(*results[1:])


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    if ctx.reduction == 0:
        of_x, of_weight, of_bias = torch.ops.flexops.linear_cross_entropy_backward.default(grad, *ctx.saved_tensors, *ctx.numbers)
    else:
        *gradients, divisor = ctx.saved_tensors[:4]
        of_x, of_weight, of_bias = (scaled(gradient, grad / divisor) for gradient in gradients)
    wanted = ctx.needs_input_grad
    return of_x if wanted[0] else None, of_weight if wanted[1] else None, of_bias.to(ctx.bias_dtype) if wanted[2] else None, *[None] * 10


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float label_smoothing, float z_loss"
_WANTED = "SymInt chunk, ScalarType dtype, bool x_grad, bool weight_grad, bool bias_grad"
define(
    "cross_entropy",
    f"linear_cross_entropy({_INPUTS}, int reduction, {_WANTED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _reference,
    _fake,
    setup_context=_setup,
    backward=_backward,
    native=False,
)
define(
    "cross_entropy",
    f"linear_cross_entropy_backward(Tensor grad, {_INPUTS}, {_WANTED}) -> (Tensor, Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
    native=False,
)
_FORWARD = caller(torch.ops.flexops.linear_cross_entropy.default)
