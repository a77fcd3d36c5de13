"""flexops.grouped_linear and flexops.gated_experts on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops import experts as moe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ends(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)


def block(
    tokens: int = 11, k: int = 3, experts: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    choices = torch.rand(tokens, experts - 1).argsort(1)[:, :k]  # the last one gets no token
    choices[0, 0] = experts  # left out
    return (
        torch.randn(tokens, 16, dtype=dtype),
        choices,
        torch.rand(tokens, k, dtype=dtype),
        torch.randn(experts, 24, 16, dtype=dtype) / 4,
        torch.randn(experts, 16, 12, dtype=dtype) / 4,
    )


def one_by_one(
    x: Tensor, choices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: Any
) -> Tensor:
    out = torch.zeros_like(x)
    for token, j in itertools.product(range(x.shape[0]), range(choices.shape[1])):
        expert = int(choices[token, j])
        if expert < gate_up.shape[0]:
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            row = weights[token, j] * (down[expert] @ (act(gate) * up))
            out = out.index_add(0, torch.tensor([token]), row[None])
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear(dtype, transposed):
    offsets = ends((3, 0, 4, 1))
    x = torch.randn(10, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, *((6, 5) if transposed else (5, 6)), dtype=dtype)
    weight = (weight.transpose(1, 2) if transposed else weight).requires_grad_()
    out = flexops.grouped_linear(x, weight, offsets)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, weight), grad)
    groups = torch.tensor([0, 0, 0, 2, 2, 2, 2, 3])
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = torch.cat([torch.einsum("tnk,tk->tn", wide[1][groups], wide[0][:8]), out[8:] * 0])
    wanted = torch.autograd.grad(expected, wide, grad.double())
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        assert torch.allclose(one.double(), other, limit, limit)
    assert not got[1][1].any()


def test_gradients():
    x, choices, weights, gate_up, down = (
        one.double() if one.is_floating_point() else one for one in block(4, 2, 4)
    )
    sources = [one.requires_grad_() for one in (x, weights, gate_up, down)]
    for activation in ("silu", "gelu", "gelu_tanh"):
        torch.autograd.gradcheck(
            lambda x, w, g, d, act=activation: flexops.gated_experts(
                x, choices, w, g, d, activation=act
            ),
            sources,
            fast_mode=True,
        )
    offsets = ends((2, 0, 1, 1))
    torch.autograd.gradcheck(
        lambda x, w: flexops.grouped_linear(x, w, offsets), (x, gate_up), fast_mode=True
    )
    order = moe.expert_order(choices, 4)
    torch.autograd.gradcheck(
        lambda x, w: moe.combine_rows(moe.spread_rows(x, order), w, order), (x, weights)
    )
    bias = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, b: moe.combine_rows(
            moe.add_bias(moe.spread_rows(x, order), b, order), weights.detach(), order
        ),
        (x, bias),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_experts(activation, dtype):
    args = block(dtype=dtype)
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }[activation]
    expected = one_by_one(*(x.double() if x.is_floating_point() else x for x in args), act)
    actual = flexops.gated_experts(*args, activation=activation)
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert torch.allclose(actual.double(), expected, limit, limit)


def test_order_is_stable():
    choices = torch.tensor([[2, 0], [0, 2], [1, 3], [2, 0]], dtype=torch.int32)
    order, inverse, offsets = moe.expert_order(choices, 3)
    assert order.flatten().tolist() == [1, 2, 7, 4, 0, 3, 6, 5]
    assert inverse.flatten()[order.flatten().long()].tolist() == list(range(8))
    assert offsets.tolist() == [3, 4, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    """Of tokens that another product has converted before, too."""
    x, choices, weights, gate_up, down = block()
    x = x.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert flexops.gated_experts(x, choices, weights, gate_up, down).dtype == torch.bfloat16
        assert flexops.grouped_linear(x, gate_up, ends((3, 1, 0, 2, 5))).dtype == torch.bfloat16
    if dtype != gate_up.dtype:
        with pytest.raises(TypeError, match=r"weight must be torch\.bfloat16, as x"):
            flexops.grouped_linear(x, gate_up, ends((3, 1, 0, 2, 5)))


@pytest.mark.parametrize("offsets", [[3, 2, 8, 9], [-1, 2, 8, 9], [3, 4, 8, 12]])
def test_offsets_that_do_not_match(offsets):
    with pytest.raises(ValueError, match="offsets must ascend from 0 or more to 11"):
        flexops.grouped_linear(
            torch.randn(11, 6), torch.randn(4, 5, 6), torch.tensor(offsets, dtype=torch.int32)
        )


@pytest.mark.parametrize("choice", [-1, 6, 2**40])
def test_choices_that_do_not_exist(choice):
    x, choices, weights, gate_up, down = block()
    choices[3, 1] = choice
    with pytest.raises(ValueError, match=f"0 to 4, or 5 for one that is left out, got {choice}"):
        flexops.gated_experts(x, choices, weights, gate_up, down)


def test_errors_name_the_argument():
    x, choices, weights, gate_up, down = block()
    offsets = ends((3, 1, 0, 2, 5))
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "offsets must be an int32", lambda: flexops.grouped_linear(x, gate_up, choices)),
        (ValueError, r"offsets must have shape \[5\]",
         lambda: flexops.grouped_linear(x, gate_up, offsets[:4])),
        (ValueError, r"weight must have shape \[groups, n, 16\]",
         lambda: flexops.grouped_linear(x, down, offsets)),
        (TypeError, "weight must be torch.float32",
         lambda: flexops.grouped_linear(x, gate_up.half(), offsets)),
        (ValueError, "x must have 2 dimensions",
         lambda: flexops.grouped_linear(x[0], gate_up, offsets)),
        (TypeError, "choices must be an int64",
         lambda: flexops.gated_experts(x, weights, weights, gate_up, down)),
        (TypeError, "weights must be a floating-point",
         lambda: flexops.gated_experts(x, choices, choices, gate_up, down)),
        (ValueError, "weights must have choices's shape",
         lambda: flexops.gated_experts(x, choices, weights[:, :2], gate_up, down)),
        (ValueError, r"choices must have shape \[11, k\]",
         lambda: flexops.gated_experts(x, choices[:4], weights, gate_up, down)),
        (ValueError, "gate_up must have shape",
         lambda: flexops.gated_experts(x, choices, weights, gate_up[:, :, :8], down)),
        (ValueError, r"down must have shape \[5, 16, 12\]",
         lambda: flexops.gated_experts(x, choices, weights, gate_up, down[:4])),
        (ValueError, "activation must be silu, gelu, gelu_tanh",
         lambda: flexops.gated_experts(x, choices, weights, gate_up, down, activation="relu")),  # type: ignore[arg-type]
    ]  # fmt: skip
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()


def test_nothing_to_do():
    x, choices, weights, gate_up, down = block()
    out = flexops.gated_experts(x[:0], choices[:0], weights[:0], gate_up, down)
    assert out.shape == (0, 16)
    assert flexops.grouped_linear(x[:0], gate_up, ends((0,) * 5)).shape == (0, 24)
