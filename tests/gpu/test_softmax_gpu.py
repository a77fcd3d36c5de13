"""Softmax on a GPU: every way through the kernels against the reference, for lengths, masks and
layouts at which the ways change."""

from __future__ import annotations

import pytest
import torch
from softmax_cases import DTYPES, LENGTHS, assert_near, compare_all, draw_lowest

import flexops
from flexops.ops import softmax as softmax_module

pytestmark = pytest.mark.gpu
FAMILIES = ("softmax",)
LONG = (8192, 16384, 16385, 32767, 32768, 32769, 33000, 50257, 65536, 70001, 131072)


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("block", range(4))
def test_cuda_gives_what_the_reference_gives(block, lengths):
    for seed in range(block * 100, block * 100 + 100):
        compare_all(seed, "cuda", lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, *DTYPES])
@pytest.mark.parametrize("keys", [1024, 1031, 2048])
@pytest.mark.parametrize(("heads", "queries"), [(3, 65), (8, 130)], ids=["few rows", "more rows"])
def test_attention_shapes(dtype, mask_dtype, keys, heads, queries):
    """Masks of padding, of a batch, of all heads, and of none; aligned and not."""
    x = torch.randn(2, heads, queries, keys, device="cuda").to(dtype)
    for shape in (
        (2, 1, 1, keys),
        (1, 1, queries, keys),
        (2, 1, queries, keys),
        (2, heads, queries, keys),
        (keys,),
        (2, heads, queries, 1),
    ):
        keep = torch.rand(shape, device="cuda") < 0.6
        mask = (
            keep
            if mask_dtype == torch.bool
            else torch.randn(shape, device="cuda").to(mask_dtype).masked_fill(~keep, -torch.inf)
        )
        assert_near(
            flexops.scaled_masked_softmax(x, mask, 0.3),
            softmax_module._scaled_masked_softmax_reference(x, mask, 0.3),
        )


@pytest.mark.parametrize("mask_dtype", [torch.bool, *DTYPES])
def test_large_masks_that_heads_share(mask_dtype):
    """The heads' rows are neighbours in the grid where a mask is more than the second-level cache
    keeps."""
    x = torch.randn(2, 3, 4200, 2048, device="cuda").to(torch.bfloat16)
    keep = torch.rand((2, 1, 4200, 2048), device="cuda") < 0.6
    mask = (
        keep
        if mask_dtype == torch.bool
        else torch.randn(keep.shape, device="cuda").to(mask_dtype).masked_fill(~keep, -torch.inf)
    )
    assert_near(
        flexops.scaled_masked_softmax(x, mask, 0.3),
        softmax_module._scaled_masked_softmax_reference(x, mask, 0.3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [9, 300, 2048, 24000])
def test_boolean_masks_at_any_scale(dtype, length):
    """A scale of 0, and rows longer than the kernel for boolean masks takes."""
    x = torch.randn(5, 7, length, device="cuda").to(dtype)
    for shape in ((5, 7, length), (7, length), (5, 7, 1)):
        keep = torch.rand(shape, device="cuda") < 0.6
        for scale in (0.0, -0.5):
            assert_near(
                flexops.scaled_masked_softmax(x, keep, scale),
                softmax_module._scaled_masked_softmax_reference(x, keep, scale),
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [9, 300, 2045, 2048, 24000, 70000])
def test_rows_masked_with_the_lowest_number_are_even(dtype, length):
    """Masks are often written with a dtype's lowest number instead of -inf; a row that has nothing
    else is as even as torch's then."""
    for arguments in draw_lowest(dtype, "cuda", length):
        assert_near(
            flexops.scaled_masked_softmax(*arguments),
            softmax_module._scaled_masked_softmax_reference(*arguments),
        )


def test_masks_are_not_expanded_in_memory():
    x = torch.randn(8, 16, 512, 512, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(8, 1, 512, 512, device="cuda") < 0.5
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = flexops.scaled_masked_softmax(x, mask)
    assert torch.cuda.max_memory_allocated() - before == y.nbytes
