"""A training step's time and memory as bars, and the losses of trainings as curves. The same data
give the same file, byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import plot

PANELS = (
    ("milliseconds", "milliseconds a step", ".0f"),
    ("gibibytes", "GiB at the peak", ".1f"),
    ("joules", "joules a step", ".0f"),
)
OURS, OTHERS = "#1f6feb", "#9aa5b1"
STYLES = {
    "transformers": ("#24292f", "-"),
    "transformers, another seed": ("#9aa5b1", "-"),
    "transformers, torch.compile": ("#57606a", ":"),
    "Liger": ("#2da44e", "--"),
    "flexops.patch": (OURS, "-"),
    "flexops.patch, another seed": ("#9aa5b1", "-"),
    "flexops.patch, torch.compile": ("#e36209", "--"),
    "flexops.patch, fp8": ("#e36209", "-"),
    "flexops.patch, fp8, gw_hp": ("#2da44e", "--"),
}
SMOOTH = 10


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def save(figure: Any, data: dict[str, Any], file: Path) -> None:
    plot.write(figure, f"{data['machine']}, {data['date']}", file, size=8)


def draw(data: dict[str, Any], file: Path) -> None:
    """Panels of what was measured, a bar for each contender, the shortest bar the best."""
    results = data["results"]
    panels = [panel for panel in PANELS if any(one.get(panel[0]) for one in results)]
    figure = _figure((10, 0.42 * len(results) + 1.1))
    positions = range(len(results))
    for number, (axes, (field, title, form)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)
    ):
        values = [one[field] for one in results]
        bars = axes.barh(
            positions, values, color=[OURS if one.get("flexops") else OTHERS for one in results]
        )
        axes.bar_label(bars, labels=[format(value, form) for value in values], padding=4)
        axes.set_yticks(*((positions, [one["name"] for one in results]) if number == 0 else ([],)))
        axes.invert_yaxis()
        axes.set_xlim(0, max(max(values) * 1.15, 1e-9))
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    save(figure, data, file)


def draw_losses(data: dict[str, Any], file: Path) -> None:
    """Losses over steps, each the mean of ten; and how far each training is from the first one,
    beside how far another seed is."""
    losses: dict[str, list[float]] = data["losses"]
    steps, first = data.get("steps", 1), next(iter(losses))
    figure = _figure((10, 4))
    left, right = figure.subplots(1, 2)
    for name, values in losses.items():
        colour, line = STYLES.get(name, (None, "-."))
        left.plot(*_smooth(values, steps), color=colour, linestyle=line, linewidth=1.2, label=name)
        if name != first:
            right.plot(
                *_smooth([abs(a - b) for a, b in zip(values, losses[first], strict=True)], steps),
                color=colour,
                linestyle=line,
                linewidth=1.2,
            )
    left.legend(fontsize=8, frameon=False)
    right.set_yscale("log")
    right.minorticks_off()
    for axes, title in (
        (left, f"loss, mean of {max(steps, SMOOTH)} steps"),
        (right, f"distance from the loss of {first}"),
    ):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(color="#d8dee4", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, data, file)


def _smooth(values: list[float], steps: int) -> tuple[list[int], list[float]]:
    if steps > 1:  # means already
        return list(range(steps, steps * len(values) + 1, steps)), values
    ends = range(min(SMOOTH, len(values)), len(values) + 1)
    return list(ends), [
        sum(values[max(0, end - SMOOTH) : end]) / len(values[max(0, end - SMOOTH) : end])
        for end in ends
    ]
