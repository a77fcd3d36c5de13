"""The ladder for a terminal: no line of a table is longer than 80 characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexops.bench.text import columns, duration, ratio

from . import build_ladder
from .build_ladder import Ladder, Measurement

OTHER_WORK = (
    "flexops-aot",
    "flexops-import",
    *(f"{side}-edit-{kind}" for side in ("torch", "flexops") for kind in ("cpp", "cu")),
)
"""Rungs that do something else than the first, so that no factor says anything."""


def lines(ladder: Ladder) -> Iterator[str]:
    """The rungs, the families, the comparisons, what was not measured and why, and the machine."""
    rungs = [item for item in ladder.measurements if not item.rung.family]
    families = [item for item in ladder.measurements if item.rung.family]
    yield from _rungs(
        ladder.op, [(item, item.seconds) for item in rungs if item.seconds is not None]
    )
    yield from _families([(item, item.seconds) for item in families if item.seconds is not None])
    yield f"one architecture: {ladder.architecture}; all: {' '.join(ladder.architectures)}"
    for name, slow, fast in build_ladder.COMPARISONS:
        if value := ladder.ratio(slow, fast):
            yield f"{name}: {ratio(value)}"
    for item in ladder.measurements:
        if item.seconds is None:
            yield f"not measured: {item.rung.side}: {item.rung.label}: {item.note}"
    yield str(ladder.machine)


def _rungs(op: str, measured: Sequence[tuple[Measurement, float]]) -> Iterator[str]:
    if not measured:
        return
    first = measured[0][1]
    rows = [
        (
            item.rung.side,
            item.rung.label,
            duration(seconds),
            "" if item.rung.id in OTHER_WORK else ratio(first / seconds),
        )
        for item, seconds in measured
    ]
    yield f"One CUDA op ({op}) from source to loaded; import torch not counted"
    yield ""
    yield from columns([("by", "how", "time", "faster"), *rows], left=2)
    yield ""


def _families(measured: Sequence[tuple[Measurement, float]]) -> Iterator[str]:
    if not measured:
        return
    yield "Each family's CUDA library and kernels from source, cold, for one architecture"
    yield ""
    yield from columns(
        [
            ("family", "time"),
            *((item.rung.family, duration(seconds)) for item, seconds in measured),
        ],
        left=1,
    )
    yield ""
