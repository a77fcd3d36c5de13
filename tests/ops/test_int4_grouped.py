"""Grouped products with weights of 4 bits: the values and gradients of the dequantized weight, and
what is rejected."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import flexops
from flexops.ops.few_experts import unpack_mxfp4
from flexops.ops.int4_grouped import int4_grouped_linear

GROUPS, N, K = 3, 16, 64
ENDS = torch.tensor([4, 4, 9], dtype=torch.int32)  # the last two of 11 rows are of no group


def weight(symmetric: bool = False) -> flexops.Int4Weight:
    torch.manual_seed(0)
    return flexops.quantize_int4(torch.randn(GROUPS * N, K), 32, symmetric)


@pytest.mark.parametrize(("symmetric", "mxfp4"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_product_with_the_dequantized_weight(dtype, symmetric, mxfp4):
    packed = weight(symmetric)
    if mxfp4:
        packed = packed._replace(scales=packed.scales.bfloat16())
    dense = (unpack_mxfp4 if mxfp4 else flexops.unpack_int4)(packed, dtype).view(GROUPS, N, K)
    x = torch.randn(11, K).to(dtype)
    results = []
    of_codes = functools.partial(int4_grouped_linear, mxfp4=mxfp4)
    for product, given in ((of_codes, packed), (flexops.grouped_linear, dense)):
        rows = x.clone().requires_grad_()
        out = product(rows, given, ENDS)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), rows)))
    (found, of_x), (wanted, of_other) = results
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert (found - wanted).norm() <= bound * wanted.norm()  # codes are multiplied, not values
    assert (of_x - of_other).norm() <= 2 * bound * of_other.norm()


def test_no_16_bit_weight_is_kept_for_the_backward_pass():
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [kept.append(x), x][1], lambda x: x):
        int4_grouped_linear(torch.randn(11, K, requires_grad=True), weight(), ENDS)
    assert kept
    assert max(one.nbytes for one in kept) <= GROUPS * N * K // 2


def test_it_can_be_compiled():
    packed, x = weight(), torch.randn(11, K, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        return int4_grouped_linear(rows, packed, ENDS).square().sum()

    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(one(x), x)[0] for one in (compiled, loss))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("x", "ends", "error", "message"),
    [
        (torch.randn(11, K).double(), ENDS, TypeError, "x must be"),
        (torch.randn(11, K - 1), ENDS, ValueError, "x must have 64 columns"),
        (torch.randn(11, K), ENDS.long(), TypeError, "offsets must be"),
        (torch.randn(11, K), ENDS.repeat(3)[:5], ValueError, "no 5 equal matrices"),
        (torch.randn(11, K), ENDS.flip(0), ValueError, "offsets must ascend"),
    ],
)
def test_what_does_not_fit_is_rejected(x, ends, error, message):
    with pytest.raises(error, match=message):
        int4_grouped_linear(x, weight(), ends)
