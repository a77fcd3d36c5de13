"""Products of a few rows, one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops import few_rows, few_rows_chain
from flexops.ops.few_rows_chain import MOST_PHASES, WORKSPACE, Phase, few_rows_chain_


def half(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def int4(n: int, k: int, symmetric: bool = False) -> Any:
    made = flexops.quantize_int4(half(n, k, scale=k**-0.5), 32, symmetric=symmetric)
    return made._replace(scales=made.scales.half())


def workspace() -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.int32)


def layer(rows: int = 2, symmetric: bool = False) -> list[Phase]:
    """What lies between two attentions."""
    x, h, norm = half(rows, 96), half(rows, 64), half(64)
    first, g, second, qkv = (half(rows, n) for n in (64, 64, 64, 56))
    pair = [int4(64, 64, symmetric) for _ in range(2)]
    three = [int4(n, 64, symmetric) for n in (32, 16, 8)]
    return [
        Phase(first, x, [int4(64, 96, symmetric)], [half(64)], None, h, 0),
        Phase(g, first, pair, [half(64), half(64)], norm, None, 1),
        Phase(second, g, [int4(64, 64, symmetric)], [], None, first, 0),
        Phase(qkv, second, three, [], norm, None, 0),
    ]


@pytest.mark.parametrize("symmetric", [False, True])
def test_each_product_reads_what_the_ones_before_it_wrote(symmetric):
    torch.manual_seed(0)
    phases = layer(symmetric=symmetric)
    few_rows_chain_(phases, workspace(), eps=1e-5, offset=1.0)
    found = [phase.out.clone() for phase in phases]
    for phase, made in zip(phases, found, strict=True):
        phase.out.copy_(
            few_rows.composed(
                phase.x, phase.weights, phase.biases, norm=phase.norm, eps=1e-5, offset=1.0,
                activation="silu" if phase.activation else None, residual=phase.residual,
            )
        )  # fmt: skip
        # sums in another order may round to the next number
        torch.testing.assert_close(made, phase.out, rtol=2**-7, atol=2**-5)


def given(**changes: Any) -> list[Any]:
    """The operator's arguments for a gated product and one behind it."""
    gate, up, down = int4(96, 64), int4(96, 64), int4(64, 96, symmetric=True)
    x, norm = half(1, 64), half(64)
    arguments: dict[str, Any] = {
        "x": x,
        "xs": [half(1, 96)],
        "weights": [gate.packed, up.packed, down.packed],
        "scales": [gate.scales, up.scales, down.scales],
        "zeros": [gate.zeros, up.zeros],
        "biases": [],
        "norms": [norm],
        "residuals": [x],
        "outs": [half(1, 96), half(1, 64)],
        "workspace": workspace(),
        "eps": 1e-6,
        "offset": 0.0,
        "kinds": (2 | 1 << 2 | 0b01011 << 4) | (1 | 0b10001 << 4) << 10,
    }
    return list((arguments | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outs": []}, "outs must be 1 to 6 tensors, one more than xs, got 0"),
        ({"outs": [half(1, 96)] * (MOST_PHASES + 1)}, "got 7"),
        ({"weights": []}, "weights must hold as many tensors as kinds="),
        ({"scales": []}, "scales must hold as many"),
        ({"zeros": []}, "zeros must hold as many"),
        ({"norms": []}, "norms must hold as many"),
        ({"residuals": []}, "residuals must hold as many"),
        ({"biases": [half(96)]}, "there are more tensors, or fewer phases, than kinds="),
        ({"kinds": given()[12] | 1 << 20}, "there are more tensors, or fewer phases"),
        ({"outs": [half(1, 96), half(2, 64)]}, r"phase's out must have shape \[1, 64\]"),
        ({"residuals": [half(2, 64)]}, r"phase's residual must have shape \[1, 64\]"),
        ({"norms": [half(48)]}, r"phase's norm must have shape \[64\]"),
        ({"x": half(17, 64)}, "at most 8 rows"),
        ({"outs": [half(1, 96), half(1, 48)]}, r"packed must have shape"),
        ({"workspace": workspace()[:4]}, "workspace must have 64 elements, got 4"),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
def test_errors_name_what_does_not_fit(changes, message):
    torch.ops.flexops.few_rows_chain_(*given())
    with pytest.raises(ValueError, match=message):
        torch.ops.flexops.few_rows_chain_(*given(**changes))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_weights_are_codes_of_4_bits(dtype):
    with pytest.raises(TypeError, match=r"chain_: weights\[0\] must be uint8, got"):
        torch.ops.flexops.few_rows_chain_(*given(weights=[torch.zeros(6, 1, 512, dtype=dtype)] * 3))


def test_what_the_kernel_computes():
    weight = int4(16, 64)
    assert few_rows_chain.fits(half(2, 64), [weight])
    assert not few_rows_chain.fits(half(3, 64), [weight])
    assert not few_rows_chain.fits(half(2, 64).float(), [weight])
    assert not few_rows_chain.fits(half(64, 2).t(), [weight])
    assert not few_rows_chain.fits(half(1, 16448), [weight])
    assert not few_rows_chain.fits(half(2, 64), [weight._replace(scales=weight.scales.float())])
    assert not few_rows_chain.fits(half(2, 64), [half(16, 64)])
