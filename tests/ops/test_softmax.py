"""flexops.scaled_masked_softmax and flexops.causal_softmax: the contract, masks of every shape,
rows in which nothing takes part, special values."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from contract import Case, Contract, Make, Refusal, Shape
from softmax_cases import DTYPES, assert_near, compare_all, draw_lowest
from torch import Tensor

import flexops
from flexops.bench.reference import OnReference
from flexops.ops import softmax as softmax_module

LOWEST = -torch.inf


def scores(make: Make, shape: Shape) -> tuple[Tensor]:
    return (make(*shape),)


def with_boolean_mask(make: Make, shape: Shape) -> tuple[Tensor, Tensor]:
    keep = make.booleans(*shape[1:-2], 1, shape[-1], likely=0.7)
    keep[..., 0] = True  # the oracle has NaN where nothing takes part
    return make(*shape), keep


def with_added_mask(make: Make, shape: Shape) -> tuple[Tensor, Tensor]:
    # Small, as biases are: in sums over rows with a few large powers, float32's own errors are
    # larger than what parity allows.
    return make(*shape), make(shape[0], *[1] * (len(shape) - 2), shape[-1]) / 4


def plain(x: Tensor, mask: Tensor | None = None) -> Tensor:
    s = x * 0.5
    if mask is not None:
        s = s.masked_fill(~mask, LOWEST) if mask.dtype == torch.bool else s + mask
    return torch.softmax(s, -1)


def plain_causal(x: Tensor) -> Tensor:
    queries, keys = x.shape[-2:]
    keep = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
    return torch.softmax((x * 0.5).masked_fill(~keep, LOWEST), -1)


def wrong_calls() -> tuple[Refusal, ...]:
    x = torch.zeros(2, 3, 4)

    def with_mask(mask: Tensor, error: type[Exception], message: str) -> Refusal:
        return Refusal(lambda: flexops.scaled_masked_softmax(x, mask), error, message)

    return (
        with_mask(torch.zeros(3), ValueError,
            r"mask must be broadcastable to x, got shape \[3\] for \[2, 3, 4\]"),
        with_mask(torch.zeros(1, 2, 3, 4), ValueError,
            r"mask must be broadcastable to x, got shape \[1, 2, 3, 4\] for \[2, 3, 4\]"),
        with_mask(torch.zeros(4, dtype=torch.uint8), TypeError,
            "mask must be bool, float32, .* got uint8"),
        with_mask(torch.zeros(4, device="meta"), ValueError,
            "mask must be on the device of x, cpu, got meta"),
        Refusal(lambda: flexops.scaled_masked_softmax(torch.zeros(())), ValueError,
            "x must have at least one dimension"),
        Refusal(lambda: flexops.causal_softmax(torch.zeros(3)), ValueError,
            "x must have at least two dimensions, queries and keys, got shape"),
    )  # fmt: skip


class TestContract(Contract):
    cases = (
        Case(
            "scaled softmax",
            "softmax",
            lambda x: flexops.scaled_masked_softmax(x, None, 0.5),
            scores,
            plain,
            names=("x",),
            differentiable=(0,),
            shapes=((3, 8), (5, 100), (33, 1031)),
            huge=(2**18 + 3, 2**13),
            refusals=wrong_calls(),
        ),
        Case(
            "softmax, boolean mask",
            "softmax",
            lambda x, mask: flexops.scaled_masked_softmax(x, mask, 0.5),
            with_boolean_mask,
            plain,
            names=("x", "mask"),
            differentiable=(0,),
            shapes=((2, 3, 8), (2, 3, 4, 100), (3, 5, 1031)),
        ),
        Case(
            "softmax, added mask",
            "softmax",
            lambda x, mask: flexops.scaled_masked_softmax(x, mask, 0.5),
            with_added_mask,
            plain,
            names=("x", "mask"),
            differentiable=(0, 1),
            parameters=(1,),
            shapes=((2, 3, 8), (2, 3, 100), (3, 5, 1031)),
            huge=(2**15 + 3, 2, 2**15 + 8),
            slack=(3.0, 1.05),
        ),
        Case(
            "causal softmax",
            "softmax",
            lambda x: flexops.causal_softmax(x, 0.5),
            scores,
            plain_causal,
            names=("x",),
            differentiable=(0,),
            shapes=((2, 3, 8), (2, 3, 5, 100), (3, 32, 1031)),
            dynamic=((2, 3, 8), (3, 4, 9), (4, 6, 24)),
            empty=((0, 3, 8), (2, 0, 8), (2, 3, 0)),
            huge=(2**9 + 1, 2**11, 2**11),
        ),
    )


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("softmax", "cpu")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("block", range(4))
def test_cpu_gives_what_the_reference_gives(block):
    """Every length, layout, mask and dtype at random."""
    for seed in range(block * 60, block * 60 + 60):
        compare_all(seed, "cpu")


# ---- masks ----


@pytest.mark.parametrize("dtype", [torch.bool, *DTYPES])
@pytest.mark.usefixtures("both")
def test_every_way_to_broadcast(dtype):
    shape = (2, 3, 4, 9)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for kept in itertools.product([True, False], repeat=4):
        full = [size if keep else 1 for size, keep in zip(shape, kept, strict=True)]
        keep = torch.rand(full, generator=torch.Generator().manual_seed(1)) < 0.6
        mask = (
            keep
            if dtype == torch.bool
            else torch.zeros(full, dtype=dtype).masked_fill(~keep, LOWEST)
        )
        # torch has NaN where nothing takes part
        expected = torch.softmax(x.masked_fill(~keep, LOWEST), -1).nan_to_num(0.0)
        for view in (mask, mask.expand(shape), mask.squeeze(0) if full[0] == 1 else mask):
            torch.testing.assert_close(flexops.scaled_masked_softmax(x, view), expected)


def test_true_takes_part_as_in_torchs_attention():
    q, k, v = (
        torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    mask = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., 0] = True
    ours = flexops.scaled_masked_softmax(q @ k.transpose(-1, -2), mask, 8**-0.5) @ v
    torch.testing.assert_close(
        ours, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    )


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 7), (1, 9), (6, 2), (1, 1)])
@pytest.mark.usefixtures("both")
def test_causality_is_at_the_lower_right(queries, keys):
    x = torch.randn(2, queries, keys, generator=torch.Generator().manual_seed(0))
    y = flexops.causal_softmax(x)
    for query in range(queries):
        seen = max(query + 1 + keys - queries, 0)
        torch.testing.assert_close(y[:, query, :seen], torch.softmax(x[:, query, :seen], -1))
        assert not y[:, query, seen:].any()


# ---- special values ----


@pytest.fixture(params=["op", "reference"])
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that takes this runs twice: on whatever kernels there are, and on the
    reference."""
    with OnReference() if request.param == "reference" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 9, 1031, 9001])
@pytest.mark.usefixtures("both")
def test_rows_in_which_nothing_takes_part_are_zeros(dtype, length):
    x = (
        torch.randn(4, length, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .requires_grad_()
    )
    nothing = torch.ones(4, 1, dtype=torch.bool)
    nothing[1] = False
    for mask in (
        nothing,
        nothing.expand(4, length).contiguous(),
        torch.zeros(4, 1).masked_fill(~nothing, LOWEST),
    ):
        y = flexops.scaled_masked_softmax(x, mask)
        (of_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert not y[1].any()
        assert not of_x[1].any()
        torch.testing.assert_close(y[[0, 2, 3]], torch.softmax(x, -1)[[0, 2, 3]])
    assert not flexops.scaled_masked_softmax(torch.full((2, length), LOWEST, dtype=dtype)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [5, 1031, 9001])
@pytest.mark.usefixtures("both")
def test_nan_and_infinity(dtype, length):
    x = torch.randn(4, length, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 3], x[1, 3], x[2, 3] = torch.nan, torch.inf, LOWEST
    y = flexops.scaled_masked_softmax(x)
    assert y[:2].isnan().all()
    torch.testing.assert_close(y[2:], torch.softmax(x, -1)[2:])
    assert y[2, 3] == 0
    without = torch.arange(length) != 3
    y = flexops.scaled_masked_softmax(x, without)  # what is left out is not looked at
    assert y.isfinite().all()
    torch.testing.assert_close(y[:, without], torch.softmax(x[:, without], -1))
    assert (
        flexops.scaled_masked_softmax(torch.full((1, length), torch.nan, dtype=dtype)).isnan().all()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [9, 300])
@pytest.mark.usefixtures("native")
def test_rows_masked_with_the_lowest_number_are_even(dtype, length):
    for arguments in draw_lowest(dtype, "cpu", length):
        assert_near(
            flexops.scaled_masked_softmax(*arguments),
            softmax_module._scaled_masked_softmax_reference(*arguments),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("both")
def test_large_scores_do_not_overflow(dtype):
    x = torch.tensor([[3e4, 3e4, -3e4, 0.0]]).to(dtype)
    torch.testing.assert_close(
        flexops.scaled_masked_softmax(x, None, 1000.0),
        torch.tensor([[0.5, 0.5, 0.0, 0.0]]).to(dtype),
    )
    torch.testing.assert_close(
        flexops.scaled_masked_softmax(x, None, -1000.0),
        torch.tensor([[0.0, 0.0, 1.0, 0.0]]).to(dtype),
    )


def test_the_masks_gradient_is_summed_over_what_it_was_broadcast_along():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for shape in ((5,), (4, 5), (3, 1, 1), (2, 1, 4, 5), (1, 1, 1, 1)):
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        for inputs in ((x, mask), (mask,)):
            ours = torch.autograd.grad(
                (flexops.scaled_masked_softmax(x, mask, 0.3) * weights).sum(), inputs
            )
            torchs = torch.autograd.grad(
                (torch.softmax(x * 0.3 + mask, -1) * weights).sum(), inputs
            )
            torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 1e39, None, "2", torch.ones(2)])
def test_a_scale_that_is_no_finite_number_is_rejected(scale):
    error = ValueError if isinstance(scale, float) else TypeError
    for name in ("causal_softmax", "scaled_masked_softmax"):
        with pytest.raises(error, match=rf"flexops\.{name}: scale must be "):
            getattr(flexops, name)(torch.ones(2, 3), scale=scale)
