"""Exit 0 if this Python's environment holds the pins, and flexops as an editable install of that checkout: ROOT [NAME==VERSION]..."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution, version


def numbers(text: str) -> list[int]:
    """``13.0.3.0`` and ``13.0.3`` are the same release; a local part (``+cpu``) does not matter."""
    parts = [int(part) for part in text.split("+")[0].split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return parts


def holds(pin: str) -> bool:
    name, _, wanted = pin.partition("==")
    try:
        return numbers(version(name.split("[")[0])) == numbers(wanted)
    except (PackageNotFoundError, ValueError):
        return False


def is_editable(root: str) -> bool:
    try:
        origin = json.loads(distribution("flexops").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return False
    return bool(origin.get("dir_info", {}).get("editable")) and origin.get("url") == f"file://{root}"


if __name__ == "__main__":
    root, *pins = sys.argv[1:]
    sys.exit(0 if is_editable(root) and all(map(holds, filter(None, pins))) else 1)
