"""Cross entropy of logits and class numbers, with its gradient.

For a row ``x`` of ``V`` logits and its class ``t``, with ``lse = log(sum(exp(x)))``::

    loss     = lse - (1 - label_smoothing) * x[t] - label_smoothing * mean(x) + z_loss * lse**2
    gradient = (softmax(x) * (1 + 2 * z_loss * lse) - label_smoothing / V
                - (1 - label_smoothing) * (class == t))

which without ``z_loss`` is what ``torch.nn.functional.cross_entropy`` computes; ``z_loss`` is
PaLM's (Chowdhery et al., 2022, section 5). All of it is computed in float32, and so are losses,
whatever the dtype of the logits: 8 bits are too few for a loss. Gradients have the dtype of
the logits.

Rows whose class is ``ignore_index`` have loss and gradient 0 and do not count in a mean; their
logits are not looked at. A class that is neither that nor one of the ``V`` makes its row's loss and
gradient NaN: nothing outside of the logits is read, and finding it out on the host would stop a
GPU. The mean over no rows at all is NaN, as in torch, and its gradient 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import is_transforming
from ._arguments import check_tensor, number, wide
from ._declared import define
from ._register import caller
from ._self_check import Make, checking

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Cross entropy between ``logits`` and class numbers. Formulas, ignored and invalid classes:
    see the module.

    Args:
        logits: ``[..., V]``, float32, float16 or bfloat16, any strides; any ``V`` from 1 to 2**30.
            Classes are the last dimension.
        target: int64 ``[...]``: a class in ``[0, V)``, or ``ignore_index``, for each row.
        ignore_index: the class number of rows that do not count.
        label_smoothing: 0 to 1.
        z_loss: weight of the squared log-sum-exp, at least 0.
        reduction: "mean" (over the rows that are not ignored), "sum" or "none".
        inplace: **write the gradient over the logits**, in the same pass that computes the loss:
            the logits are destroyed, and training takes no memory beyond them. Whatever else would
            need their values for its backward pass raises torch's "modified by an inplace
            operation"; that also goes for a second backward pass. Logits are left alone where
            nothing requires a gradient, and where their rows are not contiguous, not evenly spaced
            or lie over each other.

    Returns:
        float32: a scalar, or ``[...]`` with "none".

    Raises:
        TypeError: ``logits`` or ``target`` is no tensor of the dtypes above.
        ValueError: shapes, devices or numbers are not as above.

    Differentiable once, with respect to ``logits``. Without ``inplace`` the backward pass makes the
    gradient from the logits, which it keeps, and their log-sum-exps. With it the gradient is there
    already, and multiplied by the loss's own gradient only if that is not 1, which a GPU finds out
    without asking the host. Then float16 rounds the gradient before, not after, a ``GradScaler``'s
    factor is in it: prefer bfloat16, or ``reduction="sum"``.
    """
    check_arguments("cross_entropy", "logits", logits, target, label_smoothing, z_loss, reduction)
    if logits.shape[-1] == 0:  # "not" makes a compiler of torch 2.4 take the size for a constant
        raise ValueError(
            "flexops.cross_entropy: logits must have at least one class in their last dimension,"
            f" got shape {tuple(logits.shape)}"
        )
    shape, code = target.shape, REDUCTIONS[reduction]
    if len(shape) != 1:
        target, logits = target.reshape(-1), logits.reshape(-1, logits.shape[-1])
    if inplace and logits.requires_grad and torch.is_grad_enabled() and _has_rows(logits):
        loss: Tensor = _INPLACE(logits, target, None, ignore_index, label_smoothing, z_loss, code)[
            0
        ]
    else:
        loss = _FORWARD(logits, target, ignore_index, label_smoothing, z_loss, code)[0]
    return loss.view(shape) if code == 0 and len(shape) != 1 else loss


def check_arguments(
    op: str,
    name: str,
    values: Tensor,
    target: Tensor,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> None:
    """Those that every cross entropy has. ``values``, called ``name``, have a row for each class
    number."""
    check_tensor(f"flexops.{op}", name, values)
    check_tensor(f"flexops.{op}", "target", target, (torch.int64,))
    if values.dim() == 0:
        raise ValueError(f"flexops.{op}: {name} must have at least one dimension, got a scalar")
    if values.device != target.device:
        raise ValueError(
            f"flexops.{op}: target must be on the device of {name}, {values.device}, got"
            f" {target.device}"
        )
    if values.shape[:-1] != target.shape:
        rows = tuple(values.shape[:-1])
        raise ValueError(
            f"flexops.{op}: target must have shape {rows}, one class for each row of {name}, got"
            f" {tuple(target.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"flexops.{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}"
        )
    label_smoothing = number(f"flexops.{op}: label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"flexops.{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if not number(f"flexops.{op}: z_loss", z_loss) >= 0.0:
        raise ValueError(f"flexops.{op}: z_loss must be at least 0, got {z_loss}")


def _has_rows(logits: Tensor) -> bool:
    """Whether they can be written over."""
    (rows, classes), (step, inner) = logits.shape, logits.stride()
    return (classes == 1 or inner == 1) and (rows <= 1 or step >= classes)


# ---- the ops: logits, [N, V], target [N] ----


def divisor_of(target: Tensor, ignore_index: int, reduction: int, dtype: torch.dtype) -> Tensor:
    """What the sum of the losses is divided by: for a mean, the number of rows that are not
    ignored."""
    return (
        (target != ignore_index).sum().to(dtype)
        if reduction == 2
        else torch.ones((), dtype=dtype, device=target.device)
    )


def _stats(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Of each row its greatest logit, and the sum of the powers of the distances to it; 0 if it is
    ignored."""
    greatest = x.amax(1)
    greatest = greatest.masked_fill(greatest == -torch.inf, 0.0)
    total = torch.exp(x - greatest.unsqueeze(1)).sum(1)
    ignored = target == ignore_index
    return greatest.masked_fill(ignored, 0.0), total.masked_fill(ignored, 0.0)


def _losses(
    x: Tensor,
    target: Tensor,
    stats: tuple[Tensor, Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    (greatest, total), classes = stats, x.shape[1]
    log = total.log()
    chosen = x.gather(1, target.clamp(0, classes - 1).unsqueeze(1)).squeeze(1)
    losses = log + (1 - label_smoothing) * (greatest - chosen) + z_loss * (greatest + log).square()
    if label_smoothing != 0.0:
        losses = losses + label_smoothing * (greatest - x.mean(1))
    losses = losses.masked_fill((target < 0) | (target >= classes), torch.nan)
    return losses.masked_fill(target == ignore_index, 0.0)


def _gradient(
    x: Tensor,
    target: Tensor,
    stats: tuple[Tensor, Tensor],
    factor: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Of each row's loss, times ``factor``."""
    classes, (greatest, total) = x.shape[1], stats
    slope = (1 + 2 * z_loss * (greatest + total.log())) / total
    gradient = torch.exp(x - greatest.unsqueeze(1)) * slope.unsqueeze(1) - label_smoothing / classes
    chosen = target.clamp(0, classes - 1).unsqueeze(1)
    gradient = gradient.scatter_add(
        1, chosen, gradient.new_full((), label_smoothing - 1.0).expand(chosen.shape)
    )
    gradient = gradient * (factor.unsqueeze(1) if factor.dim() == 1 else factor)
    gradient = gradient.masked_fill(((target < 0) | (target >= classes)).unsqueeze(1), torch.nan)
    return gradient.masked_fill((target == ignore_index).unsqueeze(1), 0.0)


def _cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    x = wide(logits)
    stats = _stats(x, target, ignore_index)
    losses = _losses(x, target, stats, ignore_index, label_smoothing, z_loss)
    if reduction == 0:
        return losses, torch.cat(stats)
    divisor = divisor_of(target, ignore_index, reduction, x.dtype)
    return losses.sum() / divisor, torch.cat([*stats, losses, divisor.unsqueeze(0)])


def _cross_entropy_inplace_reference(
    logits: Tensor,
    target: Tensor,
    factors: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    x = wide(logits)
    stats = _stats(x, target, ignore_index)
    losses = _losses(x, target, stats, ignore_index, label_smoothing, z_loss)
    divisor = divisor_of(target, ignore_index, reduction, x.dtype)
    factor = (1.0 if factors is None else factors) / divisor
    logits.copy_(_gradient(x, target, stats, factor, ignore_index, label_smoothing, z_loss))
    if reduction == 0:
        return losses, torch.cat(stats)
    return losses.sum() / divisor, torch.cat([*stats, losses, divisor.unsqueeze(0)])


def _cross_entropy_backward_reference(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
) -> Tensor:
    rows = logits.shape[0]
    factor = grad if reduction == 0 else grad / stats[-1]
    pair = (stats[:rows], stats[rows : 2 * rows])
    gradient = _gradient(wide(logits), target, pair, factor, ignore_index, label_smoothing, z_loss)
    return gradient.to(logits.dtype).contiguous()


def _scale_rows_reference(values: Tensor, factors: Tensor) -> None:
    values.mul_(factors.view(-1, *[1] * (values.dim() - 1)) if factors.dim() else factors)


def loss_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _cross_entropy_setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = args
    ctx.save_for_backward(logits, target, results[1])
    ctx.mark_non_differentiable(results[1])


def _cross_entropy_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    logits, target, stats = ctx.saved_tensors
    gradient: Tensor = torch.ops.flexops.cross_entropy_backward.default(
        grad, logits, target, stats, *ctx.options
    )
    return gradient, None, None, None, None, None


def _inplace_setup(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    logits = args[0]
    # the op went past autograd: now a reader of the logits' values gets an error
    torch.autograd.graph.increment_version(logits)
    ctx.save_for_backward(logits)
    ctx.mark_non_differentiable(results[1])


def _inplace_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return scaled(gradient, grad), None, None, None, None, None, None


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """In place, so that a second backward pass, which would do it again, has to find out; while a
    compiler looks on, as plain arithmetic."""
    if type(gradient) is Tensor and gradient.is_contiguous() and not is_transforming():
        torch.ops.flexops.scale_rows_.default(gradient, factor)
        torch.autograd.graph.increment_version(gradient)
        return gradient
    factor = factor.unsqueeze(1) if factor.dim() == 1 else factor
    return (
        gradient.mul_(factor)
        if type(gradient) is Tensor and not is_transforming()
        else (gradient * factor).to(gradient.dtype)
    )


define(
    "cross_entropy",
    _cross_entropy_reference,
    setup_context=_cross_entropy_setup,
    backward=_cross_entropy_backward,
)
define(
    "cross_entropy_",
    _cross_entropy_inplace_reference,
    setup_context=_inplace_setup,
    backward=_inplace_backward,
    function="cross_entropy",
)
define(
    "cross_entropy_backward",
    _cross_entropy_backward_reference,
)
define("scale_rows_", _scale_rows_reference)
_FORWARD = caller(torch.ops.flexops.cross_entropy.default)
_INPLACE = caller(torch.ops.flexops.cross_entropy_.default)


@checking()
def self_check(make: Make) -> Any:
    """Losses, and gradients both ways."""
    logits, target = make(9, 1031, scale=3.0), make.integers(0, 1031, 9)
    target[3] = -100
    numbers, ops = (-100, 0.1, 1e-4, 2), torch.ops.flexops
    loss, stats = ops.cross_entropy(logits, target, *numbers)
    of_loss = logits.new_ones(())
    gradient = ops.cross_entropy_backward(of_loss, logits, target, stats, *numbers)
    fused = ops.cross_entropy_(logits, target, None, *numbers)[0]
    return loss, fused, gradient, logits
