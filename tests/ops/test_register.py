"""What ``flexops/ops/_register.py`` gives every operator, on the operators that show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexops


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


PAIRS = {
    "rms_norm": (flexops.rms_norm, rms_norm),
    "layer_norm": (flexops.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "softmax": (flexops.scaled_masked_softmax, lambda x: x.softmax(-1)),
    "swiglu": (lambda x: flexops.swiglu(x), lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def _loss(function: Any) -> Any:
    return lambda x: (function(x) * torch.arange(function(x).shape[-1])).square().sum()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", PAIRS)
class TestTransforms:
    """torch.func's."""

    def test_vmap(self, name: str, x: Tensor) -> None:
        ours, theirs = (torch.vmap(function)(x) for function in PAIRS[name])
        torch.testing.assert_close(ours, theirs)

    def test_vmap_of_what_requires_a_gradient(self, name: str, x: Tensor) -> None:
        leaf = x.requires_grad_()
        ours, theirs = (torch.autograd.grad(_loss(torch.vmap(function))(leaf), leaf)[0] for function in PAIRS[name])
        torch.testing.assert_close(ours, theirs)

    def test_grad_is_refused(self, name: str, x: Tensor) -> None:
        with pytest.raises(RuntimeError, match="functorch"):
            torch.func.grad(_loss(PAIRS[name][0]))(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_is_around_a_transform_gets_its_gradient(x: Tensor) -> None:
    """A tensor from outside, of another level than the one that is differentiated."""
    weight, gradients = torch.rand(8).requires_grad_(), []
    for function in PAIRS["rms_norm"]:
        inner = torch.func.grad(lambda y, function=function: (function(x, weight) * y).sum())(torch.ones(8))
        gradients.append(torch.autograd.grad(inner.square().sum(), weight)[0])
    torch.testing.assert_close(*gradients)


WRONG = {
    "layer_norm": lambda x: flexops.layer_norm(x, x[0, :5]),
    "add_rms_norm": lambda x: flexops.add_rms_norm(x, x[:, :5]),
    "rms_norm_quantized": lambda x: flexops.rms_norm_quantized(x, x[0, :5]),
    "bias_gelu": lambda x: flexops.bias_gelu(x, x[0, :5]),
    "swiglu": lambda x: flexops.swiglu(x, x[:, :5]),
    "scaled_masked_softmax": lambda x: flexops.scaled_masked_softmax(x, x[:, :5]),
    "rotary_embedding": lambda x: flexops.rotary_embedding(x[None, None], None, x[:, :4], x[:, :2]),
}


@pytest.mark.parametrize("name", WRONG)
def test_fake_tensors_are_refused_in_the_same_words(name: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match=f"^flexops.{name}: ") as native:
        WRONG[name](x)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=f"^flexops.{name}: ") as fake:
        WRONG[name](x)
    assert str(fake.value) == str(native.value)


def messages() -> dict[str, str]:
    """Of the errors that wrong calls raise."""
    found = {}
    for name, call in WRONG.items():
        with pytest.raises(ValueError) as error:
            call(torch.zeros(3, 8))
        found[name] = str(error.value)
    return found


def test_references_refuse_in_the_same_words(tmp_path: Path) -> None:
    """Where there is no native library."""
    code = "import json, flexops, test_register; print(json.dumps([test_register.messages(), [op.backend for op in flexops.status()]]))"
    without = {"FLEXOPS_JIT": "0", "FLEXOPS_CACHE_DIR": str(tmp_path), "FLEXOPS_FALLBACK": "allow"}
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | without, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    found, backends = json.loads(process.stdout)
    assert set(backends) == {"reference", "unasked"}
    assert found == messages()
