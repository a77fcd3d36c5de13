"""What ``flexops bench ops`` found, as Markdown: what the pages in ``docs/benchmarks/`` are made
of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from flexops.bench.text import duration, ratio

from .results import LEVEL, Results, Timing

_SMALL = ("call", "device")


def tables(results: Results) -> str:
    """A table of the large cases, one of the small ones, and one of those where flexops is not
    ahead."""
    groups = list(results.groups())
    large = [group for group in groups if group[0].part not in _SMALL]
    small = [group for group in groups if group[0].part in _SMALL]
    parts = [_table(large), _behind(results)]
    if small:
        parts[1:1] = [_table(small)]
    if results.absent:
        parts.append(
            "\n".join(
                f"- Not measured: {contender} in {case} ({reason})."
                for case, contender, reason in results.absent
            )
        )
    return "\n\n".join(parts) + "\n"


def _table(groups: Sequence[tuple[Timing, ...]]) -> str:
    """A line for each case: flexops's figures, and how many times as long the others take; those in
    few cases share a column."""
    cases = Counter(item.contender for group in groups for item in group[1:])
    common = [name for name, count in cases.items() if 4 * count >= len(groups)]
    bandwidth = any(group[0].bandwidth or group[0].rate for group in groups)
    head = [
        "what",
        "part",
        "flexops",
        *(["GB/s", "of copy"] if bandwidth else []),
        *common,
        *(["others"] if len(common) < len(cases) else []),
    ]
    lines = [_line(head), _line(["---", "---", *["---:"] * (len(head) - 2)])]
    for group in groups:
        ours = group[0]
        times = {
            item.contender: ratio(item.seconds / ours.seconds, 2) + _memory(item)
            for item in group[1:]
        }
        figures = (
            [f"{ours.bandwidth / 1e9:.0f}", f"{ours.of_copy:.2f}"]
            if ours.bandwidth
            else [f"{ours.rate / 1e12:.0f} TFLOP/s" if ours.rate else "", ""]
        )
        others = "; ".join(f"{name} {times[name]}" for name in times if name not in common)
        cells = [
            ours.case,
            ours.part,
            duration(ours.seconds) + _memory(ours),
            *(figures if bandwidth else []),
            *(times.get(name, "") for name in common),
        ]
        lines.append(_line([*cells, *([others] if len(common) < len(cases) else [])]))
    return "\n".join(lines)


def _behind(results: Results) -> str:
    behind = results.behind()
    if not behind:
        return "flexops is fastest in all of these."
    lines = [
        _line(["not ahead", "part", "faster", "flexops", "theirs", "by"]),
        _line(["---", "---", "---", "---:", "---:", "---:"]),
    ]
    for item in behind:
        by = "level" if item.ratio <= LEVEL else f"{(item.ratio - 1) * 100:.0f} %"
        lines.append(
            _line(
                [item.case, item.part, item.by, duration(item.seconds), duration(item.theirs), by]
            )
        )
    return "\n".join(lines)


def _memory(item: Timing) -> str:
    return "" if item.memory is None else f", + {item.memory / 2**20:.0f} MiB"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
