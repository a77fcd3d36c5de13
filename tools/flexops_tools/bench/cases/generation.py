"""What a decode step has in one kernel: products between two attentions, and a token's choice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import flexops
from flexops.ops.few_rows_chain import WORKSPACE, Phase, few_rows_chain_
from flexops.ops.int4_linear import quantize_int4
from flexops.ops.next_token import next_token_

from .case import FLEXOPS, TORCH, Case, Functions, Setup, forward_and_backward

WIDTH, INNER, KEYS = 4096, 14336, 1024
WORDS, END = 128256, 7


def few_rows_chain(setup: Setup) -> Iterator[Case]:
    """A layer's products of a model of 8 B, in one kernel and in four."""
    width, inner, keys = (max(setup.rows(n) // 64, 1) * 64 for n in (WIDTH, INNER, KEYS))
    sizes = ((width, width), (inner, width), (inner, width), (width, inner))
    output, gate, up, down, *qkv = (
        quantize_int4(setup.randn(n, k) * k**-0.5)
        for n, k in (*sizes, (width, width), (keys, width), (keys, width))
    )
    norm, workspace = setup.randn(width), torch.zeros(WORKSPACE, dtype=torch.int32)
    workspace = workspace.to(norm.device)

    def chain(x: Tensor, residual: Tensor) -> Tensor:
        h, summed = torch.empty_like(x), torch.empty_like(x)
        inside, result = x.new_empty(len(x), inner), x.new_empty(len(x), width + 2 * keys)
        phases = [
            Phase(h, x, [output], [], None, residual, 0),
            Phase(inside, h, [gate, up], [], norm, None, 1),
            Phase(summed, inside, [down], [], None, h, 0),
            Phase(result, summed, qkv, [], norm, None, 0),
        ]
        few_rows_chain_(phases, workspace)
        return result

    def singles(x: Tensor, residual: Tensor) -> Tensor:
        h = flexops.few_rows_linear(x, [output], residual=residual)
        inside = flexops.few_rows_linear(h, [gate, up], norm=norm, eps=1e-6, activation="silu")
        summed = flexops.few_rows_linear(inside, [down], residual=h)
        return flexops.few_rows_linear(summed, qkv, norm=norm, eps=1e-6)

    functions: Functions = {FLEXOPS: chain, "four kernels": singles}
    moved = sum(one.nbytes for one in (output, gate, up, down, *qkv))
    for rows in (1, 2):
        yield from forward_and_backward(
            "few_rows_chain",
            "few_rows_chain",
            f"products of a layer, 4 bits, {rows} x {width}, gate of {inner}",
            functions,
            (setup.randn(rows, width), setup.randn(rows, width)),
            (moved, "codes, scales and zero points"),
            None,
        )


def next_token(setup: Setup) -> Iterator[Case]:
    """Beside it torch's operators for the same."""
    for rows in (1, 16):
        scores = setup.randn(rows, setup.rows(WORDS))
        whole = torch.zeros(3, rows, 8, dtype=torch.int64, device=scores.device)
        tokens, last, workspace = whole[0], whole[1, :, :1].contiguous(), whole.new_zeros(rows + 1)
        finished, at = last[:, 0] > 0, whole.new_zeros(1)
        ends = torch.full_like(at, END)

        def ours(
            scores: Tensor, tokens: Tensor, last: Tensor, finished: Tensor, at: Tensor,
            ends: Tensor, workspace: Tensor,
        ) -> None:  # fmt: skip
            next_token_(scores, None, tokens, last, finished, at.zero_(), ends, 0, workspace)

        def torchs(
            scores: Tensor, tokens: Tensor, last: Tensor, finished: Tensor, at: Tensor,
            ends: Tensor, workspace: Tensor,
        ) -> None:  # fmt: skip
            del workspace
            chosen = scores.argmax(-1).masked_fill(finished, 0)
            finished |= torch.isin(chosen, ends)
            last.copy_(chosen[:, None])
            tokens.index_copy_(1, at.zero_(), last)
            at.add_(1)

        yield from forward_and_backward(
            "next_token",
            "next_token",
            f"next token of {rows} x {scores.shape[1]}, {scores.dtype}".replace("torch.", ""),
            {FLEXOPS: ours, TORCH: torchs},
            (scores, tokens, last, finished, at, ends, workspace),
            (scores.nbytes, "reads the scores"),
            None,
        )
