"""causal_conv1d and gated_rms_norm with their gradients, on the layouts that models have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flexops.ops import causal_conv1d as op
from flexops.ops import gated_norm as gated

from .case import Case, Family, Setup, contenders, rotating


def causal_conv1d(setup: Setup) -> Iterator[Case]:
    rows, channels = setup.rows(32768), 8192 if setup.device == "cuda" else 1024
    x = setup.randn(1, rows, channels).transpose(1, 2)
    args = (x, setup.randn(channels, 4), setup.randn(channels))
    moved = 5 * x.nbytes, "reads x twice and the gradient, writes the result and x's gradient"
    name, functions = "causal_conv1d", contenders(setup, ours, plain)
    what = f"{name} with silu, bf16 1x{channels}x{rows}"
    yield Family(name, setup).trained(name, what, functions, args, (0, 1, 2), moved)
    if setup.device == "cuda":
        yield from update(setup)


def update(setup: Setup) -> Iterator[Case]:
    """One step of decoding, in a CUDA graph. The states of several layers take turns, because one
    layer's would stay in the cache."""
    channels, name = 8192, "causal_conv1d_update"
    weight, bias = setup.randn(channels, 4), setup.randn(channels)
    for batch in (32, 256):
        moved = 10 * batch * channels * weight.element_size()
        sets = [
            (setup.randn(batch, channels), setup.randn(batch, channels, 4), weight, bias)
            for _ in range(2**27 // moved + 1)
        ]
        calls = {
            label: rotating([partial(function, *each) for each in sets])
            for label, function in contenders(setup, one_step, plain_step).items()
        }
        yield Case(
            "causal_conv1d",
            name,
            f"{name} with silu, bf16 {batch}x{channels}",
            "forward",
            moved,
            calls,
            "reads and writes the state, reads x, writes the result",
            "graph",
        )


def gated_norm(setup: Setup) -> Iterator[Case]:
    rows = setup.rows(32768)
    for columns, norm_first in ((128, True), (4096, False)):
        tokens = rows * 4096 // columns if setup.device == "cuda" else rows
        x, gate, weight = (setup.randn(*n) for n in ((tokens, columns),) * 2 + ((columns,),))

        def call(x: Tensor, gate: Tensor, weight: Tensor, first: bool = norm_first) -> Tensor:
            return gated.gated_rms_norm(x, gate, weight, norm_first=first)

        def plain_norm(x: Tensor, gate: Tensor, weight: Tensor, first: bool = norm_first) -> Tensor:
            return gated._reference(x, gate, weight, 1e-6, 1, first, False)

        words = "reads x and the gate twice and the gradient, writes the result and two gradients"
        yield Family("gated_norm", setup).trained(
            "gated_rms_norm",
            f"gated_rms_norm, {'norm' if norm_first else 'gate'} first, bf16 {tokens}x{columns}",
            contenders(setup, call, plain_norm),
            (x, gate, weight),
            (0, 1, 2),
            (8 * x.nbytes, words),
        )


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return op.causal_conv1d(x, weight, bias, activation="silu")


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return F.silu(out[..., : x.shape[2]])


def one_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return op.causal_conv1d_update(x, state, weight, bias, "silu")


def plain_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    state.copy_(torch.cat([state[..., 1:], x.unsqueeze(-1)], -1))
    return F.silu((state * weight).sum(-1) + bias)
