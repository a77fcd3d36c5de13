"""causal_conv1d with its gradient, on the layout that models have."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from flexops.ops import causal_conv1d as op

from .case import Case, Setup, contenders
from .cross_entropy import with_gradient


def causal_conv1d(setup: Setup) -> Iterator[Case]:
    rows, channels = setup.rows(32768), 8192 if setup.device == "cuda" else 1024
    x = setup.randn(1, rows, channels).transpose(1, 2)
    weight, bias = setup.randn(channels, 4), setup.randn(channels)
    yield Case(
        "causal_conv1d",
        "causal_conv1d",
        f"causal_conv1d with silu, bf16 1x{channels}x{rows}",
        "forward + backward",
        5 * x.nbytes,
        {
            label: with_gradient(call, (x, weight, bias), (0, 1, 2))
            for label, call in contenders(setup, ours, plain).items()
        },
        "reads x twice and the gradient, writes the result and x's gradient",
        "queued",
    )


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return op.causal_conv1d(x, weight, bias, activation="silu")


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return F.silu(out[..., : x.shape[2]])
