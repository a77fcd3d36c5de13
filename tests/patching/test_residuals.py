"""The small layer by which it is found out where a layer's parts are added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flexops.patching import residuals


class Scaled(nn.Module):
    """An activation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() * self.scale


class Layer(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(300), nn.Linear(300, 300), act

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.act(self.up(self.norm(hidden_states)))


@pytest.mark.parametrize(
    ("act", "stays"),
    [(nn.SiLU(), True), (Scaled(), False), (nn.Sequential(nn.SiLU()), False)],
    ids=["function", "with a parameter", "of parts"],
)
def test_an_activation_stays_what_it_is_and_what_has_a_width_or_parts_is_replaced(act, stays):
    made, args, named = residuals.miniature(Layer(act), (0, 0), "first")
    assert isinstance(made.act, type(act)) == stays
    assert not isinstance(made.up, nn.Linear)
    assert made(*args, **named).shape == args[0].shape
