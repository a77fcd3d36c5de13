"""What ``flexops bench build`` found, as Markdown: what the page in ``docs/benchmarks/`` is made
of."""

from __future__ import annotations

from flexops.bench.text import duration, ratio

from .build_ladder import COMPARISONS, Ladder, Measurement
from .build_text import OTHER_WORK


def tables(ladder: Ladder) -> str:
    """The ladder, what it comes to, and each family's cold build."""
    rungs = [item for item in ladder.measurements if not item.rung.family]
    families = [item for item in ladder.measurements if item.rung.family]
    slowest = next((item.seconds for item in rungs if item.seconds), None)
    lines = ["| built by | how | time | against the first |", "| --- | --- | ---: | ---: |"]
    lines += [
        f"| {item.rung.side} | {item.rung.label} | {_time(item)} | {_against(item, slowest)} |"
        for item in rungs
    ]
    parts = ["\n".join(lines)]
    if compared := [
        f"- {name}: {ratio(value)}"
        for name, slow, fast in COMPARISONS
        if (value := ladder.ratio(slow, fast))
    ]:
        parts.append("\n".join(compared))
    if families:
        lines = [
            (
                f"| family, its CUDA library and kernels for {ladder.architecture} from source |"
                " time |"
            ),
            "| --- | ---: |",
        ]
        parts.append(
            "\n".join([*lines, *(f"| {item.rung.family} | {_time(item)} |" for item in families)])
        )
    if left_out := [
        f"- Not measured: {item.rung.label} ({' '.join(item.note.split())})."
        for item in ladder.measurements
        if item.seconds is None
    ]:
        parts.append("\n".join(left_out))
    all_of_them = f"All architectures: {' '.join(ladder.architectures)}."
    return "\n\n".join([*parts, all_of_them, str(ladder.machine).replace("\n", "; ") + "."]) + "\n"


def _time(item: Measurement) -> str:
    return "-" if item.seconds is None else duration(item.seconds)


def _against(item: Measurement, slowest: float | None) -> str:
    return (
        ratio(slowest / item.seconds)
        if item.seconds and slowest and item.rung.id not in OTHER_WORK
        else ""
    )
