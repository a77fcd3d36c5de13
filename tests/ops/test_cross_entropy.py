"""flexops.cross_entropy and flexops.linear_cross_entropy: the contract, torch's function, gradients
in place, chunks, special values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import Case, Contract, Make, Refusal, Shape
from cross_entropy_cases import DTYPES, WIDE, compare_all, layer_inputs, logits_and_target
from torch import Tensor

import flexops
from flexops.bench.reference import OnReference
from flexops.ops import linear_cross_entropy as linear_module

CLASSES = (1, 2, 3, 10, 33, 100, 1000, 1024, 1025, 1031, 4096, 10007, 32000, 50257)


# ---- the contract ----


def ours(**options: Any) -> Callable[..., Tensor]:
    return lambda logits, target: flexops.cross_entropy(logits, target, **options)


def torchs(z_loss: float = 0.0, **options: Any) -> Callable[..., Tensor]:
    """In the logits' dtype, and what comes out in float32, as ours does (float64 stays)."""

    def call(logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, target, **options)
        if z_loss:
            loss = (
                loss
                + z_loss
                * (logits.logsumexp(1).square() * (target != -100)).sum()
                / (target != -100).sum()
            )
        return loss if loss.dtype == torch.float64 else loss.float()

    return call


def layer(**options: Any) -> Callable[..., Tensor]:
    return lambda x, weight, target, bias: flexops.linear_cross_entropy(
        x, weight, target, bias, **options
    )


def plain_layer(**options: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> Tensor:
        loss = F.cross_entropy(F.linear(x, weight, bias), target, **options)
        return loss if loss.dtype == torch.float64 else loss.float()

    return call


def weighted_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return *layer_inputs(make, shape), make.uniform(WIDE, low=0.2, high=3.0)


def capped_layer(**options: Any) -> Callable[..., Tensor]:
    return lambda x, weight, target, bias, class_weight: flexops.linear_cross_entropy(
        x, weight, target, bias, class_weight=class_weight, **options
    )


def plain_capped_layer(softcap: float, **options: Any) -> Callable[..., Tensor]:
    def call(
        x: Tensor, weight: Tensor, target: Tensor, bias: Tensor, class_weight: Tensor
    ) -> Tensor:
        logits = torch.tanh(F.linear(x, weight, bias) / softcap) * softcap
        loss = F.cross_entropy(logits, target, class_weight.to(logits.dtype), **options)
        return loss if loss.dtype == torch.float64 else loss.float()

    return call


def wrong_calls() -> tuple[Refusal, ...]:
    x, t = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)

    def wrong(
        message: str, args: Any, error: type[Exception] = ValueError, **options: Any
    ) -> Refusal:
        return Refusal(lambda: flexops.cross_entropy(*args, **options), error, message)

    return (
        wrong(
            r"target must have shape \(3,\), one class for each row of logits, got \(2,\)",
            (x, t[:2]),
        ),
        wrong(
            "target must be an int64 tensor, got torch.int32",
            (x, t.int()),
            error=TypeError,
        ),
        wrong("target must be on the device of logits, cpu, got meta", (x, t.to("meta"))),
        wrong(
            r"logits must have at least one class in their last dimension, got shape \(3, 0\)",
            (x[:, :0], t),
        ),
        wrong("logits must have at least one dimension, got a scalar", (x[0, 0], t[0])),
        wrong("reduction must be 'mean', 'sum' or 'none', got 'max'", (x, t), reduction="max"),
        wrong(r"label_smoothing must be in \[0, 1\], got 1.5", (x, t), label_smoothing=1.5),
        wrong("z_loss must be at least 0, got -1", (x, t), z_loss=-1),
    )


def wrong_layers() -> tuple[Refusal, ...]:
    x, w, t = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)

    def wrong(
        message: str, args: Any, error: type[Exception] = ValueError, **options: Any
    ) -> Refusal:
        return Refusal(lambda: flexops.linear_cross_entropy(*args, **options), error, message)

    return (
        wrong(r"weight must have shape \[V, 4\] with at least one class, got \[5, 3\]",
            (x, w[:, :3], t)),
        wrong(r"bias must have shape \[5\], got \[4\]", (x, w, t, w[0])),
        wrong("weight must be on x's device, cpu, got meta", (x, w.to("meta"), t)),
        wrong("chunk_size must be at least 1, or None, got 0", (x, w, t), chunk_size=0),
        wrong(r"target must have shape \(3,\), one class for each row of x, got \(1,\)",
            (x, w, t[:1])),
        wrong("softcap must be finite and greater than 0, or None, got 0", (x, w, t), softcap=0.0),
        wrong("accumulate must be 'float32', 'native' or None, got 'bfloat16'", (x, w, t),
            accumulate="bfloat16"),
        wrong(r"class_weight must have shape \[5\], got \[4\]", (x, w, t), class_weight=w[0]),
        wrong("class_weight must be a float32, float16 or bfloat16 tensor, got list",
            (x, w, t), class_weight=[1.0] * 5, error=TypeError),
        wrong(
            "class_weight must not require a gradient",
            (x, w, t),
            class_weight=torch.ones(5, requires_grad=True),
        ),
        wrong("label_smoothing must be 0 with class_weight, got 0.1", (x, w, t),
            class_weight=torch.ones(5), label_smoothing=0.1),
    )  # fmt: skip


SHAPES, LAYER_SHAPES = ((3, 8), (5, 100), (64, 1031)), ((3, 8), (5, 24), (64, 128))
LOGITS: dict[str, Any] = {"differentiable": (0,), "shapes": SHAPES, "draws": 16}
LAYER: dict[str, Any] = {
    "names": ("x", "weight", "target", "bias"),
    "differentiable": (0, 1, 3),
    "parameters": (1, 3),
    "shapes": LAYER_SHAPES,
    "draws": 16,
}
# a weight that is the same for all classes has a gradient of x that is nothing but rounding
LAYER |= {"broadcasts": False}
CAPPED: dict[str, Any] = LAYER | {
    "names": ("x", "weight", "target", "bias", "class_weight"),
    "parameters": (1, 3, 4),
    "inductor": False,
}


class TestContract(Contract):
    cases = (
        Case(
            "cross entropy",
            "cross_entropy",
            ours(),
            logits_and_target,
            torchs(),
            names=("logits", "target"),
            empty=(),
            refusals=wrong_calls(),
            **LOGITS,
        ),
        Case(
            "cross entropy, smoothed, z-loss",
            "cross_entropy",
            ours(label_smoothing=0.1, z_loss=1e-2),
            logits_and_target,
            torchs(label_smoothing=0.1, z_loss=1e-2),
            names=("logits", "target"),
            empty=(),
            **LOGITS,
        ),
        Case(
            "cross entropy of each row",
            "cross_entropy",
            ours(reduction="none"),
            logits_and_target,
            torchs(reduction="none"),
            names=("logits", "target"),
            huge=(2**14 + 5, 2**17 + 8),
            **LOGITS,
        ),
        Case(
            "linear cross entropy of each row",
            "cross_entropy",
            layer(reduction="none", chunk_size=2),
            layer_inputs,
            plain_layer(reduction="none"),
            **LAYER,
        ),
        Case(
            "linear cross entropy of each row, capped and weighted",
            "cross_entropy",
            capped_layer(softcap=1.5, reduction="none", chunk_size=2),
            # torch's products add in an order of the processor's
            weighted_inputs,
            plain_capped_layer(1.5, reduction="none"),
            rounding=2.0**-22,
            **CAPPED,
        ),
    )


class TestMadeInTheForwardPass(Contract):
    """Gradients that are there before they are asked for, so a graph serves one backward pass;
    numerical derivatives of what overwrites its inputs mean nothing."""

    test_gradcheck = None
    test_gradients_of_any_strides = None
    cases = (
        Case(
            "cross entropy in place",
            "cross_entropy",
            ours(inplace=True),
            logits_and_target,
            torchs(),
            names=("logits", "target"),
            empty=(),
            broadcasts=False,
            **LOGITS,
        ),
        Case(
            "linear cross entropy",
            "cross_entropy",
            layer(chunk_size=40),
            layer_inputs,
            plain_layer(),
            empty=(),
            refusals=wrong_layers(),
            # of few chunks the products are summed in their own dtype, a rounding more than
            # torch's one product has (H200: 1.12)
            slack=(2.5, 1.15),
            **LAYER,
        ),
        Case(
            "linear cross entropy, capped and weighted",
            "cross_entropy",
            capped_layer(softcap=1.5, chunk_size=40),
            weighted_inputs,
            plain_capped_layer(1.5),
            # 16-bit gradients are rounded once more: when they are multiplied by the loss's own
            empty=(),
            slack=(2.0, 1.1),
            **CAPPED,
        ),
    )


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("cross_entropy", "cpu")


@pytest.fixture(params=["op", "reference"])
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that takes this runs twice: on whatever kernels there are, and on the
    reference."""
    with OnReference() if request.param == "reference" else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("block", range(4))
def test_cpu_gives_what_the_reference_gives(block):
    for seed in range(block * 25, block * 25 + 25):
        compare_all(seed, "cpu", CLASSES)


# ---- against torch ----


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 1031)])
@pytest.mark.usefixtures("both")
def test_torchs_function(shape, reduction, inplace):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(shape, generator=generator, requires_grad=True)
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    if target.dim():
        target.view(-1)[0] = 5
    for smoothing in (0.0, 0.3):
        options = {
            "label_smoothing": smoothing,
            "reduction": reduction,
            "ignore_index": 5 if target.dim() else -1,
        }
        actual = flexops.cross_entropy(source * 2, target, **options, inplace=inplace)
        expected = F.cross_entropy(source.reshape(-1, shape[-1]) * 2, target.reshape(-1), **options)
        torch.testing.assert_close(actual, expected.reshape(actual.shape))
        weights = torch.randn(actual.shape, generator=generator)
        (of_ours,) = torch.autograd.grad((actual * weights).sum(), source)
        (of_torchs,) = torch.autograd.grad(
            (expected * weights.reshape(expected.shape)).sum(), source
        )
        torch.testing.assert_close(of_ours, of_torchs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.usefixtures("both")
def test_z_loss_and_smoothing_by_autograd(dtype, inplace):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(5, 333, generator=generator).to(dtype).requires_grad_()
    target = torch.tensor([0, 332, -100, 7, 9])
    actual = flexops.cross_entropy(
        source * 1, target, label_smoothing=0.2, z_loss=0.05, reduction="sum", inplace=inplace
    )
    x = source.double()
    lse = x.logsumexp(1)
    expected = (
        F.cross_entropy(x, target, label_smoothing=0.2, reduction="sum")
        + 0.05 * (lse.square() * (target >= 0)).sum()
    )
    torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=1e-6)
    (of_ours,), (of_double,) = (
        torch.autograd.grad(actual, source),
        torch.autograd.grad(expected, source),
    )
    torch.testing.assert_close(
        of_ours,
        of_double,
        rtol={torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype],
        atol=1e-6,
    )


# ---- special values ----


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("both")
def test_ignored_and_invalid_classes(dtype, inplace):
    source = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    source[1] = torch.nan  # of an ignored row: not looked at
    source.requires_grad_()
    target = torch.tensor([3, -1, 50, -7, 49, -1])
    loss = flexops.cross_entropy(
        source * 1, target, ignore_index=-1, reduction="none", inplace=inplace
    )
    (gradient,) = torch.autograd.grad(loss.sum(), source)
    assert loss.isnan().tolist() == [False, False, True, True, False, False]
    assert loss[[1, 5]].tolist() == [0.0, 0.0]
    assert gradient[[2, 3]].isnan().all()
    assert not gradient[[1, 5]].any()
    assert gradient[[0, 4]].isfinite().all()
    assert flexops.cross_entropy(source * 1, target, ignore_index=-1, inplace=inplace).isnan()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.usefixtures("both")
def test_nothing_but_ignored_rows(inplace):
    source = torch.randn(3, 5, requires_grad=True)
    target = torch.full((3,), -100)
    for reduction, expected in (("mean", torch.nan), ("sum", 0.0)):
        loss = flexops.cross_entropy(source * 1, target, reduction=reduction, inplace=inplace)
        torch.testing.assert_close(loss, torch.tensor(expected), equal_nan=True)
        (gradient,) = torch.autograd.grad(loss, source)
        assert not gradient.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("both")
def test_a_layer_with_nothing_but_ignored_rows(dtype):
    x, weight, bias = (
        torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((3, 5), (7, 5), (7,))
    )
    loss = flexops.linear_cross_entropy(x, weight, torch.full((3,), -100), bias)
    assert loss.isnan()
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (x, weight, bias)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.usefixtures("both")
def test_no_rows(reduction):
    x, target = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    weight = torch.zeros(7, 5, requires_grad=True)
    for loss in (
        flexops.cross_entropy(x, target, reduction=reduction),
        flexops.cross_entropy(x * 1, target, reduction=reduction, inplace=True),
        flexops.linear_cross_entropy(x, weight, target, reduction=reduction),
    ):
        torch.testing.assert_close(
            loss, F.cross_entropy(x, target, reduction=reduction), equal_nan=True
        )
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert gradient.shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("both")
def test_large_logits_do_not_overflow(dtype):
    x = torch.tensor([[6e4, -6e4, 6e4], [-6e4, -6e4, -6e4]]).to(dtype)
    loss = flexops.cross_entropy(x, torch.tensor([0, 2]), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([2.0, 3.0]).log(), atol=1e-2, rtol=0)


# ---- in place ----


def test_the_gradient_lies_over_the_logits():
    source = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([1, 2, 3, 999])
    logits = source * 1
    (expected,) = torch.autograd.grad(F.cross_entropy(source, target), source)
    loss = flexops.cross_entropy(logits, target, inplace=True)
    torch.testing.assert_close(logits.detach(), expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.data_ptr() == logits.data_ptr()


def test_misuse_of_destroyed_logits_is_found():
    source, target = torch.randn(3, 5, requires_grad=True), torch.tensor([1, 2, 3])
    logits = torch.tanh(source)  # whose backward pass needs its result
    loss = flexops.cross_entropy(logits, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = source * 1
    loss = flexops.cross_entropy(logits, target, inplace=True)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = flexops.cross_entropy(source * 1, target, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_are_left_alone_where_nothing_needs_a_gradient():
    x, target = torch.randn(3, 5), torch.tensor([1, 2, 3])
    before = x.clone()
    flexops.cross_entropy(x, target, inplace=True)
    with torch.no_grad():
        flexops.cross_entropy(x.requires_grad_(), target, inplace=True)
    assert torch.equal(x, before)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_with_gaps_between_rows(reduction):
    wide = torch.randn(4, 70, generator=torch.Generator().manual_seed(0))
    before, target = wide.clone(), torch.tensor([1, 2, 3, 63])
    logits = wide[:, 3:67].requires_grad_()
    loss = flexops.cross_entropy(logits, target, reduction=reduction, inplace=True)
    (gradient,) = torch.autograd.grad((loss * 3).sum(), logits)
    plain = before[:, 3:67].clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        (F.cross_entropy(plain, target, reduction=reduction) * 3).sum(), plain
    )
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, 67:], before[:, 67:])


# ---- the linear layer ----


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.usefixtures("both")
def test_layer_and_loss_in_chunks(reduction, chunk_size):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((2, 13, 16), (33, 16), (33,))
    )
    target = torch.randint(0, 33, (2, 13), generator=generator)
    target[0, 4] = -100
    for inputs in ((x, weight, bias), (x,), (weight,), (bias,)):
        actual = flexops.linear_cross_entropy(
            x, weight, target, bias, label_smoothing=0.1, reduction=reduction, chunk_size=chunk_size
        )
        flat = F.linear(x, weight, bias).view(-1, 33)
        expected = F.cross_entropy(
            flat, target.view(-1), label_smoothing=0.1, reduction=reduction
        ).view(actual.shape)
        torch.testing.assert_close(actual, expected)
        weights = torch.randn(actual.shape, generator=generator)
        of_ours = torch.autograd.grad((actual * weights).sum(), inputs)
        torch.testing.assert_close(
            of_ours, torch.autograd.grad((expected * weights).sum(), inputs), rtol=1e-4, atol=1e-5
        )
    with torch.no_grad():
        torch.testing.assert_close(
            flexops.linear_cross_entropy(x, weight, target, None),
            F.cross_entropy(F.linear(x, weight).view(-1, 33), target.view(-1)),
        )


def test_the_weights_gradient_is_summed_in_float32():
    """In bfloat16, many chunks are as exact as one."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((512, 8), (16, 8))
    )
    target = torch.randint(0, 16, (512,), generator=generator)
    (exact,) = torch.autograd.grad(
        F.cross_entropy(F.linear(x.double(), weight.double()), target), weight
    )

    def error(chunk_size: int) -> float:
        (gradient,) = torch.autograd.grad(
            flexops.linear_cross_entropy(x, weight, target, chunk_size=chunk_size), weight
        )
        return float((gradient.double() - exact.double()).norm() / exact.double().norm())

    assert error(4) <= 1.5 * error(512)


def test_the_weights_gradient_summed_as_it_is_stored(monkeypatch):
    """In less memory, and not as exactly: with one rounding for each chunk."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((512, 8), (16, 8))
    )
    target = torch.randint(0, 16, (512,), generator=generator)
    (exact,) = torch.autograd.grad(
        F.cross_entropy(F.linear(x.double(), weight.double()), target), weight
    )
    add, totals = linear_module._add_product, []
    monkeypatch.setattr(
        linear_module,
        "_add_product",
        lambda total, a, b: (totals.append(total.dtype), add(total, a, b)),
    )

    def error(accumulate: str | None, chunk_size: int = 32) -> float:
        totals.clear()
        (gradient,) = torch.autograd.grad(
            flexops.linear_cross_entropy(
                x, weight, target, chunk_size=chunk_size, accumulate=accumulate
            ),
            weight,
        )
        assert gradient.dtype == torch.bfloat16
        return float((gradient.double() - exact.double()).norm() / exact.double().norm())

    exactly = error("float32")
    assert totals == [torch.float32] * 16
    assert error(None) == exactly
    roughly = error("native")
    assert totals == [torch.bfloat16] * 15  # the first chunk's product is the sum so far
    assert exactly < roughly < 16 * 2.0**-8
    few = error(None, 128)
    assert totals == [torch.bfloat16] * 3
    assert few <= 2 * exactly


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_logits_of_one_chunk_are_held_at_once(monkeypatch, softcap):
    linear, held, most = F.linear, list[weakref.ref[Tensor]](), list[int]()

    def noted(*inputs: Any) -> Tensor:
        most.append(sum(one() is not None for one in held))
        held.append(weakref.ref(logits := linear(*inputs)))
        return logits

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    x, weight = (torch.randn(size, 16, requires_grad=True) for size in (40, 50))
    target = torch.randint(0, 50, (40,))
    flexops.linear_cross_entropy(x, weight, target, chunk_size=8, softcap=softcap)
    assert most == [0] * 5


def test_what_is_free_bounds_the_chunk_and_the_sum():
    weight, row, gigabyte = 128256 * 4096, 128256 * 2, 2**30
    for free, rows in (
        (None, 4096),
        (8 * gigabyte, 4096),
        (gigabyte, 2048),
        (gigabyte // 8, 256),
        (0, 64),
    ):
        sizes = [
            part.stop - part.start for part in linear_module._chunks(8192, row, 0, 2 * weight, free)
        ]
        assert sum(sizes) == 8192
        assert max(sizes) <= rows < max(sizes) + 128, (free, sizes)
    assert [
        part.stop - part.start for part in linear_module._chunks(8192, row, 4096, 2 * weight, 0)
    ] == [4096, 4096]
    for accumulate, free, wide in (
        (0, None, True),
        (0, 8 * gigabyte, True),
        (0, 2 * gigabyte, False),
        (1, 0, True),
        (2, 8 * gigabyte, False),
    ):
        assert linear_module._sums_wide(accumulate, 5, weight, 2, gigabyte, free) is wide
        assert linear_module._sums_wide(accumulate, 4, weight, 2, gigabyte, free) is (
            accumulate == 1
        )


# ---- the soft cap, and what else is returned ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.usefixtures("both")
def test_accuracy_and_z_loss(reduction, softcap, weighted):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((3, 20, 16), (5, 16))
    )
    target = torch.randint(0, 5, (3, 20), generator=generator)
    target[0, 4] = -100
    class_weight = torch.rand(5, generator=generator) if weighted else None
    options: dict[str, Any] = {
        "z_loss": 0.01,
        "reduction": reduction,
        "softcap": softcap,
        "class_weight": class_weight,
        "chunk_size": 7,
    }
    logits = F.linear(x, weight).flatten(0, 1)
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    used, flat = target.flatten() != -100, target.flatten()
    by = torch.ones(60) if class_weight is None else class_weight[flat.clamp(0)]
    right = ((logits.argmax(1) == flat) & used).float()
    part = 0.01 * logits.logsumexp(1).square() * by * used
    losses = F.cross_entropy(logits, flat, class_weight, reduction="none") + part
    if reduction == "none":
        expected = [each.view(3, 20) for each in (losses, right, part)]
    else:
        over = (1.0, 1.0) if reduction == "sum" else (by[used].sum(), used.sum())
        expected = [losses.sum() / over[0], right.sum() / over[1], part.sum() / over[0]]
    for needs_gradient in (True, False):
        with torch.set_grad_enabled(needs_gradient):
            loss, accuracy, z_loss = flexops.linear_cross_entropy(
                x, weight, target, **options, return_accuracy=True, return_z_loss=True
            )
        for one, other in zip((loss, accuracy, z_loss), expected, strict=True):
            torch.testing.assert_close(one.detach(), other.detach())
        assert not accuracy.requires_grad
        assert not z_loss.requires_grad
        assert loss.requires_grad is needs_gradient
        assert torch.equal(
            flexops.linear_cross_entropy(x, weight, target, **options, return_accuracy=True)[1],
            accuracy,
        )
        assert torch.equal(
            flexops.linear_cross_entropy(x, weight, target, **options, return_z_loss=True)[1],
            z_loss,
        )
    given = torch.randn(expected[0].shape, generator=generator)
    loss = flexops.linear_cross_entropy(x, weight, target, **options, return_accuracy=True)[0]
    for one, other in zip(
        *(torch.autograd.grad(each, (x, weight), given) for each in (loss, expected[0])),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_accuracy_and_z_loss_where_no_row_counts():
    x, weight, target = (
        torch.randn(3, 4, requires_grad=True),
        torch.randn(5, 4),
        torch.full((3,), -100),
    )
    for class_weight in (None, torch.ones(5)):
        both = {
            "z_loss": 0.1,
            "class_weight": class_weight,
            "return_accuracy": True,
            "return_z_loss": True,
        }
        loss, accuracy, z_loss = flexops.linear_cross_entropy(x, weight, target, **both)  # type: ignore[call-overload]
        assert loss.isnan()
        assert accuracy.isnan()
        assert z_loss.isnan()
        assert not torch.autograd.grad(loss, x)[0].any()
        assert not any(
            each.any()
            for each in flexops.linear_cross_entropy(x, weight, target, reduction="none", **both)
        )  # type: ignore[call-overload]


@pytest.mark.usefixtures("transformers_models")
def test_gemma_2s_loss():
    """That of transformers' own model, with its gradients."""
    from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=61, final_logit_softcapping=0.5, **sizes))
    model.lm_head.weight.data.mul_(20.0)  # where the cap is felt
    tokens = torch.randint(0, 61, (2, 9))

    def ours() -> Tensor:
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        return flexops.linear_cross_entropy(
            hidden, model.lm_head.weight, tokens[:, 1:], softcap=0.5
        )

    losses, gradients = [], []
    for loss in (ours(), model(tokens, labels=tokens).loss):
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*losses)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_chunks():
    for weight, rows in ((128256 * 4096 * 2, 4096), (2**20, 1024)):
        sizes = [
            part.stop - part.start for part in linear_module._chunks(8192, 128256 * 2, 0, weight)
        ]
        assert sum(sizes) == 8192
        assert set(sizes) == {rows}
    assert linear_module._chunks(10, 20, 4, 0) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert linear_module._chunks(0, 20, 0, 0) == []
    assert linear_module._chunks(100, 28, 0, 0) == [slice(0, 100)]


def test_never_all_logits(monkeypatch):
    largest = 0
    linear = F.linear

    def watched(*args: Any) -> Tensor:
        nonlocal largest
        logits = linear(*args)
        largest = max(largest, logits.shape[0])
        return logits

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    x, weight = torch.randn(100, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    flexops.linear_cross_entropy(
        x, weight, torch.zeros(100, dtype=torch.int64), chunk_size=16
    ).backward()
    assert largest == 16
