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
        order = [document["names"].index(name) for name in NAMES]
        for table in document["tables"]:
            for name, rows in table["kernels"].items():
                for arguments, text in rows.items():
                    for place, values in zip(table["places"], _values(text), strict=True):
                        found.setdefault(place, {})[name + arguments] = [values[i] for i in order]
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

    A table for each set of places that kernels are compiled for; in it a row per kernel, under its
    name by its template's arguments, with a cell per place: its numbers in the order of ``NAMES``,
    without zeros at the end; ``32*4`` for four equal cells. The compilers of one architecture are
    neighbours, because their numbers are mostly the same.
    """
    renewed = {place: dict(kernels) for place, kernels in known.items()}
    for change in compare(known, measured):
        if not change.now:
            del renewed[change.where][change.kernel]
    for place, kernels in of(measured).items():
        renewed.setdefault(place, {}).update(kernels)
    order = sorted(renewed, key=_by_architecture)
    tables: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for kernel in sorted({kernel for kernels in renewed.values() for kernel in kernels}):
        places = tuple(place for place in order if kernel in renewed[place])
        runs = groupby(_cell(renewed[place][kernel]) for place in places)
        counts = ((cell, len(list(run))) for cell, run in runs)
        name, bracket, arguments = kernel.partition("<")
        tables.setdefault(places, {}).setdefault(name, {})[bracket + arguments] = " ".join(
            f"{cell}*{count}" if count > 1 else cell for cell, count in counts
        )
    rows = [{"places": places, "kernels": kernels} for places, kernels in tables.items()]
    text = json.dumps({"names": NAMES, "tables": rows}, indent=0)
    path.write_text(text + "\n", encoding="utf-8")


def _by_architecture(place: str) -> tuple[int, str]:
    compiler, _, architecture = place.rpartition(" ")
    number = architecture.removeprefix("sm_").rstrip("af")
    return int(number), f"{architecture} {compiler}"


def _cell(values: Sequence[int]) -> str:
    shown = list(values)
    while len(shown) > 1 and not shown[-1]:
        shown.pop()
    return "/".join(map(str, shown))


def _values(text: str) -> Iterator[list[int]]:
    for run in text.split(" "):
        cell, _, count = run.partition("*")
        shown = [int(value) for value in cell.split("/")]
        yield from repeat(shown + [0] * (len(NAMES) - len(shown)), int(count or 1))
