"""cross_entropy and linear_cross_entropy, each with its gradient, because that is what they are
for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.ops import cross_entropy as op
from flexops.ops import linear_cross_entropy as linear

from .case import Case, Function, Functions, Setup, contenders, library

FAMILY = "cross_entropy"
LIGER = "liger_kernel.transformers.functional"


def cross_entropy(setup: Setup) -> Iterator[Case]:
    rows, vocabulary = setup.rows(8192), 128256 if setup.device == "cuda" else 32000
    logits = setup.randn(rows, vocabulary)
    target = torch.randint(0, vocabulary, (rows,), device=setup.device)
    what = f"bf16 {rows}x{vocabulary}"
    count = "reads the logits, writes their gradient"
    functions = contenders(
        setup, in_place, torch_loss, library("Liger", LIGER, "liger_cross_entropy")
    )
    yield _both(
        "cross_entropy",
        f"cross_entropy over the logits, {what}",
        functions,
        (logits, target),
        (0,),
        2 * logits.nbytes,
        count,
    )
    functions = contenders(setup, op.cross_entropy, torch_loss)
    yield _both(
        "cross_entropy",
        f"cross_entropy {what}",
        functions,
        (logits, target),
        (0,),
        2 * logits.nbytes,
        count,
    )
    del logits
    cuda = setup.device == "cuda"
    # few CPUs multiply bfloat16
    rows, width, dtype = (
        (setup.rows(8192), 4096, torch.bfloat16) if cuda else (setup.rows(2048), 256, torch.float32)
    )
    x = setup.randn(rows, width, dtype=dtype)
    weight = setup.randn(vocabulary, width, dtype=dtype).mul_(0.02)
    target = torch.randint(0, vocabulary, (rows,), device=setup.device)
    functions = contenders(
        setup,
        linear.linear_cross_entropy,
        torch_linear,
        library("Liger", LIGER, "liger_fused_linear_cross_entropy"),
    )
    if setup.compile:
        # tuning its matrix products would take minutes
        functions = {**functions, **setup.compiled(torch_linear, "default")}
    what = f"linear_cross_entropy {'bf16' if cuda else 'fp32'} {rows}x{width} -> {vocabulary}"
    yield _both(
        "linear_cross_entropy",
        what,
        functions,
        (x, weight, target),
        (0, 1),
        0,
        "three matrix products bound it, not memory",
    )


def _both(
    function: str,
    name: str,
    functions: Functions,
    args: Sequence[Tensor],
    differentiable: Sequence[int],
    size: int,
    count: str,
) -> Case:
    calls = {label: with_gradient(call, args, differentiable) for label, call in functions.items()}
    return Case(
        FAMILY, function, name, "forward + backward", size, calls, count, "queued", memory=True
    )


def with_gradient(
    function: Function, args: Sequence[Tensor], differentiable: Sequence[int]
) -> Callable[[], object]:
    def call() -> object:
        given = [
            arg.detach().requires_grad_(position in differentiable)
            for position, arg in enumerate(args)
        ]
        result: Any = function(*given)
        inputs = [given[position] for position in differentiable]
        return torch.autograd.grad(result, inputs, torch.ones_like(result))

    return call


def in_place(logits: Tensor, target: Tensor) -> Any:
    return op.cross_entropy(logits, target, inplace=True)


def torch_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def torch_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), target)
