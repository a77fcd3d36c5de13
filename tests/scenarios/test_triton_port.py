"""``examples/triton_port``: a Triton operator as two kernels in strings, with their contract."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexops.testing import check_kernel

FILE = Path(__file__).parents[2] / "examples" / "triton_port" / "dyt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_port_dyt", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, columns), torch.full((1,), 0.5), *torch.randn(2, columns)


def test_its_gradient_is_that_of_plain_pytorch(example):
    leaves = [one.double().requires_grad_() for one in arguments(70, 5)]
    out, expected = example.dyt(*leaves), example.reference(*leaves)
    grad = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)  # sums are float32
    with pytest.raises(ValueError, match=r"dyt: gamma must have shape \[5\], got \[1\]"):
        example.dyt(leaves[0], leaves[1], leaves[2][:1], leaves[3])


def test_an_operator_with_kernels_and_a_gradient_is_at_most_100_lines():
    lines = [line for line in FILE.read_text().splitlines() if line.strip()]
    assert len(lines) <= 100


@pytest.mark.extra
@pytest.mark.usefixtures("host_compiler")
def test_its_kernels_on_the_emulator(example):
    case = (arguments(6, 7), arguments(70, 130))
    check_kernel(example.dyt, case)
    grads = [(torch.randn(one[0].shape), *one[:3]) for one in case]
    check_kernel(example.backward_kernel, grads, rounding=1e-6)
