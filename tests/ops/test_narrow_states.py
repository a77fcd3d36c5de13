"""Optimizers with states of 16 bits."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import test_adam
import test_lamb
import test_lion
import torch
from contract import ISA_LEVELS, isa_limit
from step_contract import DTYPES, ON_BOTH, Lists, clone, make_lists, make_params, set_grads
from torch import Tensor

import flexops
from flexops import optim
from flexops.bench.reference import OnReference
from flexops.build.load import loader

NARROW = [torch.bfloat16, torch.float16]
CLASSES: dict[str, Any] = {
    "lion": optim.Lion,
    "lamb": optim.LAMB,
    "adam": optim.AdamW,
    "amsgrad": functools.partial(optim.AdamW, amsgrad=True),
    "adagrad": optim.Adagrad,
}
ALL = pytest.mark.parametrize("name", CLASSES)
KERNELS = pytest.mark.parametrize("name", list(CLASSES)[:-1])
"""Those whose kernels take such states; Adagrad's are widened for the step."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGES = {
    "lion": _MOMENTS[:1],
    "lamb": _MOMENTS,
    "adam": _MOMENTS,
    "amsgrad": (*_MOMENTS, "max_exp_avg_sq"),
    "adagrad": ("sum",),
}
STEPS = {"lion": test_lion.TestStep, "lamb": test_lamb.TestStep}


def lists_of(name: str, dtype: torch.dtype, state_dtype: torch.dtype, device: str) -> Lists:
    """Lion's with steps."""
    contract = STEPS.get(name, test_adam.TestAdamW)
    params, grads, *states = make_lists(contract.step, dtype, dtype, device)
    averages = [[state.to(state_dtype) for state in each] for each in states[: len(AVERAGES[name])]]
    return [params, grads, *averages, [torch.tensor(3.0, device=device) for _ in params]]


def step_of(name: str, lists: Lists, **options: Any) -> None:
    options |= {"lr": 0.01, "weight_decay": 0.1}
    if name == "adam":
        lists = [*lists[:-1], [], lists[-1]]  # no largest squares
    elif name == "amsgrad":
        options["amsgrad"] = True
    getattr(flexops, f"{family_of(name)}_")(*lists, **options)


def family_of(name: str) -> str:
    return "adam" if name == "amsgrad" else name


@ON_BOTH
@KERNELS
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("state_dtype", NARROW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_the_references(name, dtype, state_dtype, stochastic, device):
    """Rounded the same way: other random numbers would give another neighbour to every second
    element."""
    assert loader.ensure(family_of(name), device)
    lists = lists_of(name, dtype, state_dtype, device)
    plain = clone(lists)
    differ = total = apart = 0
    for _ in range(3):
        step_of(name, lists, stochastic=stochastic)
        with OnReference():
            step_of(name, plain, stochastic=stochastic)
        for written, expected in zip(lists[0] + lists[-1], plain[0] + plain[-1], strict=True):
            # where a state went to its other neighbour
            apart += int((~torch.isclose(written, expected, rtol=2e-2, atol=2e-4)).sum())
        for one, other in zip(
            *([state for states in each[2:-1] for state in states] for each in (lists, plain)),
            strict=True,
        ):
            differ, total = differ + int((one != other).sum()), total + one.numel()
    assert differ < total / 100, f"{differ} of {total}"
    assert apart < total / 500, f"{apart} of {total}"


@KERNELS
def test_every_instruction_set_rounds_alike(name):
    assert loader.ensure(family_of(name), "cpu")
    results = []
    for level in ISA_LEVELS:
        lists = lists_of(name, torch.bfloat16, torch.bfloat16, "cpu")
        with isa_limit(level):
            for _ in range(3):
                step_of(name, lists, stochastic=True)
        results.append(torch.cat([state.flatten() for states in lists[2:-1] for state in states]))
    for other in results[1:]:
        assert (results[0] != other).float().mean() < 0.01


@ON_BOTH
@ALL
@pytest.mark.parametrize("state_dtype", [None, "param", torch.bfloat16])
def test_states_are_of_the_dtype_that_is_asked_for(name, state_dtype, device):
    """And a state dict goes on where it was saved, bit for bit; one of another dtype is taken
    over."""
    params, expected = make_params(device, torch.float16), make_params(device, torch.float16)
    make, options = CLASSES[name], {"lr": 0.01, "state_dtype": state_dtype}
    optimizer, oracle = make(params, **options), make(expected, **options)
    wanted = {None: torch.float32, "param": torch.float16}.get(state_dtype, torch.bfloat16)  # type: ignore[arg-type]
    for step in range(4):
        if step == 2:
            saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
            optimizer = make(params, **options)
            optimizer.load_state_dict(saved)
            optimizer = pickle.loads(pickle.dumps(optimizer))
            params = optimizer.param_groups[0]["params"]
        for each in (params, expected):
            set_grads(each, seed=step)
        optimizer.step()
        oracle.step()
        assert {
            optimizer.state[param][state].dtype for param in params for state in AVERAGES[name]
        } == {wanted}
    assert all(map(torch.equal, params, expected))
    other = make(params, lr=0.01, state_dtype=torch.bfloat16 if state_dtype is None else None)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert {other.state[param][AVERAGES[name][0]].dtype for param in params} == {
        torch.bfloat16 if state_dtype is None else torch.float32
    }


@KERNELS
def test_a_thousand_steps(name):
    """A regression on batches, whose noise makes up the gradients: where it ends, beside where
    float32 states end. docs/training.md has a transformer."""

    def trained(**options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        truth = torch.randn(32, 8, generator=generator)
        weight = torch.nn.Parameter(torch.full((32, 8), 0.1))
        optimizer = CLASSES[name]([weight], lr=1e-3, weight_decay=0.0, **options)
        for _ in range(1000):
            x = torch.randn(4, 32, generator=generator)
            weight.grad = (
                x.t() @ (x @ (weight.detach() - truth) + torch.randn(4, 8, generator=generator)) / 4
            )
            optimizer.step()
        return weight.detach()

    wide = trained()
    far = (trained(state_dtype=torch.bfloat16) - wide).norm()
    assert far < 0.02 * wide.norm()
    if name == "adam":
        nearest = trained(state_dtype=torch.bfloat16, stochastic_rounding=False)
        assert (nearest - wide).norm() > 2 * far


@ON_BOTH
def test_adagrads_sums_are_those_of_float32_rounded(device, monkeypatch):
    """To one of the two neighbours; the step is made with the sum before it is rounded; and pieces
    make no difference."""
    grads = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)).to(device)
    made = []
    for options, piece in (
        ({}, 2**22),
        ({"state_dtype": torch.bfloat16}, 2**22),
        ({"state_dtype": torch.bfloat16}, 64),
    ):
        monkeypatch.setattr(optim.adagrad, "_PIECE", piece)
        param = torch.nn.Parameter(torch.ones(7, 100, device=device))
        optimizer = optim.Adagrad([param], lr=0.1, **options)
        param.grad = grads.clone()
        optimizer.step()
        made.append(
            (param.detach(), optimizer.state[param]["sum"].float(), optimizer.state[param]["step"])
        )
    (wide, total, _), *narrow = made
    for param, rounded, step in narrow:
        assert torch.equal(param, wide)
        assert ((rounded - total).abs() <= total * 2**-7).all()
        assert (rounded != total.bfloat16()).any()
        assert step == 1
    assert torch.equal(narrow[0][1], narrow[1][1])


def test_adagrads_sums_go_on_growing():
    """Rounded to nearest, 8 bits stand still once a gradient's square is less than a 512th of the
    sum."""
    grads = torch.randn(3000, 500, generator=torch.Generator().manual_seed(0))

    def grown(**options: Any) -> float:
        param = torch.nn.Parameter(torch.zeros(500))
        optimizer = optim.Adagrad([param], **options)
        for grad in grads:
            param.grad = grad
            optimizer.step()
        return float(optimizer.state[param]["sum"].float().mean())

    wide = grown()
    assert abs(grown(state_dtype=torch.bfloat16) / wide - 1) < 0.02
    assert grown(state_dtype=torch.bfloat16, stochastic_rounding=False) < 0.8 * wide


def test_a_narrow_adagrad_under_a_grad_scaler():
    """A step that is left out leaves sums and counts as they are; the next one unscales."""
    param = torch.nn.Parameter(torch.ones(40))
    optimizer = optim.Adagrad([param], lr=0.1, state_dtype=torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for factor in (1.0, float("inf"), 1.0):
        before = [
            param.detach().clone(),
            *(value.clone() for value in optimizer.state[param].values()),
        ]
        optimizer.zero_grad()
        scaler.scale((param * 3.0).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        after = [param.detach(), *optimizer.state[param].values()]
        assert all(map(torch.equal, before, after)) == (factor != 1.0)
    assert optimizer.state[param]["step"] == 2
    assert (optimizer.state[param]["sum"] - 18).abs().max() <= 0.125


def test_what_is_rejected():
    for make in CLASSES.values():
        with pytest.raises(
            ValueError, match=r"state_dtype must be None, 'param', .*got torch.int8"
        ):
            make(make_params("cpu"), state_dtype=torch.int8)
    x = [torch.ones(3)]
    with pytest.raises(ValueError, match="state_steps must be given to round stochastically"):
        flexops.lion_(x, x, x, lr=0.1, stochastic=True)
