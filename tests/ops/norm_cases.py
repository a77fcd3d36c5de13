"""Norms at random against their references, and how near results must be: shared by the tests on
the CPU and on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexops.ops._register import reference_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Drawn(NamedTuple):
    """Arguments of the operators; ``also``: the gradient of the sum, ``needs``: the gradients that
    are made."""

    x: Tensor
    residual: Tensor
    grad: Tensor
    also: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    needs: list[bool]
    bias_dtype: torch.dtype
    offset: float = 0.0


def assert_near(actual: Any, expected: Any, size: int = 1, floor: float = 1e-6) -> None:
    """Rounded as the dtype rounds; sums of many float32 within a few units of their size."""
    assert len(actual) == len(expected)
    for position, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        if one.numel():
            one, other, unit = one.double(), other.double(), ROUNDING.get(one.dtype, 0.0)
            sums = 4e-6 * size**0.5 * other.square().mean().sqrt()
            bound = 2 * unit * other.abs() + sums + floor
            wrong = ~(((one - other).abs() <= bound) | (one.isnan() & other.isnan()))
            parts = one[wrong][:3].tolist(), other[wrong][:3].tolist()
            assert not wrong.any(), (position, int(wrong.sum()), *parts)


def compare_all(drawn: Drawn, floor: float = 1e-6) -> None:
    """Each operator's kernels against its reference, forward and backward."""
    x, residual, grad, also, weight, bias, needs, bias_dtype, offset = drawn
    ops, rows = torch.ops.flexops, x.shape[0]

    def compare(name: str, *arguments: Any, size: int = 1) -> Any:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(ops, packet), overload or "default")
        results = op(*arguments)
        assert_near(results, reference_of(f"flexops::{name}")(*arguments), size, floor)
        return results

    with torch.no_grad():
        compare("layer_norm.forward", x, weight, bias, 1e-5, offset)
        compare("rms_norm.forward", x, weight, 1e-6, offset)
        _, total, statistics = compare(
            "add_layer_norm.forward", x, residual, weight, bias, 1e-5, offset
        )
        given = grad, also, total, weight, statistics, offset, *needs, bias_dtype
        compare("layer_norm_backward", *given, size=rows)
        _, total, statistics = compare("add_rms_norm.forward", x, residual, weight, 1e-6, offset)
        given = grad, also, total, weight, statistics, offset, *needs[:2]
        compare("rms_norm_backward", *given, size=rows)
