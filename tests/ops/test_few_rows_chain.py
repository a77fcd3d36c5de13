"""Products of a few rows and attentions, one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops import few_rows, few_rows_chain
from flexops.ops.few_rows_chain import (
    MOST_CACHED,
    MOST_PRODUCTS,
    WORKSPACE,
    Attention,
    Phase,
    few_rows_chain_,
)


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
        "caches": [],
        "outs": [half(1, 96), half(1, 64)],
        "cos": None,
        "sin": None,
        "seqlens": None,
        "leftpad": None,
        "workspace": workspace(),
        "eps": 1e-6,
        "offset": 0.0,
        "scale": 0.0,
        "window_left": -1,
        "kinds0": (2 | 1 << 2 | 0b0101 << 4) | (1 | 0b1000 << 4) << 8,
        "kinds1": 0,
        "kinds2": 0,
        "kinds3": 0,
    }
    return list((arguments | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outs": []}, "outs must be 1 to 6 tensors, one more than xs, got 0"),
        ({"outs": [half(1, 96)] * (MOST_PRODUCTS + 1)}, "got 7"),
        ({"weights": []}, "weights must hold as many tensors as kinds="),
        ({"scales": []}, "scales must hold as many"),
        ({"zeros": []}, "zeros must hold as many"),
        ({"norms": []}, "norms must hold as many"),
        ({"residuals": []}, "residuals must hold as many"),
        ({"biases": [half(96)]}, "there are more tensors, or fewer phases, than kinds="),
        ({"kinds0": given()[19] | 1 << 20}, "there are more tensors, or fewer phases"),
        ({"outs": [half(1, 96), half(2, 64)]}, r"phase's out must have shape \[1, 64\]"),
        ({"residuals": [half(2, 64)]}, r"phase's residual must have shape \[1, 64\]"),
        ({"norms": [half(48)]}, r"phase's norm must have shape \[64\]"),
        ({"x": half(17, 64)}, "at most 16 rows"),
        ({"outs": [half(1, 96), half(1, 48)]}, r"packed must have shape"),
        ({"workspace": workspace()[:4]}, "workspace must have 262144 elements, got 4"),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
def test_errors_name_what_does_not_fit(changes, message):
    torch.ops.flexops.few_rows_chain_(*given())
    with pytest.raises(ValueError, match=message):
        torch.ops.flexops.few_rows_chain_(*given(**changes))


def attention(x: Tensor, heads: int = 4, heads_k: int = 2, dim: int = 32) -> Attention:
    keys, values = (half(len(x), 50, heads_k, dim)[:, :40] for _ in range(2))
    lengths, padding = torch.tensor([[30], [3]], dtype=torch.int32)
    rotary: Any = half(40, 32).chunk(2, -1)
    return Attention(half(len(x), heads * dim), x, keys, values, rotary, lengths, padding, 0.2)


@pytest.mark.parametrize(("window_left", "normed"), [(-1, False), (9, True)])
def test_attention_is_that_of_the_operator(window_left, normed):
    """Behind the product whose result it takes; each appends a token to caches of its own."""
    torch.manual_seed(0)
    x, qkv = half(1, 64), half(1, 256)
    product = Phase(qkv, x, [int4(256, 64)], [], None, None, 0)
    norms: Any = (half(32), half(32)) if normed else None
    phase = attention(qkv)._replace(window_left=window_left, norms=norms)
    caches = [one.clone() for one in (phase.keys, phase.values)]
    few_rows_chain_([product, phase], workspace(), eps=1e-5, offset=1.0)
    q, k, v = qkv.view(1, 1, 8, 32).split([4, 2, 2], 2)
    if normed:
        q, k = (
            flexops.rms_norm(one, norm.float() + 1, 1e-5)
            for one, norm in zip((q, k), norms, strict=True)
        )
    expected = flexops.attention_with_kvcache(
        q, *caches, k, v, *phase.rotary, cache_seqlens=phase.seqlens, cache_leftpad=phase.leftpad,
        softmax_scale=0.2, window_size=(window_left, -1), rotary_interleaved=False,
        rotary_from_leftpad=True,
    )  # fmt: skip
    # kernels for the CPU may round a normalized number otherwise
    bound = {"rtol": 2**-7, "atol": 2**-7} if normed else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(phase.out, expected.view(1, -1), **bound)
    torch.testing.assert_close(phase.keys, caches[0], **bound)
    assert torch.equal(phase.values, caches[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caches": []}, "caches must hold as many tensors as kinds="),
        (
            {"caches": [half(1, 9, 2, 48)] * 2},
            r"caches must be two of \[1, capacity, key heads,",
        ),
        ({"outs": [half(1, 96)]}, "an attention's out must be of heads of 32, got"),
        ({"x": half(1, 224)}, "an attention's x must have 256 columns, got"),
        ({"seqlens": None}, "seqlens must be given with an attention"),
        ({"seqlens": torch.zeros(2, dtype=torch.int32)}, r"cache_seqlens must have shape"),
        ({"cos": half(9, 40)}, r"rotary_cos must have shape"),
        ({"kinds0": 1 << 6}, "norms must hold as many tensors as kinds="),
        (
            {"kinds0": 1 << 6, "norms": [half(32), half(64)]},
            r"an attention's norm must have shape \[32\], got \[64\]",
        ),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
def test_errors_of_attention(changes, message):
    lengths = torch.zeros(1, dtype=torch.int32)
    attended: dict[str, Any] = {
        name: [] for name in ("xs", "weights", "scales", "zeros", "norms", "residuals")
    }
    attended |= {"x": half(1, 256), "outs": [half(1, 128)], "seqlens": lengths, "kinds0": 0}
    attended |= {"caches": [half(1, 9, 2, 32) for _ in range(2)]}
    attended |= {"cos": half(9, 16), "sin": half(9, 16)}
    torch.ops.flexops.few_rows_chain_(*given(**attended))
    with pytest.raises(ValueError, match=message):
        torch.ops.flexops.few_rows_chain_(*given(**(attended | changes)))


def test_what_attention_the_kernel_computes():
    phase = attention(half(1, 256))
    attends = few_rows_chain.attends
    assert attends(phase)
    assert attends(phase._replace(rotary=None, leftpad=None))
    assert attends(phase._replace(window_left=5, norms=(half(32), half(32))))
    assert not attends(phase._replace(norms=(half(32), torch.ones(32))))
    assert not attends(attention(half(2, 256)))
    assert not attends(attention(half(1, 384), dim=48))
    assert not attends(phase._replace(rotary=tuple(one.float() for one in phase.rotary)))
    assert not attends(phase._replace(rotary=tuple(one[:, :12] for one in phase.rotary)))
    assert not attends(phase._replace(keys=phase.keys.float(), values=phase.values.float()))
    assert not attends(
        phase._replace(keys=phase.keys.transpose(1, 2).contiguous().transpose(1, 2))
    )  # of other strides
    one = phase.keys[:1, :1]
    most = MOST_CACHED // (4 * one.numel())
    for tokens in (most, most + 1):
        long = one.expand(1, tokens, 2, 32)
        single = attention(half(1, 256))._replace(keys=long, values=long)
        assert attends(single) == (tokens == most)


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
