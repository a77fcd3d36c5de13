"""Newton-Schulz iterations that make the singular values of matrices about 1.

One iteration, of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024)::

    G = X X^T,  P = a I + b G + c G G,  X <- P X

Every P is a polynomial of the first G, so all of them are symmetric and commute. For matrices that
are wider than high it is therefore cheaper to iterate on the small G, and to multiply X once::

    Q <- P Q,  G <- P G P,      and at the end X <- Q X

An error of G's small eigenvalues grows by a^2 (about 12) in each iteration, because nothing ties G
to X any more. After ``_RESTART`` iterations G is therefore computed from X again. In float16, whose
rounding is an eighth of bfloat16's, errors then stay below those of the plain iterations in
bfloat16. For matrices that are higher than wide, ``G = X^T X``, and the factors stand to the right
of X.

float16 has no small numbers, so X is scaled to elements of about 1 while it is iterated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.muon import COLUMNS, MIXED, ROWS, product

_RESTART = 3
_LARGEST_SCALE = 16384.0  # singular values reach 1.3 times that, below float16's 65504


def working_dtype(device: torch.device) -> torch.dtype:
    """What matrices are iterated in: the CPU has no products of float16."""
    return torch.float32 if device.type == "cpu" else torch.float16


def scale_of(rows: int, columns: int) -> float:
    """The Frobenius norm that matrices are given: elements are about 1."""
    return min(math.sqrt(max(rows * columns, 1)), _LARGEST_SCALE)


def normalize(x: Tensor, eps: float) -> Tensor:
    """``[batch, rows, columns]`` of any floating dtype as ``orthogonalize`` takes it.

    Args:
        eps: the least norm that a matrix is divided by.
    """
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    factor = scale_of(*x.shape[1:]) / norm.clamp(min=eps)
    return (x * factor).to(working_dtype(x.device))


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The matrices with their singular values brought near 1.

    Args:
        x: ``[batch, rows, columns]``, contiguous, of Frobenius norm ``scale_of(rows, columns)``.
        coefficients: a, b and c of each iteration.
        steps: how many iterations, at least 1.

    Returns:
        ``[batch, rows, columns]`` of x's dtype.
    """
    a, b, c = coefficients
    rows, columns = x.shape[1:]
    scale = scale_of(rows, columns)
    is_wide = rows <= columns
    longest = _RESTART if max(rows, columns) > 1.5 * min(rows, columns) else 1
    while steps > 0:
        run = min(steps, longest)
        steps -= run
        gram = product(x, x, ROWS if is_wide else COLUMNS, symmetric=True, alpha=scale**-2)
        factor = None
        for i in range(run):
            step = product(gram, gram, symmetric=True, alpha=c, added=gram, beta=b, diagonal=a)
            factor = step if factor is None else product(step, factor, symmetric=True)
            if i < run - 1:
                gram = product(product(step, gram, symmetric=True), step, symmetric=True)
        assert factor is not None
        pair = (factor, x, MIXED) if is_wide else (x, factor, ROWS)
        x = product(*pair, alpha=1.0 if steps else 1 / scale)
    return x
