"""What ``flexops bench ops`` found, as a chart: how near each op comes to the bandwidth of a copy,
and how near the others do; of what is not bound by memory, floating-point operations a second. The
same data give the same .svg, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import plot
from .results import FLEXOPS, Results, Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = {
    "forward, or both passes": ("forward", "forward + backward"),
    "backward, and steps of optimizers": ("backward", "step"),
}
"""The two panels, and the parts that each shows."""


class Measure(NamedTuple):
    """What an axis shows; ``least_end``: which value it shows in any case, by a line."""

    label: str
    of: Callable[[Timing], float]
    form: str
    least_end: float


MEASURES = (
    Measure("fraction of copy bandwidth", lambda item: item.of_copy, ".2f", 1.0),
    Measure("TFLOP/s", lambda item: item.rate / 1e12, ".0f", 0.0),
)

STYLES = {
    "torch eager": ("o", "#9aa5b1"),
    "torch foreach": ("o", "#9aa5b1"),
    "torch fused": ("s", "#57606a"),
    "torch.compile": ("D", "#e36209"),
    "Liger": ("^", "#2da44e"),
    "bitsandbytes": ("^", "#8250df"),
    "cuDNN": ("D", "#2da44e"),
    "torch's flash": ("^", "#e36209"),
    "torch's varlen_attn": ("^", "#e36209"),
    "reference": ("|", "#6e7781"),
}
_OTHER = ("v", "#8250df")


def save(results: Results, title: str, note: str, file: Path) -> None:
    """Draw a line for each case: flexops as a bar, the others as marks, all as fractions of the
    copy bandwidth, or in TFLOP/s; the file's suffix chooses the format.

    Raises:
        FlexopsError: matplotlib is not installed, or the file cannot be written.
    """
    plot.check(file)
    from matplotlib.figure import Figure

    rows = {measure: panels for measure in MEASURES if (panels := _panels(results, measure))}
    tallest = [max(map(len, panels.values())) for panels in rows.values()] or [1]
    wide = max(map(len, rows.values()), default=1)
    figure = Figure(
        figsize=(8.5 * wide, 0.27 * sum(tallest) + 1.1 * len(tallest) + 1.1), layout="constrained"
    )
    grid = figure.add_gridspec(len(tallest), wide, height_ratios=[lines + 1 for lines in tallest])
    handles: dict[str, Any] = {}
    for row, (measure, panels) in enumerate(rows.items()):
        for column, (name, found) in enumerate(panels.items()):
            handles |= _panel(
                figure.add_subplot(grid[row, column]), name, measure, found, tallest[row]
            )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower right",
            ncols=min(len(handles), 4),
            fontsize=8,
            frameon=False,
        )
    plot.write(figure, note, file, 210)


def _panels(results: Results, measure: Measure) -> dict[str, list[tuple[Timing, ...]]]:
    """The cases that a measure is for, by panel."""
    groups = [group for group in results.groups() if measure.of(group[0]) > 0]
    panels = {
        name: [group for group in groups if group[0].part in parts]
        for name, parts in COLUMNS.items()
    }
    return {name: found for name, found in panels.items() if found}


def _panel(
    axes: Axes, name: str, measure: Measure, groups: list[tuple[Timing, ...]], lines: int
) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    end = 1.14 * max(measure.least_end, *(measure.of(item) for group in groups for item in group))
    for line, group in enumerate(groups):
        for item in group:
            if item.contender == FLEXOPS:
                handles[FLEXOPS] = axes.barh(
                    line,
                    measure.of(item),
                    height=0.62,
                    color="#1f6feb",
                    alpha=0.85,
                    zorder=2,
                    clip_on=False,
                )
                axes.text(
                    0.99 * end,
                    line,
                    format(measure.of(item), measure.form),
                    va="center",
                    ha="right",
                    fontsize=7,
                )
                continue
            marker, colour = STYLES.get(item.contender, _OTHER)
            edge: dict[str, Any] = (
                {} if marker == "|" else {"edgecolors": "white", "linewidths": 0.6}
            )
            handles[item.contender] = axes.scatter(
                measure.of(item),
                line,
                marker=marker,
                s=34,
                color=colour,
                zorder=3,
                clip_on=False,
                **edge,
            )
    axes.set_yticks(range(len(groups)), [group[0].case for group in groups], fontsize=7)
    axes.set_ylim(lines - 0.4, -0.6)
    axes.set_xlim(0, end)
    if measure.least_end:
        axes.axvline(measure.least_end, color="#24292f", linewidth=0.8, zorder=1)
    axes.set_xlabel(measure.label, fontsize=8)
    axes.set_title(name, loc="left", fontsize=9)
    axes.grid(axis="x", color="#d8dee4", linewidth=0.5, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    return handles
