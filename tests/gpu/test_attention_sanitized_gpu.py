"""What ``flexops sanitize attention`` runs: every tiling of attention's kernels at odd lengths,
small enough for compute-sanitizer, alone as well."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flexops

pytestmark = pytest.mark.gpu
FAMILIES = ("attention",)

LENGTHS = ((1, 1), (77, 1), (1, 300), (3, 1000), (201, 333), (333, 201), (5, 0))
COLUMNS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {},
    {"window": (50, 7), "sinks": True},
    {"bias": True, "softcap": 5.0},
)


@pytest.fixture(params=["hopper", "hopper, heads apart", "sm_80", "sm_86", "few queries"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    library = ctypes.CDLL(
        str(
            next(
                one.path
                for one in flexops.status()
                if one.op == "attention" and one.device == "cuda" and one.path
            )
        )
    )
    library.flexops_attention_hopper(int(request.param.startswith("hopper")))
    library.flexops_attention_heads_split(int(request.param == "hopper, heads apart"))
    library.flexops_attention_splits(-1 if request.param == "few queries" else 0)
    library.flexops_attention_shared(
        ctypes.c_int64(99 << 10 if request.param == "sm_86" else 1 << 20)
    )
    yield request.param
    library.flexops_attention_heads_split(-1)
    library.flexops_attention_shared(ctypes.c_int64(1 << 20))
    library.flexops_attention_hopper(1)
    library.flexops_attention_splits(-1)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "full")
@pytest.mark.parametrize("columns", COLUMNS)
def test_gpu_shapes(columns, options, way):
    torch.manual_seed(0)
    for queries, keys in LENGTHS:
        if way == "few queries" and queries > 16:
            continue
        q, k, v = (
            torch.randn(2, length, heads, width, device="cuda").bfloat16().requires_grad_()
            for length, heads, width in (
                (queries, 4, columns[0]),
                (keys, 2, columns[0]),
                (keys, 2, columns[1]),
            )
        )
        tensors = {
            "bias": torch.randn(queries, keys, device="cuda"),
            "sinks": torch.randn(4, device="cuda"),
        }
        out = flexops.attention(
            q, k, v, **{name: tensors.get(name, value) for name, value in options.items()}
        )
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert all(bool(x.isfinite().all()) for x in (out, *gradients))


def test_gpu_packed(way):
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 3, 10, 11], dtype=torch.int32, device="cuda")
    many = ends if way == "few queries" else 31 * ends
    q, k, v = (
        torch.randn(int(many[-1]), heads, 128, device="cuda").bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    )
    longest = int((many[1:] - many[:-1]).max())
    out = flexops.attention(
        q,
        k,
        v,
        causal=True,
        cu_seqlens_q=many,
        cu_seqlens_k=many,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        deterministic=True,
    )
    gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))
