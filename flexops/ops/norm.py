"""Layer norm and RMS norm over the last dimension, with the residual's addition in the same pass.

With ``N`` the last dimension's size (1 to 65536), in float32::

    layer norm   mean = sum(x) / N    rstd = 1 / sqrt(sum((x - mean)**2) / N + eps)
                 y = (x - mean) * rstd * (weight + offset) + bias
    RMS norm     rstd = 1 / sqrt(sum(x**2) / N + eps)
                 y = x * rstd * (weight + offset)

``x`` is float32, float16 or bfloat16, and so is ``y``; weight and bias may have another of these
dtypes (float32 parameters with bfloat16 data need no casts). All arithmetic is in float32 and
rounded once, at the end: also where torch rounds between the steps. Inside ``torch.autocast``
nothing is cast: operators take the dtypes that they are given.

The ``add_`` variants normalize ``new_residual = x + residual``, rounded to residual's dtype, and
return it as well; their backward adds the gradients of both results in one pass. Gradients are the
same bits every time. They can be had once: a gradient of a gradient raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._arguments import wide
from ._declared import define
from ._register import add_gradient, caller
from ._self_check import Make, checking
from .norm_backward import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD

_MOST_COLUMNS = 65536


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
) -> Tensor:
    """Layer norm over the last dimension: what ``torch.nn.functional.layer_norm(x, x.shape[-1:],
    weight + offset, bias, eps)`` gives, rounded once.

    Args:
        x: ``[..., N]``, float32, float16 or bfloat16, N from 1 to 65536, any strides; may have no
            rows.
        weight: ``[N]``, of any of these dtypes; None is ones.
        bias: ``[N]``, of any of these dtypes; None is zeros.
        eps: added to the variance; at least 0.
        offset: added to the weight in float32; without a weight it has no effect.

    Returns:
        ``y``, a contiguous tensor of x's shape and dtype. A row with a NaN or an infinity is all
        NaN.

    Raises:
        TypeError: a dtype is not as above, or an argument is no tensor.
        ValueError: shapes or devices do not fit, or N or eps is out of range.
    """
    y: Tensor = _LAYER_NORM(x, weight, bias, eps, offset)
    return y


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0
) -> Tensor:
    """RMS norm over the last dimension: what ``torch.nn.functional.rms_norm(x, x.shape[-1:],
    weight + offset, eps)`` gives, rounded once.

    Args:
        x: ``[..., N]``, float32, float16 or bfloat16, N from 1 to 65536, any strides; may have no
            rows.
        weight: ``[N]``, of any of these dtypes; None is ones.
        eps: added to the mean square; at least 0. (torch's default, None, is
            ``torch.finfo(x.dtype).eps``.)
        offset: added to the weight in float32 (1 for Gemma's); without a weight it has no effect.

    Returns:
        ``y``, a contiguous tensor of x's shape and dtype. A row with a NaN is all NaN; one with an
        infinity has NaN there and 0 elsewhere.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`.
    """
    y: Tensor = _RMS_NORM(x, weight, eps, offset)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``new_residual = x + residual`` and its layer norm, in one pass over memory.

    Args:
        x: as :func:`layer_norm`'s.
        residual: of x's shape, float32, float16 or bfloat16. A float32 residual may go with a
            bfloat16 x.
        weight, bias, eps, offset: as :func:`layer_norm`'s.

    Returns:
        ``(y, new_residual)``: contiguous, of x's shape; ``y`` of x's dtype, ``new_residual`` of
        residual's. It is the rounded ``new_residual`` that is normalized.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`.
    """
    results: tuple[Tensor, Tensor] = _ADD_LAYER_NORM(x, residual, weight, bias, eps, offset)
    return results


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``new_residual = x + residual`` and its RMS norm, in one pass over memory.

    Args:
        x: as :func:`rms_norm`'s.
        residual: of x's shape, float32, float16 or bfloat16. A float32 residual may go with a
            bfloat16 x.
        weight, eps, offset: as :func:`rms_norm`'s.

    Returns:
        ``(y, new_residual)``: contiguous, of x's shape; ``y`` of x's dtype, ``new_residual`` of
        residual's. It is the rounded ``new_residual`` that is normalized.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`.
    """
    results: tuple[Tensor, Tensor] = _ADD_RMS_NORM(x, residual, weight, eps, offset)
    return results


# ---- arguments: what the declaration does not say ----


def check_row(name: str, x: Tensor, eps: float) -> None:
    """Raises if ``x`` has no rows that the kernels take, or ``eps`` is out of range."""
    where = f"flexops.{name}: x"
    if x.dim() == 0:
        raise ValueError(f"{where} must have at least one dimension, got a scalar")
    if not 1 <= x.shape[-1] <= _MOST_COLUMNS:
        raise ValueError(
            f"{where}'s last dimension must be from 1 to {_MOST_COLUMNS}, got shape {list(x.shape)}"
        )
    check_eps(name, eps)


def check_eps(name: str, eps: float) -> None:
    """Raises if ``eps`` is no number or out of range."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"flexops.{name}: eps must be a number, got {type(eps).__name__}")
    if not eps >= 0:
        raise ValueError(f"flexops.{name}: eps must be at least 0, got {eps}")


# ---- references: float32 inside, float64 for float64 ----


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The unrounded result and the rows' statistics: means and reciprocal deviations ``[2, ...]``
    if centered, else the latter alone."""
    row = wide(x)
    mean = row.mean(-1, keepdim=True) if centered else row.new_zeros(())
    rstd = (row - mean).square().mean(-1, keepdim=True).add(eps).sqrt().reciprocal()
    y = (row - mean) * rstd
    if weight is not None:
        y = y * (wide(weight) + offset)
    if bias is not None:
        y = y + wide(bias)
    return y, (
        torch.stack([mean.squeeze(-1), rstd.squeeze(-1)])
        if centered
        else rstd.squeeze(-1).contiguous()
    )


def add(x: Tensor, residual: Tensor) -> Tensor:
    return (wide(x) + wide(residual)).to(residual.dtype).contiguous()


def _reference(centered: bool, added: bool, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Of an operator with these arguments: its results and the rows' statistics."""
    sums: tuple[Tensor, ...] = (add(x, rest[0]),) if added else ()
    total, bias = sums[0] if added else x, rest[-3] if centered else None
    y, statistics = normalize(total, rest[added], bias, rest[-2], centered, rest[-1])
    return y.to(x.dtype).contiguous(), *sums, statistics


# ---- gradients ----


def _gradient(centered: bool, added: bool) -> tuple[Callable[..., None], Callable[..., Any]]:
    """``setup_context`` and ``backward``."""
    gradients = LAYER_NORM_BACKWARD if centered else RMS_NORM_BACKWARD

    def setup_context(ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
        x, bias, ctx.offset = arguments[0], arguments[-3], arguments[-1]
        ctx.save_for_backward(results[1] if added else x, arguments[1 + added], results[-1])
        ctx.x_dtype = x.dtype
        # the kernel's last argument
        ctx.more = (torch.float32 if bias is None else bias.dtype,) if centered else ()

    def backward(
        ctx: Any, grad: Tensor | None, grad_residual: Tensor | None = None
    ) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad  # x, residual, weight, bias, eps, offset
        total = grad_residual
        of_parameters: tuple[Tensor | None, ...] = (None,) * (3 + centered)
        if grad is not None:
            wanted = needs[1 + added : -2]
            total, *made = gradients(
                grad, grad_residual, *ctx.saved_tensors, ctx.offset,
                any(needs[: 1 + added]), *wanted, *ctx.more,
            )  # fmt: skip
            of_parameters = (*map(_if_needed, made, wanted), None, None)
        of_x = total if total is None or total.dtype == ctx.x_dtype else total.to(ctx.x_dtype)
        of_rows = (_if_needed(of_x, needs[0]), _if_needed(total, needs[1]))
        return *of_rows[: 1 + added], *of_parameters

    return setup_context, backward


def _if_needed(gradient: Tensor | None, needed: bool) -> Tensor | None:
    return gradient if needed else None


def _define(name: str, centered: bool, added: bool) -> Callable[..., Any]:
    """``name``, and its overload ``forward``, which returns the rows' statistics as well. Returns
    what calls it."""
    reference = functools.partial(_reference, centered, added)

    def check(x: Tensor, *rest: Any) -> None:
        check_row(name, x, rest[-2])

    define(
        name,
        lambda *args: reference(*args)[: 1 + added] if added else reference(*args)[0],
        check=check,
    )
    define(f"{name}.forward", reference, check=check, function=name)
    op = getattr(torch.ops.flexops, name).default
    add_gradient(op, *_gradient(centered, added), forward=f"flexops::{name}.forward")
    return caller(op)


_LAYER_NORM = _define("layer_norm", True, False)
_RMS_NORM = _define("rms_norm", False, False)
_ADD_LAYER_NORM = _define("add_layer_norm", True, True)
_ADD_RMS_NORM = _define("add_rms_norm", False, True)

# For operators that do more in the same pass: the results of add_rms_norm with the reciprocal
# deviations of rows, and the ``setup_context`` and ``backward`` for these.
add_rms_norm_reference = functools.partial(_reference, False, True)
add_rms_norm_gradient = _gradient(False, True)


@checking()
def self_check(make: Make) -> Any:
    """Both norms, one with an addition, one with an offset."""
    x, residual, weight, bias = make(33, 192), make(33, 192), make(192), make(192)
    ops = torch.ops.flexops
    return (
        ops.add_layer_norm.forward(x, residual, weight, bias, 1e-5, 0.0),
        ops.rms_norm.forward(x, weight, 1e-6, 1.0),
    )
