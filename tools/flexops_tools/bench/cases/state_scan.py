"""gated_delta_rule and mamba2_scan: sequences, their gradients, and one step of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexops.ops import state_chunks
from flexops.ops import state_scan as op

from .case import Case, Family, Setup, contenders, rotating

HEADS, KEY_HEADS, WIDTH = 32, 16, 128
GROUPS, OF_HEAD = 1, 64


def state_scan(setup: Setup) -> Iterator[Case]:
    length = setup.rows(4096)
    yield from _sequence(setup, "gated_delta_rule", length, _delta(setup, 1, length))
    yield from _sequence(setup, "mamba2_scan", length, _mamba2(setup, 1, length))
    if setup.device == "cuda":
        for batch in (1, 64):
            yield from _step(setup, "gated_delta_rule_update", batch, WIDTH, _delta)
            yield from _step(setup, "mamba2_scan_update", batch, OF_HEAD, _mamba2)


def _delta(setup: Setup, batch: int, length: int) -> tuple[Tensor, ...]:
    """q, k, v, g and beta."""
    q, k = (setup.randn(batch, length, KEY_HEADS, WIDTH) for _ in range(2))
    v, gates = setup.randn(batch, length, HEADS, WIDTH), setup.randn(2, batch, length, HEADS)
    return q, k, v, -gates[0].abs(), gates[1].sigmoid()


def _mamba2(setup: Setup, batch: int, length: int) -> tuple[Tensor, ...]:
    """x, dt, A, B and C."""
    b, c = (setup.randn(batch, length, GROUPS, WIDTH) for _ in range(2))
    x, dt = setup.randn(batch, length, HEADS, OF_HEAD), setup.randn(batch, length, HEADS)
    return x, dt, -setup.randn(HEADS).abs(), b, c


def _sequence(
    setup: Setup, name: str, length: int, arguments: tuple[Tensor, ...]
) -> Iterator[Case]:
    functions = contenders(setup, *_FUNCTIONS[name])
    calls: dict[str, Callable[[], Any]] = {
        label: partial(function, *arguments) for label, function in functions.items()
    }
    moved = sum(one.nbytes for one in arguments)
    what = f"{name} bf16 1x{length}, {HEADS} heads"
    yield Case("state_scan", name, what, "forward", moved, calls, "reads its arguments")
    if setup.device == "cuda":  # where kernels compute gradients
        words = "reads its arguments and the gradient twice, writes gradients"
        numbers = tuple(range(len(arguments)))
        yield Family("state_scan", setup).trained(
            name, what, functions, arguments, numbers, (3 * moved, words)
        )


def _step(setup: Setup, name: str, batch: int, columns: int, draw: Any) -> Iterator[Case]:
    """In a CUDA graph. The states of several layers take turns, because one layer's would stay in
    the cache."""
    moved = 8 * batch * HEADS * WIDTH * columns
    shape = (WIDTH, columns) if "delta" in name else (columns, WIDTH)
    sets = [
        (setup.randn(batch, HEADS, *shape).float(), *draw(setup, batch, 1))
        for _ in range(2**27 // moved + 1)
    ]
    calls = {
        label: rotating([partial(function, *each) for each in sets])
        for label, function in contenders(setup, *_FUNCTIONS[name]).items()
    }
    what = f"{name} bf16 {batch} sequences, {HEADS} heads"
    words = "reads and writes the states"
    yield Case("state_scan", name, what, "forward", moved, calls, words, "graph")


def _ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return op.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def _plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    numbers = 0, True, True, WIDTH**-0.5, 0.0, 1.0
    return state_chunks.scanned(None, q, k, v, g, beta, None, None, None, *numbers)[0]


def _our_step(state: Tensor, *arguments: Tensor) -> Tensor:
    return op.gated_delta_rule_update(state, *arguments, use_qk_l2norm_in_kernel=True)


def _plain_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    q, k = (one[:, 0].float().repeat_interleave(HEADS // KEY_HEADS, 1) for one in (q, k))
    q, k = (torch.nn.functional.normalize(one, dim=-1) for one in (q, k))
    state *= g[:, 0, :, None, None].float().exp()
    change = beta[:, 0, :, None] * (v[:, 0] - (state * k.unsqueeze(-1)).sum(-2))
    state += k.unsqueeze(-1) * change.unsqueeze(-2)
    out: Tensor = (state * (q * WIDTH**-0.5).unsqueeze(-1)).sum(-2)
    return out.to(v.dtype)


def _our_mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = op.mamba2_scan(x, dt, a, b, c, dt_softplus=True)
    assert isinstance(out, Tensor)
    return out


def _plain_mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    numbers = 1, False, False, 1.0, 0.0, float("inf")
    return state_chunks.scanned(None, c, b, x, None, dt, a, None, None, *numbers)[0]


def _our_mamba2_step(state: Tensor, *arguments: Tensor) -> Tensor:
    return op.mamba2_scan_update(state, *arguments, dt_softplus=True)


def _plain_mamba2_step(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    rate = torch.nn.functional.softplus(dt[:, 0].float())[..., None, None]
    state *= (a.float()[:, None, None] * rate).exp()
    state += rate * x[:, 0].float().unsqueeze(-1) * b.float()
    return (state @ c.float().mT).squeeze(-1).to(x.dtype)


_FUNCTIONS: dict[str, Any] = {
    "gated_delta_rule": (_ours, _plain),
    "gated_delta_rule_update": (_our_step, _plain_step),
    "mamba2_scan": (_our_mamba2, _plain_mamba2),
    "mamba2_scan_update": (_our_mamba2_step, _plain_mamba2_step),
}
