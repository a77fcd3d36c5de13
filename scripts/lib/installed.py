"""Exit 0 if this Python's environment holds the pins, and flexops-torch and flexops-tools as
editable installs of that checkout: ROOT [NAME==VERSION]...

A distribution called flexops must not be there: it is another project's, or this checkout's own
from before it was called flexops-torch.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

NAME, FORMER_NAME, TOOLS = "flexops-torch", "flexops", "flexops-tools"


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


def is_editable(name: str, root: str) -> bool:
    try:
        origin = json.loads(distribution(name).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return False
    return (
        bool(origin.get("dir_info", {}).get("editable")) and origin.get("url") == f"file://{root}"
    )


def namesake(root: str) -> str:
    """``ours``: this checkout's, under its former name; ``other VERSION``: another project's;
    empty: no distribution is called flexops."""
    try:
        return "ours" if is_editable(FORMER_NAME, root) else f"other {version(FORMER_NAME)}"
    except PackageNotFoundError:
        return ""


def half_installed(site: Path) -> list[Path]:
    """What pip left when it was stopped: it writes RECORD last, and renames what it replaces to
    ``~name`` until it is done."""
    return [
        *(info for info in site.glob("*.dist-info") if not (info / "RECORD").exists()),
        *site.glob("~*"),
    ]


if __name__ == "__main__":
    root, *pins = sys.argv[1:]
    if pins == ["--half-installed"]:
        for path in half_installed(Path(sysconfig.get_path("purelib"))):
            print(path)
        sys.exit()
    if pins == ["--namesake"]:
        print(namesake(root))
        sys.exit()
    ours = is_editable(NAME, root) and is_editable(TOOLS, f"{root}/tools")
    sys.exit(0 if ours and not namesake(root) and all(map(holds, filter(None, pins))) else 1)
