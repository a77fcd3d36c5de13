"""What ``flexops bench ops`` found, for a terminal: no line of a table is longer than 80
characters, whatever the cases are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flexops.bench.text import columns, duration, ratio

from .results import FLEXOPS, LEVEL, Results, Timing

_MANY = 4


def title(results: Results, device: str) -> str:
    """What is compared with whom, and in a second line where: the heading of a chart or table."""
    ops = list(dict.fromkeys(item.op for item in results.timings))
    what = ", ".join(ops) if len(ops) <= _MANY else f"{len(ops)} families of operators"
    others = [
        name
        for name, _ in Counter(
            item.contender for item in results.timings if item.contender != FLEXOPS
        ).most_common()
    ]
    whom = ", ".join(others[:_MANY]) + (
        f" and {len(others) - _MANY} more" if len(others) > _MANY else ""
    )
    return (
        f"{what}: {FLEXOPS} against {whom or 'nothing'}\non {device}, whose copy reaches"
        f" {results.copy / 1e9:.0f} GB/s"
    )


def lines(results: Results) -> Iterator[str]:
    """A heading for each case, below it who took part; then the cases in which another one is
    faster, and who could not take part."""
    groups = list(results.groups())
    rows = [
        ("  by", "median", "GB/s", "of copy", f"against {FLEXOPS}"),
        *(_row(item, group[0]) for group in groups for item in group),
    ]
    head, *aligned = columns(rows, left=1)
    yield head
    for group in groups:
        yield f"{group[0].case}, {group[0].part}"
        for _ in group:
            yield aligned.pop(0)
    yield from _behind(results)
    yield from (
        f"not measured: {contender} in {case}: {reason}"
        for case, contender, reason in results.absent
    )


def _row(item: Timing, ours: Timing) -> tuple[str, ...]:
    memory = "" if item.memory is None else f" (+ {item.memory / 2**20:.0f} MiB)"
    bandwidth = (
        (f"{item.bandwidth / 1e9:.0f}", f"{item.of_copy:.2f}")
        if item.bandwidth
        else (f"{item.rate / 1e12:.0f} TFLOP/s" if item.rate else "", "")
    )
    return (
        f"  {item.contender}{memory}",
        duration(item.seconds),
        *bandwidth,
        "" if item is ours else ratio(item.seconds / ours.seconds, 2),
    )


def _behind(results: Results) -> Iterator[str]:
    behind = results.behind()
    if not behind:
        yield f"{FLEXOPS} is fastest in all of these."
        return
    yield f"Not ahead (up to {(LEVEL - 1) * 100:.0f} % is called level):"
    by = [
        "level" if item.ratio <= LEVEL else f"by {(item.ratio - 1) * 100:.0f} %" for item in behind
    ]
    times = [f"{duration(item.theirs)}, {FLEXOPS} {duration(item.seconds)}" for item in behind]
    rows = columns(
        [
            (f"  {item.by}", time, ahead)
            for item, time, ahead in zip(behind, times, by, strict=True)
        ],
        left=2,
    )
    for item, row in zip(behind, rows, strict=True):
        yield f"{item.case}, {item.part}"
        yield row
