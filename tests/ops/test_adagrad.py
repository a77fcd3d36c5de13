"""flexops.adagrad_ and flexops.optim.Adagrad."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from step_contract import ON_BOTH, Step, StepContract, make_params, set_grads
from torch import Tensor

import flexops
from flexops import optim

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"lr_decay": 0.3, "initial_accumulator_value": 0.5},
    {"maximize": True, "weight_decay": 0.1, "eps": 1e-3},
]


def exact(row: list[Tensor], n: dict[str, Any]) -> list[Tensor]:
    param, grad, total, step = row
    g = grad + n["weight_decay"] * param
    total = total + g * g
    return [param - n["lr"] / (1 + step * n["lr_decay"]) * g / (total.sqrt() + n["eps"]), grad, total, step + 1]


class TestStep(StepContract):
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


@ON_BOTH
@pytest.mark.parametrize("options", OPTIONS)
def test_matches_torch_over_many_steps(options: dict[str, Any], device: str) -> None:
    params, expected = make_params(device), make_params(device)
    optimizer, oracle = optim.Adagrad(params, lr=0.1, **options), torch.optim.Adagrad(expected, lr=0.1, **options)
    for step in range(20):
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)
        assert set(optimizer.state[left]) == set(oracle.state[right])
        torch.testing.assert_close(optimizer.state[left]["sum"], oracle.state[right]["sum"], rtol=1e-5, atol=1e-5)
        assert optimizer.state[left]["step"].item() == 20


@ON_BOTH
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_state_dicts_load_both_ways(first: str, device: str) -> None:
    kinds: list[Any] = [optim.Adagrad, torch.optim.Adagrad] if first == "ours" else [torch.optim.Adagrad, optim.Adagrad]
    params, expected = make_params(device), make_params(device)
    optimizer = kinds[0](params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2)
    oracle = torch.optim.Adagrad(expected, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2)
    for step in range(6):
        if step == 3:
            saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
            optimizer = kinds[1](params, lr=1.0)
            optimizer.load_state_dict(saved)
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


def test_is_a_drop_in() -> None:
    params = make_params("cpu")
    assert isinstance(optim.Adagrad(params), torch.optim.Adagrad)
    optim.Adagrad(params, 1e-2, 0.1, 0.1, 0.1, 1e-8, False, maximize=True, fused=True)
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        optim.Adagrad(params, differentiable=True)
    late = optim.Adagrad(params[:2], initial_accumulator_value=0.5)
    late.add_param_group({"params": params[2:]})  # torch's Adagrad makes states only in its constructor
    set_grads(params, seed=0)
    late.step()
    assert late.state[params[-1]]["step"].item() == 1


def test_low_precision_parameters_have_float32_sums() -> None:
    params = make_params("cpu", torch.bfloat16)
    assert all(state["sum"].dtype == torch.float32 for state in optim.Adagrad(params).state.values())
