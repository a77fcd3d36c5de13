"""The images' jobs, from the matrix of targets, as GitHub's outputs: ``builds`` (row, machine,
runner) and ``rows``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flexops import targets

RUNNERS = {"x86_64": "ubuntu-24.04", "aarch64": "ubuntu-24.04-arm"}


def builds() -> list[dict[str, str]]:
    return [
        {"row": target.id, "machine": machine, "runner": RUNNERS[machine]}
        for target in targets.load().targets
        for machine in target.machines
    ]


if __name__ == "__main__":
    print(f"builds={json.dumps(builds())}")
    print(f"rows={json.dumps(targets.load().ids)}")
