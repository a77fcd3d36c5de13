"""Steps of the optimizers, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexops import optim
from flexops.bench.reference import on_reference

from .case import FLEXOPS, REFERENCE, Case, Functions, Setup, library

FOREACH = "torch foreach"
MANY = 1000  # tensors, as a model has
_ONE_STATE = "reads parameter, gradient and state, writes all but the gradient: 20 B"
Calls = dict[str, Callable[[], object]]
Parameters = list[Tensor]


def adam(setup: Setup) -> Iterator[Case]:
    moved = "reads parameter, gradient and two states, writes all but the gradient"
    for group in _groups(setup, 28):
        calls: Calls = {
            FLEXOPS: group.steps(optim.AdamW),
            "torch fused": group.steps(torch.optim.AdamW, fused=True),
            FOREACH: group.steps(torch.optim.AdamW, foreach=True),
        }
        if apex := library("apex", "apex.optimizers", "FusedAdam"):
            calls["apex"] = group.steps(apex["apex"])
        yield from group.step("adam", "AdamW", 28, calls, f"{moved}: 28 B")
    elements = 2 ** _exponent(setup, 28)
    half = _Group(setup, 1, (elements,), torch.bfloat16)
    calls = {
        FLEXOPS: half.steps(optim.AdamW, state_dtype="param"),
        "flexops to nearest": half.steps(
            optim.AdamW, state_dtype="param", stochastic_rounding=False
        ),
        "torch fused": half.steps(torch.optim.AdamW, fused=True),
    }
    name = f"AdamW step, all in bf16, x {elements}"
    yield from half.step("adam", "AdamW", 14, calls, f"{moved}: 14 B", name)
    name, calls = f"AdamW step + bf16 copy, fp32 x {elements}", _step_and_copy(setup, elements)
    yield from half.step("adam", "AdamW", 30, calls, "28 B, and 2 B for the copy", name)


def adam8bit(setup: Setup) -> Iterator[Case]:
    for group in _groups(setup, 28):
        calls: Calls = {FLEXOPS: group.steps(optim.AdamW8bit)}
        for label, found in library("bitsandbytes", "bitsandbytes.optim", "AdamW8bit").items():
            calls[label] = group.steps(found)
        if setup.device == "cuda":
            calls["torch fused (fp32 states)"] = group.steps(torch.optim.AdamW, fused=True)
        moved = "12 B for parameter and gradient, 4 B for two states of 8 bits"
        yield from group.step("adam8bit", "AdamW8bit", 16, calls, moved)


def lion(setup: Setup) -> Iterator[Case]:
    for group in _groups(setup, 27):
        calls: Calls = {
            FLEXOPS: group.steps(optim.Lion),
            FOREACH: group.formula(lion_step, 1),
            **group.compiled(lion_step, 1),
            REFERENCE: on_reference(group.steps(optim.Lion)),
        }
        yield from group.step("lion", "Lion", 20, calls, _ONE_STATE)


def muon(setup: Setup) -> Iterator[Case]:
    """Matrices of a layer of 2048 columns, in bfloat16."""
    size = 256 if setup.small else 1024 if setup.device == "cpu" else 2048
    for shape in ((size, size), (4 * size, size)):
        group = _Group(setup, 8, shape, torch.bfloat16)
        calls: Calls = {FLEXOPS: group.steps(optim.Muon)}
        if hasattr(torch.optim, "Muon"):  # torch 2.9
            calls["torch"] = group.steps(torch.optim.Muon)
        moved = (
            "products, not memory, decide; reads parameter, gradient and state, writes two: 10 B"
        )
        yield from group.step("muon", "Muon", 10, calls, moved)


def adagrad(setup: Setup) -> Iterator[Case]:
    for group in _groups(setup, 27):
        calls: Calls = {
            FLEXOPS: group.steps(optim.Adagrad),
            FOREACH: group.steps(torch.optim.Adagrad, foreach=True),
        }
        if setup.device == "cpu":
            calls["torch fused"] = group.steps(torch.optim.Adagrad, fused=True)
        calls |= group.compiled(adagrad_step, 1)
        yield from group.step("adagrad", "Adagrad", 20, calls, _ONE_STATE)


def lamb(setup: Setup) -> Iterator[Case]:
    for group in _groups(setup, 27):
        calls: Calls = {FLEXOPS: group.steps(optim.LAMB), FOREACH: group.formula(lamb_step, 2)}
        for label, found in library("apex", "apex.optimizers", "FusedLAMB").items():
            calls[label] = group.steps(found)
        calls |= group.compiled(lamb_step, 2)
        moved = (
            "each once: 28 B; the trust ratio needs a second pass that reads 12 B again, and 40 B"
            " in all would be 0.70 of the copy"
        )
        yield from group.step("lamb", "LAMB", 28, calls, moved)


def grad_norm(setup: Setup) -> Iterator[Case]:
    elements = 2 ** (_exponent(setup, 22) - (3 if setup.device == "cpu" else 0))
    for group in (_Group(setup, 100, (elements,)), _Group(setup, MANY, (elements // 16,))):
        functions = {FLEXOPS: optim.clip_grad_norm_, FOREACH: torch.nn.utils.clip_grad_norm_}
        calls: Calls = {
            label: _clip(function, group.parameters()) for label, function in functions.items()
        }
        moved = "reads for the norm, reads and writes to scale: 12 B"
        yield from group.step("grad_norm", "clip_grad_norm_", 12, calls, moved)


class _Group(NamedTuple):
    """Parameters of one shape, and what steps them."""

    setup: Setup
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def parameters(self) -> Parameters:
        make = partial(self.setup.randn, *self.shape, dtype=self.dtype)
        parameters = [make(grad=True) for _ in range(self.number)]
        for parameter in parameters:
            parameter.grad = make()
        return parameters

    def steps(self, kind: Callable[..., Any], **options: Any) -> Callable[[], object]:
        optimizer = kind(self.parameters(), **options)
        return lambda: optimizer.step()

    def formula(self, step: Callable[..., None], states: int) -> Callable[[], object]:
        params = [parameter.detach() for parameter in self.parameters()]
        grads = [torch.randn_like(param) for param in params]
        lists = [[torch.zeros_like(param) for param in params] for _ in range(states)]
        return lambda: step(params, grads, *lists)

    def compiled(self, step: Callable[..., None], states: int) -> Calls:
        """Of one tensor only: a thousand take torch.compile minutes."""
        found: Functions = self.setup.compiled(step) if self.number == 1 else {}
        return {label: self.formula(function, states) for label, function in found.items()}

    def step(
        self, family: str, function: str, each: int, calls: Calls, moved: str, name: str = ""
    ) -> Iterator[Case]:
        """Steps in a row, as queued; of many tensors, whose lists can take the host longer than
        the device takes to step them, once more with the host ahead. ``each``: bytes an element."""
        dtype = "fp32" if self.dtype == torch.float32 else "bf16"
        name = name or f"{function}, {self.number} {dtype} x {'x'.join(map(str, self.shape))}"
        size = each * self.number * torch.Size(self.shape).numel()
        case = Case(family, function, name, "step", size, calls, f"{moved} an element", "queued")
        # measuring a case empties it
        ahead = replace(case, name=f"{name}, host ahead", measure="device", contenders=dict(calls))
        yield case
        if self.setup.device == "cuda" and self.number == MANY:
            yield ahead


def _exponent(setup: Setup, large: int) -> int:
    return large - (2 if setup.device == "cpu" else 0) - (3 if setup.small else 0)


def _groups(setup: Setup, large: int) -> list[_Group]:
    """One large tensor, and as many as a model has."""
    many = MANY if setup.device == "cuda" and not setup.small else 100
    return [_Group(setup, 1, (2 ** _exponent(setup, large),)), _Group(setup, many, (4096, 64))]


def _step_and_copy(setup: Setup, elements: int) -> Calls:
    group = _Group(setup, 1, (elements,))
    parameters, ours = group.parameters(), group.parameters()
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
