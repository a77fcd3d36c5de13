"""The norms' backward pass: a family of its own, because who only runs a model compiles without it.

With ``g`` the result's gradient, ``u = (x - mean) * rstd`` (RMS norm: ``mean`` is 0),
``s = g * (weight + offset)`` and ``mean_`` a mean over the row::

    grad_x      = (s - mean_(s) - u * mean_(s * u)) * rstd + grad_residual
                  (RMS norm: without mean_(s))
    grad_weight = sum of g * u over the rows
    grad_bias   = sum of g over the rows
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import builtin
from ._arguments import wide
from ._declared import define
from ._self_check import Make, checking


def _differentiate(
    grad: Tensor,
    grad_residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    offset: float,
    mean: Tensor | None,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what was normalized, of weight and of bias; not rounded."""
    of_y, rstd = wide(grad), rstd.unsqueeze(-1)
    unit = (wide(x) if mean is None else wide(x) - mean.unsqueeze(-1)) * rstd
    scaled = of_y if weight is None else of_y * (wide(weight) + offset)
    grad_x = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    if mean is not None:
        grad_x = grad_x - scaled.mean(-1, keepdim=True)
    grad_x = grad_x * rstd
    if grad_residual is not None:
        grad_x = grad_x + wide(grad_residual)
    columns = x.shape[-1]
    return grad_x, (of_y * unit).reshape(-1, columns).sum(0), of_y.reshape(-1, columns).sum(0)


def _reference(
    grad: Tensor,
    grad_residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    offset: float,
    need_x: bool,
    need_weight: bool,
    *of_bias: Any,
) -> tuple[Tensor, ...]:
    """With ``need_bias, bias_dtype`` behind them for a layer norm, whose statistics are two."""
    mean, rstd = statistics if of_bias else (None, statistics)
    grad_x, grad_weight, grad_bias = _differentiate(
        grad, grad_residual, x, weight, offset, mean, rstd
    )
    return (
        _kept(grad_x, need_x, x.dtype),
        _kept(
            grad_weight,
            need_weight and weight is not None,
            (grad if weight is None else weight).dtype,
        ),
        *((_kept(grad_bias, *of_bias),) if of_bias else ()),
    )


def _kept(gradient: Tensor, needed: bool, dtype: torch.dtype) -> Tensor:
    return gradient.to(dtype).contiguous() if needed else gradient.new_empty(0, dtype=dtype)


define("layer_norm_backward", _reference)
define("rms_norm_backward", _reference)
# What the ops call: a Python frame less.
LAYER_NORM_BACKWARD = builtin(torch.ops.flexops.layer_norm_backward.default)
RMS_NORM_BACKWARD = builtin(torch.ops.flexops.rms_norm_backward.default)


@checking()
def self_check(make: Make) -> Any:
    """Gradients of both norms."""
    x, residual, grad, weight = make(33, 192), make(33, 192), make(33, 192), make(192)
    rstd = x.var(-1, unbiased=False).add(1e-5).rsqrt()
    statistics, needed = torch.stack([x.mean(-1), rstd]), (True, True)
    return (
        LAYER_NORM_BACKWARD(
            grad, residual, x, weight, statistics, 0.0, *needed, True, torch.float32
        ),
        RMS_NORM_BACKWARD(grad, None, x, weight, rstd, 1.0, *needed),
    )
