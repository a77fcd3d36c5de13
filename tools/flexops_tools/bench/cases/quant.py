"""Quantization in groups, to fp8 and to int8, and back."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flexops.bench.reference import on_reference
from flexops.ops import _register
from flexops.ops import quant as op

from .case import FLEXOPS, REFERENCE, Case, Function, Setup, forward_and_backward, library

FAMILY = "quant"


def quant(setup: Setup) -> Iterator[Case]:
    x = setup.randn(setup.rows(16384), 8192)
    for bits, dim in ((4, -1), (4, 0), (8, -1)):
        yield from _groups(setup, x, bits, dim)


def _groups(setup: Setup, x: Tensor, bits: int, dim: int) -> Iterator[Case]:
    """torch has no such operator: what torch.compile makes of our reference is the best that it
    offers."""
    quantized = op.quantize(x, bits=bits, dim=dim)
    count = (x.nbytes + quantized.nbytes, f"2 + {bits / 8} + 4/64 B an element")
    what = f"int{bits} group 64 along {dim}, bf16 {'x'.join(map(str, x.shape))}"
    there: dict[str, Function] = {FLEXOPS: lambda x: op.quantize(x, bits=bits, dim=dim)}
    back: dict[str, Function] = {
        FLEXOPS: lambda packed, scales: op.dequantize(
            quantized._replace(packed=packed, scales=scales)
        )
    }
    if bits == 4 and dim == -1:
        _register.supply_all()
        plain = {
            name: _register.references[f"flexops::{name}"] for name in ("quantize", "dequantize")
        }
        there |= setup.compiled(lambda x: plain["quantize"](x, bits, 64, 1, False))
        back |= setup.compiled(
            lambda packed, scales: plain["dequantize"](
                packed, scales, x.shape[1], bits, 64, 1, x.dtype
            )
        )
        there |= library(
            "bitsandbytes fp4", "bitsandbytes.functional", "quantize_4bit", _bitsandbytes
        )
    for function, functions, args in (
        ("quantize", there, (x,)),
        ("dequantize", back, quantized[:2]),
    ):
        functions[REFERENCE] = on_reference(functions[FLEXOPS])
        yield from forward_and_backward(
            FAMILY, function, f"{function} {what}", functions, args, count, None
        )


def _bitsandbytes(function: Function) -> Function:
    return lambda x: function(x, blocksize=64, quant_type="fp4")
