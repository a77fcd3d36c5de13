"""Resources of flexops' own kernels as they are committed, and what is worse than that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from pathlib import Path
from typing import NamedTuple

from .. import _json
from ..errors import FlexopsError
from .measuring import Measured

FILE = "tests/golden/kernel-resources.json"
"""Where a checkout has it."""
NAMES = ("registers", "stack", "spill_stores", "spill_loads", "shared")
_WITHIN_REGISTERS = 8
"""ptxas gives registers out by eight: fewer than that more are noise of its allocator."""

Baseline = dict[str, dict[str, list[int]]]
"""``<compiler> <architecture>`` -> ``<family> <kernel>``, without flexops' own namespace -> numbers
in the order of ``NAMES``."""
_OWN = "flexops::"


class Change(NamedTuple):
    """A kernel whose resources are not the baseline's; ``was`` is empty for a new one, ``now`` for
    one that is gone."""

    where: str
    kernel: str
    was: tuple[int, ...]
    now: tuple[int, ...]

    @property
    def worse(self) -> bool:
        """Spills or stack where there were fewer, eight registers more, or more shared memory; any
        spills of a new kernel, which is compared with nothing."""
        if not self.now:
            return False
        if not self.was:
            return any(self.now[2:4])
        return self.now[0] >= self.was[0] + _WITHIN_REGISTERS or any(
            now > was for was, now in zip(self.was[1:], self.now[1:], strict=True)
        )

    def __str__(self) -> str:
        if not self.was:
            return f"{self.where}  {self.kernel}: new" + (
                f", spills {self.now[2]}/{self.now[3]} bytes  WORSE" if self.worse else ""
            )
        if not self.now:
            return f"{self.where}  {self.kernel}: gone"
        parts = [
            f"{name} {was} -> {now}"
            for name, was, now in zip(NAMES, self.was, self.now, strict=True)
            if was != now
        ]
        return f"{self.where}  {self.kernel}: {', '.join(parts)}{'  WORSE' if self.worse else ''}"


def numbers(one: Measured) -> tuple[int, ...]:
    return tuple(one.resources.get(name, 0) for name in NAMES)


def of(measured: Iterable[Measured]) -> Baseline:
    found: Baseline = {}
    for one in measured:
        found.setdefault(where(one), {})[_key(one)] = list(numbers(one))
    return found


def _key(one: Measured) -> str:
    return f"{one.family} {one.kernel.replace(_OWN, '')}"


def where(one: Measured) -> str:
    return f"{one.compiler} {one.architecture.capability.sm}"


def compare(known: Baseline, measured: Sequence[Measured]) -> list[Change]:
    """What differs, at the places and in the families that were measured: kernels with other
    numbers, new ones, and those that are no longer compiled."""
    changes = []
    for one in measured:
        was = tuple(known.get(where(one), {}).get(_key(one), ()))
        if was != numbers(one):
            changes.append(Change(where(one), _key(one), was, numbers(one)))
    now = {(where(one), _key(one)) for one in measured}
    families = {(where(one), one.family) for one in measured}
    for place, kernels in known.items():
        gone = (
            key
            for key in kernels
            if (place, key) not in now and (place, key.partition(" ")[0]) in families
        )
        changes += [Change(place, key, tuple(kernels[key]), ()) for key in gone]
    return changes


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
