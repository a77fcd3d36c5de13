"""Prints a hash-locked requirements file of all wheels in a directory: ``lock_wheels.py
DIRECTORY``."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def lock(directory: Path) -> str:
    """``name==version --hash=sha256:…``, a line for each wheel."""
    lines = []
    for wheel in sorted(directory.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        with wheel.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        lines.append(
            f"{name.replace('_', '-').lower()}=={version} --hash=sha256:{digest.hexdigest()}\n"
        )
    return "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(lock(Path(sys.argv[1])))
