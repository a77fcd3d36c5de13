"""Attention's forward kernel for compute_80 (mma.sync, ldmatrix, cp.async), the one that is run always: pytest is told of this file, and does not find it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import flexops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from attention_cases import assert_close, distance_of, exact


@torch.no_grad()
def test_grouped_heads_and_rows_that_no_tile_fits() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, length, heads, 64, generator=generator).bfloat16() for length, heads in ((130, 4), (203, 2), (203, 2)))
    out, lse = flexops.attention(q, k, v, causal=True, return_lse=True)
    wanted = exact(q.double(), k.double(), v.double(), causal=True)
    assert_close({"out": distance_of(out, wanted[0]), "lse": distance_of(lse, wanted[1])}, torch.bfloat16)
