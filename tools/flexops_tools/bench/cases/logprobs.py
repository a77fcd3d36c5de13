"""logprobs and linear_logprobs, each with its gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexops.ops import linear_logprobs as linear
from flexops.ops import logprobs as op

from .case import Case, Setup, contenders
from .cross_entropy import with_gradient

FAMILY = "logprobs"


def logprobs(setup: Setup) -> Iterator[Case]:
    cuda = setup.device == "cuda"
    rows, vocabulary = setup.rows(8192), 151936 if cuda else 32000
    logits = setup.randn(rows, vocabulary)
    target = torch.randint(0, vocabulary, (rows,), device=setup.device)
    functions = contenders(setup, op.logprobs, torch_logprobs)
    yield Case(
        FAMILY,
        "logprobs",
        f"logprobs bf16 {rows}x{vocabulary}",
        "forward + backward",
        3 * logits.nbytes,
        {label: with_gradient(call, (logits, target), (0,)) for label, call in functions.items()},
        "reads the logits twice, writes their gradient",
        "queued",
        memory=True,
    )
    del logits
    # few CPUs multiply bfloat16
    rows, width, dtype = (
        (setup.rows(8192), 4096, torch.bfloat16) if cuda else (setup.rows(2048), 256, torch.float32)
    )
    x = setup.randn(rows, width, dtype=dtype)
    weight = setup.randn(vocabulary, width, dtype=dtype).mul_(0.02)
    target = torch.randint(0, vocabulary, (rows,), device=setup.device)
    functions = contenders(setup, linear.linear_logprobs, torch_linear)
    yield Case(
        FAMILY,
        "linear_logprobs",
        f"linear_logprobs {'bf16' if cuda else 'fp32'} {rows}x{width} -> {vocabulary}",
        "forward + backward",
        0,
        {
            label: with_gradient(call, (x, weight, target), (0, 1))
            for label, call in functions.items()
        },
        "three to four matrix products bound it, not memory",
        "queued",
        memory=True,
    )


def torch_logprobs(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1).float()


def torch_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch_logprobs(x @ weight.t(), target)
