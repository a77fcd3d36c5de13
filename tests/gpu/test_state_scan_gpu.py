"""Recurrences whose state is a matrix, on a GPU: the kernels against the formulas in float64, with
states that lie by rows and by columns, one step after another and by chunks."""

from __future__ import annotations

import math

import pytest
import torch
from state_scan_cases import draw, expected_delta, expected_mamba2, mamba2, near

import flexops
from flexops.ops import state_chunks, state_scan

pytestmark = pytest.mark.gpu
FAMILIES = ("state_scan", "state_chunks")
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


@pytest.fixture
def by_steps(monkeypatch):
    """Without tensor cores, whatever the length."""
    monkeypatch.setattr(state_scan, "is_chunked", lambda *_: False)


def named(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def on(device: str, given: dict[str, object]) -> dict[str, object]:
    return {
        name: one.to(device) if isinstance(one, torch.Tensor) else one
        for name, one in given.items()
    }


@pytest.mark.usefixtures("by_steps")
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


@pytest.mark.usefixtures("by_steps")
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


# ---- by chunks, on tensor cores ----


def far(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The distance, as a part of what is wanted: operands of products are rounded to bfloat16."""
    return float((actual.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("dtype", "length", "rows", "chunked"),
    [
        (torch.bfloat16, 64, 128, (True, True)),
        (torch.bfloat16, 63, 128, (False, False)),
        (torch.bfloat16, 64, 256, (True, False)),
        (torch.float16, 64, 128, (False, False)),
        (torch.float32, 64, 128, (False, False)),
    ],
)
def test_chunks_are_of_long_sequences(dtype, length, rows, chunked):
    """Without the delta rule, and with it."""
    v = torch.empty(1, length, 1, 64, dtype=dtype, device="cuda")
    found = tuple(state_chunks.is_chunked(rows, v, delta) for delta in (False, True))
    assert found == chunked


@pytest.mark.parametrize("decay", [0.0, 0.02, 3.0, math.inf])
@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize(
    "shape", [(2, 1, 2, 8, 8), (1, 2, 4, 64, 72), (1, 1, 1, 128, 40)], ids=named
)
def test_chunks_of_the_delta_rule_are_float64s(shape, length, decay):
    """With decays of which nothing is left of a state, and which some have."""
    given = draw(shape, length, torch.bfloat16)
    given["g"] = given["g"] / 3 * decay if decay < math.inf else given["g"].masked_fill(
        given["g"] < -2.5, -math.inf
    )  # fmt: skip
    out, final = flexops.gated_delta_rule(
        **on("cuda", given), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    wanted, last = expected_delta(given, True, shape[3] ** -0.5)
    assert far(out, wanted) < 8e-3
    assert far(final, last) < 8e-3


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 4, 8, 8), (1, 2, 4, 64, 72), (1, 1, 2, 128, 40), (1, 1, 2, 256, 64)],
    ids=named,
)
def test_chunks_of_mamba2_are_float64s(shape, length):
    *tensors, more = mamba2(shape, length, torch.bfloat16)
    more["dt_limit"] = (0.001, 0.1)
    out, final = flexops.mamba2_scan(
        *(one.cuda() for one in tensors), return_final_states=True, **on("cuda", more)
    )
    wanted, last = expected_mamba2(*tensors, more)
    assert far(out, wanted) < 8e-3
    assert far(final, last) < 8e-3


def test_blocks_of_64_columns():
    """Where there are as many as multiprocessors."""
    given = draw((17, 2, 8, 32, 72), 100, torch.bfloat16)
    out, final = flexops.gated_delta_rule(**on("cuda", given), scale=0.1, output_final_state=True,
                                          use_qk_l2norm_in_kernel=True)  # fmt: skip
    wanted, last = expected_delta(given, True, 0.1)
    assert far(out, wanted) < 8e-3
    assert far(final, last) < 8e-3


def test_chunks_of_many_states_take_several_launches():
    """So that what they prepare needs 128 MiB at most."""
    given = draw((33, 1, 32, 8, 8), 8 * 64, torch.bfloat16)
    given = on("cuda", given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, final = flexops.gated_delta_rule(
        **given, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert torch.cuda.max_memory_allocated() - before < (128 << 20) + 2 * out.nbytes
    wide = {name: one.float() for name, one in given.items()}
    wanted, last = flexops.gated_delta_rule(
        **wide, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert far(out, wanted.cpu().double()) < 8e-3
    assert far(final, last.cpu().double()) < 8e-3


# ---- gradients, by chunks ----


@pytest.mark.parametrize(
    ("capability", "rows", "columns", "has"),
    [
        ((8, 0), 256, 64, (True, False)),
        ((8, 6), 256, 64, (False, False)),
        ((8, 6), 128, 64, (True, True)),
        ((9, 0), 128, 60, (False, False)),
        ((0, 0), 128, 64, (False, False)),
    ],
)
def test_which_gradients_have_kernels(capability, rows, columns, has, monkeypatch):
    """Without the delta rule, and with it: blocks of some GPUs have less memory."""
    monkeypatch.setattr(state_chunks, "_capability", lambda _: capability)
    v = torch.empty(1, 1, 1, columns, dtype=torch.bfloat16, device="cuda")
    found = tuple(state_chunks.has_gradients(rows, v, delta) for delta in (False, True))
    assert found == has
    assert not state_chunks.has_gradients(rows, v.half(), False)
    assert not state_chunks.has_gradients(rows, v[:0], False)


def gradients(call, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum of products with what is drawn, of both results."""
    leaves = {name: one.detach().requires_grad_() for name, one in given.items()}
    results = call(**leaves)
    make = torch.Generator().manual_seed(5)
    drawn = [torch.randn(one.shape, generator=make).to(torch.bfloat16) for one in results]
    drawn = [way.to(one.device, one.dtype) for way, one in zip(drawn, results, strict=True)]
    found = torch.autograd.grad(results, list(leaves.values()), drawn)
    return dict(zip(leaves, found, strict=True))


def check_gradients(ours, wanted, given: dict[str, torch.Tensor]) -> None:
    """Against float64's; not by plain PyTorch, where there are kernels."""
    rows = given.get("q", given.get("B")).shape[3]
    values = given.get("v", given.get("x")).cuda()
    with pytest.MonkeyPatch.context() as patch:
        if state_chunks.has_gradients(rows, values, "q" in given):
            patch.setattr(state_scan, "scanned", None)
        found = gradients(ours, on("cuda", given))
    expected = gradients(wanted, {name: one.double() for name, one in given.items()})
    for name, one in found.items():
        assert one.dtype == given[name].dtype
        error = (one.cpu().double() - expected[name]).norm()
        bound = 3e-2 if name == "g" else 1e-2  # sums of what nearly cancels out
        assert error <= bound * expected[name].norm(), name


@pytest.mark.parametrize("decay", [0.0, 0.02, 3.0])
@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize(
    "shape", [(2, 1, 2, 8, 8), (1, 2, 4, 64, 72), (1, 1, 1, 128, 40)], ids=named
)
def test_gradients_of_chunks_of_the_delta_rule(shape, length, decay):
    given = draw(shape, length, torch.bfloat16)
    given["g"] = given["g"] / 3 * decay
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    check_gradients(
        lambda **of: flexops.gated_delta_rule(**of, **named),
        lambda **of: expected_delta(of, True, shape[3] ** -0.5),
        given,
    )


@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 4, 8, 8), (1, 2, 4, 64, 72), (1, 1, 2, 128, 40), (1, 1, 2, 256, 64)],
    ids=named,
)
def test_gradients_of_chunks_of_mamba2(shape, length):
    x, dt, A, B, C, more = mamba2(shape, length, torch.bfloat16)
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    tensors |= {name: more[name] for name in ("D", "dt_bias", "initial_states")}
    said = {"dt_softplus": True, "dt_limit": (0.001, 0.1)}
    check_gradients(
        lambda **of: flexops.mamba2_scan(**of, **said, return_final_states=True),
        lambda x, dt, A, B, C, **of: expected_mamba2(x, dt, A, B, C, of | said),
        tensors,
    )


def test_gradients_of_blocks_of_64_columns():
    """Where there are as many as multiprocessors; of heads that share q and k."""
    given = draw((17, 2, 8, 32, 72), 100, torch.bfloat16)
    named = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "scale": 0.1}
    check_gradients(
        lambda **of: flexops.gated_delta_rule(**of, **named),
        lambda **of: expected_delta(of, True, 0.1),
        given,
    )


def test_gradients_of_many_states_take_several_launches():
    """So that what is kept of chunks needs 1 GiB at most."""
    given = on("cuda", draw((300, 1, 32, 8, 8), 8 * 64, torch.bfloat16))

    def call(**of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flexops.gated_delta_rule(**of, output_final_state=True)

    def part(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        leaves = [one[begin:end].detach().requires_grad_() for one in given.values()]
        results = call(**dict(zip(given, leaves, strict=True)))
        return torch.autograd.grad(results, leaves, [one.detach() for one in results])

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = part(0, 300)
    own = sum(one.nbytes for one in given.values())
    assert torch.cuda.max_memory_allocated() - before < (1 << 30) + 40 * own
    for one, *parts in zip(whole, part(0, 140), part(140, 300), strict=True):
        assert torch.equal(one, torch.cat(parts))


def test_the_gradient_of_one_result():
    """Of the others nothing is required."""
    given = on("cuda", draw((1, 1, 2, 16, 24), 70, torch.bfloat16))
    given["v"].requires_grad_()
    out, final = flexops.gated_delta_rule(**given, output_final_state=True)
    both = torch.autograd.grad((out.sum(), final.sum()), given["v"], retain_graph=True)
    parts = [torch.autograd.grad(one.sum(), given["v"], retain_graph=True) for one in (out, final)]
    torch.testing.assert_close(both[0], sum(one for (one,) in parts), rtol=2e-2, atol=2e-2)
    (first,) = torch.autograd.grad(out.sum(), given["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_packed_sequences_by_chunks():
    """Results and gradients are those of sequences of their own."""
    lengths = (1, 63, 64, 5, 200)
    given = on("cuda", draw((1, 2, 4, 64, 72), sum(lengths), torch.bfloat16))
    given.pop("initial_state")
    leaves = [one.requires_grad_() for one in given.values()]
    begins = torch.tensor([0, 1, 64, 128, 133, 333], device="cuda")
    out, _ = flexops.gated_delta_rule(**given, cu_seqlens=begins)
    parts = zip(*(one.split(lengths, 1) for one in given.values()), strict=True)
    named = [dict(zip(given, part, strict=True)) for part in parts]
    expected = torch.cat([flexops.gated_delta_rule(**part)[0] for part in named], 1)
    upstream = torch.randn_like(out)
    pairs = zip(
        (out, *torch.autograd.grad(out, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, leaves, upstream)),
        strict=True,
    )
    for one, other in pairs:
        assert far(one, other.cpu().double()) < 1.5e-2


def test_compiled_results_and_gradients():
    given = on("cuda", draw((1, 2, 4, 64, 72), 130, torch.bfloat16))
    leaves = [one.requires_grad_() for one in given.values()]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out, final = flexops.gated_delta_rule(
            **dict(zip(given, tensors, strict=True)), output_final_state=True
        )
        return out.float().square().sum() + final.sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), call(*leaves))
    for one, other in zip(
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(call(*leaves), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
