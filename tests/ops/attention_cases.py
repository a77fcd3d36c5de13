"""What the tests of attention on the CPU and on GPUs share: the formula with the whole matrix of
scores, and how far a result is from it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import flexops

WINDOWS: tuple[tuple[int | None, int | None], ...] = ((130, 20), (64, 0), (0, None), (None, 5))


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    score_mod: Any = None,
) -> tuple[Tensor, Tensor]:
    """Output and log sum exp, in q's dtype, differentiable. A row that sees nothing is zeros."""
    group = q.shape[2] // k.shape[2]
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * (
        max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    )
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    queries, keys = s.shape[2:]
    if score_mod is not None:
        at = [
            torch.arange(n, device=q.device).view([-1 if d == dim else 1 for d in range(4)])
            for dim, n in enumerate(s.shape)
        ]
        s = score_mod(s, *at)
    distance = (
        torch.arange(keys, device=q.device)
        - torch.arange(queries, device=q.device)[:, None]
        - (keys - queries)
    )
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype).reshape(-1, q.shape[2], 1, 1) * distance.abs()
    if bias is not None:
        s = s.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else s + bias.to(s.dtype)
    left, right = window or (None, None)
    right = 0 if causal else right
    for limit, beyond in ((left, -distance), (right, distance)):
        if limit is not None and limit >= 0:
            s = s.masked_fill(beyond > limit, -math.inf)
    lse = torch.logsumexp(s, -1) if keys else s.new_full(s.shape[:-1], -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(s.dtype)[:, None])
    weights = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    weights = torch.where(s == -math.inf, 0.0, weights)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(group, 2)), lse


def squared(score: Any, _b: Any, _h: Any, _q: Any, _k: Any) -> Any:
    return score * score


def sloped(score: Any, _b: Any, h: Any, q: Any, k: Any) -> Any:
    """ALiBi, causal without a mask, with blocks of keys left out."""
    return torch.where(
        (q >= k) & ((k // 16) % 3 != 1), score - 0.1 * (h + 1) * abs(q - k), -math.inf
    )


def everything(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    capped = (
        5.0 * torch.tanh(score / 5.0)
        + torch.sin(score) * 0.1
        - (k % 3) * 0.2
        + torch.clamp(score, max=0.5)
    )
    capped = (
        capped
        + torch.exp(-torch.square(score))
        + torch.log(1.0 + torch.sqrt(score * score + 1))
        + torch.cos(score + h)
    )
    return torch.where(
        (q // 2 == k) | ~(k < 5),
        capped**2 / (3 + torch.sigmoid(score)),
        abs(capped) * (b + 1) + torch.maximum(score, -score),
    )


SCORE_MODS = (squared, sloped, everything)


def distance_of(actual: Tensor | None, expected: Tensor | None) -> float:
    """Relative to the expected tensor's norm; NaN counts as infinitely far."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    actual, expected = actual.double(), expected.double()
    infinite = expected == -math.inf
    if not torch.equal(infinite, actual == -math.inf):
        return math.inf
    difference = (actual - expected).masked_fill(infinite, 0.0)
    size = expected.masked_fill(infinite, 0.0).norm()
    found = float(difference.norm() / size) if size > 0 else float(difference.norm())
    return math.inf if math.isnan(found) else found


def errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    with_lse: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> dict[str, float]:
    """How far output, log sum exp and all gradients are from float64's. ``options``: of both
    functions; float ``bias`` and ``sinks`` get gradients."""
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {
        name: x
        for name, x in options.items()
        if isinstance(x, Tensor) and name in ("bias", "sinks") and x.is_floating_point()
    }
    generator = torch.Generator(q.device).manual_seed(11)
    grad = torch.randn(*q.shape[:3], v.shape[3], device=q.device, generator=generator).to(q.dtype)
    grad_lse = (
        torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device, generator=generator)
        if with_lse
        else None
    )

    def run(function: Any, wide: bool) -> list[Tensor | None]:
        leaves = {
            name: (x.detach().double() if wide else x.detach()).requires_grad_()
            for name, x in tensors.items()
        }
        out, lse = function(**{**options, **leaves})
        results, given = [out], [grad.to(out.dtype)]
        if grad_lse is not None:
            results, given = (
                [out, lse.masked_fill(lse == -math.inf, 0.0)],
                [*given, grad_lse.to(lse.dtype)],
            )
        return [
            out.detach(),
            lse.detach(),
            *torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True),
        ]

    expected = run(exact, True)
    actual = run(
        lambda **arguments: flexops.attention(
            **arguments, return_lse=True, deterministic=deterministic
        ),
        False,
    )
    found = {
        name: distance_of(a, b)
        for name, a, b in zip(["out", "lse", *tensors], actual, expected, strict=True)
    }
    if "sinks" in found:
        found["sinks"] *= float(expected[-1].norm()) / _size_of_terms(
            tensors["sinks"], grad, grad_lse, expected[0], expected[1]
        )
    return found


def _size_of_terms(
    sinks: Tensor, grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> float:
    """The norm of what a sink's gradient sums up: ``exp(sink - lse) * (grad * out, grad_lse)`` of
    all its rows and columns.

    Rounded results have an error of each term's size, and the terms have either sign: what is left
    of their sum may be as small as it likes.
    """
    squares = (grad.double() * out).square().sum(-1).transpose(1, 2)
    if grad_lse is not None:
        squares = squares + grad_lse.double().square()
    return float((torch.exp(2 * (sinks.double()[:, None] - lse)) * squares).sum().sqrt())


def assert_close(found: dict[str, float], dtype: torch.dtype) -> None:
    """Of kernels, the rounding of weights and results to the dtype; of float32, its own."""
    bound = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    bounds = {"out": bound, "lse": 1e-4, "sinks": bound}
    wrong = {name: error for name, error in found.items() if error > bounds.get(name, 2 * bound)}
    assert not wrong, f"{wrong} of {found}"
