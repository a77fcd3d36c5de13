"""What a run of ``flexops bench ops`` found. No torch here: results can be read, tabled and drawn
where there is none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flexops.errors import SettingsError

FLEXOPS = "flexops"
LEVEL = 1.02
"""What another may be faster by and still be called level: about what medians differ by from run to
run."""


@dataclass(frozen=True)
class Timing:
    """One contender's median in one case.

    Attributes:
        op: family of the op, as the catalogue calls it.
        function: the public function.
        case: what was done, with dtype and shape.
        part: ``forward``, ``backward``, ``step``, ``call`` (of a small tensor, host included),
            ``device`` (the same in a CUDA graph).
        contender: ``flexops``, or who else.
        seconds: of one call.
        bandwidth: bytes a second, 0 where bytes are not what bounds the case.
        of_copy: the same as a fraction of the copy bandwidth.
        memory: bytes a call holds beyond its inputs at its worst moment, if the case is about that.
        preparation: seconds of the first call, which compiles where there is something to compile.
        rate: floating-point operations a second, 0 where they are not counted.
    """

    op: str
    function: str
    case: str
    part: str
    contender: str
    seconds: float
    bandwidth: float
    of_copy: float
    memory: int | None = None
    preparation: float | None = None
    rate: float = 0.0


@dataclass(frozen=True)
class Behind:
    """A case in which another library is faster."""

    op: str
    case: str
    part: str
    by: str
    ratio: float
    seconds: float
    theirs: float


@dataclass(frozen=True)
class Results:
    """A run: the copy bandwidth in bytes a second, the timings, and which contenders could not take
    part, and why."""

    copy: float
    timings: tuple[Timing, ...]
    absent: tuple[tuple[str, str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """A case and part is one entry of ``timings``: what it is, the bytes and operations of a
        call, and what each contender needs for it."""
        absent = [
            {"case": case, "contender": contender, "reason": reason}
            for case, contender, reason in self.absent
        ]
        behind = [asdict(item) for item in self.behind()]
        return {
            "copy_bandwidth": self.copy,
            "timings": [_entry(group) for group in self.groups()],
            "behind": behind,
            "absent": absent,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Results:
        absent = tuple(
            (item["case"], item["contender"], item["reason"]) for item in data.get("absent", ())
        )
        copy = data["copy_bandwidth"]
        timings = tuple(item for entry in data["timings"] for item in _timings(entry, copy))
        return Results(copy, timings, absent)

    def only(self, names: Collection[str]) -> Results:
        """What is about the ops called ``names``, by family or by function; raises ``FlexopsError``
        for a name that nothing here is about."""
        known = {name for item in self.timings for name in (item.op, item.function)}
        if unknown := sorted(set(names) - known):
            raise SettingsError(
                f"nothing was measured of {', '.join(unknown)}",
                required=", ".join(sorted(known)),
                fix="omit --op",
            )
        timings = tuple(item for item in self.timings if {item.op, item.function} & set(names))
        cases = {item.case for item in timings}
        return Results(self.copy, timings, tuple(item for item in self.absent if item[0] in cases))

    def groups(self) -> Iterator[tuple[Timing, ...]]:
        """The timings of each case and part, flexops first."""
        grouped: dict[tuple[str, str], list[Timing]] = {}
        for item in self.timings:
            grouped.setdefault((item.case, item.part), []).append(item)
        for group in grouped.values():
            yield tuple(sorted(group, key=lambda item: item.contender != FLEXOPS))

    def behind(self) -> tuple[Behind, ...]:
        """Where another library is faster than flexops, worst first."""
        found = []
        for group in self.groups():
            ours, others = group[0], group[1:]
            best = min(others, key=lambda item: item.seconds, default=ours)
            if ours.contender == FLEXOPS and best.seconds < ours.seconds:
                found.append(
                    Behind(
                        ours.op,
                        ours.case,
                        ours.part,
                        best.contender,
                        ours.seconds / best.seconds,
                        ours.seconds,
                        best.seconds,
                    )
                )
        return tuple(sorted(found, key=lambda item: -item.ratio))


def _entry(group: Sequence[Timing]) -> dict[str, Any]:
    first = group[0]
    entry: dict[str, Any] = {
        "op": first.op,
        "function": first.function,
        "case": first.case,
        "part": first.part,
        "bytes": round(first.bandwidth * first.seconds),
        "operations": round(first.rate * first.seconds),
    }
    for name in ("seconds", "memory", "preparation"):
        found = {item.contender: getattr(item, name) for item in group}
        entry[name] = {who: value for who, value in found.items() if value is not None}
    return {name: value for name, value in entry.items() if value}


def _timings(entry: dict[str, Any], copy: float) -> Iterator[Timing]:
    """What ``_entry`` made; ``KeyError`` or ``TypeError`` if it did not."""
    memory, preparation = entry.get("memory", {}), entry.get("preparation", {})
    for contender, seconds in entry["seconds"].items():
        bandwidth = entry.get("bytes", 0) / seconds
        yield Timing(
            entry["op"],
            entry["function"],
            entry["case"],
            entry["part"],
            contender,
            seconds,
            bandwidth,
            bandwidth / copy,
            memory.get(contender),
            preparation.get(contender),
            entry.get("operations", 0) / seconds,
        )
