"""Cases of anybody's own: ``flexops bench run FILE``.

# benchmarks/scale.py
from flexops.bench import case

def cases(setup): x = setup.randn(16384, 8192) yield case("scale bf16 16384x8192", {"mylib": lambda:
    mylib.scale(x, 2.0), "torch": lambda: x * 2.0}, bytes=2 * x.nbytes)
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..builder.registered import here
from ..errors import FlexopsError, SettingsError
from . import timing
from .setup import Setup
from .text import columns, duration, ratio
from .timing import Measure

MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Own:
    """A case: contenders by name, each a call without arguments, and what a call has to do: bytes
    to move, or floating-point operations."""

    name: str
    calls: dict[str, Callable[[], object]]
    bytes: int = 0
    flops: int = 0
    measure: Measure = "device"


@dataclass(frozen=True)
class OwnTiming:
    """One contender's median; ``of_copy`` and ``of_matrix`` are fractions of what a copy and a
    matrix product reach in the same run, None where unasked."""

    case: str
    contender: str
    seconds: float
    bandwidth: float
    flops: float
    of_copy: float | None
    of_matrix: float | None
    against_first: float


def case(
    name: str,
    calls: Mapping[str, Callable[[], object]],
    *,
    bytes: int = 0,
    flops: int = 0,
    measure: Measure = "device",
) -> Own:
    """A case for ``flexops bench run``.

    Args:
        name: what is done, with dtype and shape.
        calls: contender -> a call that does it; the first one is who the others are compared with.
        bytes: that a call has to move: each input read once, each output written once.
        flops: floating-point operations of a call.
        measure: ``device`` (the host is always ahead), ``queued``, ``call`` (host included) or
            ``graph`` (in a CUDA graph).
    """
    if not calls or measure not in timing.MEASURES or bytes < 0 or flops < 0:
        found = f"{len(calls)} calls, measure={measure!r}, {bytes} bytes, {flops} operations"
        required = f"a call, and one of {', '.join(timing.MEASURES)}"
        raise FlexopsError(f"the case {name} cannot be measured", found=found, required=required)
    return Own(name, dict(calls), bytes, flops, measure)


def cases_of(place: str, setup: Setup) -> Iterator[Own]:
    """What ``cases(setup)`` of a file or a module yields.

    Raises:
        FlexopsError: there is no such file or module, or no such function in it.
    """
    try:
        with here():
            is_file = place.endswith(".py") or Path(place).is_file()
            found: Any = (
                runpy.run_path(place).get("cases")
                if is_file
                else getattr(import_module(place), "cases", None)
            )
    except (FileNotFoundError, ModuleNotFoundError) as error:
        if Path(place).is_file():
            raise FlexopsError(
                f"{place} cannot be run",
                found=str(error),
                required="what it imports",
                fix="install that: pip install -e .",
            ) from error
        required = (
            "a file with cases(setup), such as benchmarks/scale.py, or a module that can be"
            " imported"
        )
        fix = "name the file; docs/workbench.md shows one"
        raise FlexopsError(
            f"{place} has no cases", found=str(error), required=required, fix=fix
        ) from error
    if not callable(found):
        required = "one that yields flexops.bench.case(...)"
        raise FlexopsError(
            f"{place} has no cases",
            found="no function cases(setup)",
            required=required,
            fix="see docs/workbench.md",
        )
    for one in found(setup) or ():
        if not isinstance(one, Own):
            raise FlexopsError(
                f"{place} has no cases",
                found=f"cases(setup) yields {one!r}",
                required="what flexops.bench.case(...) returns",
                fix="see docs/workbench.md",
            )
        yield one


def run(
    places: Sequence[str],
    setup: Setup,
    *,
    text: str = "",
    report: Callable[[str], None] | None = None,
) -> list[OwnTiming]:
    """Measure the cases of these files and modules whose name has ``text`` in it."""
    chosen = [own for place in places for own in cases_of(place, setup) if text in own.name]
    if not chosen:
        raise SettingsError(
            "there is nothing to measure",
            found=f"no case with {text!r} in its name" if text else "no case",
            fix="omit --case",
        )
    copy = timing.copy_bandwidth(setup.device) if any(own.bytes for own in chosen) else 0.0
    matrix = matrix_peak(setup.device) if any(own.flops for own in chosen) else 0.0
    timings = []
    for own in chosen:
        if report:
            report(own.name)
        for call in own.calls.values():
            timing.warm_up(call, setup.device)
        seconds = timing.MEASURES[own.measure](own.calls, setup.device)
        first = next(iter(seconds.values()))
        for name, value in seconds.items():
            moved, done = own.bytes / value, own.flops / value
            timings.append(
                OwnTiming(
                    own.name,
                    name,
                    value,
                    moved,
                    done,
                    moved / copy if own.bytes else None,
                    done / matrix if own.flops else None,
                    value / first,
                )
            )
    return timings


def matrix_peak(device: str) -> float:
    """Floating-point operations a second of a large matrix product by torch: bfloat16 on a GPU,
    float32 on a CPU."""
    size, dtype = MATRIX_SIZE[device], torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = {"product": lambda: a @ b}
    timing.warm_up(product["product"], device)
    return 2 * size**3 / timing.medians(product, device)["product"]


def as_dicts(timings: Sequence[OwnTiming]) -> list[dict[str, Any]]:
    return [asdict(item) for item in timings]


def lines(timings: Sequence[OwnTiming]) -> Iterator[str]:
    """A table: each case, below it who took part."""
    rows = [
        ("  by", "median", "GB/s", "of copy", "TFLOP/s", "of matmul", "against first"),
        *map(_row, timings),
    ]
    head, *aligned = columns(rows, left=1)
    yield head
    name = ""
    for item, line in zip(timings, aligned, strict=True):
        if item.case != name:
            name = item.case
            yield name
        yield line


def _row(item: OwnTiming) -> tuple[str, ...]:
    moved = (
        ("", "") if item.of_copy is None else (f"{item.bandwidth / 1e9:.0f}", f"{item.of_copy:.2f}")
    )
    done = (
        ("", "")
        if item.of_matrix is None
        else (f"{item.flops / 1e12:.3g}", f"{item.of_matrix:.2f}")
    )
    return (
        f"  {item.contender}",
        duration(item.seconds),
        *moved,
        *done,
        ratio(item.against_first, 2),
    )
