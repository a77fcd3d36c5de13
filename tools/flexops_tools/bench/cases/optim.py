"""Steps of the optimizers, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexops import optim
from flexops.bench.reference import on_reference

from .case import FLEXOPS, REFERENCE, Case, Functions, Setup, library

FOREACH = "torch foreach"
MANY = 1000  # tensors, as a model has
Calls = dict[str, Callable[[], object]]
Parameters = list[Tensor]


def adam(setup: Setup) -> Iterator[Case]:
    for count, shape in _shapes(setup, 28):
        calls: Calls = {
            FLEXOPS: _steps(setup, optim.AdamW, count, shape),
            "torch fused": _steps(setup, torch.optim.AdamW, count, shape, fused=True),
            FOREACH: _steps(setup, torch.optim.AdamW, count, shape, foreach=True),
        }
        if library("apex", "apex.optimizers", "FusedAdam"):
            calls["apex"] = _steps(
                setup, library("apex", "apex.optimizers", "FusedAdam")["apex"], count, shape
            )
        size = 28 * _elements(count, shape)
        moved = "reads parameter, gradient and two states, writes all but the gradient: 28 B"
        yield from _step(setup, "adam", "AdamW", _name("AdamW", count, shape), size, calls, moved)
    elements, half = 2 ** (_exponent(setup, 28)), torch.bfloat16
    calls = {
        FLEXOPS: _steps(setup, optim.AdamW, 1, (elements,), half, state_dtype="param"),
        "flexops to nearest": _steps(
            setup, optim.AdamW, 1, (elements,), half, state_dtype="param", stochastic_rounding=False
        ),
        "torch fused": _steps(setup, torch.optim.AdamW, 1, (elements,), half, fused=True),
    }
    moved = "reads parameter, gradient and two states, writes all but the gradient: 14 B"
    yield from _step(
        setup,
        "adam",
        "AdamW",
        f"AdamW step, all in bf16, x {elements}",
        14 * elements,
        calls,
        moved,
    )
    moved = "28 B, and 2 B for the copy"
    yield from _step(
        setup,
        "adam",
        "AdamW",
        f"AdamW step + bf16 copy, fp32 x {elements}",
        30 * elements,
        _step_and_copy(setup, elements),
        moved,
    )


def adam8bit(setup: Setup) -> Iterator[Case]:
    for count, shape in _shapes(setup, 28):
        calls: Calls = {FLEXOPS: _steps(setup, optim.AdamW8bit, count, shape)}
        for label, found in library("bitsandbytes", "bitsandbytes.optim", "AdamW8bit").items():
            calls[label] = _steps(setup, found, count, shape)
        if setup.device == "cuda":
            calls["torch fused (fp32 states)"] = _steps(
                setup, torch.optim.AdamW, count, shape, fused=True
            )
        size = 16 * _elements(count, shape)
        moved = "12 B for parameter and gradient, 4 B for two states of 8 bits"
        yield from _step(
            setup, "adam8bit", "AdamW8bit", _name("AdamW8bit", count, shape), size, calls, moved
        )


def lion(setup: Setup) -> Iterator[Case]:
    for count, shape in _shapes(setup, 27):
        calls: Calls = {
            FLEXOPS: _steps(setup, optim.Lion, count, shape),
            FOREACH: _formula(setup, lion_step, 1, count, shape),
        }
        calls |= _compiled(setup, lion_step, 1, count, shape)
        calls[REFERENCE] = on_reference(_steps(setup, optim.Lion, count, shape))
        size = 20 * _elements(count, shape)
        moved = "reads parameter, gradient and state, writes all but the gradient: 20 B"
        yield from _step(setup, "lion", "Lion", _name("Lion", count, shape), size, calls, moved)


def muon(setup: Setup) -> Iterator[Case]:
    """Matrices of a layer of 2048 columns, in bfloat16."""
    size, half = 256 if setup.small else 1024 if setup.device == "cpu" else 2048, torch.bfloat16
    for count, shape in ((8, (size, size)), (8, (4 * size, size))):
        calls: Calls = {FLEXOPS: _steps(setup, optim.Muon, count, shape, half)}
        if hasattr(torch.optim, "Muon"):  # torch 2.9
            calls["torch"] = _steps(setup, torch.optim.Muon, count, shape, half)
        name = _name("Muon", count, shape).replace("fp32", "bf16")
        moved = (
            "products, not memory, decide; reads parameter, gradient and state, writes two: 10 B"
        )
        yield from _step(setup, "muon", "Muon", name, 10 * _elements(count, shape), calls, moved)


def adagrad(setup: Setup) -> Iterator[Case]:
    for count, shape in _shapes(setup, 27):
        calls: Calls = {
            FLEXOPS: _steps(setup, optim.Adagrad, count, shape),
            FOREACH: _steps(setup, torch.optim.Adagrad, count, shape, foreach=True),
        }
        if setup.device == "cpu":
            calls["torch fused"] = _steps(setup, torch.optim.Adagrad, count, shape, fused=True)
        calls |= _compiled(setup, adagrad_step, 1, count, shape)
        size = 20 * _elements(count, shape)
        moved = "reads parameter, gradient and state, writes all but the gradient: 20 B"
        yield from _step(
            setup, "adagrad", "Adagrad", _name("Adagrad", count, shape), size, calls, moved
        )


def lamb(setup: Setup) -> Iterator[Case]:
    for count, shape in _shapes(setup, 27):
        calls: Calls = {
            FLEXOPS: _steps(setup, optim.LAMB, count, shape),
            FOREACH: _formula(setup, lamb_step, 2, count, shape),
        }
        for label, found in library("apex", "apex.optimizers", "FusedLAMB").items():
            calls[label] = _steps(setup, found, count, shape)
        calls |= _compiled(setup, lamb_step, 2, count, shape)
        size = 28 * _elements(count, shape)
        moved = (
            "each once: 28 B; the trust ratio needs a second pass that reads 12 B again, and 40 B"
            " in all would be 0.70 of the copy"
        )
        yield from _step(setup, "lamb", "LAMB", _name("LAMB", count, shape), size, calls, moved)


def grad_norm(setup: Setup) -> Iterator[Case]:
    elements = 2 ** (_exponent(setup, 22) - (3 if setup.device == "cpu" else 0))
    for count, shape in ((100, (elements,)), (MANY, (elements // 16,))):
        functions = {FLEXOPS: optim.clip_grad_norm_, FOREACH: torch.nn.utils.clip_grad_norm_}
        calls: Calls = {
            label: _clip(function, _parameters(setup, count, shape))
            for label, function in functions.items()
        }
        size = 12 * _elements(count, shape)
        moved = "reads for the norm, reads and writes to scale: 12 B"
        yield from _step(
            setup,
            "grad_norm",
            "clip_grad_norm_",
            _name("clip_grad_norm_", count, shape),
            size,
            calls,
            moved,
        )


def _step(
    setup: Setup, family: str, function: str, name: str, size: int, calls: Calls, count: str
) -> Iterator[Case]:
    """Steps in a row, as queued; of many tensors, whose lists can take the host longer than the
    device takes to step them, once more with the host ahead."""
    case = Case(family, function, name, "step", size, calls, f"{count} an element", "queued")
    # measuring a case empties it
    ahead = replace(case, name=f"{name}, host ahead", measure="device", contenders=dict(calls))
    yield case
    if setup.device == "cuda" and f", {MANY} " in name:
        yield ahead


def _name(what: str, count: int, shape: tuple[int, ...]) -> str:
    return f"{what}, {count} fp32 x {'x'.join(map(str, shape))}"


def _elements(count: int, shape: tuple[int, ...]) -> int:
    return count * torch.Size(shape).numel()


def _exponent(setup: Setup, large: int) -> int:
    return large - (2 if setup.device == "cpu" else 0) - (3 if setup.small else 0)


def _shapes(setup: Setup, large: int) -> list[tuple[int, tuple[int, ...]]]:
    """One large tensor, and as many as a model has."""
    return [
        (1, (2 ** _exponent(setup, large),)),
        (MANY if setup.device == "cuda" and not setup.small else 100, (4096, 64)),
    ]


def _parameters(
    setup: Setup, count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Parameters:
    parameters = [setup.randn(*shape, dtype=dtype, grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = setup.randn(*shape, dtype=dtype)
    return parameters


def _steps(
    setup: Setup,
    kind: Callable[..., Any],
    count: int,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Callable[[], object]:
    optimizer = kind(_parameters(setup, count, shape, dtype), **options)
    return lambda: optimizer.step()


def _formula(
    setup: Setup, step: Callable[..., None], states: int, count: int, shape: tuple[int, ...]
) -> Callable[[], object]:
    params = [parameter.detach() for parameter in _parameters(setup, count, shape)]
    grads = [torch.randn_like(param) for param in params]
    lists = [[torch.zeros_like(param) for param in params] for _ in range(states)]
    return lambda: step(params, grads, *lists)


def _compiled(
    setup: Setup, step: Callable[..., None], states: int, count: int, shape: tuple[int, ...]
) -> Calls:
    """Of one tensor only: a thousand take torch.compile minutes."""
    found: Functions = setup.compiled(step) if count == 1 else {}
    return {
        label: _formula(setup, function, states, count, shape) for label, function in found.items()
    }


def _step_and_copy(setup: Setup, elements: int) -> Calls:
    parameters, ours = _parameters(setup, 1, (elements,)), _parameters(setup, 1, (elements,))
    target, copy = (
        torch.empty(elements, dtype=torch.bfloat16, device=setup.device) for _ in range(2)
    )
    fused = torch.optim.AdamW(parameters, fused=True)
    one_pass = optim.AdamW(ours, copies={ours[0]: copy})

    def step_then_copy() -> None:
        fused.step()
        target.copy_(parameters[0].detach())

    return {FLEXOPS: lambda: one_pass.step(), "torch fused, then copy": step_then_copy}


def _clip(function: Callable[..., Any], parameters: Parameters) -> Callable[[], object]:
    """Each call with a lower limit than the last, so that there is something to clip."""
    limit = 1e3

    def call() -> object:
        nonlocal limit
        limit *= 0.97
        return function(parameters, limit)

    return call


def lion_step(params: Parameters, grads: Parameters, averages: Parameters) -> None:
    update = torch._foreach_mul(averages, 0.9)
    torch._foreach_add_(update, grads, alpha=0.1)
    torch._foreach_sign_(update)
    torch._foreach_mul_(params, 1 - 1e-4 * 1e-2)
    torch._foreach_add_(params, update, alpha=-1e-4)
    torch._foreach_lerp_(averages, grads, 0.01)


def adagrad_step(params: Parameters, grads: Parameters, sums: Parameters) -> None:
    for param, grad, total in zip(params, grads, sums, strict=True):
        total.addcmul_(grad, grad)
        param.addcdiv_(grad, total.sqrt().add_(1e-10), value=-1e-2)


def lamb_step(
    params: Parameters, grads: Parameters, averages: Parameters, squares: Parameters
) -> None:
    torch._foreach_lerp_(averages, grads, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, grads, grads, 0.001)
    denominator = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominator, 1e-6)
    update = torch._foreach_div(averages, denominator)
    torch._foreach_add_(update, params, alpha=1e-2)
    norms = zip(torch._foreach_norm(params), torch._foreach_norm(update), strict=True)
    ratios = [torch.where((weight > 0) & (step > 0), weight / step, 1.0) for weight, step in norms]
    torch._foreach_mul_(update, ratios)
    torch._foreach_add_(params, update, alpha=-1e-3)
