"""flexops.optim's Adam and AdamW on a GPU against torch's fused ones. All else that optimizers do on a GPU is in tests/ops, marked ``gpu``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexops import optim

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from step_contract import make_lists, make_params, set_grads
from test_adam import TORCH_OPTIONS, TestAdam

pytestmark = pytest.mark.gpu
STEP = TestAdam.step
del TestAdam  # pytest would run it again


@pytest.fixture(autouse=True, scope="module")
def _native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("adam", "cuda")


@pytest.mark.parametrize("options", TORCH_OPTIONS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_torch_fused_after_many_steps(name: str, options: dict[str, Any]) -> None:
    params, expected = make_params("cuda"), make_params("cuda")
    optimizer = getattr(optim, name)(params, lr=0.01, **options)
    oracle = getattr(torch.optim, name)(expected, lr=0.01, fused=True, **options)
    for step in range(20):
        for each, stepper in ((params, optimizer), (expected, oracle)):
            set_grads(each, seed=step)
            stepper.step()
    for left, right in zip(params, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=5e-6)


def test_steps_on_the_wrong_device_are_named() -> None:
    lists = make_lists(STEP, torch.float32, torch.float32, "cuda")
    lists[-1][2] = torch.zeros(())
    with pytest.raises(ValueError, match=r"flexops::adam_: state_steps\[2\] must be on the device of params\[0\], cuda:0, got cpu"):
        STEP.call(*lists, **STEP.numbers)
