"""The resources of flexops' own kernels as they are committed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from pathlib import Path

from flexops import _json
from flexops.errors import FlexopsError
from flexops.inspection.baseline import NAMES, Baseline, compare, of
from flexops.inspection.measuring import Measured

FILE = "tests/golden/kernel-resources.json"
"""Where a checkout has it."""


def read(path: Path) -> Baseline:
    """The baseline in a file that ``write`` made. Raises ``FlexopsError`` if it is none."""
    found: Baseline = {}
    try:
        document = _json.load(path)
        for kernel, text in document["kernels"].items():
            for place, cell in zip(document["places"], _cells(text), strict=True):
                if cell != _ABSENT:
                    values = [int(value) for value in cell.split("/")]
                    padded = values + [0] * (len(NAMES) - len(values))
                    found.setdefault(place, {})[kernel] = padded
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise FlexopsError(
            "the baseline cannot be read",
            found=f"{path}: {error}",
            required="a checkout",
            fix="flexops target prove --update",
        ) from error
    return found


def write(path: Path, known: Baseline, measured: Sequence[Measured]) -> None:
    """Write the baseline, with what was measured in place of what it had.

    One line per kernel, one cell per place: its numbers in the order of ``NAMES``, without zeros
    at the end; ``-`` where it is not compiled; ``32*4`` for four equal cells. The compilers of one
    architecture are neighbours, because their numbers are mostly the same.
    """
    renewed = {place: dict(kernels) for place, kernels in known.items()}
    for change in compare(known, measured):
        if not change.now:
            del renewed[change.where][change.kernel]
    for place, kernels in of(measured).items():
        renewed.setdefault(place, {}).update(kernels)
    places = sorted(renewed, key=_by_architecture)
    lines = []
    for kernel in sorted({kernel for kernels in renewed.values() for kernel in kernels}):
        cells = (_cell(renewed[place].get(kernel)) for place in places)
        runs = ((cell, len(list(run))) for cell, run in groupby(cells))
        text = " ".join(f"{cell}*{count}" if count > 1 else cell for cell, count in runs)
        lines.append(f"  {json.dumps(kernel)}: {json.dumps(text)}")
    head = f' "names": {json.dumps(NAMES)},\n "places": {json.dumps(places)},\n "kernels": {{\n'
    path.write_text("{\n" + head + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")


_ABSENT = "-"


def _by_architecture(place: str) -> tuple[int, str]:
    compiler, _, architecture = place.rpartition(" ")
    number = architecture.removeprefix("sm_").rstrip("af")
    return int(number), f"{architecture} {compiler}"


def _cell(values: Sequence[int] | None) -> str:
    shown = list(values or ())
    while len(shown) > 1 and not shown[-1]:
        shown.pop()
    return "/".join(map(str, shown)) or _ABSENT


def _cells(text: str) -> Iterator[str]:
    for run in text.split(" "):
        cell, _, count = run.partition("*")
        yield from repeat(cell, int(count or 1))
