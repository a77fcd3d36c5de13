"""Draws the README's chart: docs/benchmarks/training-step.json into the .svg of its name.

    python scripts/plot_training_step.py [FILE.json]

The data are what `flexops bench model --json` prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flexops_tools.bench import model_plot  # noqa: E402

NEWEST = ROOT / "docs" / "benchmarks" / "training-step.json"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else NEWEST
    chart = source.with_suffix(".svg")
    model_plot.draw(json.loads(source.read_text(encoding="utf-8")), chart)
    print(chart)


if __name__ == "__main__":
    main()
