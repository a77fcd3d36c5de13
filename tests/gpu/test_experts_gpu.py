"""flexops.grouped_linear and flexops.gated_experts on a GPU."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops import experts as moe
from flexops.ops import few_experts
from flexops.ops import grouped_linear as grouped

pytestmark = pytest.mark.gpu
_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
SIZES = (
    (37, 0, 128, 200, 1),
    (128, 128, 128),
    (0, 0, 0, 5),
    (64, 63, 65, 127, 129, 0),
    (1000,),
    (3, 0, 700, 2),
)
SHAPES = ((64, 64), (256, 128), (72, 520), (768, 264), (8, 8))


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    assert torch.isfinite(actual).all()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def ends(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")


def by_loop(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out, begin = x.new_zeros(x.shape[0], weight.shape[1]), 0
    for matrix, end in zip(weight, offsets.tolist(), strict=True):
        out[begin:end] = x[begin:end] @ matrix.t()
        begin = end
    return out


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Whatever a test draws is what it draws by itself, in any order."""
    torch.manual_seed(20)


@pytest.fixture(params=["hopper", "hopper, sorted copies", "sm_80"])
def kernels(
    request: pytest.FixtureRequest, require: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Hopper's own kernels, with rows gathered by them or not, and those that other GPUs run."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    require(
        hopper or request.param == "sm_80",
        "a GPU of capability 9.0",
        "bash scripts/run_tests.sh -m gpu, on an H100 or H200",
    )
    weight = torch.ones(1, 8, 8, device="cuda", dtype=torch.bfloat16)
    flexops.grouped_linear(weight[0], weight, ends((8,)))  # loads the library
    (path,) = (one.path for one in flexops.status() if one.op == "grouped_linear" and one.path)
    library = ctypes.CDLL(str(path))
    library.flexops_grouped_hopper(int(request.param != "sm_80"))
    monkeypatch.setattr(grouped, "_GATHERS", request.param == "hopper")
    yield
    library.flexops_grouped_hopper(1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_linear(sizes, shape, dtype, transposed):
    k, n = shape
    rows, offsets = sum(sizes) + 9, ends(sizes)  # nine rows belong to no group
    x = torch.randn(rows, k, device="cuda", dtype=dtype)
    x[-9:] = float("nan")  # they are not multiplied
    weight = torch.randn(
        len(sizes), *((k, n) if transposed else (n, k)), device="cuda", dtype=dtype
    )
    weight = weight.transpose(1, 2) if transposed else weight
    x.requires_grad_(), weight.requires_grad_()
    out = flexops.grouped_linear(x, weight, offsets)
    assert not out[-9:].any()
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, weight), grad)
    wide = [one.detach().double().requires_grad_() for one in (x[: sum(sizes)], weight)]
    expected = by_loop(*wide, offsets)
    wanted = torch.autograd.grad(expected, wide, grad[: sum(sizes)].double())
    limit = _TOLERANCE[dtype]
    assert error(out[: sum(sizes)], expected) < limit
    assert error(got[0][: sum(sizes)], wanted[0]) < limit
    assert error(got[1], wanted[1]) < limit


def test_kernels_are_used():
    assert grouped.takes_kernels(torch.empty(8, 64, device="cuda", dtype=torch.bfloat16), 64)


@pytest.mark.parametrize("offsets", [[5, 3, 900], [-4, 10, 20], [2**31 - 1, 0, -(2**31)]])
def test_offsets_that_do_not_match_stay_in_bounds(offsets):
    x = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = flexops.grouped_linear(x, weight, torch.tensor(offsets, dtype=torch.int32, device="cuda"))
    out.sum().backward()
    assert (out.cpu().shape, weight.grad.cpu().shape) == ((100, 64), (3, 64, 64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(1, 1, 1), (5000, 8, 128), (777, 3, 7), (3000, 2, 1000)]
)
def test_order(tokens, k, experts, dtype):
    choices = torch.randint(-1, experts + 2, (tokens, k), device="cuda", dtype=dtype)
    for got, wanted in zip(
        moe.expert_order(choices, experts), moe._order_reference(choices, experts), strict=True
    ):
        assert torch.equal(got, wanted)


def block(
    tokens: int, k: int, experts: int, hidden: int, inner: int, dtype: torch.dtype, skew: float = 0
) -> tuple[Tensor, ...]:
    logits = torch.randn(tokens, experts, device="cuda")
    logits[:, 0] += skew
    if experts > 2 * k:
        logits[:, 1] = -1e9  # an expert without tokens
    weights, choices = logits.softmax(-1).topk(k, -1)
    return (
        torch.randn(tokens, hidden, device="cuda", dtype=dtype),
        choices,
        weights,
        torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=dtype) * hidden**-0.5,
        torch.randn(experts, hidden, inner, device="cuda", dtype=dtype) * inner**-0.5,
    )


def by_experts(
    x: Tensor, choices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        gate, up = (x @ gate_up[expert].t()).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * up) @ down[expert].t()
        out = out + made * (weights * (choices == expert)).sum(1, keepdim=True)
    return out


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "inner", "skew"),
    [
        (130, 2, 4, 1024, 64, 0),
        (300, 4, 16, 256, 128, 0),
        (1, 2, 8, 64, 64, 0),
        (1000, 8, 32, 128, 72, 50),
        (200, 1, 4, 264, 40, 0),
        (90, 2, 5, 36, 20, 0),
    ],
)
def test_gated_experts(tokens, k, experts, hidden, inner, skew, dtype):
    x, choices, weights, gate_up, down = block(tokens, k, experts, hidden, inner, dtype, skew)
    choices[0, 0] = experts  # left out
    sources = [one.requires_grad_() for one in (x, weights, gate_up, down)]
    out = flexops.gated_experts(x, choices, weights, gate_up, down)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, sources, grad)
    wide = [one.detach().double().requires_grad_() for one in sources]
    expected = by_experts(wide[0], choices, *wide[1:])
    wanted = torch.autograd.grad(expected, wide, grad.double())
    limit = 2 * _TOLERANCE[dtype]
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        assert error(one, other) < limit
    with torch.no_grad():
        alone = flexops.gated_experts(x, choices, weights, gate_up, down)
    if choices.numel() > few_experts.MOST_CHOICES:
        assert torch.equal(out, alone)
    assert error(alone, expected) < limit


def test_spread_and_combine():
    x, choices, weights, *_ = block(400, 4, 8, 96, 8, torch.bfloat16)
    choices[::7, 1] = 8
    order = moe.expert_order(choices, 8)
    x.requires_grad_(), weights.requires_grad_()
    rows = moe.spread_rows(x, order)
    out = moe.combine_rows(rows * 0.5, weights, order)
    grads = torch.autograd.grad(out, (x, weights), torch.ones_like(out))
    used = (choices < 8) * weights
    assert error(out, 0.5 * x.double() * used.sum(1, keepdim=True)) < 8e-3
    assert error(grads[0], 0.5 * used.sum(1, keepdim=True).expand(-1, 96)) < 8e-3
    assert error(grads[1], 0.5 * x.double().sum(1, keepdim=True) * (choices < 8)) < 8e-3


def test_a_graph_serves_other_routes():
    args = block(256, 2, 8, 128, 64, torch.bfloat16)
    other = block(256, 2, 8, 128, 64, torch.bfloat16, 20)
    x, choices, weights, gate_up, down = args
    gate_up.requires_grad_(), down.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = flexops.gated_experts(x, choices, weights, gate_up, down)
        return (out, *torch.autograd.grad(out, (gate_up, down), torch.ones_like(out)))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    choices.copy_(other[1]), weights.copy_(other[2])
    graph.replay()
    for one, wanted in zip(captured, step(), strict=True):
        assert torch.equal(one, wanted)


def test_choices_that_do_not_exist_stay_in_bounds():
    x, choices, weights, gate_up, down = block(64, 2, 8, 64, 64, torch.bfloat16)
    choices[0, 0], choices[1, 1], choices[2, 0] = -5, 2**40, 8
    out = flexops.gated_experts(x, choices, weights, gate_up, down)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(4, 4), (128, 8), (130, 3), (1000, 32)])
def test_routes(
    experts,
    k,
    normalize,
    scoring,
    dtype,
):
    logits = torch.randn(777, experts, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.randn(experts, device="cuda") * 0.1
    options: dict[str, Any] = {"scoring": scoring, "normalize": normalize, "scale": 1.5}
    weights, choices = flexops.route_tokens(logits, k, bias=bias, **options)
    grad = torch.randn_like(weights)
    (got,) = torch.autograd.grad(weights, logits, grad)
    wide = logits.detach().double().requires_grad_()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    keys = (scores + bias).gather(1, choices)
    wanted_keys = (scores + bias).topk(k, -1).values
    assert error(keys, wanted_keys) < 1e-6  # choices may differ where scores are nearly equal
    chosen = scores.gather(1, choices)
    expected = 1.5 * (chosen / chosen.sum(-1, keepdim=True) if normalize else chosen)
    (wanted,) = torch.autograd.grad(expected, wide, grad.double())
    assert error(weights, expected) < 1e-5
    assert error(got, wanted) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_routes_of_nan_are_experts():
    logits = torch.randn(64, 16, device="cuda")
    logits[3], logits[5, 2] = float("nan"), float("nan")
    _, choices = flexops.route_tokens(logits, 4)
    assert ((choices >= 0) & (choices < 16)).all()
    assert all(row.unique().numel() == 4 for row in choices)


def test_bias():
    x, choices, *_ = block(400, 4, 8, 96, 8, torch.bfloat16)
    order = moe.expert_order(choices, 8)
    bias = torch.randn(8, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = moe.add_bias(moe.spread_rows(x, order), bias, order)
    experts = choices.flatten()[order.order.flatten().long()]
    assert error(out, x[order.order.flatten().long() // 4].double() + bias.double()[experts]) < 8e-3
    grad = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, bias, grad)
    wanted = torch.zeros(8, 96, device="cuda", dtype=torch.float64)
    assert error(got, wanted.index_add(0, experts, grad.double())) < 8e-3


def test_self_checks():
    assert grouped.self_check("cuda") < 1e-3
    assert moe.self_check("cuda") < 1e-4
