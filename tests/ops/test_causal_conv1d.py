"""flexops.causal_conv1d and its update step: the contract, torch's function, states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import ISA_LEVELS, Case, Contract, Make, Refusal, Shape, isa_limit
from torch import Tensor

import flexops


def inputs(make: Make, shape: Shape, width: int = 4) -> tuple[Tensor, ...]:
    channels = shape[1]
    return make(*shape), make(channels, width, scale=0.5), make(channels)


def ours(**options: Any) -> Callable[..., Tensor]:
    return lambda x, weight, bias: flexops.causal_conv1d(x, weight, bias, **options)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = True) -> Tensor:
    """In the dtype of x, as transformers computes it."""
    width = weight.shape[1]
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[1])
    out = out[..., : x.shape[2]]
    return F.silu(out) if silu else out


def wrong_calls() -> tuple[Refusal, ...]:
    x, w = torch.zeros(2, 3, 5), torch.zeros(3, 4)

    def wrong(
        message: str, *args: Any, error: type[Exception] = ValueError, **options: Any
    ) -> Refusal:
        return Refusal(lambda: flexops.causal_conv1d(*args, **options), error, message)

    return (
        wrong(r"x must have shape \[B, D, L\], got \[3, 5\]", x[0], w),
        wrong(r"weight must have shape \[3, W\] with at least one tap, got \[2, 4\]", x, w[:2]),
        wrong("weight must have 1 to 4 taps, got shape", x, torch.zeros(3, 5)),
        wrong(r"bias must have shape \[3\], got \[4\]", x, w, w[0]),
        wrong("activation must be None or 'silu', got 'gelu'", x, w, activation="gelu"),
        wrong(r"activation must be None or 'silu', got \['silu'\]", x, w, activation=["silu"]),
        wrong("x must be a float32, float16 or bfloat16 tensor", x.int(), w, error=TypeError),
        wrong("initial_states must be a float32", x, w, initial_states=x.int(), error=TypeError),
        wrong("initial_states must be a float32", x, w, initial_states=[], error=TypeError),
        wrong("seq_idx must be an int32 or int64 tensor", x, w, seq_idx=[0], error=TypeError),
        wrong(r"seq_idx must have shape \[2, 5\], got \[2, 4\]", x, w, seq_idx=x[:, 0, :4].int()),
        wrong("leave these out", x, w, seq_idx=x[:, 0].int(), return_final_states=True),
        wrong(r"initial_states must have shape \[2, 3, 3\]", x, w, initial_states=x),
    )


class TestContract(Contract):
    cases = (
        Case(
            "causal_conv1d",
            "causal_conv1d",
            ours(activation="silu"),
            inputs,
            plain,
            names=("x", "weight", "bias"),
            differentiable=(0, 1, 2),
            parameters=(1, 2),
            shapes=((2, 3, 5), (2, 8, 130), (2, 33, 70)),
            empty=(),
            broadcasts=False,
            rounding=2.0**-22,  # sums of a gradient over many steps
            slack=(4.0, 1.6),  # torch adds the weight's gradient up in another order
            inductor=False,
            refusals=wrong_calls(),
        ),
    )


@pytest.mark.parametrize("layout", ["channels last", "contiguous"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 5, 3), (2, 16, 128), (3, 7, 300)])
@pytest.mark.parametrize("silu", [False, True])
def test_torchs_convolution(shape, width, layout, silu):
    make = torch.Generator().manual_seed(0)
    batch, channels, _ = shape
    x = torch.randn(shape, generator=make)
    if layout == "channels last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    weight = torch.randn(channels, width, generator=make)
    bias = torch.randn(channels, generator=make)
    before = torch.randn(batch, channels, width - 1, generator=make)
    arguments = [each.requires_grad_() for each in (x, weight, bias, before)]
    out, final = flexops.causal_conv1d(
        x,
        weight,
        bias,
        activation="silu" if silu else None,
        initial_states=before,
        return_final_states=True,
    )
    both = torch.cat([before, x], 2)
    expected = plain(both, weight, bias, silu)[..., width - 1 :]
    torch.testing.assert_close(out, expected)
    assert torch.equal(final, both[..., both.shape[2] - width + 1 :])
    upstream = torch.randn(out.shape, generator=make)
    torch.testing.assert_close(
        torch.autograd.grad(out, arguments, upstream),
        torch.autograd.grad(expected, arguments, upstream),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_blocks_of_channels_and_parts_of_sequences(dtype, level, native_kernels):
    """A block has 1024 channels; each thread has steps of its own."""
    native_kernels("causal_conv1d", "cpu")
    make = torch.Generator().manual_seed(0)
    x, upstream = (
        torch.randn(3, 7, 1029, generator=make).to(dtype).transpose(1, 2) for _ in range(2)
    )
    weight, bias = torch.randn(1029, 4, generator=make), torch.randn(1029, generator=make)
    ours, wide = ([one.clone().requires_grad_() for one in (x, weight, bias)] for _ in range(2))
    with isa_limit(level):
        out = flexops.causal_conv1d(*ours, activation="silu")
        found = out, *torch.autograd.grad(out, ours, upstream)
        state = torch.zeros(3, 1029, 3, dtype=dtype)
        steps = flexops.causal_conv1d_update(x, state, weight, bias, "silu")
    torch.testing.assert_close(steps, out.detach())
    expected = plain(wide[0].float(), *wide[1:])
    wanted = expected.to(dtype), *torch.autograd.grad(expected, wide, upstream.float())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3, 4, 6])
def test_steps_one_by_one_are_the_whole(size, dtype):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 9, generator=make).to(dtype)
    weight, bias = torch.randn(5, 4, generator=make), torch.randn(5, generator=make)
    state = torch.zeros(2, 5, size, dtype=dtype)
    steps = [
        flexops.causal_conv1d_update(x[:, :, 0], state, weight, bias, "silu").unsqueeze(2),
        flexops.causal_conv1d_update(x[:, :, 1:6], state, weight, bias, "silu"),
        flexops.causal_conv1d_update(x[:, :, 6:], state, weight, bias, "silu"),
    ]
    whole = flexops.causal_conv1d(x, weight, bias, activation="silu")
    torch.testing.assert_close(torch.cat(steps, 2), whole)
    assert torch.equal(state, x[:, :, -size:])


def test_final_states_keep_no_other_steps():
    x = torch.randn(2, 3, 500)
    _, final = flexops.causal_conv1d(x, torch.randn(3, 4), return_final_states=True)
    assert torch.equal(final, x[..., -3:])
    assert final.untyped_storage().nbytes() == final.numel() * final.element_size()


def test_a_backward_pass_notices_that_a_state_was_written():
    state, factor = torch.randn(2, 3, 4), torch.ones((), requires_grad=True)
    product = (factor * state).sum()
    flexops.causal_conv1d_update(torch.randn(2, 3), state, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_the_update_itself_rejects_other_shapes(native_kernels):
    """It would read and write beyond them."""
    native_kernels("causal_conv1d", "cpu")
    state, x, weight = torch.zeros(2, 3, 4), torch.zeros(2, 3, 1), torch.zeros(3, 4)
    op = torch.ops.flexops.causal_conv1d_update_
    for args, message in (
        ((state[:1].clone(), x, weight), r"x must have shape \[1, 3, 1\], got \[2, 3, 1\]"),
        ((state, x, weight[:2].clone()), r"weight must have shape \[3, 4\], got \[2, 4\]"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            op(*args, None, False)


def test_wrong_states():
    x, weight = torch.zeros(2, 3, 1), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"conv_state must hold at least 3 steps, got shape"):
        flexops.causal_conv1d_update(x, torch.zeros(2, 3, 2), weight)
    for state, words in (
        (None, "update: conv_state must be a float32, float16 or bfloat16 tensor, got NoneType"),
        (x.double(), "update: conv_state must be float32, float16 or bfloat16, got float64"),
        (x.half(), "update: x must be float16, as conv_state, got float32"),
    ):
        with pytest.raises(TypeError, match=words):
            flexops.causal_conv1d_update(x, state, weight[:, :2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="update: x must be on the device of conv_state, meta"):
        flexops.causal_conv1d_update(x, torch.zeros(2, 3, 4, device="meta"), weight)
    with pytest.raises(ValueError, match=r"conv_state must have shape \[2, 3, S\], got"):
        flexops.causal_conv1d_update(x, torch.zeros(2, 4, 3), weight)


@pytest.mark.parametrize("level", ISA_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("width", [2, 4])
def test_packed_sequences_are_sequences_of_their_own(width, dtype, level, native_kernels):
    """Results and gradients; also of sequences shorter than the filter."""
    native_kernels("causal_conv1d", "cpu")
    kind = torch.int64 if dtype == torch.int64 else torch.int32
    dtype = torch.float32 if dtype == torch.int64 else dtype
    make = torch.Generator().manual_seed(0)
    lengths = (1, 2, 140, 1, 3, 60)
    x, upstream = (
        torch.randn(2, sum(lengths), 40, generator=make).to(dtype).transpose(1, 2) for _ in range(2)
    )
    weight, bias = torch.randn(40, width, generator=make), torch.randn(40, generator=make)
    ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], dtype=kind)
    ids = torch.stack([ids, torch.zeros_like(ids)])
    ours, apart = ([one.clone().requires_grad_() for one in (x, weight, bias)] for _ in range(2))
    with isa_limit(level):
        out = flexops.causal_conv1d(*ours, activation="silu", seq_idx=ids)
        found = out, *torch.autograd.grad(out, ours, upstream)
        parts = [
            flexops.causal_conv1d(part, *apart[1:], activation="silu")
            for part in apart[0][:1].split(lengths, 2)
        ]
        whole = flexops.causal_conv1d(apart[0][1:], *apart[1:], activation="silu")
        expected = torch.cat([torch.cat(parts, 2), whole])
        wanted = expected, *torch.autograd.grad(expected, apart, upstream)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **near)
