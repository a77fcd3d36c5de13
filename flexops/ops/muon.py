"""Products of matrices of one shape, as ``flexops.optim.Muon`` iterates them::

    out[i] = alpha op(a[i]) op(b[i]) + beta added[i] + diagonal I

Of results that are known to be symmetric, Hopper's kernels compute the part up to the diagonal.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ._declared import define
from ._difference import difference
from ._register import has_native

ROWS, MIXED, COLUMNS = range(3)
"""Which dimensions of the operands are summed over: ``a b^T``, ``a b``, ``a^T b``."""


def product(
    a: Tensor,
    b: Tensor,
    form: int = ROWS,
    *,
    symmetric: bool = False,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """``alpha op(a) op(b) + beta added + diagonal I``, matrix by matrix.

    Args:
        a, b: ``[matrices, rows, columns]`` of one floating dtype, contiguous.
        form: ``ROWS``, ``MIXED`` or ``COLUMNS``.
        symmetric: the result is symmetric but for rounding.
        added: of the result's shape and dtype.

    Returns:
        ``[matrices, m, n]`` of a's dtype; sums are of float32.
    """
    m, n = a.shape[1 if form != COLUMNS else 2], b.shape[1 if form == ROWS else 2]
    out = a.new_empty(a.shape[0], m, n)
    means = torch.ops.flexops.muon_product_.default if _takes_kernels(a, n) else _reference
    means(out, a, b, added, form, symmetric, alpha, beta, diagonal)
    return out


def _takes_kernels(a: Tensor, n: int) -> bool:
    return (
        a.is_cuda
        and a.dtype == torch.float16
        and all(size % 8 == 0 for size in (*a.shape[1:], n))
        and a.numel() > 0
        and _is_hopper(a.device)
        and has_native("muon", "cuda")
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _reference(
    out: Tensor, a: Tensor, b: Tensor, added: Tensor | None, form: int, symmetric: bool,
    alpha: float, beta: float, diagonal: float,
) -> None:  # fmt: skip
    del symmetric
    left, right = a.mT if form == COLUMNS else a, b.mT if form == ROWS else b
    given = out if added is None else added
    # without an addend beta is 0, and what is in `out` does not count
    torch.baddbmm(given, left, right, beta=beta if added is not None else 0, alpha=alpha, out=out)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)


define("muon_product_", _reference, hidden=True)


def self_check(device: str) -> float:
    """The largest difference between the operator's results on ``device`` and those of its
    reference in float32, divided by 16: float16 rounds results of this size by 2^-12."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 264, 72, generator=generator) / 8).to(device, torch.float16)
    y = x.reshape(2, 72, 264)
    actual, expected = [], []
    means = torch.ops.flexops.muon_product_.default
    for form, b in ((ROWS, x), (MIXED, y), (COLUMNS, x)):
        m, n = x.shape[2 if form == COLUMNS else 1], b.shape[1 if form == ROWS else 2]
        out = x.new_empty(2, m, n)
        means(out, x, b, None, form, form != MIXED, 0.5, 0.0, 0.25)
        wide = out.new_empty(out.shape, dtype=torch.float32)
        _reference(wide, x.float(), b.float(), None, form, False, 0.5, 0.0, 0.25)
        actual.append(out.float())
        expected.append(wide)
    return difference(actual, expected) / 16
