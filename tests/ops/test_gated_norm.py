"""flexops.gated_rms_norm: transformers' classes of both orders, groups, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import ISA_LEVELS, Case, Contract, Make, Shape, isa_limit
from torch import Tensor
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import flexops

WIDTH = 48


def inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return make(*shape), make(*shape), make(shape[-1])


def plain(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    norm_first: bool = True,
    groups: int = 1,
    activation: str = "silu",
) -> Tensor:
    gate = torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate)
    u = x if norm_first else x * gate
    parts = u.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-6)
    n = (parts * scale).flatten(-2) * weight
    return n * gate if norm_first else n


def case(name: str, **options: Any) -> Case:
    def ours(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return flexops.gated_rms_norm(x, gate, weight, **options)

    def oracle(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return plain(x, gate, weight, **options)

    return Case(
        name, "gated_norm", ours, inputs, oracle,
        names=("x", "gate", "weight"), differentiable=(0, 1, 2), parameters=(2,),
        shapes=((3, 6), (2, 5, 24), (37, 600)), empty=(), broadcasts=False,
        rounding=2.0**-22, slack=(4.0, 1.6), inductor=False,
    )  # fmt: skip


class TestContract(Contract):
    cases = (
        case("norm first"),
        case("gate first, groups", norm_first=False, groups=3),
        case("sigmoid", activation="sigmoid"),
        case("sigmoid first", activation="sigmoid", norm_first=False),
    )


@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"norm_first": False, "groups": 3}], ids=str)
def test_on_a_cpu_rows_of_several_blocks(options, dtype, level, native_kernels):
    """A block has 1024 columns; the last one of a row is no whole register."""
    native_kernels("gated_norm", "cpu")
    generator = torch.Generator().manual_seed(0)
    x, gate, upstream = (torch.randn(3, 3087, generator=generator).to(dtype) for _ in range(3))
    weight = torch.rand(3087, generator=generator) + 0.5
    ours, wide = ([one.clone().requires_grad_() for one in (x, gate, weight)] for _ in range(2))
    with isa_limit(level):
        out = flexops.gated_rms_norm(*ours, **options)
        found = out, *torch.autograd.grad(out, ours, upstream)
    expected = plain(wide[0].float(), wide[1].float(), wide[2], **options)
    wanted = expected.to(dtype), *torch.autograd.grad(expected, wide, upstream.float())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Qwen3NextRMSNormGated(WIDTH), {}),
        (lambda: KimiLinearRMSNormGated(WIDTH), {"activation": "sigmoid"}),
        (lambda: BambaRMSNormGated(WIDTH), {"norm_first": False}),
        (lambda: FalconH1RMSNormGated(WIDTH, n_groups=3), {"groups": 3}),
        (
            lambda: FalconH1RMSNormGated(WIDTH, n_groups=3, norm_before_gate=False),
            {"groups": 3, "norm_first": False},
        ),
    ],
    ids=["qwen3_next", "kimi_linear", "bamba", "falcon_h1", "falcon_h1, gate first"],
)
def test_transformers_classes(make, options, dtype):
    torch.manual_seed(0)
    layer = make().to(dtype)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2.0)
    x, gate, upstream = (torch.randn(2, 5, WIDTH, dtype=dtype) for _ in range(3))
    inputs = [x.requires_grad_(), gate.requires_grad_(), layer.weight]
    expected = layer(x, gate)
    actual = flexops.gated_rms_norm(x, gate, layer.weight, layer.variance_epsilon, **options)
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected.to(dtype), **near)
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream.to(expected.dtype)),
        **({"rtol": 5e-2, "atol": 1e-1} if near else {}),
    )


@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 3, 0), (0, 6), (0, 3, 6), (2, 0, 6)], ids=str)
def test_no_elements(shape):
    x, gate = (torch.randn(shape, requires_grad=True) for _ in range(2))
    weight = torch.randn(shape[-1], requires_grad=True)
    out = flexops.gated_rms_norm(x, gate, weight)
    assert out.shape == shape
    gradients = torch.autograd.grad(out, (x, gate, weight), torch.ones_like(out))
    assert [one.shape for one in gradients] == [x.shape, x.shape, weight.shape]
    assert not gradients[2].any()


@pytest.mark.parametrize("groups", [0, -1, 4, 2**31])
def test_the_operators_themselves_reject_groups(groups, native_kernels):
    """A number of columns that is divided by 0 would end the process."""
    native_kernels("gated_norm", "cpu")
    x, options = torch.zeros(2, 6), (None, 1e-6, groups, True, False)
    for call in (
        lambda: torch.ops.flexops.gated_rms_norm(x, x, *options),
        lambda: torch.ops.flexops.gated_rms_norm_backward(x, x, x, *options),
    ):
        with pytest.raises(
            RuntimeError, match=f"groups must divide the columns of x, got {groups}"
        ):
            call()


def test_wrong_calls():
    x = torch.zeros(2, 6)
    for options, message in (
        ({"gate": x[:1]}, r"gate must have x's shape \[2, 6\], got \[1, 6\]"),
        ({"gate": x, "activation": "tanh"}, "activation must be silu or sigmoid, got 'tanh'"),
        ({"gate": x, "groups": 4}, "groups must divide the last dimension of x, got 4"),
        ({"gate": x, "eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"gate": x, "weight": x[0, :4]}, r"weight must have shape \[6\], got \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            flexops.gated_rms_norm(x, **options)  # type: ignore[arg-type]
