"""bias_gelu, bias_silu, swiglu and geglu: the shared contract, float64, special values, and every
way to pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import (
    ROUNDING,
    Case,
    Contract,
    Make,
    Refusal,
    Shape,
    assert_near,
    run,
)
from torch import Tensor

import flexops
from flexops.build.load import loader
from flexops.ops import activation as activation_module

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES: tuple[Shape, ...] = ((3, 8), (2, 5, 100), (64, 1032))
SMALL = torch.zeros(3, 8)


def wrong(
    message: str, function: Any, args: Any, error: type[Exception] = ValueError, **options: Any
) -> Refusal:
    return Refusal(lambda: function(*args, **options), error, message)


def biased_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return make(*shape, scale=2.0), make(shape[-1])


def plain_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return (make(*shape, scale=2.0),)


def gated_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return make(*shape, scale=2.0), make(*shape)


def packed_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return (make(*shape[:-1], 2 * shape[-1], scale=2.0),)


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def kind(
    inputs: Callable[..., tuple[Tensor, ...]], *names: str, **more: Any
) -> Callable[..., Case]:
    """Makes the cases of one kind of call; ``more`` and what a case adds are options of Case."""

    def case(name: str, call: Any, oracle: Any, **options: Any) -> Case:
        known = {"names": names, "differentiable": tuple(range(len(names))), "shapes": SHAPES}
        return Case(name, "activation", call, inputs, oracle, **(known | more | options))

    return case


biased = kind(biased_inputs, "x", "bias", parameters=(1,), huge=(2**18 + 3, 2**13))
plain = kind(plain_inputs, "x", huge=(2**18 + 3, 2**13))
gated = kind(gated_inputs, "gate", "up")
packed = kind(packed_inputs, "gate")


def layer_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return *gated_inputs(make, shape), make(6, shape[-1], scale=shape[-1] ** -0.5), make(6)


def packed_layer_inputs(make: Make, shape: Shape) -> tuple[Tensor, ...]:
    return *packed_inputs(make, shape), make(6, shape[-1], scale=shape[-1] ** -0.5)


layer = kind(layer_inputs, "gate", "up", "weight", "bias", parameters=(2, 3), inductor=False)
packed_layer = kind(packed_layer_inputs, "gate", "weight", parameters=(1,), inductor=False)


class TestLayerContract(Contract):
    cases = (
        layer("swiglu_linear", flexops.swiglu_linear, lambda g, u, w,
            b: F.linear(F.silu(g) * u, w, b),
            refusals=(
                wrong(r"weight must have shape \[any, 8\], got \[5, 7\]", flexops.swiglu_linear,
                    (SMALL, SMALL, torch.zeros(5, 7))),
                wrong(r"weight must have shape \[any, 4\]", flexops.swiglu_linear,
                    (SMALL, None, torch.zeros(5, 8))),
                wrong(r"bias must have shape \[5\]", flexops.swiglu_linear,
                    (SMALL, SMALL, torch.zeros(5, 8), torch.zeros(4))),
                wrong(r"up must have gate's shape", flexops.swiglu_linear,
                    (SMALL, SMALL[:2], torch.zeros(5, 8))),
                wrong('geglu_linear: approximate must be "none" or "tanh"', flexops.geglu_linear,
                    (SMALL, SMALL, torch.zeros(5, 8)), approximate="erf"),
            )),
        layer("geglu_linear", lambda g, u, w,
            b: flexops.geglu_linear(g, u, w, b, approximate="tanh"), lambda g, u, w,
            b: F.linear(F.gelu(g, approximate="tanh") * u, w, b)),
        packed_layer("geglu_linear of pairs", lambda x,
            w: flexops.geglu_linear(x, None, w, interleaved=True), lambda x,
            w: F.linear(F.gelu(pairs(x)[0]) * pairs(x)[1], w)),
    )  # fmt: skip


# ---- what is kept for the backward pass ----


def kept_bytes(forward: Callable[[], Tensor], parameters: tuple[Tensor, ...]) -> int:
    """Of all tensors that a forward pass keeps, each once, without the parameters."""
    kept: dict[int, int] = {}
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (alive.append(tensor), keep(tensor))[1], lambda tensor: tensor
    ):
        forward().sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_tensors_are_kept_and_not_three(dtype):
    """In a block as models have it: of its inner width the gate and up, which are the projections'
    results; and its input."""
    torch.manual_seed(0)
    rows, width, inner = 40, 8, 64
    x = torch.randn(rows, width, dtype=dtype)
    weights = tuple(
        (torch.randn(shape, dtype=dtype) * 0.2).requires_grad_()
        for shape in ((inner, width), (inner, width), (width, inner))
    )
    gate, up, down = weights
    packed = torch.cat([gate, up]).detach().requires_grad_()
    unit = rows * inner * x.element_size()
    blocks: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "two operations": (
            3,
            lambda: F.linear(flexops.swiglu(F.linear(x, gate), F.linear(x, up)), down),
        ),
        "one": (2, lambda: flexops.swiglu_linear(F.linear(x, gate), F.linear(x, up), down)),
        "packed": (2, lambda: flexops.swiglu_linear(F.linear(x, packed), None, down)),
        "gelu": (2, lambda: flexops.geglu_linear(F.linear(x, gate), F.linear(x, up), down)),
        "torch's": (4, lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)),
    }
    for name, (units, block) in blocks.items():
        assert kept_bytes(block, (*weights, packed)) == units * unit + x.nbytes, name


def test_the_layers_gradients_do_not_harm_what_others_use():
    """Gate and up may be used elsewhere, and the graph twice."""
    torch.manual_seed(0)
    gate, up, weight = (
        torch.randn(shape, requires_grad=True) for shape in ((5, 8), (5, 8), (6, 8))
    )
    for layer, plain in ((flexops.swiglu_linear, F.silu), (flexops.geglu_linear, F.gelu)):
        result = layer(gate * 1, up * 1, weight)
        grad = torch.randn_like(result)
        before = grad.clone()
        first, again = (
            torch.autograd.grad(result, (gate, up, weight), grad, retain_graph=True)
            for _ in range(2)
        )
        assert torch.equal(grad, before)
        assert all(map(torch.equal, first, again))
        for one, other in zip(
            first,
            torch.autograd.grad(F.linear(plain(gate) * up, weight), (gate, up, weight), grad),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
        for wanted in ((gate,), (weight,), (up, weight)):
            results = (layer(gate, up, weight), F.linear(plain(gate) * up, weight))
            for one, other in zip(
                *(torch.autograd.grad(result, wanted, grad) for result in results), strict=True
            ):
                torch.testing.assert_close(one, other)


class TestContract(Contract):
    cases = (
        biased("bias_gelu", flexops.bias_gelu, lambda x, b: F.gelu(x + b), refusals=(
            wrong(r"bias_gelu: bias must have shape \[8\], .*got \[7\]", flexops.bias_gelu,
                (SMALL, torch.zeros(7))),
            wrong("bias must have shape", flexops.bias_gelu, (SMALL, torch.zeros(1, 8))),
            wrong('approximate must be "none", "tanh" or "quick"', flexops.bias_gelu, (SMALL,),
                approximate="erf"),
            wrong("x must have at least one dimension", flexops.bias_gelu, (torch.zeros(()),)),
        )),
        biased("bias_gelu tanh", lambda x, b: flexops.bias_gelu(x, b, "tanh"), lambda x,
            b: F.gelu(x + b, approximate="tanh"), inductor=False),
        biased("bias_gelu quick", lambda x, b: flexops.bias_gelu(x, b, "quick"), lambda x,
            b: (x + b) * torch.sigmoid(1.702 * (x + b)), inductor=False),
        biased("bias_relu2", flexops.bias_relu2, lambda x, b: (x + b).relu().square(),
            inductor=False),
        plain("bias_gelu without a bias", flexops.bias_gelu, F.gelu),
        biased("bias_silu", flexops.bias_silu, lambda x, b: F.silu(x + b), inductor=False),
        gated("swiglu", flexops.swiglu, lambda g, u: F.silu(g) * u, huge=(2**18 + 3, 2**13),
            refusals=(
                wrong(r"swiglu: up must have gate's shape \[3, 8\], got \[2, 8\]", flexops.swiglu,
                    (SMALL, SMALL[:2])),
                wrong("interleaved must be False", flexops.swiglu, (SMALL, SMALL),
                    interleaved=True),
                wrong("up must be float32, as gate, got float16", flexops.swiglu,
                    (SMALL, SMALL.half()), error=TypeError),
                wrong("gate must have an even last dimension", flexops.swiglu, (SMALL[:, :7],)),
                wrong("gate must have at least one dimension", flexops.swiglu, (torch.zeros(()),)),
            )),
        packed("swiglu of halves", flexops.swiglu,
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
        packed(
            "swiglu of pairs",
            lambda x: flexops.swiglu(x, interleaved=True),
            lambda x: F.silu(pairs(x)[0]) * pairs(x)[1],
        ),
        gated("geglu", flexops.geglu, lambda g, u: F.gelu(g) * u,
            refusals=(
                wrong("geglu: approximate must be", flexops.geglu, (SMALL,),
                    approximate="none "),)),
        packed(
            "geglu tanh of pairs",
            lambda x: flexops.geglu(x, approximate="tanh", interleaved=True),
            lambda x: F.gelu(pairs(x)[0], approximate="tanh") * pairs(x)[1],
            huge=(2**17 + 3, 2**13),
        ),
    )  # fmt: skip


# ---- float64 ----

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (flexops.bias_gelu, F.gelu),
    "gelu tanh": (
        lambda x: flexops.bias_gelu(x, None, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "silu": (flexops.bias_silu, F.silu),
}


@pytest.fixture(scope="module")
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("activation", "cpu")


@pytest.mark.parametrize("which", ACTIVATIONS)
@pytest.mark.usefixtures("native")
def test_every_float32_keeps_its_digits(which):
    """Values and derivatives, small ones for negative x too, which 1 + tanh(u) and 1 + erf(x) would
    cancel away."""
    call, oracle = ACTIVATIONS[which]
    x, wide = (
        torch.linspace(-12, 12, 400_001, requires_grad=True),
        torch.linspace(-12, 12, 400_001).double().requires_grad_(),
    )
    value, exact = call(x), oracle(wide)
    assert ((value.double() - exact).abs() <= 4e-6 * exact.abs().clamp(min=1e-5)).all()
    (slope,), (exact_slope,) = (
        torch.autograd.grad(value.sum(), x),
        torch.autograd.grad(exact.sum(), wide),
    )
    near = torch.where(x.abs() < 3, 2e-7, 0.0)  # the derivative of each has a root there
    assert (
        (slope.double() - exact_slope).abs() <= near + 1e-5 * exact_slope.abs().clamp(min=1e-5)
    ).all()


@pytest.mark.parametrize("which", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("native")
def test_every_16_bit_number_is_rounded_right(which, dtype):
    """All of them that are finite: at most a hair more than half a unit in the last place from the
    exact value."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e30)]
    call, oracle = ACTIVATIONS[which]
    exact = oracle(x.double())
    unit = 2 * ROUNDING[dtype] * exact.abs() + torch.finfo(dtype).tiny * ROUNDING[dtype] * 2
    error = (call(x).double() - exact).abs()
    assert (error <= 0.505 * unit + 1e-10).all()


@pytest.mark.parametrize("which", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("native")
def test_special_values_are_as_documented(which, dtype):
    """Not compared with torch's float32 kernels: with AVX-512 torch 2.11 gives NaN for gelu(inf)."""
    call, oracle = ACTIVATIONS[which]
    infinity, nan, largest = float("inf"), float("nan"), torch.finfo(dtype).max
    x = torch.tensor(
        [infinity, -infinity, nan, 0.0, -0.0, 1e4, -1e4, largest, -largest, 1.0], dtype=dtype
    )
    expected = torch.tensor(
        [
            infinity,
            nan,
            nan,
            0.0,
            0.0,
            float(x[5]),
            0.0,
            largest,
            0.0,
            float(oracle(x[9:].double())),
        ],
        dtype=torch.float64,
    ).to(dtype)
    torch.testing.assert_close(call(x), expected, equal_nan=True)
    torch.testing.assert_close(call(x.repeat(5)), expected.repeat(5), equal_nan=True)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(leaf).sum(), leaf)
    assert slope[:3].isnan().all()  # as torch's
    torch.testing.assert_close(
        slope[3:].float(), torch.tensor([0.5, 0.5, 1.0, 0.0, 1.0, 0.0, float(slope[-1])])
    )
    assert not slope[3:].isnan().any()


# ---- ways to call ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize("columns", [8, 7, 1, 1500])
def test_ways_to_pack_give_the_same_bits(name, dtype, columns):
    function = getattr(flexops, name)
    gate, up, grad = (
        torch.randn(6, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for seed in range(3)
    )
    halves, alternating = torch.cat([gate, up], -1), torch.stack([gate, up], -1).flatten(-2)
    expected = function(gate, up)
    assert torch.equal(function(halves), expected)
    assert torch.equal(function(alternating, interleaved=True), expected)
    assert torch.equal(function(*halves.chunk(2, -1)), expected)
    leaves = [x.clone().requires_grad_() for x in (gate, up, halves, alternating)]
    of_gate, of_up = torch.autograd.grad(function(leaves[0], leaves[1]), leaves[:2], grad)
    (of_halves,) = torch.autograd.grad(function(leaves[2]), leaves[2], grad)
    (of_alternating,) = torch.autograd.grad(function(leaves[3], interleaved=True), leaves[3], grad)
    assert torch.equal(of_halves, torch.cat([of_gate, of_up], -1))
    assert torch.equal(of_alternating, torch.stack([of_gate, of_up], -1).flatten(-2))
    assert of_halves.is_contiguous()


def test_only_inputs_are_kept_for_backward():
    x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    result = flexops.bias_gelu(x, bias)  # held: torch 2.4 frees what a node saved with its result
    assert {tensor.data_ptr() for tensor in result.grad_fn.saved_tensors} == {
        x.data_ptr(),
        bias.data_ptr(),
    }  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("columns", [1, 24, 1023, 1025])
@pytest.mark.usefixtures("native")
def test_the_bias_gradient_adds_up_all_rows(rows, columns):
    x, bias, grad = (
        torch.randn(shape, generator=torch.Generator().manual_seed(4))
        for shape in ((rows, columns), (columns,), (rows, columns))
    )
    for dtype in DTYPES:
        arguments = (grad.to(dtype), x.to(dtype), bias)
        of_x, of_bias = torch.ops.flexops.bias_silu_backward(*arguments, True)
        exact = activation_module._biased_backward(
            *(value.double() for value in arguments), "silu", True
        )[1]
        torch.testing.assert_close(of_bias.double(), exact, atol=2e-6 * rows**0.5, rtol=1e-5)
        assert of_x.dtype == dtype


def test_no_rows_give_a_bias_gradient_of_zeros():
    x, bias = torch.zeros(0, 8), torch.randn(8, requires_grad=True)
    flexops.bias_gelu(x, bias).sum().backward()
    assert bias.grad is not None
    assert (bias.grad == 0).all()


def test_a_vector_has_a_bias_too():
    x, bias = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert_near(
        run(flexops.bias_silu, (x, bias), (0, 1)),
        run(lambda x, b: F.silu(x + b), (x.detach().double(), bias.detach().double()), (0, 1)),
        2.0**-24,
    )


@pytest.mark.usefixtures("native")
def test_the_ops_themselves_check_too():
    """For those who call torch.ops directly: a wrong argument is an error, never a wrong
    address."""
    ops, x = torch.ops.flexops, torch.zeros(4, 8)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: ops.bias_gelu(x.double(), None, 0), "bias_gelu: x must be float32"),
        (lambda: ops.bias_gelu(x, torch.zeros(7), 0), r"bias_gelu: bias must have shape \[8\]"),
        (lambda: ops.bias_silu(x, torch.zeros(8, dtype=torch.int64)),
         "bias_silu: bias must be float32"),
        (lambda: ops.bias_silu_backward(x[:3], x, None, False),
         "bias_silu_backward: grad must have x's shape"),
        (lambda: ops.bias_silu_backward(x.half(), x, None, False), "grad must be float32"),
        (lambda: ops.bias_silu_backward(x, x, None, True),
         "bias_gradient must be false without a bias"),
        (lambda: ops.swiglu(x, x[:, :4], False), "swiglu: up must have gate's shape"),
        (lambda: ops.swiglu(x, x.half(), False), "up must be float32"),
        (lambda: ops.swiglu(x, x, True), "interleaved must be false"),
        (lambda: ops.geglu(x[:, :7], None, False, False),
         "geglu: gate must have an even last dimension"),
        (lambda: ops.geglu_backward(x, x, None, False, False),
         "geglu_backward: grad must have the result's shape"),
    ]  # fmt: skip
    assert loader.ensure("activation", "cpu")
    for call, message in wrong:
        with torch.no_grad(), pytest.raises(RuntimeError, match=message):
            call()
