"""Products of a few rows on a GPU against float64. The launcher chooses a kernel by capability,
rows, columns, alignment and k. The small cases reach all kernels of up to 8 rows on a GPU with 108
multiprocessors: tests/emulated runs them as 8.0 and as 9.0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexops.ops import few_rows

pytestmark = pytest.mark.gpu
FAMILIES = ("few_rows",)

SMALL = [
    (1544, (3444, 24), None),
    (520, (1744, 1744), "gelu"),
    (3080, (40, 5, 21), None),
    (264, (50, 50), "silu"),
    (4104, (33, 2), None),
    (4104, (20, 20), "gelu_tanh"),
    (37, (20, 7), None),
    (37, (20, 20), "silu"),
]
LARGE = [
    (4096, (4096, 1024, 1024), None),
    (4096, (14336, 14336), "silu"),
    (14336, (4096,), None),
    (4096, (128256,), None),
    (264, (9003, 5000, 24), None),
    (264, (9003, 9003), "silu"),
    (26624, (500,), None),  # shared memory holds one normalized row, not two
]
COPIED = [
    (192, (50, 21, 7), None),
    (64, (100,), None),
    (8192, (40,), None),
    (320, (333, 333), "gelu_tanh"),
    (2048, (2048, 512, 512), None),
    (2048, (8192, 8192), "silu"),
    (4160, (3000, 2000, 1152), None),
    (1024, (14336, 14336), "gelu"),
]
"""Of these the kernel of 9 to 16 rows on GPUs of 9.0 has each number of tiles, and clusters of
each size."""
OPERANDS = ["plain", "residual", "norm"]


def verify(
    rows: int, k: int, widths: tuple[int, ...], activation: str | None, dtype: torch.dtype,
    operands: str,
) -> None:  # fmt: skip
    """``residual`` and ``norm`` have a residual and biases."""
    torch.manual_seed(rows + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    x, weights = random(rows, k), [random(n, k) / k**0.5 for n in widths]
    biases, residual, norm = list[Tensor](), None, None
    if operands != "plain":
        biases = [random(n) for n in widths]
        residual = random(rows, sum(widths) if activation is None else widths[0])
    exact = x.double()
    if operands == "norm":
        norm = random(k)
        exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (norm.double() + 1)
    out = few_rows.few_rows_linear(
        x, weights, biases, norm=norm, offset=1.0, activation=activation, residual=residual
    )
    wanted = few_rows.composed(
        exact, [one.double() for one in weights], [one.double() for one in biases],
        activation=activation, residual=None if residual is None else residual.double(),
    )  # fmt: skip
    eps, error = torch.finfo(dtype).eps, out.double() - wanted
    if activation is None and operands == "plain":  # rounded once; sums are of float32
        assert (error.abs() <= eps / 2 * wanted.abs() + 1e-4).all()
    # rounded before and after the norm's factor, and before the activation
    assert error.norm() < 0.8 * eps * wanted.norm()
    assert (error.abs() < 8 * eps * (1 + wanted.abs())).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize(("k", "widths", "activation"), SMALL)
def test_a_small_product(k, widths, activation, operands, rows, dtype):
    verify(rows, k, widths, activation, dtype, operands)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize(("k", "widths", "activation"), LARGE)
def test_a_large_product(k, widths, activation, operands, rows):
    verify(rows, k, widths, activation, torch.bfloat16, operands)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [9, 13, 16])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize(("k", "widths", "activation"), COPIED)
def test_a_product_of_more_rows(k, widths, activation, operands, rows, dtype):
    verify(rows, k, widths, activation, dtype, operands)


@torch.no_grad()
@pytest.mark.parametrize("which", ["x", "weight", "norm", "residual"])
def test_operands_at_any_address(which):
    shapes = {"x": (16, 256), "weight": (64, 256), "norm": (256,), "residual": (16, 64)}

    def made(name: str) -> Tensor:
        """Contiguous, at no multiple of four bytes if it is this one."""
        count = torch.Size(shapes[name]).numel()
        memory = torch.randn(count + 1, device="cuda").bfloat16()
        return memory[name == which :][:count].view(shapes[name])

    given = {name: made(name) for name in shapes}
    x, weights = given.pop("x"), [given.pop("weight")]
    out = few_rows.few_rows_linear(x, weights, **given).double()
    wanted = few_rows.composed(x, weights, **given).double()
    assert (out - wanted).norm() < 8e-3 * wanted.norm()
