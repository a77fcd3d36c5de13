# ruff: noqa: ARG001, ARG005 - a score_mod has five parameters, and uses what it needs
"""What FlexAttention's users write in score modifiers, and attention in float64 with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

BATCH, HEADS, LENGTH = 2, 4, 24


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ONE, BY_HEAD, BY_BATCH, BY_QUERY = (
    torch.tensor(3, dtype=torch.int32),
    draw(HEADS),
    draw(BATCH),
    draw(LENGTH),
)
TWO_DIMS, THREE_DIMS = draw(LENGTH, LENGTH), draw(BATCH, LENGTH, LENGTH)
FOUR_DIMS, MANY = draw(BATCH, HEADS, LENGTH, LENGTH), draw(3, BATCH, HEADS, LENGTH)
KEEP = draw(BATCH, HEADS, LENGTH, LENGTH, seed=1) > -0.5
POINTS, LENGTHS = draw(LENGTH, 3, seed=2), torch.tensor([5, 9], dtype=torch.int32)
STARTS, PART = torch.tensor([0, 7, 19, 24], dtype=torch.int32), torch.arange(LENGTH) // 7
ZERO, ORDER, SWITCH = torch.tensor(0), torch.arange(LENGTH).flip(0), {"add": True}
WIDTH, INF = 6, float("inf")


def upper(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(q <= k, score, -INF)


def shifted(of: Callable[..., Any], starts: Tensor, part: Tensor) -> Callable[..., Any]:
    def inner(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return of(score, b, h, q - starts[part[q]], k - starts[part[k]])

    return inner


def distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    apart = (POINTS[q] - POINTS[k]).pow(2).sum(-1).sqrt()
    return torch.exp(-apart / (1 + BY_HEAD[h].abs())) * score


def grid(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    near = ((q / WIDTH - k / WIDTH).abs() <= 2) | ((q % WIDTH - k % WIDTH).abs() <= 2)
    return torch.where(near, score, -INF)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(draw(HEADS, seed=4), requires_grad=False)
        self.register_buffer("tables", draw(2, LENGTH, seed=5))

    def score_mod(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * self.slopes[h] + self.tables[b][q] - self.tables[-1, k]


class Masked(torch.autograd.Function):
    """Of which only its own backward pass is the derivative, which kernels have not."""

    @staticmethod
    def forward(score: Any, keep: Any) -> Any:
        return torch.where(keep, score, -INF)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


MODULE = Module()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, k: s,
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -INF),
    "upper": upper,
    "relative": lambda s, b, h, q, k: s + (q - k),
    "relative causal": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -INF),
    "exp2": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "sin cos tan": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "tan of the score": lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(s * 0.3),
    "scaled by head": lambda s, b, h, q, k: s * BY_HEAD[h],
    "documents": lambda s, b, h, q, k: torch.where((q >= k) & (PART[q] == PART[k]), s, -INF),
    "t[b][q]": lambda s, b, h, q, k: s + TWO_DIMS[b][q],
    "t[0][b, h][q]": lambda s, b, h, q, k: s + MANY[0][b, h][q],
    "t[1, b, h, q]": lambda s, b, h, q, k: s + MANY[1, b, h, q],
    "t[b][h][zero, q]": lambda s, b, h, q, k: s + FOUR_DIMS[b][h][ZERO, q],
    "odd keys": lambda s, b, h, q, k: torch.where(k % 2 == 0, s, -INF),
    "composed": lambda s, b, h, q, k: upper(s + (q - k), b, h, q, k),
    "all dims": lambda s, b, h, q, k: s + BY_QUERY[q] + BY_BATCH[b] + BY_HEAD[h],
    "2 dims": lambda s, b, h, q, k: s + TWO_DIMS[q, k],
    "3 dims": lambda s, b, h, q, k: s + THREE_DIMS[b, q, k],
    "3 dims, turned": lambda s, b, h, q, k: s + THREE_DIMS[b, k, q],
    "4 dims": lambda s, b, h, q, k: s + FOUR_DIMS[b, h, q, k],
    "4 dims, half": lambda s, b, h, q, k: s + FOUR_DIMS[b, h, q, k // 4],
    "prefix": lambda s, b, h, q, k: torch.where(
        (q <= LENGTHS[b]) & (k <= LENGTHS[b]) | (q >= k), s, -INF
    ),
    "grid": grid,
    "floor division": lambda s, b, h, q, k: s - q // (1 + k),
    "silu": lambda s, b, h, q, k: silu(s),
    "padded": lambda s, b, h, q, k: torch.where(s <= LENGTHS[b], upper(s, b, h, q, k), -INF),
    "a number": lambda s, b, h, q, k: s + ONE,
    "a switch": lambda s, b, h, q, k: s + ONE if SWITCH["add"] else s * ONE,
    "nested": lambda s, b, h, q, k: shifted(upper, STARTS, PART)(s, b, h, q, k),
    "sum of a row": lambda s, b, h, q, k: s + POINTS[q].sum(dim=-1),
    "product of rows": lambda s, b, h, q, k: s + torch.dot(POINTS[q], POINTS[k]),
    "distance": distance,
    "new_zeros": lambda s, b, h, q, k: s + KEEP[b, h.new_zeros(h.shape), q, k],
    "clamped": lambda s, b, h, q, k: s + BY_QUERY[torch.clamp(q - k + 8, 0, 16)],
    "indirect": lambda s, b, h, q, k: s + BY_QUERY[ORDER[q]] + BY_QUERY[torch.abs(q - k)],
    "gate": lambda s, b, h, q, k: s * torch.sigmoid(BY_HEAD[h].to(torch.float32)),
    "casts": lambda s, b, h, q, k: (
        s.float() * (q.float() / 8) + (s * 4).long().to(torch.float32) + (q > k).int()
    ),
    "xor": lambda s, b, h, q, k: torch.where((q > 8) ^ (k > 8), -INF, s + ((q ^ k) & 3)),
    "bits": lambda s, b, h, q, k: s + ((q << 1) | (k >> 1)) - (~q & 5),
    "not": lambda s, b, h, q, k: torch.where(~KEEP[b, h, q, k], -1e4, s),
    "methods": lambda s, b, h, q, k: (
        s.abs().sqrt().tanh() + s.exp().log1p() + s.clamp(min=-1).square()
    ),
    "powers": lambda s, b, h, q, k: (
        (s.abs() + 1) ** -2 + (s.abs() + 2) ** 0.5 + 2**s + torch.pow(s, 3)
    ),
    "rounded": lambda s, b, h, q, k: s + torch.floor(q / 5) - (k / 7).ceil() + torch.sign(q - k),
    "rational": lambda s, b, h, q, k: torch.rsqrt(s * s + 1) + torch.reciprocal(2 + s.sigmoid()),
    "softplus": lambda s, b, h, q, k: torch.nn.functional.softplus(s) - torch.relu(s - 0.25),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(k > q, -INF),
    "detach": lambda s, b, h, q, k: s * s.detach().sigmoid(),
    "a tensor made there": lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(-INF)),
    "a view made there": lambda s, b, h, q, k: (
        s + TWO_DIMS.view(-1)[q * LENGTH + k] + (2 * BY_HEAD)[h]
    ),
    "whole choice": lambda s, b, h, q, k: s + BY_QUERY[torch.where(q > k, q, k)],
    "attributes of a module": lambda s, b, h, q, k: MODULE.score_mod(s, b, h, q, k),
}
UNLIKE_TORCHS = {"detach"}  # FlexAttention's eager form is what has no rule for it


def inputs(columns: int = 16) -> list[Tensor]:
    shapes = ((BATCH, LENGTH, HEADS, columns), *[(BATCH, LENGTH, 2, columns)] * 2)
    return [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def wide(q: Tensor, k: Tensor, v: Tensor, score_mod: Any) -> Tensor:
    """In float64, a score at a time, as FlexAttention defines it."""
    k, v = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    at = [torch.arange(n, device=s.device) for n in s.shape]
    for place in range(3, -1, -1):
        dims = [None] * 5
        dims[0], dims[place + 1] = 0, 0
        score_mod = torch.vmap(score_mod, in_dims=tuple(dims), out_dims=0)
    weights = torch.softmax(score_mod(s, *at).to(v.dtype), -1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
