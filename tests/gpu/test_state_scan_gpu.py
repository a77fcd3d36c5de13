"""Recurrences whose state is a matrix, on a GPU: the kernels against the formulas in float64, with
states that lie by rows and by columns."""

from __future__ import annotations

import pytest
import torch
from state_scan_cases import draw, expected_delta, expected_mamba2, mamba2, near

import flexops

pytestmark = pytest.mark.gpu
FAMILIES = ("state_scan",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# more than 16 steps are loaded in turns, eight where a state has more than 128 rows
LENGTHS = (1, 2, 16, 17, 150)
SMALL = (
    (1, 1, 2, 8, 8),
    (2, 2, 4, 64, 72),
    (1, 1, 2, 96, 40),
    (1, 1, 1, 128, 32),
    (1, 1, 1, 256, 40),
)
# four columns of a thread
LARGE = ((40, 2, 8, 128, 128), (300, 1, 1, 64, 64), (150, 1, 4, 32, 72))


def named(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def on(device: str, given: dict[str, object]) -> dict[str, object]:
    return {
        name: one.to(device) if isinstance(one, torch.Tensor) else one
        for name, one in given.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=named)
def test_the_delta_rule_is_float64s(shape, length, dtype):
    if shape in LARGE and length > 17:
        length = 40
    given = draw(shape, length, dtype)
    out, final = flexops.gated_delta_rule(
        **on("cuda", given), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    wanted, last = expected_delta(given, True, shape[3] ** -0.5)
    torch.testing.assert_close(out.cpu().double(), wanted, **near(dtype))
    torch.testing.assert_close(final.cpu().double(), last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=named)
def test_mamba2_is_float64s(shape, length, dtype):
    if shape in LARGE and length > 17:
        length = 40
    *tensors, named = mamba2(shape, length, dtype)
    out, final = flexops.mamba2_scan(
        *(one.cuda() for one in tensors), return_final_states=True, **on("cuda", named)
    )
    wanted, last = expected_mamba2(*tensors, named)
    torch.testing.assert_close(out.cpu().double(), wanted, **near(dtype))
    torch.testing.assert_close(final.cpu().double(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beginning", [0, 1])
def test_states_that_are_parts_of_others(beginning):
    """Whose rows are apart, or which begin anywhere."""
    given = draw((2, 2, 4, 16, 24), 3)
    wanted, last = expected_delta(given, False, 0.25)
    given = on("cuda", given)
    before = given.pop("initial_state")
    room = torch.zeros(2, 4, 17, 33, device="cuda")
    flat = torch.zeros(before.numel() + 1, device="cuda")
    for state in (room[:, :, beginning:][:, :, :16, beginning : beginning + 24],
                  flat[beginning:][: before.numel()].view_as(before)):  # fmt: skip
        state.copy_(before)
        out = flexops.gated_delta_rule_update(state, **given)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.cpu().double(), last, rtol=1e-4, atol=1e-4)


def test_steps_are_captured():
    """A graph of a step, replayed, goes on with the state."""
    given = draw((2, 2, 4, 64, 64), 6, torch.bfloat16)
    whole, _ = flexops.gated_delta_rule(**on("cuda", given))
    given = on("cuda", given)
    state = given.pop("initial_state")
    before = state.clone()
    buffers = {name: one[:, :1].clone() for name, one in given.items()}
    flexops.gated_delta_rule_update(state, **buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexops.gated_delta_rule_update(state, **buffers)
    state.copy_(before)
    for step in range(6):
        for name, one in given.items():
            buffers[name].copy_(one[:, step : step + 1])
        graph.replay()
        torch.testing.assert_close(out[:, 0], whole[:, step], rtol=1e-2, atol=1e-2)
