"""What ``flexops doctor`` runs: results of operators against those of their references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flexops import ops
from flexops.build.describe import catalog
from flexops.ops import _register
from flexops.ops._self_check import difference


@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_reported_wherever_it_is(place):
    results, expected = (
        [torch.zeros(4), torch.ones(2, 3), torch.zeros(())],
        [torch.zeros(4), torch.zeros(2, 3), torch.zeros(())],
    )
    assert difference(results, expected) == 1.0
    results[place].view(-1)[-1] = torch.nan
    assert math.isnan(difference(results, expected))


def test_16_bits_round_more():
    pair = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3)
    assert difference(*[[one] for one in pair], of_halves=0.25) == 0.25
    assert difference(*[[one.float()] for one in pair], of_halves=0.25) == 1.0


OWN = {"int4_linear", "kvcache_attention"}
"""Families whose checks compare functions, not operators."""


@pytest.mark.filterwarnings("ignore")  # of what has no kernels for a CPU
@pytest.mark.parametrize("family", sorted({one.name for one in catalog.CATALOG} - OWN))
def test_every_operator_of_a_check_is_compared(family, monkeypatch):
    """With a wrong reference of any, results differ."""
    check, called, broken = getattr(ops, family).self_check, set(), set()

    def watched(name, reference):
        def call(*args, **named):
            called.add(name)
            result = reference(*args, **named)
            if name in broken and result is None:
                tree_map(_spoil, (args, named))
            return tree_map(_other, result) if name in broken else result

        return call

    _register.supply_all()
    for name, reference in list(_register.references.items()):
        monkeypatch.setitem(_register.references, name, watched(name, reference))
    assert check("cpu") < 1e-4
    assert called
    for name in called.copy():
        broken.add(name)
        assert not check("cpu") < 1e-3, name
        broken.clear()


def _other(x):
    if not isinstance(x, Tensor) or not x.numel():
        return x
    return x + 1 if x.is_floating_point() and x.dtype.itemsize > 1 else x.flip(0)


def _spoil(x):
    if not isinstance(x, Tensor):
        return x
    if x.dim() and x.dtype == torch.int64:  # not offsets, which have to ascend
        return x.copy_(x.flip(0))
    return x.add_(1) if x.is_floating_point() else x
