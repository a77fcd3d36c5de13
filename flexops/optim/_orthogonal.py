"""Newton-Schulz iterations that make the singular values of matrices about 1.

One iteration, of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024)::

    G = X X^T,  P = a I + b G + c G G,  X <- P X

Every P is a polynomial of the first G, so all of them are symmetric and commute. For matrices that
are wider than high it is therefore cheaper to iterate on the small G, and to multiply X once::

    Q <- P Q,  G <- P G P,      and at the end X <- Q X

An error of G's small eigenvalues grows by a^2 (about 12) in each iteration, because nothing ties G
to X any more. After ``_RESTART`` iterations G is therefore computed from X again: rounding to
bfloat16 then stays below what the plain iterations have. For matrices that are higher than wide,
``G = X^T X``, and the factors stand to the right of X. Q is then transposed: in exact arithmetic it
is symmetric, but its rounding errors are those of a left factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RESTART = 3
_PANELS = 4


def orthogonalize(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The matrices, divided by their Frobenius norms, with their singular values brought near 1.

    Args:
        x: ``[batch, rows, columns]``; it is overwritten.
        coefficients: a, b and c of each iteration.
        steps: how many iterations, at least 1.
        eps: the least norm that a matrix is divided by.

    Returns:
        ``[batch, rows, columns]`` of x's dtype.
    """
    a, b, c = coefficients
    rows, columns = x.shape[1:]
    wide = max(rows, columns) / max(min(rows, columns), 1)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x.div_(norm.clamp(min=eps))
    while steps > 0:
        run = min(steps, _RESTART) if _gram_is_cheaper(wide, min(steps, _RESTART)) else 1
        steps -= run
        gram, product = (_gram(x, x.mT) if rows <= columns else _gram(x.mT, x)), None
        for i in range(run):
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if run == 1:  # the sum with a X in the product rounds once less
                break
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            product = factor if product is None else torch.bmm(factor, product)
            if i < run - 1:
                gram = torch.bmm(torch.bmm(gram, factor), factor)
        if product is None:
            pair = (factor, x) if rows <= columns else (x, factor)
            x = torch.baddbmm(x, *pair, beta=a)
        else:
            x = torch.bmm(product, x) if rows <= columns else torch.bmm(x, product.mT)
    return x


def _gram_is_cheaper(wide: float, run: int) -> bool:
    """Multiplications in units of m^3, for matrices of m rows and ``wide m`` columns: iterations on
    X against those on G."""
    return run > 1 and 4 * wide + 8 * run - 6 < run * (4 * wide + 2)


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """``a b``, which is known to be symmetric: in panels of rows up to the diagonal, of which what
    is above it is copied. Saves 3/8 of the multiplications."""
    size = a.shape[1]
    if not a.is_cuda or size % (128 * _PANELS) or a.shape[2] <= 2 * size:
        return torch.bmm(a, b)
    return _by_panels(a, b)


def _by_panels(a: Tensor, b: Tensor) -> Tensor:
    batch, size = a.shape[:2]
    out = a.new_empty(batch, size, size)
    panel = size // _PANELS
    for start in range(0, size, panel):
        rows, end = slice(start, start + panel), start + panel
        torch.bmm(a[:, rows], b[:, :, :end], out=out[:, rows, :end])
        out[:, :start, rows] = out[:, rows, :start].mT
    return out
