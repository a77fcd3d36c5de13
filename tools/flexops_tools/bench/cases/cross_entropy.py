"""cross_entropy and linear_cross_entropy, each with its gradient, because that is what they are
for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.ops import cross_entropy as op
from flexops.ops import linear_cross_entropy as linear

from .case import Case, Family, Setup, contenders, library

LIGER = "liger_kernel.transformers.functional"


def cross_entropy(setup: Setup) -> Iterator[Case]:
    family, rows = Family("cross_entropy", setup), setup.rows(8192)
    vocabulary = 128256 if setup.device == "cuda" else 32000
    logits, target = setup.randn(rows, vocabulary), classes(setup, rows, vocabulary)
    what = f"bf16 {rows}x{vocabulary}"
    moved = 2 * logits.nbytes, "reads the logits, writes their gradient"
    liger = library("Liger", LIGER, "liger_cross_entropy")
    for name, functions in (
        ("cross_entropy over the logits,", contenders(setup, in_place, torch_loss, liger)),
        ("cross_entropy", contenders(setup, op.cross_entropy, torch_loss)),
    ):
        yield family.trained(
            "cross_entropy", f"{name} {what}", functions, (logits, target), (0,), moved, memory=True
        )
    del logits
    x, weight, target, what = layer(setup, vocabulary)
    liger = library("Liger", LIGER, "liger_fused_linear_cross_entropy")
    functions = contenders(setup, linear.linear_cross_entropy, torch_linear, liger)
    if setup.compile:
        # tuning its matrix products would take minutes
        functions = {**functions, **setup.compiled(torch_linear, "default")}
    name, moved = "linear_cross_entropy", (0, "three matrix products bound it, not memory")
    args = (x, weight, target)
    yield family.trained(name, f"{name} {what}", functions, args, (0, 1), moved, memory=True)


def classes(setup: Setup, rows: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows,), device=setup.device)


def layer(setup: Setup, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, str]:
    """Rows, a head's weight, class numbers, and these in words. Few CPUs multiply bfloat16."""
    cuda = setup.device == "cuda"
    rows, width = (setup.rows(8192), 4096) if cuda else (setup.rows(2048), 256)
    dtype = torch.bfloat16 if cuda else torch.float32
    x, weight = (setup.randn(count, width, dtype=dtype) for count in (rows, vocabulary))
    what = f"{'bf16' if cuda else 'fp32'} {rows}x{width} -> {vocabulary}"
    return x, weight.mul_(0.02), classes(setup, rows, vocabulary), what


def in_place(logits: Tensor, target: Tensor) -> Any:
    return op.cross_entropy(logits, target, inplace=True)


def torch_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def torch_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), target)
