"""flexops.lamb_ and flexops.optim.LAMB."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_contract import (
    DTYPES,
    ON_BOTH,
    OPCHECKS,
    Step,
    StepContract,
    assert_params_close,
    clone,
    make_lists,
    make_params,
    step_alike,
)
from torch import Tensor

import flexops
from flexops import optim


def exact(row: list[Tensor], n: dict[str, Any]) -> list[Tensor]:
    param, grad, m, v, step = row
    beta1, beta2 = n["beta1"], n["beta2"]
    m, v, count = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad, step + 1
    update = (
        m / (1 - beta1**count) / ((v / (1 - beta2**count)).sqrt() + n["eps"])
        + n["weight_decay"] * param
    )
    of_param, of_update = param.norm(), update.norm()
    ratio = of_param / of_update if of_param > 0 and of_update > 0 else 1.0
    return [param - n["lr"] * ratio * update, grad, m, v, count]


class TestStep(StepContract):
    step = Step(
        "lamb",
        flexops.lamb_,
        {
            "params": None,
            "grads": None,
            "exp_avgs": torch.float32,
            "exp_avg_sqs": torch.float32,
            "state_steps": torch.float32,
        },
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1},
        optim.LAMB,
        exact,
        {"betas": (0.9, 0.999), "weight_decay": 0.1},
        bad_numbers=("lr", "weight_decay", "eps"),
        any_width=("exp_avgs", "exp_avg_sqs"),
    )


@ON_BOTH
def test_without_adaptation_is_adam_with_decay_in_the_update(device):
    params, expected = make_params(device), make_params(device)
    optimizer, oracle = (
        optim.LAMB(params, lr=0.01, eps=1e-8, adapt=False),
        torch.optim.Adam(expected, lr=0.01),
    )
    step_alike(5, (params, optimizer), (expected, oracle))
    assert_params_close(params, expected)


@ON_BOTH
def test_a_parameter_of_zeros_is_moved(device):
    param, grad = torch.zeros(1000, device=device), torch.ones(1000, device=device)
    flexops.lamb_(
        [param],
        [grad],
        [torch.zeros_like(param)],
        [torch.zeros_like(param)],
        [torch.zeros((), device=device)],
        lr=0.1,
    )
    torch.testing.assert_close(param, torch.full_like(param, -0.1))


@ON_BOTH
@pytest.mark.parametrize("adapt", [False, True])
def test_the_step_has_the_length_that_it_promises(adapt, device):
    lists = make_lists(TestStep.step, torch.float32, torch.float32, device, shapes=[(100_000,)])
    before = clone(lists)[0][0]
    flexops.lamb_(*lists, lr=0.01, adapt=adapt)
    length = (lists[0][0] - before).norm() / before.norm()
    assert (abs(length - 0.01) < 1e-5) == adapt


@ON_BOTH
def test_the_passes_of_sharded_parameters_are_the_step(device):
    """Bit for bit: with the norms in between, which ranks add up."""
    step, numbers = torch.tensor([0.3], device=device), (0.9, 0.999, 1e-6, 0.1)
    groups = [
        make_lists(TestStep.step, param, grad, device)
        for param, grad in zip(DTYPES, reversed(DTYPES), strict=True)
    ]
    lists = [[tensor for group in groups for tensor in group[k]] for k in range(5)]
    whole = clone(lists)
    norms = torch.ops.flexops.lamb_moments_(*lists, *numbers, True, None, None)
    torch.ops.flexops.lamb_apply_(lists[0], *lists[2:], norms, 0.0, *numbers, True, step, None)
    torch.ops.flexops.lamb_(*whole, 0.0, *numbers, True, True, step, None, None)
    for found, wanted in zip(lists, whole, strict=True):
        assert all(map(torch.equal, found, wanted))


def test_opcheck_of_the_passes():
    lists = make_lists(TestStep.step, torch.float32, torch.bfloat16, "cpu", shapes=[(7,), (33, 65)])
    params, _, *states = lists
    numbers = 0.9, 0.999, 1e-6, 0.1
    torch.library.opcheck(
        torch.ops.flexops.lamb_moments_.default,
        (*lists, *numbers, False, None, None),
        test_utils=OPCHECKS,
    )
    torch.library.opcheck(
        torch.ops.flexops.lamb_apply_.default,
        (params, *states, torch.ones(2, 2), 0.1, *numbers, True, None, None),
        test_utils=OPCHECKS,
    )


def test_norms_of_the_wrong_shape_are_rejected():
    params, _, *states = make_lists(TestStep.step, torch.float32, torch.float32, "cpu")
    with pytest.raises(
        RuntimeError, match=r"flexops::lamb_apply_: norms must have shape \[11, 2\], got \[3, 2\]"
    ):
        torch.ops.flexops.lamb_apply_(
            params, *states, torch.zeros(3, 2), 0.1, 0.9, 0.999, 1e-6, 0.0, True, None, None
        )
