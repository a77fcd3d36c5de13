"""Newton-Schulz iterations that make the singular values of matrices about 1.

One iteration, of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024)::

    G = X X^T,  P = a I + b G + c G G,  X <- P X

Every P is a polynomial of the first G, so all of them are symmetric and commute. For matrices that
are wider than high it is therefore cheaper to iterate on the small G, and to multiply X once::

    Q <- P Q,  G <- P G P,      and at the end X <- Q X

An error of G's small eigenvalues grows by a^2 (about 12) in each iteration, because nothing ties G
to X any more. After ``_RESTART`` iterations G is therefore computed from X again: rounding to
bfloat16 then stays below what the plain iterations have.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RESTART = 3
_PANELS = 4


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The matrices with their singular values brought near 1.

    Args:
        x: ``[batch, m, n]`` with m <= n, Frobenius norms at most 1. It may be overwritten.
        coefficients: a, b and c of each iteration.
        steps: how many iterations.

    Returns:
        ``[batch, m, n]`` of x's dtype.
    """
    a, b, c = coefficients
    while steps > 0:
        run = (
            min(steps, _RESTART)
            if _gram_is_cheaper(x.shape[2] / x.shape[1], min(steps, _RESTART))
            else 1
        )
        steps -= run
        gram, product = _symmetric(x, x.mT), None
        for i in range(run):
            factor = _symmetric(gram, gram, gram, beta=b, alpha=c)
            if run == 1:
                break
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            product = factor if product is None else _symmetric(factor, product)
            if i < run - 1:
                gram = _symmetric(_symmetric(gram, factor), factor)
        x = torch.baddbmm(x, factor, x, beta=a) if product is None else torch.bmm(product, x)
    return x


def _gram_is_cheaper(wide: float, run: int) -> bool:
    """Multiplications, in units of m^3 with ``wide = n / m``: iterations on X against those on
    G."""
    return run > 1 and 4 * wide + 8 * run - 6 < run * (4 * wide + 2)


def _symmetric(
    a: Tensor, b: Tensor, add: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """``alpha a b + beta add``, which is known to be symmetric: in panels of rows up to the
    diagonal, of which what is above it is copied. Saves 3/8 of the multiplications."""
    size = a.shape[1]
    if not a.is_cuda or size % (128 * _PANELS):
        return torch.bmm(a, b) if add is None else torch.baddbmm(add, a, b, beta=beta, alpha=alpha)
    return _by_panels(a, b, add, beta, alpha)


def _by_panels(a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    batch, size = a.shape[:2]
    out = a.new_empty(batch, size, size)
    panel = size // _PANELS
    for start in range(0, size, panel):
        rows, end = slice(start, start + panel), start + panel
        below = out[:, rows, :end]
        if add is None:
            torch.bmm(a[:, rows], b[:, :, :end], out=below)
        else:
            torch.baddbmm(
                add[:, rows, :end], a[:, rows], b[:, :, :end], beta=beta, alpha=alpha, out=below
            )
        out[:, :start, rows] = out[:, rows, :start].mT
    return out
