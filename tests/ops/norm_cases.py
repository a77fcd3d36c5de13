"""Norms at random against their references, and how near results must be: shared by the tests on
the CPU and on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexops.ops import norm
from flexops.ops._register import references

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
    x, residual, grad, also, weight, bias, needs, bias_dtype = drawn
    ops, rows = torch.ops.flexops, x.shape[0]

    def compare(op: Any, reference: Any, *arguments: Any, size: int = 1) -> Any:
        results = op(*arguments)
        assert_near(results, reference(*arguments), size, floor)
        return results

    def compare_backward(name: str, *arguments: Any) -> None:
        compare(getattr(ops, name), references[f"flexops::{name}"], *arguments, size=rows)

    with torch.no_grad():
        compare(ops.layer_norm.forward, norm._layer_norm_reference, x, weight, bias, 1e-5)
        compare(ops.rms_norm.forward, norm._rms_norm_reference, x, weight, 1e-6)
        add, reference = ops.add_layer_norm.forward, norm._add_layer_norm_reference
        _, total, statistics = compare(add, reference, x, residual, weight, bias, 1e-5)
        given = grad, also, total, weight, statistics, *needs, bias_dtype
        compare_backward("layer_norm_backward", *given)
        add, reference = ops.add_rms_norm.forward, norm._add_rms_norm_reference
        _, total, statistics = compare(add, reference, x, residual, weight, 1e-6)
        given = grad, also, total, weight, statistics, *needs[:2]
        compare_backward("rms_norm_backward", *given)
