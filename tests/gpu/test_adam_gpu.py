"""flexops.optim's Adam and AdamW on a GPU against torch's fused ones. All else that optimizers do
on a GPU is in tests/ops, marked ``gpu``."""

from __future__ import annotations

import pytest
import torch
from step_contract import assert_params_close, make_lists, make_params, step_alike
from test_adam import TORCH_OPTIONS, TestAdam

from flexops import optim

pytestmark = pytest.mark.gpu
FAMILIES = ("adam",)
STEP = TestAdam.step
del TestAdam  # pytest would run it again


@pytest.mark.parametrize("options", TORCH_OPTIONS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_torch_fused_after_many_steps(name, options):
    params, expected = make_params("cuda"), make_params("cuda")
    optimizer = getattr(optim, name)(params, lr=0.01, **options)
    oracle = getattr(torch.optim, name)(expected, lr=0.01, fused=True, **options)
    step_alike(20, (params, optimizer), (expected, oracle))
    assert_params_close(params, expected)


def test_steps_on_the_wrong_device_are_named():
    lists = make_lists(STEP, torch.float32, torch.float32, "cuda")
    lists[-1][2] = torch.zeros(())
    with pytest.raises(
        ValueError,
        match=(
            r"flexops\.adam_: state_steps\[2\] must be on the device of params\[0\], cuda:0,"
            r" got cpu"
        ),
    ):
        STEP.call(*lists, **STEP.numbers)
