"""flexops.route_tokens on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexops


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_routes(scoring, normalize):
    torch.manual_seed(0)
    logits = torch.randn(40, 9, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9)
    options: dict[str, Any] = {"scoring": scoring, "normalize": normalize, "scale": 1.7}
    weights, choices = flexops.route_tokens(logits, 3, bias=bias, **options)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    assert torch.equal(choices, (scores + bias).topk(3, -1).indices)
    chosen = scores.gather(1, choices)
    chosen = chosen / chosen.sum(-1, keepdim=True) if normalize else chosen
    assert torch.allclose(weights, 1.7 * chosen)
    few = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: flexops.route_tokens(x, 3, **options)[0], (few,))


def test_of_equal_scores_the_first():
    weights, choices = flexops.route_tokens(torch.zeros(2, 6), 3)
    assert choices.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.full((2, 3), 1 / 3))


def test_errors():
    logits = torch.randn(5, 4)
    logits[3, 1] = float("nan")
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "logits must not be NaN, got one in row 3", (logits, 2, {})),
        (ValueError, "k must be 1 to 4, the experts, got 5", (logits, 5, {})),
        (ValueError, "k must be 1 to 4, the experts, got 0", (logits, 0, {})),
        (ValueError, "scoring must be", (logits, 2, {"scoring": "relu"})),
        (ValueError, r"logits must be \[tokens, experts\]", (logits[0], 2, {})),
        (TypeError, "logits must be a float32", (logits.int(), 2, {})),
        (ValueError, r"bias must have shape \[4\]", (logits, 2, {"bias": torch.zeros(3)})),
        (TypeError, "bias must be a float32", (logits, 2, {"bias": torch.zeros(4).half()})),
    ]
    for error, words, (x, k, options) in cases:
        with pytest.raises(error, match=words):
            flexops.route_tokens(x, k, **options)
