"""flexops.fp8_linear on a GPU: the references' bits, products, and a compiled call."""

from __future__ import annotations

import pytest
import torch
from test_fp8_linear import values
from torch import Tensor

import flexops
from flexops.ops import fp8_linear as module

pytestmark = pytest.mark.gpu
FAMILIES = ("fp8_linear",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, wanted, strict=True):
        if a.dtype == torch.float8_e4m3fn:
            # a zero's sign is not a value
            a, b = a.float() + 0.0, b.float() + 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 16), (17, 48), (129, 272), (64, 2048), (40, 16384), (5, 40000), (1000, 4096)],
)
def test_kernels_give_the_references_bits(rows, columns, dtype):
    x = torch.randn(rows, columns, device="cuda")
    x *= torch.logspace(-4, 3, rows, device=x.device)[:, None]
    x = x.to(dtype)
    if rows > 16:
        x[3], x[:, 5], x[7, 2] = 0, 0, 1e-6
    for broken in (False, rows == 129):
        if broken:
            x[11, 3], x[12, 4] = float("nan"), float("inf")
        padded = -(-rows // 16) * 16
        codes = module._rows((x,))
        known = module._rows_reference(x, (), rows)
        same(codes, known)
        largest = codes[2]
        same(module._columns(codes[:1], largest, codes[1]),
             module._columns_reference(known[0], (), known[1], largest, padded))  # fmt: skip
        same(module._columns((x,), largest),
             module._columns_reference(x, (), None, largest, padded))  # fmt: skip


def test_several_matrices_and_strides():
    sizes = (256, 64, 16, 32, 96, 48)  # more than a launch takes
    parts = [torch.randn(rows, 512, device="cuda").bfloat16() for rows in sizes]
    part = torch.randn(96, 1024, device="cuda").bfloat16()[:, 256:768]
    for one in (parts, parts[:3], [part]):
        rows = sum(map(len, one))
        codes = module._rows(one)
        same(codes, module._rows_reference(one[0], one[1:], rows))
        same(module._columns(one, codes[2]),
             module._columns_reference(one[0], one[1:], None, codes[2], rows))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (3, 65, 272), (2000, 2048), (70, 4096), (33, 8192)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_rows(shape, dtype, offset):
    x, residual, grad = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(shape[-1], device="cuda").to(dtype)
    args = [one.requires_grad_() for one in (x, residual, weight)]
    y, total, codes = module.fp8_add_rms_norm(*args, 1e-6, offset)  # type: ignore[misc]
    plain = flexops.add_rms_norm(*args, offset=offset)
    torch.testing.assert_close((y, total), plain)
    assert torch.equal(total, plain[1])
    same(codes, module._rows((y.detach().reshape(-1, shape[-1]),)))
    wanted = torch.autograd.grad(plain[0] + 2 * plain[1], args, grad)
    for a, b in zip(torch.autograd.grad(y + 2 * total, args, grad), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 if dtype == torch.float32 else 1e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", module.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (65, 2048), (40, 14336), (7, 40000)])
def test_gated_rows(rows, width, activation, dtype):
    packed = torch.randn(rows, 2 * width, device="cuda").to(dtype)
    grad = torch.randn(rows, width, device="cuda").to(dtype)
    forward = module._gated_rows(packed, None, activation)
    same(forward[0], module._rows((module._gated(packed, activation),)))
    actual = module._gated_rows(packed, grad, activation)
    wanted = module._gated_rows_reference(packed, grad, module.ACTIVATIONS.index(activation))
    for found, known in zip(actual, (wanted[:3], wanted[3:]), strict=True):
        # roundings of the activation move a code here and there
        a, b = values(*found[:2]), values(*known[:2])
        assert (a - b).norm() <= 5e-3 * b.norm()
        torch.testing.assert_close(found[2], known[2], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("recipe", module.RECIPES)
@pytest.mark.parametrize(
    ("rows", "k", "n", "bias"),
    [
        (8192, 2048, 3072, False),
        (100, 2048, 2048, True),
        (1, 64, 48, True),
        (33, 4096, 14336, False),
    ],
)
def test_products(rows, k, n, bias, recipe):
    if reason := flexops.ops.fp8_linear.fp8_refusal("cuda"):
        pytest.skip(reason)
    x = torch.randn(rows, k, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().requires_grad_()
    offset = torch.randn(n, device="cuda").bfloat16().requires_grad_() if bias else None
    grad = torch.randn(rows, n, device="cuda").bfloat16()
    wanted = (x.double() @ weight.double().t(), grad.double() @ weight.double(),
              grad.double().t() @ x.double())  # fmt: skip
    y = flexops.fp8_linear(x, weight, offset, recipe)
    results = (y, *torch.autograd.grad(y, (x, weight), grad))
    if offset is not None:
        wanted = (wanted[0] + offset.double(), *wanted[1:])
    for a, b in zip(results, wanted, strict=True):
        assert (a.double() - b).norm() < 0.05 * b.norm()


def test_a_compiled_call_and_a_captured_one():
    x = torch.randn(256, 512, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(128, 512, device="cuda").bfloat16().requires_grad_()
    wanted = flexops.fp8_linear(x, weight)
    grads = torch.autograd.grad(wanted.square().sum(), (x, weight))
    compiled = torch.compile(flexops.fp8_linear, fullgraph=True)(x, weight)
    torch.testing.assert_close(compiled, wanted)
    for a, b in zip(torch.autograd.grad(compiled.square().sum(), (x, weight)), grads, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = flexops.fp8_linear(x, weight)
    with torch.no_grad():
        weight.mul_(2.0)  # a replay quantizes the weight again
    graph.replay()
    torch.testing.assert_close(captured, 2 * wanted.detach())
