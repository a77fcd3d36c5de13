"""Experts of few tokens on a GPU, against float64, the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops import few_experts as few

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
SILU: dict[str, Any] = {"activation": "silu"}
CLAMPED: dict[str, Any] = {
    "activation": "clamped", "interleaved": True, "alpha": 1.702, "limit": 1.5,
}  # fmt: skip
CASES = [
    (1, 8, 128, 512, 768, SILU, False),
    (3, 4, 8, 72, 40, {"activation": "gelu"}, True),
    (2, 2, 5, 1032, 264, {"activation": "gelu_tanh", "interleaved": True}, False),
    (1, 4, 9, 720, 360, CLAMPED, True),
    (5, 1, 3, 8, 8, CLAMPED, True),
    (64, 1, 40, 264, 136, SILU, False),
]


@pytest.fixture(scope="module", autouse=True)
def native(native_kernels: Callable[[str, str], None]) -> None:
    native_kernels("few_experts", "cuda")


def layer(experts: int, outputs: int, inputs: int, columns: bool, dtype: torch.dtype) -> Tensor:
    made = (torch.randn(experts, outputs, inputs, device=CUDA) * inputs**-0.5).to(dtype)
    return made.transpose(1, 2).contiguous().transpose(1, 2) if columns else made


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_float64s(case, columns, dtype):
    """Some choices are no expert's number; weights are float32 or not, choices of 64 or 32 bits."""
    torch.manual_seed(0)
    tokens, k, experts, hidden, inner, options, biased = case
    x = torch.randn(tokens, hidden, device=CUDA).to(dtype)
    choices = torch.randint(0, experts + 1, (tokens, k), device=CUDA)
    weights = torch.rand(tokens, k, device=CUDA)
    if biased:
        choices, weights = choices.int(), weights.to(dtype)
    gate_up = layer(experts, 2 * inner, hidden, columns, dtype)
    down = layer(experts, hidden, inner, columns, dtype)
    biases: Any = (None, None)
    if biased:
        biases = tuple(torch.randn(experts, n, device=CUDA).to(dtype) for n in (2 * inner, hidden))
    found = [few.few_experts(x, choices, weights, gate_up, down, biases, **options)
             for _ in range(3)]  # fmt: skip
    wide = [None if one is None else one.double() for one in (gate_up, down, *biases)]
    exact = few._reference(
        x.double(), choices, weights.double(), *wide, False, options.get("interleaved", False),
        few.ACTIVATIONS[options["activation"]], options.get("alpha", 0), options.get("limit", 0),
    )  # fmt: skip
    assert (found[0].double() - exact).norm() <= BOUNDS[dtype] * exact.norm()
    assert all(torch.equal(found[0], one) for one in found)
    x[0, 0], choices[0, 0] = torch.nan, 0
    spoilt = few.few_experts(x, choices, weights, gate_up, down, biases, **options)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1:], found[0][1:])


@torch.no_grad()
def test_gated_experts_of_few_tokens(monkeypatch):
    """They are these, also in a captured graph; with a gradient they are not."""
    calls: list[int] = []
    run = few.few_experts
    monkeypatch.setattr(
        few, "few_experts", lambda *args, **kw: (calls.append(1), run(*args, **kw))[1]
    )
    x, weights = torch.randn(4, 64, device=CUDA).bfloat16(), torch.rand(4, 2, device=CUDA)
    gate_up, down = layer(8, 96, 64, False, x.dtype), layer(8, 64, 48, False, x.dtype)
    choices = torch.randint(0, 8, (4, 2), device=CUDA)
    out = flexops.gated_experts(x, choices, weights, gate_up, down)
    assert len(calls) == 1
    with torch.enable_grad():
        kept = flexops.gated_experts(x, choices, weights.requires_grad_(), gate_up, down)
    assert len(calls) == 1
    assert (out.float() - kept.float()).norm() < 1e-2 * kept.float().norm()
    weights = weights.detach()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flexops.gated_experts(x, choices, weights, gate_up, down)
    choices.copy_(choices.flip(0))
    graph.replay()
    assert torch.equal(captured, flexops.gated_experts(x, choices, weights, gate_up, down))


INT4_CASES = [
    (1, 8, 32, 512, 768, SILU, False),
    (3, 4, 8, 96, 64, {"activation": "gelu"}, True),
    (2, 2, 5, 1056, 288, {"activation": "gelu_tanh", "interleaved": True}, False),
    (1, 4, 9, 704, 352, CLAMPED, True),
    (40, 1, 12, 128, 64, SILU, False),
]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["64", "32", "128 symmetric", "mxfp4"])
@pytest.mark.parametrize("case", INT4_CASES, ids=str)
def test_results_of_4_bits_are_float64s(case, kind, dtype):
    """Some choices are no expert's number, or have a weight of 0."""
    torch.manual_seed(0)
    tokens, k, experts, hidden, inner, options, biased = case
    mxfp4, size = kind == "mxfp4", 32 if kind == "mxfp4" else int(kind.split()[0])
    hidden, inner = hidden // size * size, max(inner // size, 1) * size
    hidden, inner = max(hidden, size), max(inner, size)
    x = torch.randn(tokens, hidden, device=CUDA).to(dtype)
    choices = torch.randint(0, experts + 1, (tokens, k), device=CUDA)
    weights = torch.rand(tokens, k, device=CUDA)
    weights[-1, -1] = 0
    if biased:
        choices, weights = choices.int(), weights.to(dtype)
    symmetric = kind.endswith("symmetric") or mxfp4
    packed = [
        flexops.quantize_int4(one.flatten(0, 1), size, symmetric)
        for one in (
            layer(experts, 2 * inner, hidden, False, torch.bfloat16),
            layer(experts, hidden, inner, False, torch.bfloat16),
        )
    ]
    biases: Any = (None, None)
    if biased:
        biases = tuple(torch.randn(experts, n, device=CUDA).to(dtype) for n in (2 * inner, hidden))
    given = x, choices, weights, *packed, biases
    found = [few.few_experts_int4(*given, mxfp4=mxfp4, **options) for _ in range(3)]
    unpack = few.unpack_mxfp4 if mxfp4 else flexops.unpack_int4
    wide = [unpack(one, torch.float32).double().view(experts, -1, one.k) for one in packed]
    wide += [None if one is None else one.double() for one in biases]
    exact = few._reference(
        x.double(), choices, weights.double(), *wide, False, options.get("interleaved", False),
        few.ACTIVATIONS[options["activation"]], options.get("alpha", 0), options.get("limit", 0),
    )  # fmt: skip
    assert (found[0].double() - exact).norm() <= BOUNDS[dtype] * exact.norm()
    assert all(torch.equal(found[0], one) for one in found)
    x[0, 0], choices[0, 0], weights[0, 0] = torch.nan, 0, 1
    spoilt = few.few_experts_int4(*given, mxfp4=mxfp4, **options)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1:], found[0][1:])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(48, 96), (23, 256)], ids=str)
def test_mxfp4_is_unpacked_exactly(shape, dtype):
    n, k = shape
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, device=CUDA)
    scales = (2.0 ** torch.randint(-14, 12, (n, k // 32), device=CUDA)).bfloat16()
    weight = flexops.pack_int4(codes, scales, group_size=32)
    expected = few._unpack_reference(weight.packed, weight.scales, n, k, dtype)
    assert torch.equal(few.unpack_mxfp4(weight, dtype), expected)
