"""flexops.fp8_linear on the CPU: the bits of the quantization, the products' formulas, gradients
and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexops
from flexops.ops import fp8_linear as module

E4M3 = torch.float8_e4m3fn


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales.double()


def expected_scale(largest: float) -> float:
    """The least power of two with ``largest <= 448 * scale``, by other means than the operator."""
    if largest == 0:
        return 1.0
    scale = 2.0 ** (math.floor(math.log2(largest)) - 8)
    return max(2.0**-126, scale if largest <= 448 * scale else 2 * scale)


def test_scales_are_the_least_powers_of_two():
    edges = [448.0, math.nextafter(448.0, 1e3) + 1e-4, 447.9, 1.75, 1.7500001, 3.5e-38, 0.0, 1e-40]
    x = torch.zeros(16, 16)
    x[: len(edges), 3] = torch.tensor(edges)
    x[8:] = draw(8, 16) * 1e30
    codes, scales, largest = module._rows((x,))
    assert torch.equal(largest, x.abs().amax(0))
    for row, scale in zip(x.abs().amax(1).tolist(), scales[:, 0].tolist(), strict=True):
        assert scale == expected_scale(row)
    assert codes.float().abs().max() <= 448
    exact = (x.double() / scales.double()).float().to(E4M3)
    assert torch.equal(codes.view(torch.uint8), exact.view(torch.uint8))


def test_columns_of_codes_lose_nothing_but_what_is_subnormal_there():
    x = draw(40, 48) * torch.logspace(-2, 2, 40)[:, None]
    codes, scales, largest = module._rows((x,))
    turned, column_scales = module._columns((codes,), largest, scales)
    assert turned.shape == (48, 48)
    assert not turned[:, 40:].float().any()
    before, after = values(codes, scales).t(), values(turned, column_scales)[:, :40]
    normal = before.abs() >= column_scales.double() * 2.0**-6
    assert torch.equal(before[normal], after[normal])
    assert normal.float().mean() > 0.9
    assert ((before - after).abs() <= column_scales.double() * 2.0**-10).all()


def test_several_matrices_are_one():
    parts = [draw(rows, 32, seed=rows) for rows in (48, 16, 20)]
    largest = torch.cat(parts).abs().amax(0)
    for make in (module._rows, lambda matrices: module._columns(matrices, largest)):
        actual, wanted = make(parts), make((torch.cat(parts),))
        assert all(map(torch.equal, (x.float() for x in actual), (x.float() for x in wanted)))


@pytest.mark.parametrize("recipe", module.RECIPES)
def test_products_and_gradients_are_the_formulas(recipe):
    x, weight, bias = draw(3, 11, 64), draw(48, 64), draw(48)
    args = [one.requires_grad_() for one in (x, weight, bias)]
    y = flexops.fp8_linear(*args, recipe)
    grad = draw(3, 11, 48, seed=1)
    of_x, of_weight, of_bias = torch.autograd.grad(y, args, grad)

    rows, wide = x.detach().reshape(-1, 64), grad.reshape(-1, 48)
    a, w, g = (module._rows((one,)) for one in (rows, weight.detach(), wide))
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4, "check_dtype": False}
    assert_close = torch.testing.assert_close
    products = [values(*one[:2]) for one in (a, w, g)]
    assert_close(y.reshape(-1, 48), products[0] @ products[1].t() + bias.bfloat16(), **close)
    turned = values(*module._columns((weight.detach(),), w[2]))
    assert_close(of_x.reshape(-1, 64), products[2] @ turned.t(), **close)
    if recipe == "rowwise":
        of_g, of_a = (values(*module._columns(one[:1], one[2], one[1])) for one in (g, a))
        outer = of_g @ of_a.t()
    else:
        outer = wide.double().t() @ rows.double()
    assert_close(of_weight, outer, **close)
    assert_close(of_bias, wide.sum(0), **close)
    exact = F.linear(x, weight, bias)
    assert (y - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    "activation", ["silu", pytest.param("none", marks=pytest.mark.extra), "tanh"]
)
@pytest.mark.parametrize("recipe", module.RECIPES)
def test_a_gated_block_is_its_parts(activation, recipe):
    x, gate, up, down = (
        one.requires_grad_() for one in (draw(2, 9, 32), draw(48, 32), draw(48, 32), draw(32, 48))
    )
    grad = draw(2, 9, 32, seed=1)
    y = module.fp8_gated_mlp(x, gate, up, down, activation, recipe)
    both = module.fp8_linears(x, (gate, up), (), recipe)
    inner = (
        flexops.swiglu(both)
        if activation == "silu"
        else flexops.geglu(both, approximate=activation)  # type: ignore[arg-type]
    )
    parts = module.fp8_linears(inner, (down,), (), recipe)
    torch.testing.assert_close(y, parts)
    wanted = torch.autograd.grad(parts, (x, gate, up, down), grad)
    for a, b in zip(torch.autograd.grad(y, (x, gate, up, down), grad), wanted, strict=True):
        assert (a - b).norm() <= 5e-3 * b.norm()  # a code here and there


@pytest.mark.parametrize("activation", module.ACTIVATIONS)
def test_a_gates_gradient_is_its_activations(activation):
    """Its own test: the difference between the two GELUs is less than the error of a code."""
    packed, grad = draw(9, 96).requires_grad_(), draw(9, 48, seed=1)
    gate, up = packed.chunk(2, -1)
    plain = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)
    torch.testing.assert_close(module._gated(packed.detach(), activation), (plain * up).detach())
    (wanted,) = torch.autograd.grad(plain * up, packed, grad)
    found = module._gated_gradient(grad, packed.detach(), activation)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_gives_codes_of_its_result(offset):
    tensors = [draw(2, 9, 32), draw(2, 9, 32, seed=1), draw(32)]
    args = [one.requires_grad_() for one in tensors]
    y, total, codes = module.fp8_add_rms_norm(*args, 1e-6, offset)  # type: ignore[misc]
    plain = flexops.add_rms_norm(*args, offset=offset)
    torch.testing.assert_close(y, plain[0])
    assert torch.equal(total, plain[1])
    for a, b in zip(codes, module._rows((y.detach().view(18, 32),)), strict=True):
        assert torch.equal(a.float(), b.float())
    grad = draw(2, 9, 32, seed=2)
    wanted = torch.autograd.grad(plain[0] + 2 * plain[1], args, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y + 2 * total, args, grad), wanted)
    other = module.fp8_linears(y.detach(), (draw(16, 32),), (), "rowwise", codes=codes)
    assert torch.equal(other, module.fp8_linears(y.detach(), (draw(16, 32),), (), "rowwise"))
    assert module.fp8_add_rms_norm(draw(2, 9), draw(2, 9), draw(9), 1e-6) is None


def test_what_is_not_finite_stays_so_and_zeros_stay_zeros():
    x, weight = draw(5, 32), draw(16, 32).requires_grad_()
    x[1, 3], x[2, 4], x[3] = math.nan, math.inf, 0.0
    x.requires_grad_()
    y = flexops.fp8_linear(x, weight)
    assert y.isnan().all(1).tolist() == [False, True, True, False, False]
    assert not y.detach()[3].any()
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.ones(5, 16))
    assert of_x.isfinite().all()
    assert of_weight.isnan().all()
    y = flexops.fp8_linear(draw(5, 32), weight)
    (of_weight,) = torch.autograd.grad(y, weight, torch.full((5, 16), math.inf))
    assert of_weight.isnan().all()
    y = flexops.fp8_linear(draw(5, 32), weight)
    (of_weight,) = torch.autograd.grad(y, weight, torch.full((5, 16), 1e30))  # beyond e4m3
    assert of_weight.isfinite().all()


@pytest.mark.parametrize("factor", [2.0**80, 2.0**-60])
def test_gradients_of_any_magnitude_keep_their_bits(factor):
    weight, given = draw(16, 32).requires_grad_(), draw(4, 16)
    x = draw(4, 32).requires_grad_()
    expected = torch.autograd.grad(flexops.fp8_linear(x, weight), (x, weight), given)
    found = torch.autograd.grad(flexops.fp8_linear(x, weight), (x, weight), given * factor)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other * factor)


def test_a_frozen_weight_keeps_no_input():
    kept: list[Tensor] = []
    x, weight = draw(6, 32).requires_grad_(), draw(16, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = flexops.fp8_linear(x, weight)
    assert [one.shape for one in kept] == [(32,), weight.shape]  # the largest of its columns
    y.sum().backward()
    assert x.grad is not None


def test_no_rows_and_no_outputs():
    weight = draw(16, 32).requires_grad_()
    y = flexops.fp8_linear(torch.empty(2, 0, 32, requires_grad=True), weight)
    assert y.shape == (2, 0, 16)
    y.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_autocast_decides_the_results_dtype():
    x, weight = draw(6, 32).requires_grad_(), draw(16, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = flexops.fp8_linear(x, weight)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("how", ["checkpoint", pytest.param("compile", marks=pytest.mark.extra)])
def test_it_checkpoints_and_compiles_without_a_break(how):
    x, weight = draw(20, 32).requires_grad_(), draw(16, 32).requires_grad_()

    def call(x: Tensor) -> Tensor:
        return flexops.fp8_linear(x, weight, None, "rowwise")

    def checkpointed(x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
        return result

    other = (
        checkpointed
        if how == "checkpoint"
        else torch.compile(call, fullgraph=True, backend="aot_eager")
    )
    results = []
    for function in (call, other):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(map(torch.equal, *results))


def test_errors_name_the_argument():
    x, weight = draw(4, 32), draw(16, 32)
    for error, text, args in (
        (TypeError, "x must be a float32", (x.double(), weight)),
        (TypeError, "weight must be a float32", (x, "weight")),
        (ValueError, "recipe must be 'rowwise' or", (x, weight, None, "tensorwise")),
        (ValueError, "weight must have shape", (x, weight[:, :16])),
        (ValueError, "bias must have shape", (x, weight, draw(15))),
        (ValueError, "multiples of 16", (draw(4, 24), draw(16, 24))),
        (ValueError, "on the device of x", (x, weight.to("meta"))),
    ):
        with pytest.raises(error, match=text):
            flexops.fp8_linear(*args)  # type: ignore[arg-type]
    for text, op in (
        ("one width", lambda: torch.ops.flexops.fp8_rows(x, [draw(4, 16)], 8)),
        ("multiples of 16", lambda: torch.ops.flexops.fp8_rows(x, [x], 8)),
    ):
        with pytest.raises(ValueError, match=text):
            op()
    for sizes in ((30, 16), (32, -16), ("32", 16)):
        with pytest.raises(ValueError, match="multiples of 16, got"):
            flexops.nn.Fp8Linear(*sizes)
    for transformed in (torch.func.grad(lambda x: flexops.fp8_linear(x, weight).sum()),
                        torch.vmap(lambda x: flexops.fp8_linear(x, weight))):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
            transformed(x)
    with pytest.raises(ValueError, match="recipe must be"):
        flexops.nn.Fp8Linear(32, 16, recipe="fast")


def test_a_gradient_penalty_is_rejected():
    """torch's decorator would leave it out of a sum of losses."""
    x, weight = draw(4, 32).requires_grad_(), draw(16, 32).requires_grad_()
    loss = flexops.fp8_linear(x, weight).sum()
    (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + of_x.square().sum()).backward()


def test_the_module_has_torchs_state():
    plain = torch.nn.Linear(32, 16)
    ours = flexops.nn.Fp8Linear(32, 16, recipe="rowwise_with_gw_hp")
    ours.load_state_dict(plain.state_dict())
    x = draw(4, 32)
    assert torch.equal(ours(x), flexops.fp8_linear(x, plain.weight, plain.bias))
    assert "rowwise_with_gw_hp" in repr(ours)
