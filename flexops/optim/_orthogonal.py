"""Newton-Schulz iterations that make the singular values of matrices about 1.

One iteration, of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024)::

    G = X X^T,  P = a I + b G + c G G,  X <- P X

Every P is a polynomial of the first G, so all of them are symmetric and commute. For matrices that
are wider than high it is therefore cheaper to iterate on the small G, and to multiply X once::

    Q <- P Q,  G <- P G P,      and at the end X <- Q X

An error of G's small eigenvalues grows by a^2 (about 12) in each iteration, because nothing ties G
to X any more. After a few iterations G is therefore computed anew: of large matrices as Q G Q from
the first G, which is kept in two parts, rounded and what it was rounded off; of small ones from X,
to which Q is applied first. In float16, whose rounding is an eighth of bfloat16's, errors then stay
below those of the plain iterations in bfloat16 (tests/optim/test_muon.py). For matrices that are
higher than wide, ``G = X^T X``, and the factors stand to the right of X.

float16 has no small numbers, so X is scaled to elements of about 1 while it is iterated, and the
first G by 1024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.muon import COLUMNS, MIXED, ROWS, product

_RUN = 3  # iterations from one G
_TIED_FROM = 1024  # rows and columns of G: below, products of float32 would cost more
_TIED_RUN = 2  # iterations before G is computed anew from the first one
_LARGEST_SCALE = 16384.0  # singular values reach 1.3 times that, below float16's 65504
_GRAM_SCALE = 1024.0


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
    scaled: Tensor = x * factor
    return scaled.to(working_dtype(x.device))


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The matrices with their singular values brought near 1.

    Args:
        x: ``[batch, rows, columns]``, contiguous, of Frobenius norm ``scale_of(rows, columns)``.
        coefficients: a, b and c of each iteration.
        steps: how many iterations, at least 1.

    Returns:
        ``[batch, rows, columns]`` of x's dtype.
    """
    rows, columns = x.shape[1:]
    least, most = sorted((rows, columns))
    scale = scale_of(rows, columns)
    is_wide = rows <= columns
    form = ROWS if is_wide else COLUMNS
    tied = least >= _TIED_FROM and most > 1.5 * least
    longest = _RUN + _TIED_RUN if tied else _RUN if most > 1.5 * least else 1
    while steps > 0:
        run = min(steps, longest)
        steps -= run
        if run > _RUN:
            gram = product(x, x, form, symmetric=True, alpha=_GRAM_SCALE / scale**2, low=True)
            factor = _tied_factor(gram, coefficients, run)
        else:
            gram = product(x, x, form, symmetric=True, alpha=scale**-2)
            factor = _factor(gram, 1.0, coefficients, run)
        pair = (factor, x, MIXED) if is_wide else (x, factor, ROWS)
        x = product(*pair, alpha=1.0 if steps else 1 / scale)
    return x


def _factor(
    gram: Tensor, scale: float, coefficients: tuple[float, float, float], run: int
) -> Tensor:
    """The product of the factors of ``run`` iterations from ``scale`` times the Gram matrix."""
    a, b, c = coefficients
    factor = None
    for i in range(run):
        step = product(
            gram, gram, symmetric=True, alpha=c / scale**2, added=gram, beta=b / scale, diagonal=a
        )
        factor = step if factor is None else product(step, factor, MIXED, symmetric=True)
        if i < run - 1:
            half = product(step, gram, symmetric=True)
            gram, scale = product(half, step, symmetric=True, alpha=1 / scale), 1.0
    assert factor is not None
    return factor


def _tied_factor(parts: Tensor, coefficients: tuple[float, float, float], run: int) -> Tensor:
    """The same from both parts of the Gram matrix times ``_GRAM_SCALE``."""
    gram, low = parts.chunk(2)
    first = _factor(gram, _GRAM_SCALE, coefficients, _TIED_RUN)
    half = product(first, gram, added=product(first, low), beta=1.0, over=True)
    gram = product(half, first, symmetric=True, alpha=1 / _GRAM_SCALE)
    second = _factor(gram, 1.0, coefficients, run - _TIED_RUN)
    return product(second, first, MIXED)  # not as symmetric: errors are those of a left factor
