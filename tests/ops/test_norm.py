"""The norms on the CPU: the contract, and what is special: mixed dtypes, lengths, special values,
codes, which gradients are made."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import Case, Contract, Make, Recorder, Refusal, tensors_of
from norm_cases import DTYPES, ROUNDING, Drawn, compare_all
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexops
from flexops.build.load import loader
from flexops.ops._register import operator_of, reference_of


def affine(make: Make, shape: tuple[int, ...]) -> tuple[Any, ...]:
    return make(*shape, shift=0.5), make(shape[-1], scale=0.5, shift=1.0), make(shape[-1])


def scaled(make: Make, shape: tuple[int, ...]) -> tuple[Any, ...]:
    return affine(make, shape)[:2]


def with_residual(inputs: Any) -> Any:
    def make_inputs(make: Make, shape: tuple[int, ...]) -> tuple[Any, ...]:
        x, *parameters = inputs(make, shape)
        return x, make(*shape), *parameters

    return make_inputs


def layer_norm_oracle(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def rms_norm_oracle(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def with_gain(oracle: Any) -> Any:
    """With 1 added to the weight."""
    return lambda x, weight, *bias: oracle(x, weight + 1, *bias)


def after_sum(oracle: Any) -> Any:
    def summed(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return oracle(total, *parameters), total

    return summed


def decoded(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Coarse enough for a code that is one off, because it lies between two and sums are rounded
    another way."""
    values, scales = flexops.rms_norm_quantized(x, weight)
    return (values.float() * scales).bfloat16(), scales


def decoded_oracle(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x.double(), x.shape[-1:], weight.double(), 1e-6)
    scales = y.abs().amax(-1, keepdim=True) / 127
    return ((y / scales).round() * scales).bfloat16(), scales.float()


X, WEIGHT = torch.ones(2, 4), torch.ones(4)
SHAPES = ((3, 8), (5, 100), (4, 3, 264), (64, 1024))
HUGE = (2**18 + 3, 2**13)


def refusals(name: str, call: Any) -> tuple[Refusal, ...]:
    return (
        Refusal(lambda: call(torch.ones(())), ValueError,
            rf"flexops.{name}: x must have at least one dimension"),
        Refusal(lambda: call(torch.ones(2, 0)), ValueError,
            rf"flexops.{name}: x's last dimension must be from 1 to 65536, got shape \[2, 0\]"),
        Refusal(lambda: call(torch.ones(65537)), ValueError,
            rf"flexops.{name}: x's last dimension"),
        Refusal(lambda: call(X, weight=torch.ones(5)), ValueError,
            rf"flexops.{name}: weight must have shape \[4\]"),
        Refusal(lambda: call(X, weight=torch.ones(1, 4)), ValueError,
            rf"flexops.{name}: weight must have shape"),
        Refusal(lambda: call(X, weight=torch.ones(4, device="meta")), ValueError,
            rf"flexops.{name}: weight must be on the device of x"),
        Refusal(lambda: call(X, eps=-1.0), ValueError, rf"flexops.{name}: eps must be at least 0"),
        Refusal(lambda: call(X, eps=None), TypeError, rf"flexops.{name}: eps must be a number"),
        Refusal(lambda: call(X, eps=float("nan")), ValueError,
            rf"flexops.{name}: eps must be at least 0"),
    )  # fmt: skip


class TestContract(Contract):
    cases = (
        Case(
            "layer_norm",
            "norm",
            flexops.layer_norm,
            affine,
            layer_norm_oracle,
            names=("x", "weight", "bias"),
            differentiable=(0, 1, 2),
            parameters=(1, 2),
            shapes=SHAPES,
            gradients="norm_backward",
            huge=HUGE,
            refusals=(
                *refusals("layer_norm", flexops.layer_norm),
                Refusal(
                    lambda: flexops.layer_norm(X, WEIGHT, torch.ones(3)),
                    ValueError,
                    r"flexops.layer_norm: bias must have shape \[4\]",
                ),
            ),
        ),
        Case(
            "rms_norm",
            "norm",
            flexops.rms_norm,
            scaled,
            rms_norm_oracle,
            names=("x", "weight"),
            differentiable=(0, 1),
            parameters=(1,),
            shapes=SHAPES,
            gradients="norm_backward",
            huge=HUGE,
            refusals=refusals("rms_norm", flexops.rms_norm),
        ),
        Case(
            "rms_norm (1 + weight)",
            "norm",
            functools.partial(flexops.rms_norm, offset=1.0),
            scaled,
            with_gain(rms_norm_oracle),
            names=("x", "weight"),
            differentiable=(0, 1),
            parameters=(1,),
            shapes=SHAPES,
            gradients="norm_backward",
        ),
        Case(
            "add_layer_norm (1 + weight)",
            "norm",
            functools.partial(flexops.add_layer_norm, offset=1.0),
            with_residual(affine),
            after_sum(with_gain(layer_norm_oracle)),
            names=("x", "residual", "weight", "bias"),
            differentiable=(0, 1, 2, 3),
            parameters=(2, 3),
            shapes=SHAPES,
            gradients="norm_backward",
        ),
        Case(
            "add_layer_norm",
            "norm",
            flexops.add_layer_norm,
            with_residual(affine),
            after_sum(layer_norm_oracle),
            names=("x", "residual", "weight", "bias"),
            differentiable=(0, 1, 2, 3),
            parameters=(2, 3),
            shapes=SHAPES,
            gradients="norm_backward",
            huge=(2**18 + 3, 2**13),
            refusals=(
                *refusals(
                    "add_layer_norm", lambda x, **keywords: flexops.add_layer_norm(x, x, **keywords)
                ),
                Refusal(
                    lambda: flexops.add_layer_norm(X, X[:1]),
                    ValueError,
                    r"flexops.add_layer_norm: residual must have x's shape \[2, 4\]",
                ),
                Refusal(
                    lambda: flexops.add_layer_norm(X, None),
                    TypeError,
                    r"flexops.add_layer_norm: residual must be a tensor",
                ),  # type: ignore[arg-type]
            ),
        ),
        Case(
            "add_rms_norm",
            "norm",
            flexops.add_rms_norm,
            with_residual(scaled),
            after_sum(rms_norm_oracle),
            names=("x", "residual", "weight"),
            differentiable=(0, 1, 2),
            parameters=(2,),
            shapes=SHAPES,
            gradients="norm_backward",
            huge=(2**18 + 3, 2**13),
            refusals=(
                *refusals(
                    "add_rms_norm", lambda x, **keywords: flexops.add_rms_norm(x, x, **keywords)
                ),
                Refusal(
                    lambda: flexops.add_rms_norm(X, X.to("meta")),
                    ValueError,
                    r"flexops.add_rms_norm: residual must be on the device of x",
                ),
            ),
        ),
        Case(
            "rms_norm_quantized",
            "norm",
            decoded,
            scaled,
            decoded_oracle,
            names=("x", "weight"),
            parameters=(1,),
            shapes=SHAPES,
            huge=HUGE,
            accuracy=False,
            refusals=(
                *refusals("rms_norm_quantized", flexops.rms_norm_quantized),
                Refusal(
                    lambda: flexops.rms_norm_quantized(X, dtype=torch.uint8),
                    TypeError,
                    r"flexops.rms_norm_quantized: dtype must be torch.int8",
                ),
                Refusal(
                    lambda: flexops.rms_norm_quantized(X, residual=X[0]),
                    ValueError,
                    r"flexops.rms_norm_quantized: residual must have x's shape",
                ),
            ),
        ),
    )


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    for family in ("norm", "norm_backward"):
        native_kernels(family, "cpu")


# ---- every length, mixed dtypes ----


def compare_everything(seeds: range) -> None:
    """Kernels against references, with dtypes, lengths, strides and parts left out drawn at
    random."""
    assert loader.ensure("norm", "cpu")
    assert loader.ensure("norm_backward", "cpu")
    for seed in seeds:
        torch.manual_seed(seed)
        choose = random.Random(seed)
        rows, columns = (
            choose.choice((1, 3, 40)),
            choose.choice((*range(1, 70), 255, 512, 1000, 1027, 4096, 9000)),
        )
        x_dtype, row_dtype, weight_dtype, bias_dtype = (choose.choice(DTYPES) for _ in range(4))
        x, residual, grad, also = (
            (torch.randn(rows, columns + pad) * 3 + 1).to(dtype)[:, pad:]
            for dtype, pad in zip(
                (x_dtype, row_dtype, x_dtype, row_dtype),
                (choose.choice((0, 0, 1, 4)) for _ in range(4)),
                strict=True,
            )
        )
        weight = torch.randn(columns).to(weight_dtype) if choose.random() < 0.8 else None
        bias = torch.randn(columns).to(bias_dtype) if choose.random() < 0.8 else None
        needs = [choose.random() < 0.8 for _ in range(3)]
        compare_all(
            Drawn(
                *(x, residual, grad, also if seed % 3 else None, weight, bias, needs, bias_dtype),
                offset=float(seed % 2),
            )
        )


@pytest.mark.usefixtures("native")
def test_any_lengths_and_dtypes():
    compare_everything(range(150))


@pytest.mark.usefixtures("native")
def test_the_number_of_threads_changes_no_bit():
    x, weight, bias = (
        torch.randn(3000, 129).requires_grad_(),
        torch.randn(129).requires_grad_(),
        torch.randn(129).requires_grad_(),
    )
    grad, found = torch.randn(3000, 129), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                torch.autograd.grad(flexops.layer_norm(x, weight, bias), (x, weight, bias), grad)
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ---- special values ----


@pytest.mark.parametrize("native_kernels", [True, False])
def test_special_rows(native_kernels):
    x = torch.randn(6, 33)
    x[1], x[2, 5], x[3, 7], x[4] = 0, torch.nan, torch.inf, 3.0
    if native_kernels:
        layer, rms = flexops.layer_norm(x), flexops.rms_norm(x)
    else:
        layer = reference_of("flexops::layer_norm.forward")(x, None, None, 1e-5, 0.0)[0]
        rms = reference_of("flexops::rms_norm.forward")(x, None, 1e-6, 0.0)[0]
    assert layer[[2, 3]].isnan().all()
    assert (layer[[1, 4]] == 0).all()
    assert layer[[0, 5]].isfinite().all()
    assert rms[2].isnan().all()
    assert rms[3, 7].isnan()
    assert (rms[3, [0, 8]] == 0).all()
    assert (rms[1] == 0).all()
    torch.testing.assert_close(rms[4], torch.ones(33))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
def test_a_large_mean_is_no_harm(mean):
    """The variance is not the difference of two large numbers."""
    torch.manual_seed(0)
    x = torch.randn(64, 4096) + mean
    exact = F.layer_norm(x.double(), (4096,))
    ours, torchs = (
        (y.double() - exact).abs().max() for y in (flexops.layer_norm(x), F.layer_norm(x, (4096,)))
    )
    assert ours <= 1.5 * torchs + 2e-7
    assert ours <= 2**-24 * mean + 7e-7, "as if the mean were the nearest float32"


@pytest.mark.usefixtures("native")
def test_equal_large_elements_have_no_negative_variance():
    """The rounding of a variance of zero may be less than -eps."""
    x = torch.logspace(0, 18, 256)[:, None].expand(256, 1000)
    assert (flexops.layer_norm(x) == 0).all()


def test_one_column():
    x = torch.tensor([[2.0], [-3.0], [0.0]], requires_grad=True)
    y = flexops.layer_norm(x, torch.full((1,), 5.0), torch.full((1,), 7.0))
    assert (y == 7).all()
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert (gradient == 0).all()
    torch.testing.assert_close(
        flexops.rms_norm(x.detach(), eps=0.0),
        torch.tensor([[1.0], [-1.0], [torch.nan]]),
        equal_nan=True,
    )


# ---- codes ----


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 4096])
def test_codes(dtype, columns):
    torch.manual_seed(columns)
    for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        x, residual, weight = (
            torch.randn(9, columns).to(x_dtype),
            torch.randn(9, columns).to(weight_dtype),
            torch.randn(columns).to(weight_dtype),
        )
        values, scales = flexops.rms_norm_quantized(x, weight, dtype=dtype)
        assert_codes(
            values, scales, *reference_of("flexops::rms_norm_quantized")(x, weight, 1e-6, dtype)
        )
        exact = F.rms_norm(x.double(), (columns,), weight.double(), 1e-6)
        step = (
            scales.double() * 0.5
            if dtype == torch.int8
            else torch.maximum(exact.abs() / 16, scales.double() * 2.0**-10)
        )
        assert (
            (values.double() * scales.double() - exact).abs() <= step * 1.001 + 1e-6 * exact.abs()
        ).all()
        values, scales, total = flexops.rms_norm_quantized(
            x, weight, dtype=dtype, residual=residual
        )
        expected = reference_of("flexops::add_rms_norm_quantized")(x, residual, weight, 1e-6, dtype)
        assert_codes(values, scales, *expected[:2])
        assert torch.equal(total, expected[2])
        assert total.dtype == weight_dtype


def assert_codes(values: Tensor, scales: Tensor, expected: Tensor, expected_scales: Tensor) -> None:
    """The same, but for ties that sums in another order push to the other side."""
    assert values.shape == expected.shape
    assert values.dtype == expected.dtype
    assert scales.shape == expected_scales.shape == (*values.shape[:-1], 1)
    torch.testing.assert_close(scales, expected_scales, rtol=2e-6, atol=0, equal_nan=True)
    difference = (values.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= 1 + difference.numel() // 500


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_special_rows(dtype):
    x = torch.randn(5, 40)
    x[1], x[2, 3], x[3, 4], x[4] = 0, torch.nan, -torch.inf, x[4] * 1e-40
    native = flexops.rms_norm_quantized(x, dtype=dtype)
    plain = reference_of("flexops::rms_norm_quantized")(x, None, 1e-6, dtype)
    for values, scales in (native, plain):
        assert scales[1] == 1
        assert scales[2:4].isnan().all()
        assert (values[1:4].float() == 0).all()
        top = 127 if dtype == torch.int8 else 448
        assert values[0].float().abs().max() == top
        assert scales[4] == 2**-126, "the least whose inverse is a number"
    torch.testing.assert_close(native[0][4].float(), plain[0][4].float(), rtol=0.1, atol=1)


def test_codes_are_not_differentiable():
    values, scales, total = flexops.rms_norm_quantized(
        X.clone().requires_grad_(), WEIGHT.clone().requires_grad_(), residual=X
    )
    assert not values.requires_grad
    assert not scales.requires_grad
    assert not total.requires_grad


# ---- gradients ----


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_gradients_with_a_residual_of_another_dtype(x_dtype, residual_dtype):
    torch.manual_seed(0)
    x, residual = (
        torch.randn(6, 50).to(x_dtype).requires_grad_(),
        torch.randn(6, 50).to(residual_dtype).requires_grad_(),
    )
    weight = torch.randn(50).requires_grad_()
    y, total = flexops.add_rms_norm(x, residual, weight)
    assert (y.dtype, total.dtype) == (x_dtype, residual_dtype)
    given = torch.randn_like(y), torch.randn_like(total)
    actual = torch.autograd.grad((y, total), (x, residual, weight), given)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, residual, weight)]
    sums = exact[0] + exact[1]
    expected = torch.autograd.grad(
        (F.rms_norm(sums, (50,), exact[2], 1e-6), sums), exact, [grad.double() for grad in given]
    )
    for one, other, leaf in zip(actual, expected, (x, residual, weight), strict=True):
        assert one.dtype == leaf.dtype
        grain = 4 * max(ROUNDING[x_dtype], ROUNDING[residual_dtype])
        assert (
            (one.double() - other).abs() <= grain * (other.abs() + other.square().mean().sqrt())
        ).all()


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_the_residuals_gradient_is_added_in_the_same_pass(name):
    """A chain of blocks, as models have them: no addition of tensors is left, forward or
    backward."""
    x, weights = (
        torch.randn(6, 32, requires_grad=True),
        [torch.randn(32, requires_grad=True) for _ in range(3)],
    )
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def chain(add: Callable[..., Any]) -> Tensor:
        y, residual = x * 1.0, torch.ones_like(x)
        for weight in weights:
            y, residual = add(y, residual, weight)
            y = y.sin()
        return (y * residual).sum()

    with Watch():
        found = torch.autograd.grad(chain(getattr(flexops, name)), [x, *weights])
    assert not [call for call in seen if call.startswith("aten.add")], seen
    norm = (
        (lambda s, w: F.rms_norm(s, (32,), w, 1e-6))
        if name == "add_rms_norm"
        else (lambda s, w: F.layer_norm(s, (32,), w, None, 1e-5))
    )
    wanted = torch.autograd.grad(
        chain(lambda y, residual, weight: (norm(y + residual, weight), y + residual)), [x, *weights]
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_the_residual_goes_on():
    """The norm's result unused: its gradient is None, and the residual's passes through."""
    x, residual, weight = (
        torch.randn(3, 8, requires_grad=True),
        torch.randn(3, 8, requires_grad=True),
        torch.randn(8, requires_grad=True),
    )
    _, total = flexops.add_rms_norm(x, residual, weight)
    grad = torch.randn(3, 8)
    of_x, of_residual, of_weight = torch.autograd.grad(
        total, (x, residual, weight), grad, allow_unused=True
    )
    assert torch.equal(of_x, grad)
    assert torch.equal(of_residual, grad)
    assert of_weight is None


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_statistics_are_for_gradients_alone(name, gradient):
    """A call asks for them where something requires a gradient; results are the same bits, from the
    operators for users as well."""
    torch.manual_seed(0)
    arguments: list[Any] = [torch.randn(5, 96) for _ in range(1 + name.startswith("add"))]
    arguments += [torch.randn(96) for _ in range(1 + name.endswith("layer_norm"))]
    for argument in arguments:
        argument.requires_grad_(gradient)
    with Recorder() as recorder:
        results = tensors_of(getattr(flexops, name)(*arguments, 1e-5))
    op, plain, forward = (
        operator_of(f"flexops::{name}{way}") for way in ("", "_plain", ".forward")
    )
    assert {call[0] for call in recorder.calls} == ({op, forward} if gradient else {op})
    for_users = tensors_of(op(*arguments, 1e-5, 0.0))
    leaves = [argument.detach() for argument in arguments]
    for one, *others in zip(
        results,
        for_users,
        tensors_of(plain(*leaves, 1e-5, 0.0)),
        tensors_of(forward(*leaves, 1e-5, 0.0))[:-1],
        strict=True,
    ):
        assert all(torch.equal(one, other) for other in others)
    if gradient:
        given = [torch.randn_like(one) for one in results]
        for one, other in zip(
            torch.autograd.grad(results, arguments, given),
            torch.autograd.grad(for_users, arguments, given),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_no_rows_give_zero_gradients():
    x, weight, bias = (
        torch.randn(0, 8, requires_grad=True),
        torch.randn(8, requires_grad=True),
        torch.randn(8, requires_grad=True),
    )
    gradients = torch.autograd.grad(flexops.layer_norm(x, weight, bias).sum(), (x, weight, bias))
    assert gradients[0].shape == (0, 8)
    assert (gradients[1] == 0).all()
    assert (gradients[2] == 0).all()


def test_a_module_trains_as_torchs():
    torch.manual_seed(0)
    plain = torch.nn.LayerNorm(16)
    with torch.no_grad():
        plain.weight.normal_()
    x = torch.randn(4, 5, 16)
    expected = torch.autograd.grad(plain(x).square().sum(), tuple(plain.parameters()))
    y = flexops.layer_norm(x, plain.weight, plain.bias, plain.eps)
    actual = torch.autograd.grad(y.square().sum(), tuple(plain.parameters()))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
