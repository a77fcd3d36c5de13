"""Resources of kernels as they were, and what is worse than that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .measuring import Measured

NAMES = ("registers", "shared", "stack", "spill_stores", "spill_loads")
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
            return any(self.now[3:])
        return self.now[0] >= self.was[0] + _WITHIN_REGISTERS or any(
            now > was for was, now in zip(self.was[1:], self.now[1:], strict=True)
        )

    def __str__(self) -> str:
        if not self.was:
            return f"{self.where}  {self.kernel}: new" + (
                f", spills {self.now[3]}/{self.now[4]} bytes  WORSE" if self.worse else ""
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
