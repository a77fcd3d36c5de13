"""Checks of arguments that no declaration makes, in the same words for every function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..build.describe.declaration import in_words
from ._register import check_places, is_dense

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ANY_FLOAT = (*FLOAT_DTYPES, torch.float64)
"""float64 is for checks of functions only, and no error names it."""
_LEAST_FLOAT32, _MOST_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def wide(x: Tensor) -> Tensor:
    """float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def number(what: str, value: Any) -> float:
    """The argument ``what`` as a float.

    Raises:
        TypeError: it is no number, nor a tensor of one element.
    """
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return float(value.__float__())
    except (AttributeError, RuntimeError, ValueError):
        raise TypeError(f"{what} must be a number, got {value!r}") from None


def whole(what: str, value: Any) -> int:
    """The argument ``what``, which must be an int (TypeError)."""
    if not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{what} must be a whole number, got {value!r}")
    return value  # type: ignore[return-value]


def soft_cap(what: str, value: Any, none: str = "0") -> float:
    """The argument ``what`` as a float. Kernels leave a negative cap out, which the formula does
    not, and an infinite one would make scores NaN.

    Raises:
        TypeError: it is no number.
        ValueError: it is not greater than 0 (which ``none="0"`` allows) or not finite, in float64
            or in float32.
    """
    cap = number(what, value)
    if not 0.0 < cap < math.inf and (cap or none != "0"):
        raise ValueError(f"{what} must be finite and greater than 0, or {none}, got {value}")
    if cap:
        check_float32(what, cap)
    return cap


def check_float32(what: str, value: float) -> None:
    """Raise unless a number greater than 0 is a normal float32: kernels, which take it and its
    reciprocal in float32, would have 0 or infinity instead."""
    if not _LEAST_FLOAT32 <= value <= _MOST_FLOAT32:
        limits = f"{_LEAST_FLOAT32:.3g} to {_MOST_FLOAT32:.3g}"
        raise ValueError(f"{what} must be from {limits} (float32), got {value}")


def check_tensor(
    op: str, name: str, value: Any, dtypes: Sequence[torch.dtype] = FLOAT_DTYPES, *, dims: int = -1
) -> None:
    """Raise unless ``value`` is a dense tensor of one of these dtypes, with ``dims`` dimensions.

    Args:
        op: the function, as errors name it: ``flexops.cross_entropy``.
    """
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        names = in_words([str(one)[6:] for one in dtypes if one != torch.float64])
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{op}: {name} must be {'an' if names[0] == 'i' else 'a'} {names} tensor, got {found}"
        )
    if not is_dense(value):
        check_places(op, {name: value})
    if dims >= 0 and value.dim() != dims:
        raise ValueError(f"{op}: {name} must have {dims} dimensions, got {list(value.shape)}")


def check_shape(
    op: str, name: str, tensor: Tensor, shape: Sequence[object], why: str = "", *, whose: str = ""
) -> None:
    """Raise unless the tensor has this shape, in which a word stands for any size; ``why`` follows
    the shape, which may be that of another argument (``whose``)."""
    if len(shape) != tensor.dim() or any(
        isinstance(wanted, int) and size != wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join(map(str, shape))
        shown = f"{whose}'s shape" if whose else "shape"
        raise ValueError(
            f"{op}: {name} must have {shown} [{wanted}]{why}, got {list(tensor.shape)}"
        )


def check_sequences(where: str, seq_idx: Any, name: str, like: Tensor) -> None:
    """Raise unless it says which sequence each step of ``like``, ``[batch, length, ...]``, belongs
    to."""
    check_tensor(where, "seq_idx", seq_idx, (torch.int32, torch.int64))
    check_device(where, "seq_idx", seq_idx, name, like)
    check_shape(where, "seq_idx", seq_idx, list(like.shape[:2]))


def check_device(op: str, name: str, tensor: Tensor, of: str, other: Tensor) -> None:
    """Raise unless both are on one device."""
    if tensor.device != other.device:
        raise ValueError(
            f"{op}: {name} must be on {of}'{'s' * (of[-1] != 's')} device, {other.device}, got"
            f" {tensor.device}"
        )
