"""Attention's forward kernel for compute_80 (mma.sync, ldmatrix, cp.async), the one that is run
always: pytest gets this file by name, and does not find it."""

from __future__ import annotations

import pytest
import torch
from attention_cases import assert_close, distance_of, exact

import flexops


@torch.no_grad()
def test_grouped_heads_and_rows_that_no_tile_fits():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, length, heads, 64, generator=generator).bfloat16()
        for length, heads in ((130, 4), (203, 2), (203, 2))
    )
    out, lse = flexops.attention(q, k, v, causal=True, return_lse=True)
    wanted = exact(q.double(), k.double(), v.double(), causal=True)
    assert_close(
        {"out": distance_of(out, wanted[0]), "lse": distance_of(lse, wanted[1])}, torch.bfloat16
    )


def _declined() -> list[str]:
    """Why calls of attention left the kernels."""
    found = [one for one in flexops.status() if one.op == "attention"]
    return [one.reason for one in found if one.backend == "reference"]


@torch.no_grad()
@pytest.mark.parametrize("columns", [(60, 60), (100, 36), (36, 64), (5, 3)], ids=str)
def test_head_dims_that_are_no_multiple_of_8_are_the_kernels(columns):
    generator = torch.Generator().manual_seed(2)
    shapes = ((70, 4, columns[0]), (90, 2, columns[0]), (90, 2, columns[1]))
    q, k, v = (torch.randn(1, *shape, generator=generator).bfloat16() for shape in shapes)
    wanted = exact(q.double(), k.double(), v.double(), causal=True)
    out, lse = flexops.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (1, 70, 4, columns[1])
    assert out.is_contiguous()
    found = {"out": distance_of(out, wanted[0]), "lse": distance_of(lse, wanted[1])}
    assert_close(found, torch.bfloat16)
    rows = [x.transpose(1, 2) for x in (q, k[:, 20:], v[:, 20:])]
    alone = flexops.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    wanted = exact(q.double(), k[:, 20:].double(), v[:, 20:].double(), causal=True)
    assert_close({"out": distance_of(alone.transpose(1, 2), wanted[0])}, torch.bfloat16)
    assert not _declined()
