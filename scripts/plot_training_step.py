"""Draws a training step's time and memory, as in the README, and the losses beside them: docs/benchmarks/*-training-step.json, into .svg files of its name.

    python scripts/plot_training_step.py [FILE.json]       the newest, if none is named

The data are what `flexops bench model --json` prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flexops.bench import model_plot  # noqa: E402


def newest() -> Path:
    return max((ROOT / "docs" / "benchmarks").glob("*-training-step.json"))


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    data = json.loads(source.read_text(encoding="utf-8"))
    model_plot.draw(data, source.with_suffix(".svg"))
    print(source.with_suffix(".svg"))
    if data.get("losses"):
        curves = source.with_name(f"{source.stem}-losses.svg")
        model_plot.draw_losses(data, curves)
        print(curves)


if __name__ == "__main__":
    main()
