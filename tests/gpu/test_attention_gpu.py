"""flexops.attention's kernels on a GPU: every tiling of both ways, Hopper's own and the one for
sm_80 and newer (backward also with the 99 KB of shared memory that 8.6, 8.9 and 12.x have), against
float64 and torch's flash backend."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import score_mod_cases
import torch
from attention_cases import SCORE_MODS, WINDOWS, assert_close, distance_of, errors, exact
from processes import completed
from torch import Tensor

import flexops
from flexops.build.load import loader
from flexops.ops import attention as attention_module
from flexops.testing import accuracy
from flexops.testing.comparing import size_of

pytestmark = pytest.mark.gpu
FAMILIES = ("attention",)
HALVES = (torch.bfloat16, torch.float16)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Whatever a test draws is what it draws alone, in any order."""
    torch.manual_seed(20)


def _library() -> Any:
    return ctypes.CDLL(
        str(
            next(
                one.path
                for one in flexops.status()
                if one.op == "attention" and one.device == "cuda" and one.path
            )
        )
    )


@pytest.fixture(params=["hopper", "sm_80", "sm_86"])
def way(request: pytest.FixtureRequest, require: Any) -> Iterator[str]:
    """Which kernels run, of those that take any number of queries."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    require(
        hopper or request.param != "hopper",
        "a GPU of capability 9.0",
        "bash scripts/run_tests.sh -m gpu, on an H100 or H200",
    )
    _library().flexops_attention_hopper(int(request.param == "hopper"))
    _library().flexops_attention_splits(0)
    _library().flexops_attention_shared(
        ctypes.c_int64(99 << 10 if request.param == "sm_86" else 1 << 20)
    )
    _library().flexops_attention_heads_split(0 if request.param == "sm_80" else -1)
    yield request.param
    _library().flexops_attention_heads_split(-1)
    _library().flexops_attention_shared(ctypes.c_int64(1 << 20))
    _library().flexops_attention_hopper(1)
    _library().flexops_attention_splits(-1)


@pytest.fixture(params=[-1, 1, 5], ids=["splits as chosen", "one split", "5 splits"])
def splits(request: pytest.FixtureRequest) -> Iterator[int]:
    """The kernels of few queries, and in how many parts they cut the keys."""
    _library().flexops_attention_splits(request.param)
    yield request.param
    _library().flexops_attention_splits(-1)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def qkv(
    queries: int,
    keys: int,
    heads: int,
    key_heads: int,
    columns: int,
    columns_v: int = 0,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    torch.manual_seed(queries + keys + columns)
    return (
        rand(batch, queries, heads, columns, dtype=dtype),
        rand(batch, keys, key_heads, columns, dtype=dtype),
        rand(batch, keys, key_heads, columns_v or columns, dtype=dtype),
    )


# ---- tilings ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "columns",
    [
        (32, 32),
        (64, 64),
        (72, 72),
        (96, 96),
        (80, 80),
        (128, 128),
        (64, 128),
        (192, 128),
        (192, 192),
        (160, 160),
        (256, 256),
    ],
)
@pytest.mark.usefixtures("way")
def test_every_tiling(columns, causal):
    assert_close(errors(*qkv(201, 333, 6, 2, *columns), causal=causal), torch.bfloat16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("columns", [(60, 60), (100, 36), (36, 64), (250, 250), (5, 3)], ids=str)
@pytest.mark.usefixtures("way")
def test_head_dims_that_are_no_multiple_of_8(columns, causal, monkeypatch):
    """Columns of zeros are added; the scale is that of q's own columns, gradients have no
    others."""

    def fail(*arguments: Any) -> None:
        pytest.fail(f"left the kernels: {arguments}")

    monkeypatch.setattr(loader, "decline", fail)
    assert_close(errors(*qkv(130, 150, 4, 2, *columns, batch=1), causal=causal), torch.bfloat16)
    found = errors(*qkv(70, 90, 4, 2, *columns, batch=1), with_lse=True, scale=0.3)
    assert_close(found, torch.bfloat16)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.usefixtures("way")
def test_float16(columns):
    assert_close(
        errors(*qkv(201, 333, 4, 4, columns, dtype=torch.float16), causal=True), torch.float16
    )


@pytest.mark.usefixtures("way")
def test_long_rows():
    """The tiling of 8192 keys and more."""
    assert_close(errors(*qkv(300, 8300, 2, 1, 128, batch=1), causal=True), torch.bfloat16)


INPUTS: dict[str, tuple[int, int, float, bool]] = {  # queries, keys, factor of q and k, causal
    "full": (1000, 1000, 1, False),
    "causal": (1000, 1000, 1, True),
    "causal, large logits": (1000, 1000, 6, True),
    "long rows": (256, 16384, 1, False),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_no_worse_than_torchs_flash_backend(dtype, columns, inputs, way):
    queries, keys, factor, causal = INPUTS[inputs]
    tensors = [
        x * size
        for x, size in zip(
            qkv(queries, keys, 4, 4, columns, dtype=dtype), (factor, factor, 1), strict=True
        )
    ]
    grad = rand(2, queries, 4, columns, dtype=dtype)

    def run(function: Any, of: list[Tensor], gradient: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in of]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def flash(*of: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in of), is_causal=causal
            ).transpose(1, 2)

    expected = run(
        lambda *of: exact(*of, causal=causal)[0], [x.double() for x in tensors], grad.double()
    )
    ours, theirs = (
        run(lambda *of: flexops.attention(*of, causal=causal), tensors, grad),
        run(flash, tensors, grad),
    )
    for what, actual, rival, value in zip(
        ("result", "gradient of q", "gradient of k", "gradient of v"),
        ours,
        theirs,
        expected,
        strict=True,
    ):
        name = (
            f"attention, {inputs}, {columns} columns{'' if way == 'hopper' else f', as on {way}'}"
        )
        found = accuracy.errors(actual, value), accuracy.errors(rival, value)
        accuracy.write(
            SimpleNamespace(name=name), "cuda", dtype, what, *found, float(size_of(value))
        )  # type: ignore[arg-type]
        assert distance_of(actual, value) <= 1.1 * distance_of(rival, value), f"{what}: {found}"


# ---- what scores may be ----


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("way")
def test_windows(window, causal):
    assert_close(
        errors(*qkv(700, 900, 2, 2, 128, batch=1), window=window, causal=causal), torch.bfloat16
    )


def _biases() -> dict[str, Tensor]:
    torch.manual_seed(5)
    keep = torch.rand(2, 1, 130, 257, device="cuda") > 0.3
    keep[:, :, 7] = False  # a row that sees nothing
    return {
        "float32, all batches": torch.randn(1, 4, 130, 257, device="cuda"),
        "bfloat16": torch.randn(2, 4, 130, 257, device="cuda").bfloat16(),
        "float16, one row": torch.randn(2, 1, 1, 257, device="cuda").half(),
        "bool": keep,
        "two dimensions, transposed": torch.randn(257, 130, device="cuda").t(),
    }


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize(
    "kind",
    ["float32, all batches", "bfloat16", "float16, one row", "bool", "two dimensions, transposed"],
)
@pytest.mark.usefixtures("way")
def test_bias(kind, columns):
    assert_close(errors(*qkv(130, 257, 4, 2, columns), bias=_biases()[kind]), torch.bfloat16)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.usefixtures("way")
def test_soft_cap(columns):
    q, k, v = qkv(500, 500, 2, 2, columns, batch=1)
    assert_close(errors(q * 4, k * 4, v, softcap=20.0, causal=True), torch.bfloat16)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.usefixtures("way")
def test_alibi(batched):
    slopes = torch.rand((2, 4) if batched else (4,), device="cuda")
    assert_close(
        errors(*qkv(500, 600, 4, 2, 128), alibi_slopes=slopes, causal=True), torch.bfloat16
    )


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("score_mod", SCORE_MODS)
@pytest.mark.usefixtures("way")
def test_score_modifiers(score_mod, columns):
    assert_close(
        errors(
            *qkv(190, 200, 4, 2, columns), score_mod=score_mod, sinks=torch.randn(4, device="cuda")
        ),
        torch.bfloat16,
    )


@pytest.mark.parametrize("name", score_mod_cases.FUNCTIONS)
def test_score_modifiers_of_flex_attention(name, monkeypatch):
    for known, value in vars(score_mod_cases).items():  # what the functions look things up in
        if isinstance(value, Tensor):
            monkeypatch.setattr(score_mod_cases, known, value.cuda())
    monkeypatch.setattr(score_mod_cases, "MODULE", score_mod_cases.Module().to("cuda"))
    tensors = [x.detach().to("cuda", torch.bfloat16) for x in score_mod_cases.inputs(64)]
    tensors = [x.requires_grad_() for x in tensors]
    doubled = [x.detach().double().requires_grad_() for x in tensors]
    function = score_mod_cases.FUNCTIONS[name]
    expected = score_mod_cases.wide(*doubled, function)
    out = flexops.attention(*tensors, score_mod=function)
    grad = torch.randn_like(out)
    wanted = [expected, *torch.autograd.grad(expected, doubled, grad.double())]
    found = [out, *torch.autograd.grad(out, tensors, grad)]
    names = ("out", "q", "k", "v")
    errors_of = {one: distance_of(a, b) for one, a, b in zip(names, found, wanted, strict=True)}
    assert_close(errors_of, torch.bfloat16)


def test_gradients_of_what_score_modifiers_look_up():
    q, k, v = (x.requires_grad_() for x in qkv(70, 90, 4, 2, 60))
    bias = torch.randn(4, 159, device="cuda", requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]

    def score_mod(table: Any, score: Any, _b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q >= k - 20, score + table[h, q - k + 89], -math.inf)

    out = flexops.attention(q, k, v, score_mod=functools.partial(score_mod, bias))
    expected, _ = exact(*wide[:3], score_mod=functools.partial(score_mod, wide[3]))
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    found = torch.autograd.grad(out, (q, k, v, bias), grad)
    names = ("q", "k", "v", "bias")
    errors_of = {one: distance_of(a, b) for one, a, b in zip(names, found, wanted, strict=True)}
    assert_close(errors_of, torch.bfloat16)


@pytest.mark.usefixtures("way")
def test_score_modifiers_that_look_things_up():
    """By an expression and by a function with the tensors around it: relative bias, and sequences
    in one row; what changes later is seen."""
    torch.manual_seed(0)
    bias, document = (
        torch.randn(4, 399, device="cuda"),
        (torch.arange(200, device="cuda") // 70).int(),
    )

    def score_mod(score: Any, _b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(
            (document[q] == document[k]) & (q >= k), score + bias[h, q - k + 199], -math.inf
        )

    text = flexops.ScoreMod(
        "score + bias[h, q - k + 199] if document[q] == document[k] and q >= k else -inf",
        bias=bias,
        document=document,
    )
    for _ in range(2):
        q, k, v = qkv(200, 200, 4, 2, 128)
        expected, found = (
            errors(q, k, v, score_mod=score_mod),
            flexops.attention(q, k, v, score_mod=text),
        )
        assert_close(expected, torch.bfloat16)
        assert torch.equal(found, flexops.attention(q, k, v, score_mod=score_mod))  # type: ignore[arg-type]
        bias.mul_(-1)
        document.copy_(torch.arange(200, device="cuda") // 20)


@pytest.mark.usefixtures("way")
def test_sinks_and_gradients_of_log_sum_exp():
    assert_close(
        errors(
            *qkv(200, 300, 4, 2, 128),
            sinks=torch.randn(4, device="cuda"),
            causal=True,
            with_lse=True,
        ),
        torch.bfloat16,
    )


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.usefixtures("way")
def test_all_at_once(columns):
    options = {
        "alibi_slopes": torch.rand(4, device="cuda"),
        "bias": torch.randn(2, 1, 300, 400, device="cuda"),
        "sinks": torch.randn(4, device="cuda"),
    }
    q, k, v = qkv(300, 400, 4, 2, columns)
    assert_close(
        errors(
            q * 3, k * 3, v, causal=True, softcap=20.0, window=(150, None), with_lse=True, **options
        ),
        torch.bfloat16,
    )


@pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
@pytest.mark.usefixtures("way")
def test_any_scale(scale):
    found = errors(*qkv(130, 200, 2, 2, 128), scale=scale)
    if scale == 0:
        assert found.pop("q") == found.pop("k") == 0
    assert_close(found, torch.bfloat16)


@pytest.mark.usefixtures("way")
def test_large_logits():
    q, k, v = qkv(300, 300, 2, 2, 128, batch=1)
    found = errors(q * 8, k * 8, v)
    assert found["out"] < 6e-3
    assert found["lse"] < 1e-4


# ---- what tensors may be ----


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (1, 1000), (3, 20000), (77, 1), (300, 100), (5, 0), (0, 5), (128, 128), (129, 127)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.usefixtures("way")
def test_any_lengths(queries, keys, columns):
    found = errors(*qkv(queries, keys, 4, 2, columns), causal=True)
    if keys == 1:  # softmax of one number has no gradient: what is left is rounding
        del found["q"], found["k"]
    assert_close(found, torch.bfloat16)


@pytest.mark.usefixtures("way")
def test_an_empty_batch():
    assert_close(errors(*qkv(5, 5, 4, 2, 64, batch=0)), torch.bfloat16)


def _strided(kind: str) -> list[Tensor]:
    torch.manual_seed(3)
    if kind == "packed projection":
        return list(rand(2, 400, 3, 4, 128).unbind(2))
    if kind == "heads first":
        return [rand(2, 4, 400, 128).transpose(1, 2) for _ in range(3)]
    if kind == "misaligned":
        return [rand(2 * 400 * 4 * 128 + 1)[1:].view(2, 400, 4, 128) for _ in range(3)]
    if kind == "broadcast":
        return [
            rand(1, 400, 4, 128).expand(2, 400, 4, 128),
            *(rand(2, 400, 1, 128).expand(2, 400, 4, 128) for _ in range(2)),
        ]
    return [rand(2, 400, 4, 256)[..., ::2] for _ in range(3)]


@pytest.mark.parametrize(
    "kind", ["packed projection", "heads first", "misaligned", "broadcast", "every second column"]
)
@pytest.mark.usefixtures("way")
def test_strides(kind):
    assert_close(errors(*_strided(kind), causal=True), torch.bfloat16)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("way")
def test_packed(columns, causal):
    """Each sequence gives what it gives alone; some are empty on one side."""
    torch.manual_seed(0)
    lengths_q, lengths_k = [100, 0, 333, 1, 128, 7], [100, 50, 400, 300, 7, 0]
    at_q, at_k = (
        [sum(lengths[:i]) for i in range(len(lengths) + 1)] for lengths in (lengths_q, lengths_k)
    )
    cumulative = [torch.tensor(at, dtype=torch.int32, device="cuda") for at in (at_q, at_k)]
    tensors = rand(at_q[-1], 4, columns), rand(at_k[-1], 2, columns), rand(at_k[-1], 2, columns)
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    grad, slopes = rand(*q.shape), torch.rand(4, device="cuda")
    out, lse = flexops.attention(
        q,
        k,
        v,
        causal=causal,
        alibi_slopes=slopes,
        cu_seqlens_q=cumulative[0],
        cu_seqlens_k=cumulative[1],
        max_seqlen_q=333,
        max_seqlen_k=400,
        return_lse=True,
    )
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    expected = [
        torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (out, lse, q, k, v)
    ]
    for i in range(len(lengths_q)):
        rows, keys = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
        wide = [
            x[None, part].double().requires_grad_()
            for x, part in ((tensors[0], rows), (tensors[1], keys), (tensors[2], keys))
        ]
        part, part_lse = exact(*wide, causal=causal, alibi_slopes=slopes)
        expected[0][rows], expected[1][:, rows] = part[0].detach(), part_lse[0].detach()
        of_q, of_k, of_v = torch.autograd.grad(part, wide, grad[None, rows].double())
        expected[2][rows], expected[3][keys], expected[4][keys] = of_q[0], of_k[0], of_v[0]
    names = ("out", "lse", "q", "k", "v")
    assert_close(
        {
            name: distance_of(a, b)
            for name, a, b in zip(names, (out, lse, *gradients), expected, strict=True)
        },
        torch.bfloat16,
    )


@pytest.mark.usefixtures("way")
def test_more_than_2_to_31_scores():
    """Some rows of a long sequence are what float64 makes of them."""
    length, heads = 2**17, 2
    q, k, v = qkv(length, length, heads, 1, 64, batch=1)
    out, lse = flexops.attention(q, k, v, causal=True, return_lse=True)
    for row in (0, 1, 12345, length // 2, length - 1):
        alone, alone_lse = exact(
            q[:, row : row + 1].double(), k[:, : row + 1].double(), v[:, : row + 1].double()
        )
        assert distance_of(out[:, row : row + 1], alone) < 6e-3
        assert distance_of(lse[..., row : row + 1], alone_lse) < 1e-4


@pytest.mark.usefixtures("way")
def test_gradients_over_262144_keys():
    """A length of 256k, both ways, with a window: of a part of the sequence float64 can then tell
    what the gradients are."""
    length, window = 2**18, 1000
    q, k, v = (x.requires_grad_() for x in qkv(length, length, 2, 1, 64, batch=1))
    grad = rand(1, length, 2, 64)
    gradients = torch.autograd.grad(
        flexops.attention(q, k, v, causal=True, window=(window, 0)), (q, k, v), grad
    )
    for begin in (0, length // 2, length - 3 * window):
        part = slice(begin, begin + 3 * window)
        wide = [x[:, part].detach().double().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(
            exact(*wide, causal=True, window=(window, 0))[0], wide, grad[:, part].double()
        )
        # queries whose keys are all in the part, and keys whose queries are such
        for actual, alone, last in zip(gradients, expected, (3, 2, 2), strict=True):
            assert (
                distance_of(
                    actual[:, part][:, window : last * window - 1],
                    alone[:, window : last * window - 1],
                )
                < 1.2e-2
            )


# ---- few queries, many keys ----


@pytest.mark.parametrize(
    "columns", [(32, 32), (64, 64), (96, 96), (128, 128), (72, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "key_heads"),
    [(1, 5000, 8, 2), (3, 700, 4, 4), (5, 1000, 12, 1), (1, 1, 2, 2), (2, 0, 2, 1), (7, 40, 6, 3)],
)
@pytest.mark.usefixtures("splits")
def test_few_queries(queries, keys, heads, key_heads, columns):
    found = errors(*qkv(queries, keys, heads, key_heads, *columns, batch=3), causal=True)
    if keys == 1:  # softmax of one number has no gradient: what is left is rounding
        del found["q"], found["k"]
    assert_close(found, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.usefixtures("splits")
def test_few_queries_with_every_option(dtype):
    q, k, v = qkv(3, 900, 8, 2, 128, dtype=dtype)
    bias, sinks = torch.randn(2, 1, 3, 900, device="cuda"), torch.randn(8, device="cuda")
    keep = torch.rand(2, 8, 3, 900, device="cuda") > 0.3
    keep[0, :, 1] = False  # rows that see nothing
    for options in (
        {"window": (200, 0)},
        {"window": (100, 3)},
        {"softcap": 5.0},
        {"alibi_slopes": torch.rand(8, device="cuda"), "causal": True},
        {"bias": bias},
        {"bias": keep},
        {"scale": -0.1},
        {"sinks": sinks, "with_lse": True},
        {"score_mod": SCORE_MODS[1], "sinks": sinks},
        {"softcap": 5.0, "bias": bias, "sinks": sinks, "window": (500, None), "causal": True},
    ):
        assert_close(errors(q, k, v, **options), dtype)  # type: ignore[arg-type]


@pytest.mark.usefixtures("splits")
def test_few_queries_over_a_packed_cache():
    """Sequences with one query or a few, and caches of any length, one of them empty."""
    lengths_q, lengths_k = [1, 4, 1, 0, 2], [3000, 17, 0, 5, 901]
    ends = [
        torch.tensor([sum(lengths[:i]) for i in range(6)], dtype=torch.int32, device="cuda")
        for lengths in (lengths_q, lengths_k)
    ]
    q, k, v = (
        rand(sum(lengths_q), 8, 128),
        rand(sum(lengths_k), 2, 128),
        rand(sum(lengths_k), 2, 128),
    )
    out, lse = flexops.attention(
        q,
        k,
        v,
        causal=True,
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=4,
        max_seqlen_k=3000,
        return_lse=True,
    )
    for rows, keys in (
        (slice(*ends[0][i : i + 2].tolist()), slice(*ends[1][i : i + 2].tolist())) for i in range(5)
    ):
        alone, alone_lse = exact(
            q[None, rows].double(), k[None, keys].double(), v[None, keys].double(), causal=True
        )
        assert distance_of(out[None, rows], alone) < 6e-3
        assert distance_of(lse[None, :, rows], alone_lse) < 1e-4


def test_few_queries_of_a_cache_that_is_longer_than_what_is_used():
    """Generation by scaled_dot_product_attention, in a graph, over a slice of a cache [batch,
    heads, length, head_dim]."""
    cache = rand(2, 4, 2, 4096, 128)
    q, k, v = rand(4, 8, 1, 128), cache[0, :, :, :3333], cache[1, :, :, :3333]
    graph = torch.cuda.CUDAGraph()
    flexops.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with torch.cuda.graph(graph):
        out = flexops.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    cache.normal_()
    graph.replay()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), enable_gqa=True
    )
    assert distance_of(out, expected) < 6e-3


@pytest.mark.parametrize("split", [0, 1], ids=["all in one block", "blocks of their own"])
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.usefixtures("way")
def test_query_heads_that_share_a_key_head(columns, split):
    """Gradients of a key head are added up in one block, or, where there would be few blocks,
    afterwards."""
    _library().flexops_attention_heads_split(split)
    q, k, v = qkv(150, 200, 4, 2, columns, batch=1)
    options = {"alibi_slopes": torch.rand(4, device="cuda"), "causal": True}
    for deterministic in (False, True):
        assert_close(errors(q, k, v, causal=True, deterministic=deterministic), torch.bfloat16)
        assert_close(
            errors(q.half(), k.half(), v.half(), deterministic=deterministic, **options),
            torch.float16,
        )
    # a tile, a key head, fewer columns of v
    assert_close(errors(q[:1, :50], k[:1, :70, :1], v[:1, :70, :1, : columns // 2]), torch.bfloat16)


# ---- always the same ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.usefixtures("way")
def test_deterministic_gradients(columns, causal):
    q, k, v = (x.requires_grad_() for x in qkv(1100, 1500, 8, 4, columns))
    grad = rand(2, 1100, 8, columns)
    runs = [
        torch.autograd.grad(
            flexops.attention(q, k, v, causal=causal, deterministic=True), (q, k, v), grad
        )
        for _ in range(4)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert_close(errors(q, k, v, causal=causal, deterministic=True), torch.bfloat16)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_deterministic_gradients_with_all_modifiers(columns):
    """By the kernels that compute dQ alone: soft cap, ALiBi, bias, sinks, a window, and rows that
    see nothing."""
    q, k, v = qkv(300, 230, 4, 2, columns)
    options = {
        "alibi_slopes": torch.rand(4, device="cuda"),
        "bias": torch.randn(2, 1, 300, 230, device="cuda"),
        "sinks": torch.randn(4, device="cuda"),
    }
    assert_close(
        errors(
            q * 3,
            k * 3,
            v,
            causal=True,
            softcap=20.0,
            window=(90, None),
            with_lse=True,
            deterministic=True,
            **options,
        ),
        torch.bfloat16,
    )
    assert_close(errors(q, k, v, score_mod=SCORE_MODS[1], deterministic=True), torch.bfloat16)


@pytest.mark.usefixtures("way")
def test_on_many_threads():
    cases = [(columns, causal) for columns in (64, 128, 256) for causal in (False, True)]
    found: list[dict[str, float]] = [{} for _ in cases]

    def work(number: int) -> None:
        columns, causal = cases[number]
        with torch.cuda.stream(torch.cuda.Stream()):
            generator = torch.Generator("cuda").manual_seed(number)
            q, k, v = (
                torch.randn(2, 300, 4, columns, device="cuda", generator=generator).bfloat16()
                for _ in range(3)
            )
            found[number] = errors(q, k, v, causal=causal)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        assert one
        assert_close(one, torch.bfloat16)


FIRST_LAUNCH = """
import torch, flexops
torch.manual_seed(0)
q, k, v, grad = (torch.randn(2, 300, 4, 64, device="cuda").bfloat16() for _ in range(4))
q, k, v = (x.requires_grad_() for x in (q, k, v))
assert not flexops.attention(q[:, :0], k, v).numel()  # loads the library, launches nothing
torch.autograd.grad((q.float() @ k.float().transpose(-1, -2)).sum(), (q, k))  # torch's own first things
torch.cuda.synchronize()

def run():
    out = flexops.attention(q, k, v, causal=True)
    return out, *torch.autograd.grad(out, (q, k, v), grad)

stream = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    results = run()
graph.replay()
torch.cuda.synchronize()
expected = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
for a, b in zip(results, (expected, *torch.autograd.grad(expected, (q, k, v), grad.double())), strict=True):
    assert (a.double() - b.double()).norm() < 0.01 * b.double().norm(), (a, b)
assert {one.device: one.backend for one in flexops.status() if one.op == "attention"}["cuda"] in ("aot", "jit")
"""


BACKWARD_FIRST = """
import torch, flexops
torch.manual_seed(0)
q, k, v, grad = (torch.randn(2, 300, 4, 128, device="cuda").bfloat16() for _ in range(4))
q, k, v = (x.requires_grad_() for x in (q, k, v))
out = flexops.attention(q, k, v, causal=True)
memory = torch.empty(2**28, device="cuda", dtype=torch.uint8)
del memory  # what backward allocates is there: nothing of CUDA's runtime runs on autograd's thread before our kernels
gradients = torch.autograd.grad(out, (q, k, v), grad)
torch.cuda.synchronize()
assert all(x.isfinite().all() and x.any() for x in gradients)
"""


def test_backward_is_the_first_thing_on_autograds_thread():
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    completed([sys.executable, "-c", BACKWARD_FIRST], env=environment)


def test_first_launch_in_graph_capture():
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    completed([sys.executable, "-c", FIRST_LAUNCH], env=environment)


# ---- what kernels do not take ----


@pytest.mark.filterwarnings("ignore::flexops.FallbackWarning")
@pytest.mark.parametrize(
    ("columns", "dtype", "reason"),
    [(64, torch.float32, "float32 on a GPU"), (320, torch.bfloat16, "head_dim of 320")],
)
def test_the_reason_of_plain_pytorch_is_reported(columns, dtype, reason):
    assert_close(errors(*qkv(50, 70, 4, 2, columns, dtype=dtype), causal=True), torch.bfloat16)
    assert any(
        reason in one.reason
        for one in flexops.status()
        if one.op == "attention" and one.backend == "reference"
    )
    with torch.no_grad():
        q, k, v = (x.transpose(1, 2) for x in qkv(50, 50, 4, 4, columns, dtype=dtype))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(
            flexops.scaled_dot_product_attention(q, k, v, is_causal=True), expected
        )


@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (100, 150), (150, 100)])
def test_torchs_arguments(queries, keys):
    q, k, v = (x.transpose(1, 2) for x in qkv(queries, keys, 4, 2, 64))
    keep = torch.rand(2, 1, queries, keys, device="cuda") > 0.3
    for options in ({"is_causal": True}, {"attn_mask": keep}, {"scale": 0.3}):
        wide = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), enable_gqa=True, **options
        )  # type: ignore[arg-type]
        ours = flexops.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)  # type: ignore[arg-type]
        assert distance_of(ours, wide.nan_to_num(0.0)) < 6e-3


def test_self_check():
    assert attention_module.self_check("cuda") < 0.05
    assert math.isfinite(attention_module.self_check("cuda"))
