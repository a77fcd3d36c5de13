"""Draws a training step's time and memory, as in the README: bars from docs/benchmarks/*-training-step.json, into an .svg beside it.

    python scripts/plot_training_step.py [FILE.json]       the newest, if none is named
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PANELS = (("milliseconds", "milliseconds a step", ".0f"), ("gibibytes", "GiB at the peak", ".1f"))
OURS, OTHERS = "#1f6feb", "#9aa5b1"


def newest() -> Path:
    return max((ROOT / "docs" / "benchmarks").glob("*-training-step.json"))


def draw(data: dict[str, Any], file: Path) -> None:
    """Two panels, a bar for each contender, the shortest bar the best. The same data give the same file, byte by byte."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "flexops"
    results = data["results"]
    figure = Figure(figsize=(10, 0.42 * len(results) + 1.1), layout="constrained")
    positions = range(len(results))
    for number, (axes, (field, title, form)) in enumerate(zip(figure.subplots(1, 2), PANELS, strict=True)):
        values = [one[field] for one in results]
        bars = axes.barh(positions, values, color=[OURS if one.get("flexops") else OTHERS for one in results])
        axes.bar_label(bars, labels=[format(value, form) for value in values], padding=4)
        axes.set_yticks(positions, [one["name"] for one in results] if number == 0 else [""] * len(results))
        axes.invert_yaxis()
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.supxlabel(f"{data['machine']}, {data['date']}", fontsize=8, color="#57606a", x=0.01, ha="left")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    draw(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".svg"))
    print(source.with_suffix(".svg"))


if __name__ == "__main__":
    main()
