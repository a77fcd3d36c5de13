"""RMS norm with a quantized result, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._declared import define
from ._register import caller
from .norm import add, check_row, normalize

_CODES = (torch.int8, torch.float8_e4m3fn)
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.int8,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMS norm whose result is written as 8-bit codes with a scale a row: the input of an int8 or
    fp8 matrix product, in one pass.

    With ``y`` the norm in float32 (it is not rounded to x's dtype first) and ``top`` 127 or 448::

        scale = max(|y|) / top, at least 2**-126; 1 if y is all zeros
        code  = y * (1 / scale), rounded to nearest even
        y     = code * scale, as nearly as 8 bits can hold

    A row that holds a NaN or an infinity has codes 0 and a scale of NaN, so that all of it comes
    back as NaN.

    Args:
        x, weight, eps: as :func:`rms_norm`'s.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        residual: as :func:`add_rms_norm`'s; None to leave the addition out.

    Returns:
        ``(values, scales)``, or ``(values, scales, new_residual)`` with a residual: the codes, of
        ``dtype`` and x's shape; scales, float32 ``[..., 1]``, which is what ``torch._scaled_mm``
        takes for a 2-dimensional ``x``; ``x + residual``, of residual's dtype. All contiguous.

    Raises:
        TypeError, ValueError: as :func:`layer_norm`; ``dtype`` is another one.

    Not differentiable: results do not require gradients.
    """
    x, weight = _detached(x), _detached(weight)
    if residual is None:
        results: tuple[Tensor, ...] = _RMS_NORM(x, weight, eps, dtype)
    else:
        results = _ADD_RMS_NORM(x, _detached(residual), weight, eps, dtype)
    return results


def _check(x: Tensor, *rest: Any) -> None:
    *_, eps, dtype = rest
    check_row("rms_norm_quantized", x, eps)
    if dtype not in _CODES:
        raise TypeError(
            "flexops.rms_norm_quantized: dtype must be torch.int8 or torch.float8_e4m3fn, got"
            f" {dtype}"
        )


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def _encode(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    top = 127.0 if dtype == torch.int8 else 448.0
    largest = y.abs().amax(-1, keepdim=True)
    broken = ~largest.isfinite()
    # dividing by a plain number, torch multiplies by its reciprocal on a GPU
    most = torch.full_like(largest, top)
    scales = (
        (largest / most)
        .clamp(min=_LEAST_SCALE)
        .masked_fill(largest == 0, 1.0)
        .masked_fill(broken, torch.nan)
    )
    codes = (y * scales.reciprocal()).clamp(-top, top).masked_fill(broken, 0.0)
    return (codes.round() if dtype == torch.int8 else codes).to(
        dtype
    ).contiguous(), scales.float().contiguous()


def _rms_norm_quantized_reference(
    x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _encode(normalize(x, weight, None, eps, False)[0], dtype)


def _add_rms_norm_quantized_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    new_residual = add(x, residual)
    return *_encode(normalize(new_residual, weight, None, eps, False)[0], dtype), new_residual


define("rms_norm_quantized", _rms_norm_quantized_reference, check=_check)
define(
    "add_rms_norm_quantized",
    _add_rms_norm_quantized_reference,
    check=_check,
    function="rms_norm_quantized",
)
_RMS_NORM = caller(torch.ops.flexops.rms_norm_quantized.default)
_ADD_RMS_NORM = caller(torch.ops.flexops.add_rms_norm_quantized.default)
