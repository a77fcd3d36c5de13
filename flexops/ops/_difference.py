"""How far kernels are off their references, for ``flexops doctor``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def difference(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest absolute difference of float tensors that correspond, of equal shapes; NaN if
    there is one, which Python's ``max`` may pass over."""
    return float(
        torch.stack(
            [(one - other).abs().max() for one, other in zip(actual, expected, strict=True)]
        ).max()
    )
