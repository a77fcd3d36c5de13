"""Our name on package indexes. ``flexops`` is another project's there, with the same import name,
so the distribution is called ``flexops-torch``."""

from __future__ import annotations

from importlib import metadata

NAME = "flexops-torch"
# as pyproject.toml says; before it had this name, our own distribution was called as the other is
AUTHOR = "The flexops developers"


def namesake() -> str:
    """The other project's distribution with its version and place, if this Python has it installed;
    empty if not. It and ours overwrite each other."""
    for one in metadata.distributions(name="flexops"):
        if one.metadata["Author"] != AUTHOR:
            return f"flexops {one.version} in {one.locate_file('')}"
    return ""
