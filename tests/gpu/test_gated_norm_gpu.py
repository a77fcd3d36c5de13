"""The gated RMS norm on a GPU: the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from flexops.ops import gated_norm as module

pytestmark = pytest.mark.gpu
FAMILIES = ("gated_norm",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 1), 1),
        ((33, 100), 4),  # 25 columns: no vector fits
        ((15, 128), 1),
        ((16, 1024), 8),
        ((40, 515), 1),
        ((700, 96), 1),
        ((300, 1920), 40),  # more groups than a block's teams
        ((400, 960), 5),
        ((1400, 4096), 1),
        ((35, 16386), 2),  # more than threads hold
        ((9, 20480), 1),
        ((3, 30001), 1),
    ],
)
def test_cuda_gives_what_the_reference_gives(shape, groups, sigmoid, norm_first, dtype):
    ops = torch.ops.flexops
    torch.manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda")

    x, gate, grad = (draw(*shape).to(dtype) for _ in range(3))
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    for weight in (None, draw(shape[1]), draw(shape[1]).to(dtype)):
        known = (weight, 1e-6, groups, norm_first, sigmoid)
        torch.testing.assert_close(
            ops.gated_rms_norm(x, gate, *known), module._reference(x, gate, *known), **near
        )
        torch.testing.assert_close(
            list(ops.gated_rms_norm_backward(grad, x, gate, *known)),
            list(module._backward_reference(grad, x, gate, *known)),
            **near,
        )
