"""The parts of a step of flexops.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexops.ops import muon

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [  # matrices, m, n, k
    (2, 24, 40, 16),
    *(
        pytest.param(sizes, marks=pytest.mark.extra)
        for sizes in [
            (1, 256, 256, 64),
            (3, 128, 264, 128),
            (2, 520, 776, 1032),
            (140, 64, 136, 88),
            (1, 7, 5, 3),
        ]
    ),
]


def drawn(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("form", "symmetric"),
    [
        (muon.ROWS, False),
        (muon.ROWS, True),
        (muon.MIXED, False),
        (muon.COLUMNS, False),
        (muon.COLUMNS, True),
    ],
)
@pytest.mark.parametrize("sizes", SIZES)
def test_products(
    sizes,
    form,
    symmetric,
    device,
    monkeypatch,
):
    monkeypatch.setattr(muon, "_LEAST", 1)
    count, m, n, k = sizes
    dtype = torch.float16 if device == "cuda" else torch.float32
    a = drawn(count, *((k, m) if form == muon.COLUMNS else (m, k)), device=device, dtype=dtype)
    b = drawn(count, *((n, k) if form == muon.ROWS else (k, n)), device=device, dtype=dtype)
    if symmetric:
        b = a
    left, right = a.mT if form == muon.COLUMNS else a, b.mT if form == muon.ROWS else b
    product = (left.double() @ right.double()).cpu()
    added = drawn(*product.shape, device=device, dtype=dtype)
    added = added + added.mT if symmetric else added
    identity = torch.eye(product.shape[1], product.shape[2], dtype=torch.float64)
    over = added.clone()
    same = muon.product(a, b, form, symmetric=symmetric, added=over, beta=1.0, over=True)
    assert same.data_ptr() == over.data_ptr()
    for actual, expected in (
        (muon.product(a, b, form, symmetric=symmetric), product),
        (same, product + added.double().cpu()),
        (
            muon.product(
                a, b, form, symmetric=symmetric, alpha=0.5, added=added, beta=-2.0, diagonal=3.0
            ),
            0.5 * product - 2 * added.double().cpu() + 3 * identity,
        ),
    ):
        assert actual.dtype == dtype
        error = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < (2e-3 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [40, pytest.param(520, marks=pytest.mark.extra)])
def test_a_product_and_what_it_was_rounded_off(size, device, monkeypatch):
    monkeypatch.setattr(muon, "_LEAST", 1)
    x = drawn(2, size, 96, device=device, dtype=torch.float16)
    high, low = muon.product(x, x, symmetric=True, alpha=4.0, low=True).chunk(2)
    exact = 4 * x.double() @ x.double().mT
    torch.testing.assert_close(high.double(), exact, rtol=2**-11, atol=2**-14)
    torch.testing.assert_close(high.double() + low.double(), exact, rtol=2**-18, atol=2**-14)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_and_steps(dtype, nesterov, device):
    shape = (200, 77)
    grads = [scale * drawn(*shape, device=device, dtype=dtype) for scale in (1, 1e-6, 0)]
    buffers = [drawn(*shape, device=device, dtype=dtype) for _ in grads]
    buffers[2].zero_()
    before = [(grad.double(), buffer.double()) for grad, buffer in zip(grads, buffers, strict=True)]
    averages = list(torch.empty(3, *shape, device=device))
    scale = torch.full((1,), 2.0, device=device)
    muon.average_(
        grads, buffers, averages, momentum=0.9, nesterov=nesterov, scale=5.0, eps=1e-7,
        grad_scale=scale,
    )  # fmt: skip
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for (grad, old), new, average in zip(before, buffers, averages, strict=True):
        expected = old.lerp(grad / 2, 0.1)
        torch.testing.assert_close(new.double(), expected, check_dtype=False, **tolerance)
        expected = (grad / 2).lerp(expected, 0.9) if nesterov else expected
        expected = 5 * expected / expected.norm().clamp(min=1e-7)
        torch.testing.assert_close(average.double(), expected, **tolerance)
    rate = torch.tensor(0.25, device=device)
    for lr in (0.25, rate):
        params = [buffer.clone() for buffer in buffers]
        muon.apply_(params, averages, lr=lr, decay=0.5, factor=3.0)
        for param, old, step in zip(params, buffers, averages, strict=True):
            expected = old.double() * (1 - 0.125) - 0.75 * step.double()
            torch.testing.assert_close(param.double(), expected, **tolerance)
