"""The images' jobs, from the matrix of targets, as GitHub's outputs: ``builds`` (row, machine,
runner) and ``rows``; ``matrix.py ROW FIELD`` prints a field, lists separated by blanks."""

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


if __name__ == "__main__" and len(sys.argv) == 3:
    value = getattr(targets.load().find(sys.argv[1]), sys.argv[2])
    print(" ".join(value) if isinstance(value, tuple) else value)
elif __name__ == "__main__":
    print(f"builds={json.dumps(builds())}")
    print(f"rows={json.dumps(targets.load().ids)}")
