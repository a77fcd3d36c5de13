"""What ``flexops bench ops`` found, as a chart: how near each op comes to the bandwidth of a copy, and how near the others do."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FlexopsError
from .results import FLEXOPS, Results, Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = {"forward": ("forward", "forward + backward"), "backward, and steps of optimizers": ("backward", "step")}
"""The two panels, and the parts that each shows."""

STYLES = {
    "torch eager": ("o", "#9aa5b1"),
    "torch foreach": ("o", "#9aa5b1"),
    "torch fused": ("s", "#57606a"),
    "torch.compile": ("D", "#e36209"),
    "Liger": ("^", "#2da44e"),
    "bitsandbytes": ("^", "#8250df"),
    "reference": ("|", "#6e7781"),
}
_OTHER = ("v", "#8250df")


def save(results: Results, title: str, note: str, file: Path) -> None:
    """Draw a line for each case: flexops as a bar, the others as marks, all as fractions of the copy bandwidth; the file's suffix chooses the format.

    Raises:
        FlexopsError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlexopsError("a chart needs matplotlib", found=str(error), fix="pip install matplotlib") from error
    groups = [group for group in results.groups() if group[0].bandwidth > 0]
    panels = {name: [group for group in groups if group[0].part in parts] for name, parts in COLUMNS.items()}
    panels = {name: found for name, found in panels.items() if found}
    tallest = max((len(found) for found in panels.values()), default=1)
    figure = Figure(figsize=(8.5 * max(len(panels), 1), 0.27 * tallest + 2.2), layout="constrained")
    handles: dict[str, Any] = {}
    for number, (name, found) in enumerate(panels.items()):
        handles |= _panel(figure.add_subplot(1, len(panels), number + 1), name, found, tallest)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower right", ncols=min(len(handles), 4), fontsize=8, frameon=False)
    figure.supxlabel("\n".join(textwrap.wrap(note, 210)), fontsize=7, color="#57606a", x=0.01, ha="left")
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise FlexopsError("the chart cannot be written", found=f"{file}: {error}", required="a .png, .svg or .pdf in a writable directory") from error


def _panel(axes: Axes, name: str, groups: list[tuple[Timing, ...]], lines: int) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    end = max(1.0, *(item.of_copy for group in groups for item in group)) + 0.14
    for line, group in enumerate(groups):
        for item in group:
            if item.contender == FLEXOPS:
                handles[FLEXOPS] = axes.barh(line, item.of_copy, height=0.62, color="#1f6feb", alpha=0.85, zorder=2)
                axes.text(end - 0.01, line, f"{item.of_copy:.2f}", va="center", ha="right", fontsize=7)
                continue
            marker, colour = STYLES.get(item.contender, _OTHER)
            edge: dict[str, Any] = {} if marker == "|" else {"edgecolors": "white", "linewidths": 0.6}
            handles[item.contender] = axes.scatter(item.of_copy, line, marker=marker, s=34, color=colour, zorder=3, **edge)
    axes.set_yticks(range(len(groups)), [group[0].case for group in groups], fontsize=7)
    axes.set_ylim(lines - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.axvline(1, color="#24292f", linewidth=0.8, zorder=1)
    axes.set_xlabel("fraction of copy bandwidth", fontsize=8)
    axes.set_title(name, loc="left", fontsize=9)
    axes.grid(axis="x", color="#d8dee4", linewidth=0.5, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=7)
    return handles
