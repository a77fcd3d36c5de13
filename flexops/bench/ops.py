"""``flexops bench ops``: every op against torch's own ways to do the same, as bytes over time and as a part of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import optim
from ..errors import FlexopsError
from ..op_builder import loader
from ..ops import quant as quant_op
from . import timing

FLEXOPS = "flexops"


@dataclass(frozen=True)
class Case:
    """One thing to do, and the ways to do it.

    Attributes:
        op: the op's name in the catalogue.
        name: what is done, with dtype and shape.
        bytes: each input read once and each output written once.
        contenders: name -> a call that does it; flexops's own is called ``flexops``. All write into memory of their own.
        reads_and_writes: the same in words, for the reader to check.
    """

    op: str
    name: str
    bytes: int
    contenders: dict[str, Callable[[], object]]
    reads_and_writes: str


@dataclass(frozen=True)
class Timing:
    """One contender's median seconds in one case, and the bandwidth that this is, in bytes a second."""

    case: str
    op: str
    contender: str
    seconds: float
    bandwidth: float
    of_copy: float


def run(device: str, ops: Sequence[str], *, small: bool = False, report: Callable[[str], None] | None = None) -> tuple[float, list[Timing]]:
    """Measure every case of the ops called ``ops`` (none: all) on ``device``; returns the copy bandwidth and the timings.

    Raises:
        FlexopsError: an op has no cases, or its native library is not there (a reference timed as flexops would mislead).
    """
    unknown = sorted(set(ops) - set(_CASES))
    if unknown:
        raise FlexopsError(f"no benchmark for {', '.join(unknown)}", required=", ".join(_CASES), fix="flexops bench ops --help")
    copy = timing.copy_bandwidth(device)
    results = []
    for op in [name for name in _CASES if not ops or name in ops]:
        if not loader.ensure(op, device):
            raise FlexopsError(f"{op} is not native on {device}, so there is nothing to measure", fix="flexops doctor")
        for case in _CASES[op](device, small):
            if report:
                report(f"{case.op}: {case.name}")
            seconds = timing.medians(case.contenders, device)
            for contender, value in seconds.items():
                bandwidth = case.bytes / value
                results.append(Timing(case.name, op, contender, value, bandwidth, bandwidth / copy))
            del case
            if device == "cuda":
                torch.cuda.empty_cache()
    return copy, results


def default_device() -> str:
    """``cuda`` where torch has a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    """What is measured, in words."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _parameters(device: str, count: int, shape: tuple[int, ...]) -> list[Tensor]:
    parameters = [torch.randn(shape, device=device, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(shape, device=device)
    return parameters


def _steps(optimizer: Any) -> Callable[[], object]:
    optimizer.step()  # makes the states
    return lambda: optimizer.step()


def _adam_cases(device: str, small: bool) -> Iterator[Case]:
    cuda = device == "cuda"
    size = 2 ** ((26 if small else 28) if cuda else (23 if small else 26))
    shapes: list[tuple[int, tuple[int, ...]]] = [(1, (size,)), (1000 if cuda and not small else 100, (4096, 64))]
    for count, shape in shapes:
        contenders: dict[str, Callable[[], object]] = {
            FLEXOPS: _steps(optim.AdamW(_parameters(device, count, shape))),
            "torch fused": _steps(torch.optim.AdamW(_parameters(device, count, shape), fused=True)),
            "torch foreach": _steps(torch.optim.AdamW(_parameters(device, count, shape), foreach=True)),
        }
        what = "reads parameter, gradient and two states, writes all but the gradient: 28 B an element"
        yield Case("adam", f"AdamW step, {count} fp32 x {'x'.join(map(str, shape))}", 28 * count * torch.Size(shape).numel(), contenders, what)
        contenders.clear()
    yield Case("adam", f"AdamW step + bf16 copy, fp32 x {size}", 30 * size, _step_and_copy(device, size), "28 B, and 2 B for the copy")


def _step_and_copy(device: str, size: int) -> dict[str, Callable[[], object]]:
    parameters = _parameters(device, 1, (size,))
    ours = _parameters(device, 1, (size,))
    target, copy = torch.empty(size, dtype=torch.bfloat16, device=device), torch.empty(size, dtype=torch.bfloat16, device=device)
    fused = torch.optim.AdamW(parameters, fused=True)
    one_pass = optim.AdamW(ours, copies={ours[0]: copy})
    fused.step()
    one_pass.step()

    def step_then_copy() -> None:
        fused.step()
        target.copy_(parameters[0].detach())

    return {FLEXOPS: lambda: one_pass.step(), "torch fused, then copy": step_then_copy}


def _quant_cases(device: str, small: bool) -> Iterator[Case]:
    cuda = device == "cuda"
    shape = (2048, 8192) if small or not cuda else (16384, 8192)
    x = torch.randn(shape, device=device).to(torch.bfloat16)
    for bits, dim in ((4, -1), (4, 0), (8, -1)):
        label = f"int{bits} group 64 along {dim}, bf16 {shape[0]}x{shape[1]}"
        bytes_touched = x.nbytes + quant_op.quantize(x, bits=bits, dim=dim).nbytes
        quantize, dequantize = _quant_contenders(x, bits, dim)
        yield Case("quant", f"quantize {label}", bytes_touched, quantize, f"2 + {bits / 8} + 4/64 B an element")
        yield Case("quant", f"dequantize {label}", bytes_touched, dequantize, f"2 + {bits / 8} + 4/64 B an element")


def _quant_contenders(x: Tensor, bits: int, dim: int) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    quantized = quant_op.quantize(x, bits=bits, dim=dim)
    packed, scales, length = quantized[:3]
    there: dict[str, Callable[[], object]] = {
        FLEXOPS: lambda: quant_op.quantize(x, bits=bits, dim=dim),
        "torch eager": lambda: quant_op._quantize_reference(x, bits, 64, dim % 2, False),
    }
    back: dict[str, Callable[[], object]] = {
        FLEXOPS: lambda: quant_op.dequantize(quantized),
        "torch eager": lambda: quant_op._dequantize_reference(packed, scales, length, bits, 64, dim % 2, x.dtype),
    }
    return there, back


_CASES: dict[str, Callable[[str, bool], Iterator[Case]]] = {"adam": _adam_cases, "quant": _quant_cases}
