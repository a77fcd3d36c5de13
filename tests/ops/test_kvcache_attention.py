"""flexops.attention_with_kvcache: an oracle of its own, over the parameters of the tests that
flash-attn has for ``flash_attn_with_kvcache``."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexops
from flexops._torch import below_versions
from flexops.ops import kvcache_attention


class Config(NamedTuple):
    """A point of the parameter space."""

    queries: int = 1
    capacity: int = 339
    head_dim: int = 64
    key_heads: int = 6
    new: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    rotary: float = 0.0
    interleaved: bool = True
    page: int = 0
    leftpad: bool = False
    indexed: bool = False
    alibi: bool = False
    softcap: float = 0.0
    sinks: bool = False
    splits: int = 0
    dtype: torch.dtype = torch.float32
    batch: int = 3
    from_leftpad: bool = False


def configs(count: int, dtype: torch.dtype, seed: int, **fixed: Any) -> list[Config]:
    """Points drawn at random: each value of each parameter occurs many times."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        queries, capacity = draw.choice(
            [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (16, 2000), (128, 128)]
        )
        new = draw.choice([0, 0, queries, draw.randint(1, queries)])
        page = draw.choice([0, 0, 16, 64, 48, 256])
        made.append(
            Config(
                queries,
                capacity,
                draw.choice([32, 64, 80, 128, 256]),
                draw.choice([6, 1, 2]),
                new,
                draw.random() < 0.5,
                draw.choice([(-1, -1), (draw.randint(0, capacity), draw.randint(0, capacity))]),
                draw.choice([0.0, 0.5, 1.0]) if new else 0.0,
                draw.random() < 0.5,
                page,
                draw.random() < 0.3,
                page == 0 and draw.random() < 0.4,
                draw.random() < 0.25,
                draw.choice([0.0, 0.0, 0.0, 15.0]),
                draw.random() < 0.2,
                draw.choice([0, 0, 1, 3, 7]),
                dtype,
                from_leftpad=draw.random() < 0.5,
            )._replace(**fixed)
        )
    return made


class Problem:
    """Tensors of a configuration, and what the oracle gives for them."""

    def __init__(self, c: Config, device: str = "cpu", seed: int = 0):
        self.c, g = c, torch.Generator().manual_seed(seed)
        make = lambda *shape: torch.randn(*shape, generator=g).to(c.dtype).to(device)  # noqa: E731
        heads, rows = 6, c.batch + 2
        self.q = make(c.batch, c.queries, heads, c.head_dim)
        self.k = make(c.batch, c.new, c.key_heads, c.head_dim) if c.new else None
        self.v = make(c.batch, c.new, c.key_heads, c.head_dim) if c.new else None
        self.index = self.table = self.leftpad = self.cos = self.sin = None
        if c.page:
            each = -(-c.capacity // c.page)
            blocks = each * c.batch + 3
            order = torch.randperm(blocks, generator=g)[: each * c.batch]
            self.table = order.int().view(c.batch, each).to(device)
            caches = make(2, blocks, c.page, c.key_heads, c.head_dim)
        else:
            caches = make(2, rows, c.capacity, c.key_heads, c.head_dim)
            if c.indexed:
                self.index = torch.randperm(rows, generator=g)[: c.batch].int().to(device)
        self.k_cache, self.v_cache = caches
        most = c.capacity - max(c.new, c.queries if c.rotary else 0)
        lengths = torch.randint(0 if c.new else 1, most + 1, (c.batch,), generator=g)
        self.lengths = lengths.int().to(device)
        if c.leftpad:
            self.leftpad = torch.tensor(
                [int(torch.randint(0, n + 1, (), generator=g)) for n in lengths.tolist()],
                dtype=torch.int32,
                device=device,
            )
        if c.rotary:
            half = int(c.rotary * c.head_dim) // 16 * 8
            angle = torch.rand(c.capacity, half, generator=g) * 6.3
            self.cos, self.sin = (f(angle).to(c.dtype).to(device) for f in (torch.cos, torch.sin))
        self.slopes = torch.rand(c.batch, heads, generator=g).to(device) if c.alibi else None
        self.sinks = torch.randn(heads, generator=g).to(device) if c.sinks else None

    def call(self, **others: Any) -> tuple[Tensor, Tensor]:
        c = self.c
        arguments: dict[str, Any] = {
            "k": self.k, "v": self.v, "rotary_cos": self.cos, "rotary_sin": self.sin,
            "cache_seqlens": self.lengths, "cache_batch_idx": self.index,
            "cache_leftpad": self.leftpad, "block_table": self.table, "causal": c.causal,
            "window_size": c.window, "softcap": c.softcap, "rotary_interleaved": c.interleaved,
            "alibi_slopes": self.slopes, "num_splits": c.splits, "sinks": self.sinks,
            "return_softmax_lse": True, "rotary_from_leftpad": c.from_leftpad,
        }  # fmt: skip
        return flexops.attention_with_kvcache(
            self.q, self.k_cache, self.v_cache, **arguments | others
        )

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, lse and both caches, in float64."""
        c, d = self.c, torch.float64
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        outs, sums = [], []
        for b in range(c.batch):
            n = int(self.lengths[b])
            end = n + c.new
            turned = int(self.leftpad[b]) if c.from_leftpad and self.leftpad is not None else 0
            if self.table is not None:
                at = [(int(self.table[b, t // c.page]), t % c.page) for t in range(end)]
            else:
                row = b if self.index is None else int(self.index[b])
                at = [(row, t) for t in range(end)]
            where = tuple(torch.tensor(x, dtype=torch.long, device=self.q.device).view(-1)
                          for x in (list(zip(*at, strict=True)) or ([], [])))  # fmt: skip
            if self.k is not None and self.v is not None:
                into = tuple(x[n:] for x in where)
                k_cache[into] = self.rotated(self.k[b], range(n - turned, end - turned)).to(c.dtype)
                v_cache[into] = self.v[b]
            masked = c.causal or c.window != (-1, -1)
            positions = [n - turned + i * masked for i in range(c.queries)]
            q = self.rotated(self.q[b], positions).to(c.dtype).to(d)
            group = q.shape[1] // c.key_heads
            keys, values = (x[where].to(d).repeat_interleave(group, 1) for x in (k_cache, v_cache))
            s = torch.einsum("qhd,khd->hqk", q, keys) * c.head_dim**-0.5
            if c.softcap:
                s = c.softcap * torch.tanh(s / c.softcap)
            i = torch.arange(c.queries, device=s.device)[:, None] + end - c.queries
            j = torch.arange(end, device=s.device)
            if self.slopes is not None:
                s = s - self.slopes[b].to(d)[:, None, None] * (i - j).abs()
            left, right = c.window[0], 0 if c.causal else c.window[1]
            hidden = (j < (0 if self.leftpad is None else int(self.leftpad[b]))) | (i < -(10**9))
            hidden = hidden | (j < i - left) if left >= 0 else hidden
            hidden = hidden | (j > i + right) if right >= 0 else hidden
            s = s.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                sink = self.sinks.to(d)[:, None, None].expand(-1, c.queries, 1)
                s = torch.cat((s, sink), -1)
            lse = torch.logsumexp(s, -1) if s.shape[-1] else s.sum(-1) - torch.inf
            p = torch.exp(s - lse[..., None]).nan_to_num(0.0)[..., :end]
            outs.append(torch.einsum("hqk,khd->qhd", p, values)), sums.append(lse)
        return torch.stack(outs), torch.stack(sums), k_cache, v_cache

    def rotated(self, x: Tensor, positions: Any) -> Tensor:
        if self.cos is None or self.sin is None:
            return x
        at = torch.tensor(list(positions), dtype=torch.long, device=x.device)
        cos, sin = (t.double()[at][:, None] for t in (self.cos, self.sin))
        half, wide = cos.shape[-1], x.double()
        out = wide.clone()
        if self.c.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        out[..., first] = wide[..., first] * cos - wide[..., second] * sin
        out[..., second] = wide[..., second] * cos + wide[..., first] * sin
        return out


def verify(problem: Problem) -> None:
    """A call against the oracle: output, lse and what is in the caches afterwards."""
    out, lse, k_cache, v_cache = problem.expected()
    actual, sums = problem.call()
    narrow = problem.c.dtype != torch.float32
    tolerance = 0.02 if narrow else 2e-5
    torch.testing.assert_close(actual.double(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sums.double(), lse, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(problem.v_cache, v_cache, rtol=0, atol=0)
    torch.testing.assert_close(
        problem.k_cache, k_cache, rtol=2**-7 if narrow else 1e-6, atol=2**-8 if narrow else 1e-6
    )


@pytest.mark.parametrize("config", configs(40, torch.float32, 0), ids=str)
def test_the_parameter_space_of_flash_attn(config):
    verify(Problem(config))


def test_lengths_that_are_no_tensor_are_named():
    q, cache, new = torch.randn(2, 1, 4, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 1, 2, 64)
    with pytest.raises(ValueError, match=r"or int32 \[batch\], got \[3, 4\]"):
        flexops.attention_with_kvcache(q, cache, cache, new, new, cache_seqlens=[3, 4])


def verify_that_backward_passes_notice_writes(device: str, dtype: torch.dtype) -> None:
    """Appending counts as a write of both caches, attending alone does not."""
    config = Config(capacity=64, new=1, causal=True, dtype=dtype)
    for new in (1, 0):
        for name in ("k_cache", "v_cache"):
            problem = Problem(config._replace(new=new), device)
            problem.k_cache = problem.k_cache.clone()  # no view of the memory of both
            factor = torch.ones((), device=device, requires_grad=True)
            product = (factor * getattr(problem, name)).sum()
            problem.call()
            if new:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    product.backward()
            else:
                product.backward()


@pytest.mark.parametrize("make", [torch.tensor, list])
def test_a_window_may_be_a_tensor_or_a_list(make):
    q, cache = torch.randn(1, 4, 2, 16), torch.randn(1, 40, 2, 16)
    expected = flexops.attention_with_kvcache(q, cache, cache, window_size=(9, 3))
    found = flexops.attention_with_kvcache(q, cache, cache, window_size=make([9, 3]))
    assert torch.equal(found, expected)
    assert torch.equal(flexops.attention(q, cache, cache, window=make([9, 3])), expected)


@pytest.mark.parametrize("window", [torch.tensor([0.5, 1.0]), torch.tensor(3), (1, 2, 3)])
def test_a_window_that_is_none_is_named(window):
    q, cache = torch.randn(1, 4, 2, 16), torch.randn(1, 40, 2, 16)
    with pytest.raises(ValueError, match="window_size must be two numbers of keys"):
        flexops.attention_with_kvcache(q, cache, cache, window_size=window)


def test_a_backward_pass_notices_that_a_cache_was_written():
    verify_that_backward_passes_notice_writes("cpu", torch.float32)


def test_writes_count_where_a_kernel_does_not_count_them(monkeypatch):
    """A kernel for GPUs writes memory, and torch counts nothing."""
    plain = kvcache_attention._composed

    def uncounted(*args: Any) -> Any:
        with below_versions():
            return plain(*args)

    monkeypatch.setattr(kvcache_attention, "_composed", uncounted)
    verify_that_backward_passes_notice_writes("cpu", torch.float32)
