"""flexops.lion_ and flexops.optim.Lion."""

from __future__ import annotations

from typing import Any

import torch
from step_contract import Step, StepContract
from torch import Tensor

import flexops
from flexops import optim


def exact(row: list[Tensor], n: dict[str, Any]) -> list[Tensor]:
    param, grad, exp_avg = row
    update = (n["beta1"] * exp_avg + (1 - n["beta1"]) * grad).sign()
    return [
        param - n["lr"] * (update + n["weight_decay"] * param),
        grad,
        n["beta2"] * exp_avg + (1 - n["beta2"]) * grad,
    ]


class TestStep(StepContract):
    step = Step(
        "lion",
        flexops.lion_,
        {"params": None, "grads": None, "exp_avgs": torch.float32},
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
        optim.Lion,
        exact,
        {"betas": (0.9, 0.99), "weight_decay": 0.1},
        any_width=("exp_avgs",),
    )


def test_where_the_average_is_zero_nothing_moves():
    param, zeros = torch.ones(5), torch.zeros(5)
    flexops.lion_([param], [zeros], [zeros.clone()], lr=0.1)
    assert torch.equal(param, torch.ones(5))
