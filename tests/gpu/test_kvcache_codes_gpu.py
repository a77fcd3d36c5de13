"""A compressed key-value cache on a GPU: kernels against plain PyTorch, and a captured step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexops.ops import kvcache_codes as codes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from test_kvcache_codes import grown, step

pytestmark = pytest.mark.gpu
KINDS = [(bits, group, dim) for bits in (8, 4) for group, dim in ((64, 64), (64, 128), (64, 256))]
KINDS += [(4, 32, 64), (8, 32, 128), (4, 128, 128), (8, 128, 256), (4, 128, 64)]


def copy_of(cache: codes.CompressedKVCache) -> codes.CompressedKVCache:
    return cache._replace(
        **{name: x.clone() for name, x in zip(cache._fields[:6], cache[:6], strict=True)}
    )


def assert_same(one: codes.CompressedKVCache, other: codes.CompressedKVCache) -> None:
    for name, x, y in zip(one._fields[:6], one[:6], other[:6], strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize(("bits", "group", "dim"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_give_the_codes_of_the_reference(bits, group, dim, dtype):
    cache, k, v = grown(bits, group, dim, dtype, "cuda")
    plain = copy_of(cache)
    for x in plain[:4]:
        x.zero_()
    coded = cache.coded(300)
    codes._compress_reference(k[:, :coded], v[:, :coded], *plain[:4], 0, bits, group)
    assert_same(cache, plain)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (150, -1), "num_splits": 3},
    "modified": {"softcap": 20.0, "sinks": torch.ones(8), "alibi_slopes": torch.full((8,), 0.01)},
}


@pytest.mark.parametrize(
    ("bits", "group", "dim", "option"),
    [(*kind, "plain") for kind in KINDS]
    + [
        (bits, 64, dim, more)
        for bits, dim in ((8, 128), (4, 64))
        for more in ("window", "modified")
    ],
)
def test_kernels_attend_as_the_reference(bits, group, dim, option, monkeypatch):
    options = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in OPTIONS[option].items()
    }
    cache, *_ = grown(bits, group, dim, torch.bfloat16, "cuda")
    angle = torch.rand(700, dim // 2, device="cuda") * 6.3
    options |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    options["cache_leftpad"] = torch.tensor([0, 3, 70], dtype=torch.int32, device="cuda")
    leaves = next(n for n in range(300, 500) if cache.coded(n + 1) > cache.coded(n))
    for lengths in ([300, 299, 298], [leaves] * 3, [10, leaves, 64]):
        other = copy_of(cache)
        (out, lse), *_ = step(cache, lengths, **options)
        with monkeypatch.context() as patch:
            patch.setattr(codes, "_takes_kernels", lambda _: False)
            (expected, sums), *_ = step(other, lengths, **options)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, sums, rtol=1e-2, atol=1e-2)
        for name, x, y in zip(cache._fields[:6], cache[:6], other[:6], strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=0.01, atol=1.001, msg=name)


def test_a_captured_step_follows_lengths_on_the_device():
    cache, *_ = grown(4, 64, 128, torch.bfloat16, "cuda")
    lengths = torch.full((3,), 300, dtype=torch.int32, device="cuda")
    other = copy_of(cache)
    step(other, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, k, v = (torch.ones(3, 1, n, 128, dtype=torch.bfloat16, device="cuda") for n in (8, 2, 2))
        out, _ = codes.attention_with_compressed_kvcache(q, cache, k, v, lengths)
    for n in range(300, 330):
        lengths.fill_(n)
        graph.replay()
        keys, values = codes.decompress(cache, n + 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=True
        ).transpose(1, 2)
        if cache.coded(n + 1) == cache.coded(n):
            torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
