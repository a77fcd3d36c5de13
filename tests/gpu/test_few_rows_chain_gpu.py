"""Chains of products of a few rows on a GPU: each phase against float64 of what it reads; the
same bits each time, also in a captured graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import flexops
from flexops.ops import few_rows_chain, int4_linear, kvcache_attention
from flexops.ops.few_rows_chain import WORKSPACE, Attention, Phase, attends, few_rows_chain_

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BOUNDS = {torch.bfloat16: (4e-3, 9e-3), torch.float16: (1e-3, 2e-3)}
"""Of the distance, relative to the norm: a plain product's, and one's behind a norm or with an
activation, whose operands or factors are rounded once more."""


@pytest.fixture(scope="module", autouse=True)
def native(native_kernels: Callable[[str, str], None]) -> None:
    if not few_rows_chain.runs_on(CUDA):
        pytest.skip("runs on 9.0 and newer")
    native_kernels("few_rows_chain", "cuda")


def int4(
    n: int, k: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> flexops.Int4Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=CUDA)
    scales = (torch.rand(n, k // group_size, device=CUDA) + 0.1).to(dtype) / 8 / k**0.5
    zeros = None if symmetric else torch.rand(n, k // group_size, device=CUDA) * 15
    return flexops.pack_int4(codes, scales, zeros, group_size=group_size)


def layer(
    rows: int, sizes: tuple[int, int, tuple[int, ...]], group_size: int, symmetric: bool,
    bias: bool, activation: int, dtype: torch.dtype,
) -> list[Phase]:  # fmt: skip
    """What lies between two attentions."""
    hidden, inner, last = sizes

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=CUDA).to(dtype)

    def weight(n: int, k: int) -> flexops.Int4Weight:
        return int4(n, k, group_size, symmetric, dtype)

    def biases(*sizes: int) -> list[Tensor]:
        return [random(n) for n in sizes] if bias else []

    x, h = random(rows, hidden), random(rows, hidden)
    first, g, second, qkv = (
        torch.full((rows, n), torch.nan, dtype=dtype, device=CUDA)
        for n in (hidden, inner, hidden, sum(last))
    )
    half = inner if activation else inner // 2
    pair = [weight(half, hidden), weight(half, hidden)]
    return [
        Phase(first, x, [weight(hidden, hidden)], biases(hidden), None, h, 0),
        Phase(g, first, pair, biases(half, half), random(hidden), None, activation),
        Phase(second, g, [weight(hidden, inner)], biases(hidden), None, first, 0),
        Phase(
            qkv, second, [weight(n, hidden) for n in last], biases(*last), random(hidden), None, 0
        ),
    ]


def wanted(phase: Phase, offset: float) -> Tensor:
    """From what the phase has read, in float64; each product rounded."""
    x = phase.x.double()
    if phase.norm is not None:
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x = x * factor * (phase.norm.double() + offset)
    made = []
    for i, weight in enumerate(phase.weights):
        dense = int4_linear.unpack_reference(weight, torch.float32)
        y = x @ dense.double().t() + (phase.biases[i].double() if phase.biases else 0)
        made.append(y.to(phase.out.dtype).double())
    if phase.activation:
        functional = torch.nn.functional
        acted = {
            1: functional.silu,
            2: functional.gelu,
            3: lambda x: functional.gelu(x, approximate="tanh"),
        }[phase.activation](made[0])
        made = [acted * made[1]]
    y = torch.cat(made, -1)
    return y if phase.residual is None else y + phase.residual.double()


SMALL = (512, 1280, (512, 128, 112))
CASES = [
    *((SMALL, size, symmetric, size == 32, 1) for size in (32, 64, 128) for symmetric in (0, 1)),
    ((4096, 14336, (4096, 1024, 1024)), 64, False, False, 1),
    ((2048, 8192, (2048, 512, 512)), 64, False, True, 3),
    ((896, 4864, (896, 128, 128)), 128, True, True, 1),
    ((128, 70 * 64, (90,)), 64, False, False, 2),
    ((192, 133 * 64, (16, 48, 32)), 64, False, False, 1),
    ((512, 1280, (512,)), 64, True, False, 0),
    ((256, 16384, (256,)), 64, False, False, 1),
    ((384, 16384, (64,)), 32, False, False, 1),  # the fewest stages
    ((8192, 16384, (8192, 8192)), 64, False, False, 1),  # more than 32 chunks of a warp
]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_phase_is_float64s(
    case, dtype,
    rows,
):  # fmt: skip
    torch.manual_seed(rows)
    sizes, group_size, symmetric, bias, activation = case
    phases = layer(rows, sizes, group_size, symmetric, bias, activation, dtype)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=CUDA)
    for count in range(len(phases), 0, -1):
        for phase in phases:
            phase.out.fill_(torch.nan)
        few_rows_chain_(phases[:count], workspace, offset=1.0)
        for phase in phases[:count]:
            exact = wanted(phase, 1.0)
            distance = (phase.out.double() - exact).norm() / exact.norm()
            assert distance < BOUNDS[dtype][phase.norm is not None or phase.activation > 0]
        found = [phase.out.clone() for phase in phases[:count]]
        for _ in range(3):
            few_rows_chain_(phases[:count], workspace, offset=1.0)
        assert all(map(torch.equal, found, (phase.out for phase in phases)))
        assert all(phase.out.isnan().all() for phase in phases[count:])


@torch.no_grad()
def test_launches_follow_each_other_in_a_graph():
    """Each launch's first blocks start while the one before runs."""
    torch.manual_seed(0)
    layers = [layer(1, SMALL, 64, False, False, 1, torch.bfloat16) for _ in range(8)]
    for before, after in itertools.pairwise(layers):
        after[0] = after[0]._replace(x=before[3].out[:, :512], residual=before[2].out)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=CUDA)

    def step() -> None:
        for phases in layers:
            few_rows_chain_(phases, workspace)

    step()
    found = [phase.out.clone() for phases in layers for phase in phases]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        for phases in layers:
            for phase in phases:
                phase.out.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, found, (phase.out for phases in layers for phase in phases)))


def attention(
    x: Tensor, heads: int, heads_k: int, dim: int, length: int, padding: int | None, turned: int,
    window_left: int, normed: bool, capacity: int = 600,
) -> Attention:  # fmt: skip
    """Of a part of longer caches; ``turned``: columns that the rotary embedding turns."""
    keys, values = (
        torch.randn(1, capacity + 8, heads_k, dim, device=CUDA).to(x.dtype)[:, :capacity]
        for _ in range(2)
    )
    angles = torch.rand(capacity + 8, turned // 2, device=CUDA) * 6.3
    tables = torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype).chunk(2, -1)
    whole = [
        None if one is None else torch.tensor([one], dtype=torch.int32, device=CUDA)
        for one in (length, padding)
    ]
    out = torch.full((1, heads * dim), torch.nan, dtype=x.dtype, device=CUDA)
    rotary = tuple(tables) if turned else None
    norms = torch.rand(2, dim, device=CUDA).to(x.dtype).unbind() if normed else None
    rest = *whole, dim**-0.5, window_left, norms
    return Attention(out, x, keys, values, rotary, *rest)  # type: ignore[arg-type]


def attended(phase: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and both caches, in float64."""
    wide = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, phase)
    given = few_rows_chain._attended(wide, EPS, OFFSET)
    caches = [one.clone() for one in given[1:3]]
    out, _ = kvcache_attention._reference(given[0], *caches, *given[3:])
    return out.view(len(out), -1), *caches


EPS, OFFSET = 1e-5, 0.5
ATTENTIONS = [
    (32, 8, 128, 511, None, 128, -1, False),
    (32, 8, 128, 512, 70, 128, -1, True),
    (32, 8, 64, 599, 0, 64, 300, False),
    (8, 8, 128, 0, None, 128, -1, True),
    (4, 4, 32, 2, 5, 0, -1, True),  # padding hides the new token
    (6, 2, 256, 130, 7, 64, 0, True),  # it sees itself alone
    (10, 2, 64, 300, None, 48, 77, True),
    (5, 1, 32, 450, 449, 32, -1, True),
    (5, 1, 32, 600, None, 32, 20, True),  # a full cache takes no token
    (128, 64, 64, 333, None, 64, -1, False),  # one split
]
"""Heads, key heads, their columns, length, padding, columns that are turned, the window's left
part, whether queries and key are normalized."""


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
def test_attention_is_float64s(case, dtype):
    """As the first phase of a launch, and behind and before a product."""
    torch.manual_seed(0)
    heads, heads_k, dim, *_ = case
    hidden = 192
    workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=CUDA)
    x = torch.randn(1, hidden, device=CUDA).to(dtype)
    qkv = torch.full((1, (heads + 2 * heads_k) * dim), torch.nan, dtype=dtype, device=CUDA)
    project = Phase(qkv, x, [int4(qkv.shape[1], hidden, 64, False, dtype)], [], None, None, 0)
    capacity = 400 if heads_k == 64 else 600
    phase = attention(qkv, *case, capacity)
    assert attends(phase)
    end = Phase(torch.empty_like(x), phase.out, [int4(hidden, heads * dim, 32 if dim == 32 else 64,
                False, dtype)], [], None, None, 0)  # fmt: skip
    kept = phase.keys.clone(), phase.values.clone()
    few_rows_chain_([project], workspace)
    exact, keys, values = attended(phase)
    chains = [[phase], [project, phase], [project, phase, end] if dim > 32 else [phase]]
    found = []
    for phases in chains + chains:
        phase.keys.copy_(kept[0]), phase.values.copy_(kept[1])
        phase.out.fill_(torch.nan)
        few_rows_chain_(phases, workspace, eps=EPS, offset=OFFSET)
        # of no token that is seen: zeros
        assert (phase.out.double() - exact).norm() <= BOUNDS[dtype][0] * exact.norm()
        assert (phase.keys.double() - keys).norm() < BOUNDS[dtype][0] * keys.norm()
        assert torch.equal(phase.values.double(), values)
        found.append(phase.out.clone())
    assert all(torch.equal(found[0], one) for one in found)
    if dim > 32:
        exact = wanted(end, 0.0)
        assert (end.out.double() - exact).norm() < BOUNDS[dtype][0] * exact.norm()


@torch.no_grad()
def test_the_host_refuses_what_does_not_fit():
    phases = layer(1, SMALL, 64, False, False, 1, torch.bfloat16)
    workspace = torch.zeros(WORKSPACE, dtype=torch.int32, device=CUDA)
    wide = phases[0]._replace(out=phases[0].out.new_empty(1, 1024)[:, ::2])
    with pytest.raises((RuntimeError, ValueError), match="outs"):
        few_rows_chain_([wide], workspace)
    three = layer(3, SMALL, 64, False, False, 1, torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError), match="at most 2 rows"):
        few_rows_chain_(three, workspace)
    small = layer(1, SMALL, 32, False, False, 1, torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError), match="scales of phase 1"):
        few_rows_chain_([phases[0], small[1]._replace(x=phases[0].out)], workspace)
