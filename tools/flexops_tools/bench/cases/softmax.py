"""scaled_masked_softmax and causal_softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexops.ops import softmax as op

from .case import Case, Family, Setup, library

SCALE = 0.125


def softmax(setup: Setup) -> Iterator[Case]:
    heads, length = (32 if setup.device == "cuda" else 4), (512 if setup.small else 2048)
    x, family = setup.randn(4, heads, length, length, grad=True), Family("softmax", setup)
    what, size = f"bf16 4x{heads}x{length}x{length}", x.nbytes
    liger = library(
        "Liger",
        "liger_kernel.transformers.functional",
        "liger_softmax",
        lambda function: lambda x: function(x * SCALE),
    )
    once, back = (2 * size, "reads x, writes y"), (3 * size, "reads dy and y, writes dx")
    op_name = "scaled_masked_softmax"
    functions: tuple[Any, ...] = (scaled, torch_scaled, liger)
    yield from family.passes(op_name, f"scaled softmax {what}", functions, (x,), once, back)
    keep = torch.rand(4, 1, length, length, device=setup.device) < 0.9
    count = (2 * size + keep.nbytes, "reads x and a boolean mask that heads share, writes y")
    functions = (masked, torch_masked)
    yield from family.passes(op_name, f"masked softmax {what}", functions, (x, keep), count)
    for dtype, shape, sharing in (
        (torch.bfloat16, (4, 1, length, length), "bf16 mask that heads share"),
        (torch.float32, (4, 1, length, length), "fp32 mask that heads share"),
        (torch.bfloat16, (4, 1, 1, length), "bf16 mask of keys"),
    ):
        left_out = torch.rand(shape, device=setup.device) < 0.1
        mask = torch.randn(shape, device=setup.device).masked_fill(left_out, -torch.inf).to(dtype)
        count = (2 * size + mask.nbytes, "reads x and the mask, writes y")
        name, functions = f"softmax, added {sharing}, {what}", (masked, torch_added)
        yield from family.passes(op_name, name, functions, (x, mask), count)
    count = (size // 2 + size, "reads half of x, writes y")
    back = (2 * size, "reads half of dy and y, writes dx")
    name, functions = f"causal softmax {what}", (causal, torch_causal)
    yield from family.passes("causal_softmax", name, functions, (x,), count, back)
    yield from family.small(
        op_name, scaled, torch_scaled, lambda n: (setup.randn(n, 2048),), "2048 bf16"
    )


def scaled(x: Tensor) -> Any:
    return op.scaled_masked_softmax(x, scale=SCALE)


def torch_scaled(x: Tensor) -> Tensor:
    return torch.softmax(x * SCALE, -1)


def masked(x: Tensor, mask: Tensor) -> Any:
    return op.scaled_masked_softmax(x, mask, SCALE)


def torch_masked(x: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax((x * SCALE).masked_fill(~keep, -torch.inf), -1)


def torch_added(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x * SCALE + mask, -1).to(x.dtype)  # a float32 mask makes float32 of it all


def causal(x: Tensor) -> Any:
    return op.causal_softmax(x, SCALE)


def torch_causal(x: Tensor) -> Tensor:
    keep = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return torch_masked(x, keep)
