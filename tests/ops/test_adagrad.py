"""flexops.adagrad_ and flexops.optim.Adagrad."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from step_contract import Step, TorchStepContract, make_params, set_grads
from torch import Tensor

import flexops
from flexops import optim


def exact(row: list[Tensor], n: dict[str, Any]) -> list[Tensor]:
    param, grad, total, step = row
    g = grad + n["weight_decay"] * param
    total = total + g * g
    return [
        param - n["lr"] / (1 + step * n["lr_decay"]) * g / (total.sqrt() + n["eps"]),
        grad,
        total,
        step + 1,
    ]


class TestStep(TorchStepContract):
    step = Step(
        "adagrad",
        flexops.adagrad_,
        {"params": None, "grads": None, "sums": torch.float32, "state_steps": torch.float32},
        {"lr": 0.01, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 1e-10},
        optim.Adagrad,
        exact,
        {"lr_decay": 0.2, "weight_decay": 0.1},
        bad_numbers=("lr", "lr_decay", "weight_decay", "eps"),
    )
    oracle = torch.optim.Adagrad
    torch_options: ClassVar = [
        {},
        {"weight_decay": 0.1},
        {"lr_decay": 0.3, "initial_accumulator_value": 0.5},
        {"maximize": True, "weight_decay": 0.1, "eps": 1e-3},
    ]


def test_a_group_that_is_added_later_has_states():
    params = make_params("cpu")
    late = optim.Adagrad(params[:2], initial_accumulator_value=0.5)
    # torch's Adagrad makes states only in its constructor
    late.add_param_group({"params": params[2:]})
    set_grads(params, seed=0)
    late.step()
    assert late.state[params[-1]]["step"].item() == 1


def test_low_precision_parameters_have_float32_sums():
    params = make_params("cpu", torch.bfloat16)
    assert all(
        state["sum"].dtype == torch.float32 for state in optim.Adagrad(params).state.values()
    )
