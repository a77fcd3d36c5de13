"""Inputs of recurrences whose state is a matrix, and their formulas, step by step in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, int, int, int, int]
"""Batch, key heads, heads, rows and columns of a state."""


def near(dtype: torch.dtype) -> dict[str, float]:
    return {
        torch.float32: {"rtol": 1e-4, "atol": 1e-5},
        torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    }.get(dtype, {"rtol": 2e-3, "atol": 2e-3})


def draw(shape: Shape, length: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What the delta rule takes; steps are rows of wider tensors, as models split them."""
    batch, groups, heads, rows, columns = shape
    make = torch.Generator().manual_seed(length)
    wide = torch.randn(batch, length, 2 * groups * rows + heads * columns, generator=make).to(dtype)
    q, k, v = wide.split([groups * rows, groups * rows, heads * columns], -1)
    return {
        "q": q.unflatten(-1, (groups, rows)),
        "k": k.unflatten(-1, (groups, rows)),
        "v": v.unflatten(-1, (heads, columns)),
        "g": -3 * torch.rand(batch, length, heads, generator=make),
        "beta": torch.rand(batch, length, heads, generator=make).to(dtype),
        "initial_state": torch.randn(batch, heads, rows, columns, generator=make),
    }


def by_steps(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor, delta: bool
) -> tuple[Tensor, Tensor]:
    """The formula of the module, one step after another, in float64."""
    heads = v.shape[2]
    q, k = (one.double().repeat_interleave(heads // one.shape[2], 2) for one in (q, k))
    state, results = state.double(), []
    for t in range(v.shape[1]):
        state = decays[:, t, :, None, None].double() * state
        value = v[:, t].double()
        if delta:
            value = value - (state.mT @ k[:, t, :, :, None]).squeeze(-1)
        value = rates[:, t, :, None].double() * value
        state = state + k[:, t, :, :, None] * value.unsqueeze(-2)
        results.append((state.mT @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(results, 1), state


def expected_delta(
    given: dict[str, Tensor], normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k = given["q"].double(), given["k"].double()
    if normalize:
        q, k = (one / (one.square().sum(-1, True) + 1e-6).sqrt() for one in (q, k))
    decays = given["g"].double().exp()
    return by_steps(given["initial_state"], q * scale, k, given["v"], decays, given["beta"], True)


def mamba2(shape: Shape, length: int, dtype: torch.dtype = torch.float32) -> Any:
    given = draw(shape, length, dtype)
    heads = shape[2]
    make = torch.Generator().manual_seed(length)
    named = {
        "D": torch.randn(heads, generator=make),
        "dt_bias": torch.randn(heads, generator=make),
        "dt_softplus": True,
        "dt_limit": (0.01, 2.0),
        "initial_states": given["initial_state"].mT.contiguous(),
    }
    A = -torch.rand(heads, generator=make) - 0.1
    scale = shape[3] ** -0.5
    return given["v"], given["g"].to(dtype), A, given["k"] * scale, given["q"] * scale, named


def expected_mamba2(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What :func:`mamba2` draws."""
    rates = F.softplus(dt.double() + named["dt_bias"].double()).clamp(*named["dt_limit"])
    states = named["initial_states"].mT
    out, last = by_steps(states, C, B, x, (A.double() * rates).exp(), rates, False)
    return out + named["D"].double()[:, None] * x.double(), last.mT
