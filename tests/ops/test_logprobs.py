"""flexops.logprobs and flexops.linear_logprobs: the contract, torch's functions, chunks, special
values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import Case, Contract, Refusal, at_each_isa
from cross_entropy_cases import layer_inputs, logits_and_target
from logprobs_cases import check_draw
from torch import Tensor

import flexops


def ours(**options: Any) -> Callable[..., Any]:
    return lambda logits, target: flexops.logprobs(logits, target, **options)


def layer(**options: Any) -> Callable[..., Any]:
    return lambda hidden, weight, target, bias: flexops.linear_logprobs(
        hidden, weight, target, bias, **options
    )


def plain(
    logits: Tensor, target: Tensor, temperature: float = 1.0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, in the logits' dtype, as TRL computes them."""
    z = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    logs = z.log_softmax(-1)
    chosen = logs.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return tuple(  # type: ignore[return-value]
        (each if each.dtype == torch.float64 else each.float()).masked_fill(target == -100, 0.0)
        for each in (chosen, entropy)
    )


def plain_one(logits: Tensor, target: Tensor) -> Tensor:
    return plain(logits, target)[0]


def plain_layer(**options: Any) -> Callable[..., Any]:
    return lambda hidden, weight, target, bias: plain(
        F.linear(hidden, weight, bias), target, **options
    )


def wrong_calls() -> tuple[Refusal, ...]:
    x, t = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)

    def wrong(
        message: str, *args: Any, error: type[Exception] = ValueError, **options: Any
    ) -> Refusal:
        return Refusal(lambda: flexops.logprobs(*args, **options), error, message)

    return (
        wrong(
            r"target must have shape \(3,\), one class for each row of logits, got \(2,\)", x, t[:2]
        ),
        wrong("target must be an int64 tensor, got float", x, 1.0, error=TypeError),
        wrong("logits must be a float32, float16 or bfloat16 tensor", t, t, error=TypeError),
        wrong("logits must have at least one class in their last dimension", x[:, :0], t),
        wrong("temperature must be greater than 0, got 0.0", x, t, temperature=0.0),
        wrong("temperature must be greater than 0, got nan", x, t, temperature=float("nan")),
        wrong("softcap must be finite and greater than 0, or None, got -1.0", x, t, softcap=-1.0),
        # of float64 numbers that are 0 or infinite in float32
        wrong(r"softcap must be from 1.18e-38 to 3.4e\+38 .* got 1e-300", x, t, softcap=1e-300),
        wrong(r"softcap must be from 1.18e-38 to 3.4e\+38 .* got 1e\+39", x, t, softcap=1e39),
        wrong("temperature must be from 1.18e-38 .* got 1e-300", x, t, temperature=1e-300),
    )


def wrong_layers() -> tuple[Refusal, ...]:
    x, w, t = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)

    def wrong(message: str, *args: Any, **options: Any) -> Refusal:
        return Refusal(lambda: flexops.linear_logprobs(*args, **options), ValueError, message)

    return (
        wrong(r"weight must have shape \[V, 4\] with at least one class", x, w[:, :3], t),
        wrong(r"bias must have shape \[5\], got \[4\]", x, w, t, w[0]),
        wrong("weight must be on hidden's device, cpu, got meta", x, w.to("meta"), t),
        wrong("chunk_size must be at least 1, or None, got 0", x, w, t, chunk_size=0),
        wrong("temperature must be greater than 0, got -1", x, w, t, temperature=-1),
        wrong("softcap must be from 1.18e-38 .* got 1e-300", x, w, t, softcap=1e-300),
        wrong(
            r"target must have shape \(3,\), one class for each row of hidden, got \(1,\)",
            x,
            w,
            t[:1],
        ),
    )


LOGITS: dict[str, Any] = {
    "names": ("logits", "target"),
    "differentiable": (0,),
    "shapes": ((3, 8), (5, 100), (64, 1031)),
    "draws": 16,
    "empty": (),
    "rounding": 2.0**-22,  # tanh
}
LAYER: dict[str, Any] = {
    "names": ("hidden", "weight", "target", "bias"),
    "differentiable": (0, 1, 3),
    "parameters": (1, 3),
    "shapes": ((3, 8), (5, 24), (64, 128)),
    "draws": 16,
    # a weight that is the same for all classes has a gradient of x that is only rounding
    "broadcasts": False,
    "rounding": 2.0**-22,  # torch's products add in an order of the processor's
}


class TestContract(Contract):
    cases = (
        Case("logprobs", "logprobs", ours(), logits_and_target, plain_one, refusals=wrong_calls(),
            **LOGITS),
        Case("logprobs and entropy, capped, at a temperature", "logprobs",
            ours(temperature=0.7, softcap=3.0, return_entropy=True), logits_and_target,
            lambda logits, target: plain(logits, target, 0.7, 3.0), **LOGITS),
    )  # fmt: skip


class TestKeptLogits(Contract):
    """One of the op's results, which no caller gets, is written in the backward pass: no compiler
    may see that, and none does (test_the_op_that_compilers_get)."""

    test_opcheck = None
    cases = (
        Case(
            "linear logprobs",
            "logprobs",
            layer(chunk_size=40, return_entropy=True, temperature=0.7),
            layer_inputs,
            plain_layer(temperature=0.7),
            refusals=wrong_layers(),
            **LAYER,
        ),
    )


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("logprobs", "cpu")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("block", range(4))
def test_cpu_gives_what_the_reference_gives(block):
    for seed in range(block * 25, block * 25 + 25):
        check_draw(seed, "cpu")


# ---- special values ----


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_ignored_invalid_and_masked_classes(softcap):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.nan  # of an ignored row: not read
    logits[3, 2:] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([9, -100, -3, 1])
    result, entropy = flexops.logprobs(logits, target, softcap=softcap, return_entropy=True)
    for each in (result, entropy):
        assert each.isnan().tolist() == [True, False, True, False]
        assert each[1] == 0
    (gradient,) = torch.autograd.grad(result[1:].sum() + entropy.sum(), logits)
    assert gradient[[0, 2]].isnan().all()
    assert not gradient[1].any()
    assert not gradient[3, 2:].any()
    expected = plain(logits.detach()[3:, :2], target[3:], softcap=softcap or 0.0)
    torch.testing.assert_close(result[3:], expected[0])
    torch.testing.assert_close(entropy[3:], expected[1])


@pytest.mark.usefixtures("native")
def test_logits_further_apart_than_a_float_is_large():
    """In blocks of their own, whose maxima have a distance of -infinity."""
    logits = torch.full((2, 3000), -3e38)
    logits[0, 1500], logits[1, 2900] = 3e38, 1e38
    for isa in at_each_isa("cpu"):
        with isa:
            result, entropy = flexops.logprobs(logits, torch.tensor([1500, 0]), return_entropy=True)
        assert result.tolist() == [0, -torch.inf]
        assert entropy.tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 3, 0)], ids=str)
def test_a_layer_without_inputs(shape):
    hidden, weight = torch.randn(shape), torch.randn(5, 0)
    result = flexops.linear_logprobs(hidden, weight, torch.zeros(shape[:-1], dtype=torch.int64))
    torch.testing.assert_close(result, torch.full(shape[:-1], -math.log(5)))


def test_another_ignored_class():
    logits, target = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 2])
    result = flexops.logprobs(logits, target, ignore_index=1)
    assert result[1] == 0
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert flexops.linear_logprobs(hidden, weight, target, ignore_index=1)[1] == 0


# ---- chunks ----


@pytest.mark.parametrize("chunk", [None, 1, 7, 20, 64])
def test_chunks_change_nothing(chunk):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 5, 12, generator=make, requires_grad=True)
    weight = torch.randn(33, 12, generator=make, requires_grad=True)
    target = torch.randint(0, 33, (4, 5), generator=make)
    upstream = [torch.randn(4, 5, generator=make) for _ in range(2)]
    results = flexops.linear_logprobs(
        hidden, weight, target, return_entropy=True, chunk_size=chunk, temperature=1.7
    )
    expected = plain(hidden @ weight.t(), target, 1.7)
    torch.testing.assert_close(results, expected)
    inputs = (hidden, weight)
    torch.testing.assert_close(
        torch.autograd.grad(results, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    )


def test_a_retained_graph_gives_the_same_gradient_twice():
    """The kept logits are their gradient by then."""
    hidden, weight = torch.randn(9, 6), torch.randn(11, 6, requires_grad=True)
    result = flexops.linear_logprobs(hidden, weight, torch.arange(9), chunk_size=4)
    first, second = (
        torch.autograd.grad(result.sum(), weight, retain_graph=True)[0] for _ in range(2)
    )
    torch.testing.assert_close(first, second)


def test_the_op_that_compilers_get():
    """It keeps no logits."""
    x, weight, target = torch.randn(9, 6), torch.randn(11, 6), torch.arange(9)
    arguments = (x.requires_grad_(), weight.requires_grad_(), None, target, -100, 0.7, 3.0)
    op = torch.ops.flexops.linear_logprobs.default
    torch.library.opcheck(op, (*arguments, 4, torch.float32, 0))


def test_logits_of_two_chunks_are_kept_for_a_gradient_alone():
    hidden, weight = torch.randn(10, 6), torch.randn(11, 6, requires_grad=True)
    target = torch.zeros(10, dtype=torch.int64)

    def kept() -> int:
        result = flexops.linear_logprobs(hidden, weight, target, chunk_size=4)
        last = getattr(result.grad_fn, "last", None)
        return 0 if last is None else last.shape[0]

    assert kept() == 6  # of chunks of 4, 4 and 2 rows
    weight.requires_grad_(False)
    assert kept() == 0
