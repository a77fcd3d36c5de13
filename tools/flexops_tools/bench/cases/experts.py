"""grouped_linear and gated_experts: the block of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import flexops
from flexops.ops import few_experts as few
from flexops.ops.experts import expert_order
from flexops.ops.int4_grouped import int4_grouped_linear

from .case import FLEXOPS, Case, Family, Function, Functions, Setup, forward_and_backward, library

EXPERTS, CHOICES, HIDDEN, INNER = 128, 8, 2048, 768
_GROUPED_MM = "torch grouped_mm"


def _routes(setup: Setup, tokens: int) -> tuple[Tensor, Tensor]:
    weights, choices = setup.randn(tokens, EXPERTS).float().softmax(-1).topk(CHOICES, -1)
    return weights / weights.sum(-1, keepdim=True), choices


def _matrices(setup: Setup, rows: int, columns: int) -> Tensor:
    made = setup.randn(EXPERTS, rows, columns).mul_(columns**-0.5)
    return made.requires_grad_()


def grouped_linear(setup: Setup) -> Iterator[Case]:
    tokens = setup.rows(32768)
    offsets = expert_order(_routes(setup, tokens)[1], EXPERTS).offsets
    x = setup.randn(tokens * CHOICES, HIDDEN, grad=True)
    weight = _matrices(setup, 2 * INNER, HIDDEN)
    functions = {FLEXOPS: flexops.grouped_linear}
    functions |= library(_GROUPED_MM, "torch.nn.functional", "grouped_mm", _by_grouped_mm)
    operations = 2 * x.shape[0] * 2 * INNER * HIDDEN
    yield from forward_and_backward(
        "grouped_linear",
        "grouped_linear",
        f"grouped_linear bf16 {x.shape[0]}x{HIDDEN} -> {2 * INNER}, {EXPERTS} groups",
        functions,
        (x, weight, offsets),
        (0, ""),
        (0, ""),
        (operations, 2 * operations),
    )


def _by_grouped_mm(function: Function) -> Function:
    return lambda x, weight, offsets: function(x, weight.transpose(1, 2), offs=offsets)


def experts(setup: Setup) -> Iterator[Case]:
    tokens = setup.rows(32768)
    weights, choices = _routes(setup, tokens)
    args = (
        setup.randn(tokens, HIDDEN, grad=True),
        choices,
        weights.requires_grad_(),
        _matrices(setup, 2 * INNER, HIDDEN),
        _matrices(setup, HIDDEN, INNER),
    )
    functions = _functions()
    operations = 2 * tokens * CHOICES * 3 * INNER * HIDDEN
    name = "gated_experts"
    what = f"{name} bf16 {tokens}x{HIDDEN}, {CHOICES} of {EXPERTS} experts of {INNER}"
    nothing, passes = (0, ""), (operations, 2 * operations)
    yield from forward_and_backward(
        "experts", name, what, functions, args, nothing, nothing, passes
    )
    trained = Family("experts", setup).trained
    yield trained(name, what, functions, args, (0, 2, 3, 4), nothing, memory=True)


def few_experts(setup: Setup) -> Iterator[Case]:
    """A decode step's: of one sequence, and of four; in 4 bits of one and of 16."""
    gate_up, down = (one.detach() for one in (_matrices(setup, 2 * INNER, HIDDEN),
                                              _matrices(setup, HIDDEN, INNER)))  # fmt: skip
    for tokens in (1, 4):
        weights, choices = _routes(setup, tokens)
        read = len(set(choices.flatten().tolist())) * 3 * INNER * HIDDEN * gate_up.element_size()
        yield from forward_and_backward(
            "few_experts",
            "gated_experts",
            f"gated_experts bf16 {tokens}x{HIDDEN}, {CHOICES} of {EXPERTS} experts of {INNER}",
            _functions(),
            (setup.randn(tokens, HIDDEN), choices, weights, gate_up, down),
            (read, "reads the weights of experts that were chosen"),
            None,
        )
    yield from _few_experts_int4(setup)


def _packed(setup: Setup, rows: int, columns: int) -> flexops.Int4Weight:
    return flexops.quantize_int4(setup.randn(EXPERTS * rows, columns))


def _few_experts_int4(setup: Setup) -> Iterator[Case]:
    """The same with weights of 4 bits."""
    both = [_packed(setup, 2 * INNER, HIDDEN), _packed(setup, HIDDEN, INNER)]

    def packed(x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        return few.few_experts_int4(x, choices, weights, both[0], both[1])

    def dequantized(x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        matrices = [flexops.unpack_int4(one).view(EXPERTS, -1, one.k) for one in both]
        return flexops.gated_experts(x, choices, weights, matrices[0], matrices[1])

    for tokens in (1, 16):
        weights, choices = _routes(setup, tokens)
        chosen = len(set(choices.flatten().tolist()))
        yield from forward_and_backward(
            "few_experts",
            "few_experts_int4",
            f"few_experts_int4 bf16 {tokens}x{HIDDEN}, {CHOICES} of {EXPERTS} experts of {INNER}",
            {FLEXOPS: packed, "dequantized": dequantized},
            (setup.randn(tokens, HIDDEN), choices, weights),
            (sum(one.nbytes for one in both) * chosen // EXPERTS, "reads the packed weights"),
            None,
        )


def _functions() -> Functions:
    other = library(
        "transformers grouped_mm",
        "transformers.integrations.moe",
        "grouped_mm_experts_forward",
        _by_transformers,
    )
    return {FLEXOPS: flexops.gated_experts, **other}


class _Experts(torch.nn.Module):
    """What transformers' function needs of a module."""

    has_gate, has_bias, is_transposed, num_experts = True, False, False, EXPERTS
    gate_up_proj: Any
    down_proj: Any

    def _apply_gate(self, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def _by_transformers(function: Function) -> Function:
    module = _Experts()

    def call(x: Tensor, choices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        module.__dict__.update(gate_up_proj=gate_up, down_proj=down)
        return function(module, x, choices, weights)

    return call


def int4_grouped(setup: Setup) -> Iterator[Case]:
    """Gate and up with weights of 4 bits: of 16 sequences' step, and of prompts."""
    weight = _packed(setup, 2 * INNER, HIDDEN)

    def dequantized(x: Tensor, offsets: Tensor) -> Tensor:
        dense = flexops.unpack_int4(weight, x.dtype).view(EXPERTS, -1, HIDDEN)
        return flexops.grouped_linear(x, dense, offsets)

    for tokens in (16, 1024, setup.rows(4096)):
        choices = _routes(setup, tokens)[1]
        chosen, rows = len(set(choices.flatten().tolist())), tokens * CHOICES
        offsets = expert_order(choices, EXPERTS).offsets
        yield from forward_and_backward(
            "int4_grouped",
            "int4_grouped_linear",
            f"int4_grouped_linear bf16 {rows}x{HIDDEN} -> {2 * INNER}, {EXPERTS} groups",
            {
                FLEXOPS: lambda x, ends: int4_grouped_linear(x, weight, ends),
                "dequantized": dequantized,
            },
            (setup.randn(rows, HIDDEN), offsets),
            (weight.nbytes * chosen // EXPERTS, "reads the packed weights"),
            None,
        )
