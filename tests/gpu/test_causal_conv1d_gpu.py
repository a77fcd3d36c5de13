"""The causal convolution on a GPU: the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from flexops.ops import causal_conv1d as module

pytestmark = pytest.mark.gpu
FAMILIES = ("causal_conv1d",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 127, 8), (2, 128, 3), (3, 129, 1032), (1, 1000, 515), (2, 300, 4096)]
)
def test_cuda_gives_what_the_reference_gives(shape, silu, dtype):
    ops, channels = torch.ops.flexops, shape[2]
    torch.manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda")

    x, grad, weight, bias = draw(*shape).to(dtype), draw(*shape).to(dtype), draw(4, channels), None
    ids = torch.arange(shape[0] * shape[1], device="cuda", dtype=torch.int32).view(shape[:2])
    # also where three sequences begin within a filter, or one is where another ended
    packed = ids.square() // 40 % 3
    for bias, sequences in ((None, None), (draw(channels), packed), (draw(channels), None)):
        known = (weight, bias, sequences, silu)
        near = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {}
        torch.testing.assert_close(
            ops.causal_conv1d(x, *known), module._reference(x, *known), **near
        )
        of_x, sums = ops.causal_conv1d_backward(grad, x, *known)
        expected, expected_sums = module._backward_reference(grad, x, *known)
        torch.testing.assert_close(of_x, expected, **near)
        torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-3)
        state = draw(shape[0], channels, 4).to(dtype)
        other, steps = state.clone(), x[:, :3].transpose(1, 2)
        step = (steps, weight.t().contiguous(), bias, silu)
        for kind in {dtype, torch.float32}:
            filters = (
                weight.t().to(kind).contiguous(),
                None if bias is None else bias.to(kind),
                silu,
            )
            one = draw(shape[0], channels, 4).to(dtype)
            two = one.clone()
            for length in (1, 2):
                torch.testing.assert_close(
                    ops.causal_conv1d_update_(one, x[:, :length].transpose(1, 2), *filters),
                    module._update_reference(two, x[:, :length].transpose(1, 2), *filters),
                    **near,
                )
                torch.testing.assert_close(one, two)
        torch.testing.assert_close(
            ops.causal_conv1d_update_(state, *step), module._update_reference(other, *step), **near
        )
        assert torch.equal(state, other)
