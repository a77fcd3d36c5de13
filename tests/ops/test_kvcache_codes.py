"""A compressed key-value cache: codes, the ring, and attention over both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexops.ops import kvcache_codes as codes
from flexops.ops.attention import attention

CASES = [(8, 64, 64), (4, 64, 128), (4, 32, 64), pytest.param(8, 128, 256, marks=pytest.mark.extra)]


def grown(
    bits: int, group: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu",
    length: int = 300, heads: int = 2,
) -> tuple[codes.CompressedKVCache, Tensor, Tensor]:  # fmt: skip
    """A cache of `length` tokens, and the tokens; channels differ in size and mean, as keys' do."""
    g = torch.Generator().manual_seed(bits + dim)
    k, v = (torch.randn(3, length, heads, dim, generator=g) for _ in range(2))
    k = k * torch.rand(dim, generator=g) * 3 + torch.randn(dim, generator=g) * 4
    k, v = (x.to(dtype).to(device) for x in (k, v))
    cache = codes.make_compressed_cache(
        3, 640, heads, dim, bits=bits, group_size=group, residual_length=64, dtype=dtype,
        device=device,
    )  # fmt: skip
    codes.append_compressed_(cache, k, v, 0)
    return cache, k, v


def step(
    cache: codes.CompressedKVCache,
    lengths: Any,
    query_heads: int = 8,
    seed: int = 0,
    **options: Any,
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """A decode step on random numbers; and what went in."""
    ring, g = cache.recent_k, torch.Generator().manual_seed(seed)
    batch, _, heads, dim = ring.shape
    q, k, v = (
        torch.randn(batch, 1, n, dim, generator=g).to(ring.dtype).to(ring.device)
        for n in (query_heads, heads, heads)
    )
    if isinstance(lengths, list):
        lengths = torch.tensor(lengths, dtype=torch.int32, device=ring.device)
    return codes.attention_with_compressed_kvcache(q, cache, k, v, lengths, **options), q, k, v


@pytest.mark.parametrize(("bits", "group", "dim"), CASES)
def test_values_come_back_within_half_a_step(bits, group, dim):
    cache, k, v = grown(bits, group, dim)
    keys, values = codes.decompress(cache, 300)
    coded = cache.coded(300)
    assert coded == (300 - 64) // group * group
    torch.testing.assert_close(keys[:, coded:], k[:, coded:], rtol=0, atol=0)
    for found, given, axis, size in ((keys, k, 1, group), (values, v, 3, min(group, dim))):
        parts = given[:, :coded].unflatten(axis, (-1, size))
        spans = parts.amax(axis + 1, True) - parts.amin(axis + 1, True)
        error = (found[:, :coded] - given[:, :coded]).abs().unflatten(axis, (-1, size))
        # half a step, and what fp16 rounds of steps and minima
        assert (error <= spans / (2**bits - 1) * 0.51 + spans * 2**-10 + 0.01).all()


def test_parts_give_the_cache_of_the_whole():
    whole, k, v = grown(4, 64, 64)
    cache = codes.make_compressed_cache(
        3, 640, 2, 64, bits=4, group_size=64, residual_length=64, dtype=torch.float32
    )
    at = 0
    for size in (1, 100, 63, 130, 6):
        codes.append_compressed_(cache, k[:, at : at + size], v[:, at : at + size], at)
        at += size
    assert at == 300
    for one, other in zip(codes.decompress(cache, 300), codes.decompress(whole, 300), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="has no room for 641"):
        codes.append_compressed_(cache, k[:, :41], v[:, :41], 600)


@pytest.mark.parametrize("length", [1, 64, 127, 128, 129, 191, 192, 300])
def test_tokens_whose_number_the_device_knows_give_the_same_cache(length):
    _, k, v = grown(4, 64, 64)
    given, filled = (
        codes.make_compressed_cache(
            3, 640, 2, 64, bits=4, group_size=64, residual_length=64, dtype=torch.float32
        )
        for _ in range(2)
    )
    codes.append_compressed_(given, k[:, :length], v[:, :length], 0)
    codes.fill_compressed_(filled, k, v, codes.slots_of(filled, torch.tensor([length])))
    for n in (length, length + 64):  # codes that were read by nothing are written again
        pairs = zip(codes.decompress(filled, n), codes.decompress(given, n), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        for cache in (filled, given):
            codes.append_compressed_(cache, k[:, :64], v[:, :64], n)


@pytest.mark.parametrize(("bits", "group", "dim"), CASES[:3])
def test_a_step_attends_to_what_the_cache_holds(bits, group, dim):
    cache, *_ = grown(bits, group, dim)
    for n in range(300, 300 + group + 1):  # groups leave the ring
        if n not in (300, 300 + group):
            step(cache, n, seed=n)
            continue
        keys, values = codes.decompress(cache, n)
        (out, _), q, k, v = step(cache, [n] * 3, seed=n, window_size=(200, -1), softcap=20.0)
        expected = attention(
            q, torch.cat((keys, k), 1), torch.cat((values, v), 1), window=(200, None), softcap=20.0
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert cache.coded(301 + group) > cache.coded(300)
    assert torch.equal(codes.decompress(cache, 301 + group)[0][:, -1:], k)


def test_bad_numbers_are_errors():
    for wrong, words in (
        ({"bits": 3}, "bits .* must be 8 or 4, got 3"),
        ({"group_size": 48}, "group_size .* got 48"),
        ({"residual_length": 100}, "residual_length .* multiple of 32"),
        ({"head_dim": 96}, "head_dim .* multiple of 8 and of 64"),
    ):
        given = {"batch": 1, "capacity": 64, "heads": 1, "head_dim": 64, "bits": 8, **wrong}
        with pytest.raises(ValueError, match=words):
            codes.make_compressed_cache(**given)
