"""Layer norm and RMS norm over the last dimension, with the residual's addition in the same pass.

With ``N`` the last dimension's size (1 to 65536), in float32::

    layer norm   mean = sum(x) / N    rstd = 1 / sqrt(sum((x - mean)**2) / N + eps)
                 y = (x - mean) * rstd * weight + bias
    RMS norm     rstd = 1 / sqrt(sum(x**2) / N + eps)
                 y = x * rstd * weight

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
import operator
from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._difference import difference
from ._register import add_gradient, caller
from .norm_backward import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD, widen

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_COLUMNS = 65536


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the last dimension: what ``torch.nn.functional.layer_norm(x, x.shape[-1:],
    weight, bias, eps)`` gives, rounded once.

    Args:
        x: ``[..., N]``, float32, float16 or bfloat16, N from 1 to 65536, any strides; may have no
            rows.
        weight: ``[N]``, of any of these dtypes; None is ones.
        bias: ``[N]``, of any of these dtypes; None is zeros.
        eps: added to the variance; at least 0.

    Returns:
        ``y``, a contiguous tensor of x's shape and dtype. A row with a NaN or an infinity is all
        NaN.

    Raises:
        TypeError: a dtype is not as above, or an argument is no tensor.
        ValueError: shapes or devices do not fit, or N or eps is out of range.
    """
    y: Tensor = _LAYER_NORM(x, weight, bias, eps)
    return y


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last dimension: what ``torch.nn.functional.rms_norm(x, x.shape[-1:],
    weight, eps)`` gives, rounded once.

    Args:
        x: ``[..., N]``, float32, float16 or bfloat16, N from 1 to 65536, any strides; may have no
            rows.
        weight: ``[N]``, of any of these dtypes; None is ones.
        eps: added to the mean square; at least 0. (torch's default, None, is
            ``torch.finfo(x.dtype).eps``.)

    Returns:
        ``y``, a contiguous tensor of x's shape and dtype. A row with a NaN is all NaN; one with an
        infinity has NaN there and 0 elsewhere.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`.
    """
    y: Tensor = _RMS_NORM(x, weight, eps)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """``new_residual = x + residual`` and its layer norm, in one pass over memory.

    Args:
        x: as :func:`layer_norm`'s.
        residual: of x's shape, float32, float16 or bfloat16. A float32 residual may go with a
            bfloat16 x.
        weight, bias, eps: as :func:`layer_norm`'s.

    Returns:
        ``(y, new_residual)``: contiguous, of x's shape; ``y`` of x's dtype, ``new_residual`` of
        residual's. It is the rounded ``new_residual`` that is normalized.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`.
    """
    results: tuple[Tensor, Tensor] = _ADD_LAYER_NORM(x, residual, weight, bias, eps)
    return results


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """``new_residual = x + residual`` and its RMS norm, in one pass over memory.

    Args:
        x: as :func:`rms_norm`'s.
        residual: of x's shape, float32, float16 or bfloat16. A float32 residual may go with a
            bfloat16 x.
        weight, eps: as :func:`rms_norm`'s.

    Returns:
        ``(y, new_residual)``: contiguous, of x's shape; ``y`` of x's dtype, ``new_residual`` of
        residual's. It is the rounded ``new_residual`` that is normalized.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`.
    """
    results: tuple[Tensor, Tensor] = _ADD_RMS_NORM(x, residual, weight, eps)
    return results


# ---- arguments -----------------------------------------------------------------------------------


def check(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    """Raises if an argument is not as the public functions say."""
    if (
        not isinstance(x, Tensor)
        or x.dtype not in _DTYPES
        or x.dim() == 0
        or not 1 <= x.shape[-1] <= _MOST_COLUMNS
    ):
        _refuse_x(name, x)
    if (residual is not None or name.startswith("add")) and not _is_residual(residual, x):
        _refuse(name, "residual", residual, x, x.shape)
    if weight is not None and not _is_parameter(weight, x):
        _refuse(name, "weight", weight, x, x.shape[-1:])
    if bias is not None and not _is_parameter(bias, x):
        _refuse(name, "bias", bias, x, x.shape[-1:])
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"flexops.{name}: eps must be a number, got {type(eps).__name__}")
    if not eps >= 0:
        raise ValueError(f"flexops.{name}: eps must be at least 0, got {eps}")


def _is_parameter(parameter: Tensor, x: Tensor) -> bool:
    return (
        isinstance(parameter, Tensor)
        and parameter.dtype in _DTYPES
        and parameter.dim() == 1
        and parameter.shape[0] == x.shape[-1]
    )


def _is_residual(residual: Any, x: Tensor) -> bool:
    return isinstance(residual, Tensor) and residual.dtype in _DTYPES and residual.shape == x.shape


def _refuse_x(name: str, x: Any) -> None:
    where = f"flexops.{name}: x"
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
        raise TypeError(
            f"{where} must be a float32, float16 or bfloat16 tensor, got"
            f" {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        )
    if x.dim() == 0:
        raise ValueError(f"{where} must have at least one dimension, got a scalar")
    raise ValueError(
        f"{where}'s last dimension must be from 1 to {_MOST_COLUMNS}, got shape {tuple(x.shape)}"
    )


def _refuse(name: str, argument: str, tensor: Any, x: Tensor, shape: torch.Size) -> None:
    where = f"flexops.{name}: {argument}"
    if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{where} must be a float32, float16 or bfloat16 tensor, got {found}")
    raise ValueError(
        f"{where} must have shape {tuple(shape)} for x of shape {tuple(x.shape)}, got"
        f" {tuple(tensor.shape)}"
    )


# ---- references: float32 inside, float64 for float64 ---------------------------------------------


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """The unrounded result and the rows' statistics: means and reciprocal deviations ``[2, ...]``
    if centered, else the latter alone."""
    wide = widen(x)
    mean = wide.mean(-1, keepdim=True) if centered else wide.new_zeros(())
    rstd = (wide - mean).square().mean(-1, keepdim=True).add(eps).sqrt().reciprocal()
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    return y, (
        torch.stack([mean.squeeze(-1), rstd.squeeze(-1)])
        if centered
        else rstd.squeeze(-1).contiguous()
    )


def add(x: Tensor, residual: Tensor) -> Tensor:
    return (widen(x) + widen(residual)).to(residual.dtype).contiguous()


def _layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    y, statistics = normalize(x, weight, bias, eps, True)
    return y.to(x.dtype).contiguous(), statistics


def _rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, statistics = normalize(x, weight, None, eps, False)
    return y.to(x.dtype).contiguous(), statistics


def _add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    new_residual = add(x, residual)
    y, statistics = normalize(new_residual, weight, bias, eps, True)
    return y.to(x.dtype).contiguous(), new_residual, statistics


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of :func:`add_rms_norm`, and the reciprocal deviations of rows."""
    new_residual = add(x, residual)
    y, statistics = normalize(new_residual, weight, None, eps, False)
    return y.to(x.dtype).contiguous(), new_residual, statistics


# ---- fake kernels --------------------------------------------------------------------------------


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _statistics(x: Tensor, centered: bool) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty([2, *x.shape[:-1]] if centered else x.shape[:-1], dtype=dtype)


def _layer_norm_fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return like(x), _statistics(x, True)


def _rms_norm_fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return like(x), _statistics(x, False)


def _add_layer_norm_fake(x: Tensor, residual: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return like(x), like(residual), _statistics(residual, True)


def _add_rms_norm_fake(x: Tensor, residual: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return like(x), like(residual), _statistics(residual, False)


# ---- gradients -----------------------------------------------------------------------------------


def _save_layer_norm(ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
    x, weight, bias, _ = arguments
    ctx.save_for_backward(x, weight, results[1])
    ctx.bias_dtype = torch.float32 if bias is None else bias.dtype


def _save_rms_norm(ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
    ctx.save_for_backward(arguments[0], arguments[1], results[1])


def _save_add_layer_norm(ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
    x, _, weight, bias, _ = arguments
    ctx.save_for_backward(results[1], weight, results[2])
    ctx.x_dtype, ctx.bias_dtype = x.dtype, torch.float32 if bias is None else bias.dtype


def _save_add_rms_norm(ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
    ctx.save_for_backward(results[1], arguments[2], results[2])
    ctx.x_dtype = arguments[0].dtype


def _layer_norm_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    need_x, need_weight, need_bias, _eps = ctx.needs_input_grad
    x, weight, statistics = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = LAYER_NORM_BACKWARD(
        grad, None, x, weight, statistics, need_x, need_weight, need_bias, ctx.bias_dtype
    )
    return (
        grad_x if need_x else None,
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
        None,
    )


def _rms_norm_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    need_x, need_weight, _eps = ctx.needs_input_grad
    x, weight, statistics = ctx.saved_tensors
    grad_x, grad_weight = RMS_NORM_BACKWARD(grad, None, x, weight, statistics, need_x, need_weight)
    return grad_x if need_x else None, grad_weight if need_weight else None, None


def _add_layer_norm_gradient(
    ctx: Any, grad: Tensor | None, grad_residual: Tensor | None
) -> tuple[Any, ...]:
    need_x, need_residual, need_weight, need_bias, _eps = ctx.needs_input_grad
    if grad is None:
        return _of_x(ctx, grad_residual) if need_x else None, grad_residual, None, None, None
    total, weight, statistics = ctx.saved_tensors
    needs = (need_x or need_residual, need_weight, need_bias)
    grad_total, grad_weight, grad_bias = LAYER_NORM_BACKWARD(
        grad, grad_residual, total, weight, statistics, *needs, ctx.bias_dtype
    )
    grad_x = _of_x(ctx, grad_total) if need_x else None
    return (
        grad_x,
        grad_total if need_residual else None,
        grad_weight if need_weight else None,
        grad_bias if need_bias else None,
        None,
    )


def add_rms_norm_gradient(
    ctx: Any, grad: Tensor | None, grad_residual: Tensor | None
) -> tuple[Any, ...]:
    """Of x, residual, weight and eps; ``ctx`` has saved new_residual, weight and the reciprocal
    deviations, and has x's dtype as ``x_dtype``."""
    need_x, need_residual, need_weight, _eps = ctx.needs_input_grad
    if grad is None:
        return _of_x(ctx, grad_residual) if need_x else None, grad_residual, None, None
    total, weight, statistics = ctx.saved_tensors
    grad_total, grad_weight = RMS_NORM_BACKWARD(
        grad, grad_residual, total, weight, statistics, need_x or need_residual, need_weight
    )
    return (
        _of_x(ctx, grad_total) if need_x else None,
        grad_total if need_residual else None,
        grad_weight if need_weight else None,
        None,
    )


def _of_x(ctx: Any, total: Tensor | None) -> Tensor | None:
    return total if total is None or total.dtype == ctx.x_dtype else total.to(ctx.x_dtype)


def _define(
    name: str,
    count: int,
    reference: Any,
    fake: Any,
    check: Any,
    setup_context: Any,
    backward: Any,
) -> None:
    """``name``, whose first ``count`` results are for everybody, and its overload ``forward``,
    which has the rows' statistics behind these."""
    shown = operator.itemgetter(0 if count == 1 else slice(count))
    define(
        name,
        lambda *args: shown(reference(*args)),
        lambda *args: shown(fake(*args)),
        check=check,
    )
    define(
        f"{name}.forward",
        reference,
        fake,
        check=check,
        hidden=True,
        function=name,
    )
    add_gradient(
        getattr(torch.ops.flexops, name).default,
        setup_context,
        backward,
        forward=f"flexops::{name}.forward",
    )


_define(
    "layer_norm",
    1,
    _layer_norm_reference,
    _layer_norm_fake,
    lambda x, weight, bias, eps: check("layer_norm", x, None, weight, bias, eps),
    _save_layer_norm,
    _layer_norm_gradient,
)
_define(
    "rms_norm",
    1,
    _rms_norm_reference,
    _rms_norm_fake,
    lambda x, weight, eps: check("rms_norm", x, None, weight, None, eps),
    _save_rms_norm,
    _rms_norm_gradient,
)
_define(
    "add_layer_norm",
    2,
    _add_layer_norm_reference,
    _add_layer_norm_fake,
    functools.partial(check, "add_layer_norm"),
    _save_add_layer_norm,
    _add_layer_norm_gradient,
)
_define(
    "add_rms_norm",
    2,
    add_rms_norm_reference,
    _add_rms_norm_fake,
    lambda x, residual, weight, eps: check("add_rms_norm", x, residual, weight, None, eps),
    _save_add_rms_norm,
    add_rms_norm_gradient,
)
_LAYER_NORM, _RMS_NORM = (
    caller(torch.ops.flexops.layer_norm.default),
    caller(torch.ops.flexops.rms_norm.default),
)
_ADD_LAYER_NORM, _ADD_RMS_NORM = (
    caller(torch.ops.flexops.add_layer_norm.default),
    caller(torch.ops.flexops.add_rms_norm.default),
)


def self_check(device: str) -> float:
    """Random rows normalized by whatever kernels calls reach on ``device`` and by the reference.

    For ``flexops doctor``. Returns the largest difference.
    """
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(33, 192, generator=generator).to(device) for _ in range(2))
    weight, bias = (torch.randn(192, generator=generator).to(device) for _ in range(2))
    ops = torch.ops.flexops
    results = (
        *ops.add_layer_norm.forward(x, residual, weight, bias, 1e-5),
        *ops.rms_norm.forward(x, weight, 1e-6),
    )
    expected = (
        *_add_layer_norm_reference(x, residual, weight, bias, 1e-5),
        *_rms_norm_reference(x, weight, 1e-6),
    )
    return difference(results, expected)
