"""flexops.few_rows_linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexops
from flexops.ops import few_rows, int4_few_rows
from flexops.testing import Case, Contract
from flexops.testing.case import Make

HALVES = (torch.bfloat16, torch.float16)


def oracle(x: Tensor, norm: Tensor, one: Tensor, two: Tensor, bias: Tensor, more: Tensor) -> Tensor:
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm
    return F.silu(F.linear(scaled, one, bias)) * F.linear(scaled, two, bias) + more


def fused(x: Tensor, norm: Tensor, one: Tensor, two: Tensor, bias: Tensor, more: Tensor) -> Tensor:
    return flexops.few_rows_linear(
        x, [one, two], [bias, bias], norm=norm, activation="silu", residual=more
    )


def inputs(make: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    k, n = shape[-1], 20
    small = k**-0.5
    weights = make(n, k, scale=small), make(n, k, scale=small)
    return make(*shape), make(k), *weights, make(n), make(*shape[:-1], n)


class TestFewRowsLinear(Contract):
    def test_autocast(self, case, device):
        """There are no products of float32."""
        args = case.inputs(Make(torch.float32, device), case.shapes[0])
        with torch.autocast(device, torch.bfloat16), pytest.raises(TypeError, match="x must be"):
            case.call(*args)

    cases = (
        Case(
            "few_rows_linear",
            "few_rows",
            lambda x, one, two, three: flexops.few_rows_linear(x, [one, two, three]),
            lambda make, shape: (make(*shape), *(make(n, shape[-1]) for n in (5, 16, 40))),
            oracle=lambda x, *weights: F.linear(x, torch.cat(weights)),
            shapes=((2, 24), (1, 8), (16, 72), (3, 5, 136), (1, 1, 2048)),
            names=("x", "weights", "weights", "weights"),
            dtypes=HALVES,
        ),
        Case(
            "few_rows_linear, fused",
            "few_rows",
            fused,
            inputs,
            oracle=oracle,
            names=("x", "norm", "weights", "weights", "biases", "residual"),
            shapes=((2, 24), (1, 7), (16, 72), (3, 5, 136), (1, 1, 2048)),
            dtypes=HALVES,
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(17, 8)}, "at most 16 rows"),
        ({"weights": []}, "1 to 3 tensors, got 0"),
        ({"weights": [torch.zeros(4, 9)]}, r"weights\[0\] must have shape \[any, 8\]"),
        ({"activation": "silu"}, "must be 2 tensors, got 1"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"biases": [torch.zeros(5)]}, r"biases\[0\] must have shape \[4\]"),
    ],
    ids=str,
)
def test_errors_name_the_argument(changes, message):
    given: dict[str, Any] = {"x": torch.zeros(2, 8), "weights": [torch.zeros(4, 8)]} | changes
    given = {
        name: [one.bfloat16() for one in x] if isinstance(x, list) else x
        for name, x in given.items()
    }
    given["x"] = given["x"].bfloat16()
    with pytest.raises(ValueError, match=message):
        flexops.few_rows_linear(given.pop("x"), given.pop("weights"), **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": [1.0]}, "x must be a float16 or bfloat16 tensor, got list"),
        ({"norm": torch.zeros(64).bfloat16()}, r"norm must have shape \[128\], got \[64\]"),
        ({"norm": torch.zeros(128)}, "norm must be a bfloat16 tensor, got torch.float32"),
        ({"residual": torch.zeros(1, 32).bfloat16()}, r"residual must have shape \[2, 32\]"),
        ({"residual": "a"}, "residual must be a bfloat16 tensor, got str"),
        ({"biases": [torch.zeros(5).bfloat16()]}, r"biases\[0\] must have shape \[32\], got \[5\]"),
        ({"biases": None}, "biases must be a list of tensors, got NoneType"),
        ({"activation": ["silu"]}, "activation must be one of"),
    ],
    ids=str,
)
def test_errors_of_weights_of_4_bits(changes, message):
    weight = flexops.quantize_int4(torch.randn(32, 128).half())
    given = {"x": torch.zeros(2, 128).bfloat16(), "weights": [weight]} | changes
    with pytest.raises((TypeError, ValueError), match=f"^flexops.few_rows_linear: {message}"):
        flexops.few_rows_linear(**given)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_weights_of_4_bits(activation):
    """The operator's reference is the linear layers, one after another."""
    widths = (32, 16, 21) if activation is None else (32, 32)
    weights = [flexops.quantize_int4(torch.randn(n, 128)) for n in widths]
    weights = [one._replace(scales=one.scales.half(), zeros=one.zeros.half()) for one in weights]
    width = sum(widths) if activation is None else 32
    x, norm, residual = (torch.randn(n).bfloat16() for n in ((3, 128), (128,), (3, width)))
    biases = [torch.randn(n).bfloat16() for n in widths]
    options: dict[str, Any] = {"norm": norm, "activation": activation, "residual": residual}
    packed, scales, zeros = ([one[i] for one in weights] for i in range(3))
    kind = few_rows.ACTIVATIONS[activation]
    found = int4_few_rows.reference(
        x, packed, scales, zeros, biases, norm, 1e-6, 0.0, residual, kind, width, 64, 0
    )
    assert torch.equal(
        flexops.few_rows_linear(x, weights, biases, **options),
        few_rows.composed(x, weights, biases, **options),
    )
    wanted = few_rows.composed(x, weights, biases, **options)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_weights_of_4_bits_that_do_not_fit_each_other():
    x = torch.zeros(2, 128).bfloat16()
    one, other = (flexops.quantize_int4(torch.randn(32, 128).half(), size) for size in (64, 32))
    part = flexops.quantize_int4(torch.randn(20, 128).half())
    for weights in ([one, other], [part, one], [one, torch.zeros(32, 128).bfloat16()]):
        with pytest.raises(ValueError, match=r"must have one group size.*fix: a call for each"):
            flexops.few_rows_linear(x, weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 16 rows"):
        flexops.few_rows_linear(x.repeat(9, 1), [one])
    with pytest.raises(ValueError, match=r"x must have shape \[..., 128\]"):
        flexops.few_rows_linear(x[:, :64].contiguous(), [one])
    lists = ([part] for part in one[:3])
    with pytest.raises(ValueError, match="at most 16 rows"):
        torch.ops.flexops.int4_few_rows_linear(
            x.repeat(9, 1), *lists, [], None, 0.0, 0.0, None, 0, 32, 64, 0
        )
