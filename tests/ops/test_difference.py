"""What ``flexops doctor`` holds self-checks' results against."""

from __future__ import annotations

import math

import pytest
import torch

from flexops.ops._difference import difference


@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_reported_wherever_it_is(place):
    results, expected = (
        [torch.zeros(4), torch.ones(2, 3), torch.zeros(())],
        [torch.zeros(4), torch.zeros(2, 3), torch.zeros(())],
    )
    assert difference(results, expected) == 1.0
    results[place].view(-1)[-1] = torch.nan
    assert math.isnan(difference(results, expected))
