"""Quantization to scaled bytes, fp8 or int8, with a float32 scale a row, a group or a tensor, and
back.

What matrix multiplications in 8 bits take (``torch._scaled_mm``, ``torch._int_mm``, and the kernels
of inference engines): codes, and scales that their products are *multiplied* by, ``value = code *
scale``. (The 4-bit and 8-bit groups of :func:`flexops.quantize` keep FlexGen's format, whose scales
divide.)

The arithmetic, in float32 with one rounding an operation, to nearest even::

    largest = max(|x|) over the row, group or tensor
    scale   = largest / B, at least 2**-126; 1 if largest is 0
    code    = x * (1 / scale), clamped to [-B, B] and rounded to the nearest code (halves to even)
    value   = code * scale, rounded to the result's dtype

with ``B`` = 448 for float8_e4m3fn, 57344 for float8_e5m2 and 127 for int8: the largest finite code.
So no code is an infinity.

A row, group or tensor that holds a NaN or an infinity is broken: its codes are 0 and its scale is
NaN, and so all of it comes back as NaN, loudly; others are not touched. All zeros come back as
zeros: their scale is 1. Where the scale is given, nothing looks for these: what is beyond the
range, infinities included, becomes the largest code of its sign, and a NaN stays a NaN.

The native CPU and CUDA kernels give exactly the codes, scales and values of the plain PyTorch
version in this file (a NaN may be another NaN).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import FLOAT_DTYPES, check_device, check_tensor
from ._declared import define
from ._self_check import Make, checking

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
_LEAST_SCALE = 2.0**-126
_PER_ROW, _PER_TENSOR = -1, 0  # in place of a group size, in the ops


def quantize_fp8(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scaling: str = "row",
    group_size: int = 128,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to fp8. Formulas, and what becomes of NaN, infinities and zeros: see the
    module.

    Args:
        x: float32, float16 or bfloat16, at least one dimension, any strides; may be empty. A row is
            what lies along the last dimension.
        dtype: ``torch.float8_e4m3fn`` (3 bits of fraction, up to 448) or ``torch.float8_e5m2`` (2
            bits, up to 57344; for gradients).
        scaling: ``"row"``; ``"group"``: of ``group_size`` consecutive elements of a row, of which
            the last may be short; or ``"tensor"``.
        group_size: elements a group, from 1 on; for ``"group"`` only. Kernels are fastest with
            powers of two from 32 on.
        scale: for ``"tensor"`` only: use this scale, one float32 number on x's device, instead of
            looking for the largest element, which reads ``x`` once more. Not looked at on the host:
            nothing waits for the device.

    Returns:
        ``(values, scales)``: ``values`` of ``dtype``, contiguous, of x's shape; ``scales`` float32,
        contiguous: ``[*before, 1]`` for rows, ``[*before, ceil(length / group_size)]`` for groups,
        ``[]`` for the tensor (``scale`` itself if it was given). Row and tensor scales are what
        ``torch._scaled_mm`` takes as ``scale_a`` (transposed, as ``scale_b``).

    Raises:
        TypeError: ``x``, ``dtype`` or ``scale`` is not as above.
        ValueError: one of the other arguments is not as above.

    Not differentiable: results do not require gradients.
    """
    _check_input("flexops.quantize_fp8", x)
    if dtype not in _FP8_DTYPES:
        raise TypeError(
            "flexops.quantize_fp8: dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got"
            f" {dtype}"
        )
    if x.requires_grad:
        x = x.detach()
    if scale is not None:
        _check_scale(x, scaling, scale)
        values: Tensor = torch.ops.flexops.quantize_fp8_scaled.default(x, scale.detach(), dtype)
        return values, scale
    segment = _segment_of(scaling, group_size)
    result: tuple[Tensor, Tensor] = torch.ops.flexops.quantize_fp8.default(x, dtype, segment)
    return result


def dequantize_fp8(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, group_size: int = 128
) -> Tensor:
    """The tensor that ``values`` and ``scales`` stand for: ``values * scales``, each scale for its
    row, its group or all.

    Args:
        values: float8_e4m3fn or float8_e5m2, any strides.
        scales: float32, on the same device: one number without dimensions for the tensor,
            ``[*before, 1]`` for rows, ``[*before, groups]`` for groups.
        dtype: float32, float16 or bfloat16. A value beyond its range becomes infinite.
        group_size: elements a group; looked at only if there are scales for groups.

    Returns:
        a contiguous tensor of values' shape.

    Raises:
        TypeError: one of the dtypes is not as above.
        ValueError: shapes and devices of the arguments do not fit each other.
    """
    check_tensor("flexops.dequantize_fp8", "values", values, _FP8_DTYPES)
    segment = _check_dequantize("flexops.dequantize_fp8", values, scales, dtype, group_size)
    result: Tensor = torch.ops.flexops.dequantize_fp8.default(
        values, scales.detach() if scales.requires_grad else scales, segment, dtype
    )
    return result


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of ``x`` (a token's, in a model) to int8, symmetrically. Formulas, and what
    becomes of NaN, infinities and zeros: see the module.

    Args:
        x: float32, float16 or bfloat16, at least one dimension, any strides; may be empty. A row is
            what lies along the last dimension.

    Returns:
        ``(values, scales)``: int8 of x's shape, from -127 to 127, contiguous; float32 ``[*before,
        1]``: what a product of ``values`` is to be multiplied by.

    Raises:
        TypeError: ``x`` is no tensor of these dtypes.
        ValueError: ``x`` has no dimensions.

    Not differentiable: results do not require gradients.
    """
    _check_input("flexops.quantize_int8", x)
    result: tuple[Tensor, Tensor] = torch.ops.flexops.quantize_int8.default(
        x.detach() if x.requires_grad else x
    )
    return result


def dequantize_int8(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor that ``values`` and ``scales`` stand for: ``values * scales``, each scale for its
    row.

    Args:
        values: int8, any strides.
        scales: float32 ``[*before, 1]``, on the same device.
        dtype: float32, float16 or bfloat16. A value beyond its range becomes infinite.

    Returns:
        a contiguous tensor of values' shape.

    Raises:
        TypeError: one of the dtypes is not as above.
        ValueError: shapes and devices of the arguments do not fit each other.
    """
    check_tensor("flexops.dequantize_int8", "values", values, (torch.int8,))
    if _check_dequantize("flexops.dequantize_int8", values, scales, dtype, 1) != _PER_ROW:
        raise ValueError(
            f"flexops.dequantize_int8: scales must have shape {[*values.shape[:-1], 1]}, got"
            f" {list(scales.shape)}"
        )
    result: Tensor = torch.ops.flexops.dequantize_int8.default(
        values, scales.detach() if scales.requires_grad else scales, dtype
    )
    return result


def _check_input(where: str, x: Tensor) -> None:
    check_tensor(where, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{where}: x must have at least one dimension, got a scalar")


def _check_scale(x: Tensor, scaling: str, scale: Tensor) -> None:
    where = "flexops.quantize_fp8"
    if scaling != "tensor":
        raise ValueError(
            f"{where}: scale must be None unless scaling is 'tensor', got scaling={scaling!r}"
        )
    check_tensor(where, "scale", scale, (torch.float32,))
    if scale.numel() != 1:
        raise ValueError(f"{where}: scale must be one number, got shape {list(scale.shape)}")
    check_device(where, "scale", scale, "x", x)


def _segment_of(scaling: str, group_size: int) -> int:
    if scaling in ("row", "tensor"):
        return _PER_ROW if scaling == "row" else _PER_TENSOR
    if scaling != "group":
        raise ValueError(
            f"flexops.quantize_fp8: scaling must be 'row', 'group' or 'tensor', got {scaling!r}"
        )
    if group_size < 1:
        raise ValueError(f"flexops.quantize_fp8: group_size must be at least 1, got {group_size}")
    return group_size


def _check_dequantize(
    where: str, values: Tensor, scales: Tensor, dtype: torch.dtype, group_size: int
) -> int:
    """What the scales are for: a group size, _PER_ROW or _PER_TENSOR."""
    check_tensor(where, "scales", scales, (torch.float32,))
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{where}: dtype must be float32, float16 or bfloat16, got {dtype}")
    check_device(where, "scales", scales, "values", values)
    dims = values.dim()
    if dims == 0:
        raise ValueError(f"{where}: values must have at least one dimension, got a scalar")
    if scales.dim() == 0:
        return _PER_TENSOR
    if scales.dim() == dims and scales.shape[:-1] == values.shape[:-1]:
        if scales.shape[-1] == 1:
            return _PER_ROW
        if group_size < 1:
            raise ValueError(f"{where}: group_size must be at least 1, got {group_size}")
        if scales.shape[-1] == (values.shape[-1] + group_size - 1) // group_size:
            return group_size
    groups = -(-values.shape[-1] // max(group_size, 1))
    expected = (
        f"{[*values.shape[:-1], 1]} (rows), {[*values.shape[:-1], groups]} (groups) or [] (tensor)"
    )
    raise ValueError(f"{where}: scales must have shape {expected}, got {list(scales.shape)}")


def _segments(length: int, segment: int) -> int:
    return 1 if segment == _PER_ROW else (length + segment - 1) // segment


def _scale_shape(x: Tensor, segment: int) -> list[int]:
    return [] if segment == _PER_TENSOR else [*x.shape[:-1], _segments(x.shape[-1], segment)]


def _split(x: Tensor, segment: int) -> Tensor:
    """``[..., segments, elements]``; a short group is filled with zeros."""
    if segment == _PER_TENSOR:
        return x.reshape(1, -1)
    if segment == _PER_ROW:
        return x.unsqueeze(-2)
    groups = _segments(x.shape[-1], segment)
    padded = torch.nn.functional.pad(x, (0, groups * segment - x.shape[-1]))
    split: Tensor = padded.unflatten(-1, (groups, segment))
    return split


def _join(x: Tensor, like: Tensor, segment: int) -> Tensor:
    """What _split took apart."""
    joined: Tensor = (
        x.flatten(-2)
        .narrow(-1, 0, like.numel() if segment == _PER_TENSOR else like.shape[-1])
        .reshape(like.shape)
    )
    return joined


def _encode(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = _LARGEST[dtype]
    scaled = (x * scale.reciprocal()).clamp(-largest, largest)
    if dtype == torch.int8:
        return scaled.round().to(dtype)
    return scaled.masked_fill(scaled.isnan(), torch.nan).to(dtype)  # every NaN the same one


def _quantize_reference(x: Tensor, dtype: torch.dtype, segment: int) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        raise ValueError("flexops: x must have at least one dimension, got a scalar")
    shape = _scale_shape(x, segment)
    data = _split(x.detach().float(), segment)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device), torch.ones(
            shape, device=x.device
        )
    largest = data.abs().amax(-1, keepdim=True)
    broken = ~largest.isfinite()
    # dividing by a plain number, torch multiplies by its reciprocal on a GPU
    most = torch.full_like(largest, _LARGEST[dtype])
    scale = (largest / most).clamp(min=_LEAST_SCALE).masked_fill((largest == 0) | broken, 1.0)
    codes = _encode(data.masked_fill(broken, 0.0), scale, dtype)
    return _join(codes, x, segment).contiguous(), scale.masked_fill(broken, torch.nan).reshape(
        shape
    )


def _quantize_scaled_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _encode(x.detach().float(), scale.reshape(()), dtype).contiguous()


def _dequantize_reference(
    values: Tensor, scales: Tensor, segment: int, dtype: torch.dtype
) -> Tensor:
    if values.numel() == 0:
        return torch.empty(values.shape, dtype=dtype, device=values.device)
    scale = scales.reshape(1, 1) if segment == _PER_TENSOR else scales.unsqueeze(-1)
    return _join(_split(values.float(), segment) * scale, values, segment).to(dtype).contiguous()


def _dequantize_int8_reference(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return _dequantize_reference(values, scales, _PER_ROW, dtype)


def _quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantize_reference(x, torch.int8, _PER_ROW)


def _quantize_fake(x: Tensor, dtype: torch.dtype, segment: int) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(
        _scale_shape(x, segment), device=x.device
    )


define("quantize_fp8", _quantize_reference, _quantize_fake)
define("quantize_fp8_scaled", _quantize_scaled_reference)
define("dequantize_fp8", _dequantize_reference)
define("quantize_int8", _quantize_int8_reference)
define("dequantize_int8", _dequantize_int8_reference)


@checking()
def self_check(make: Make) -> Any:
    """To 8 bits and back: the values that come back, and the scales."""
    x, ops = make(65, 193), torch.ops.flexops
    values, scales = ops.quantize_int8(x)
    results = [ops.dequantize_int8(values, scales, x.dtype)]
    for dtype, segment in (
        (torch.float8_e4m3fn, _PER_ROW),
        (torch.float8_e5m2, 64),
        (torch.float8_e4m3fn, _PER_TENSOR),
    ):
        values, scales = ops.quantize_fp8(x, dtype, segment)
        results += [ops.dequantize_fp8(values, scales, segment, x.dtype), scales]
    return results
