"""The index of a channel: what conda reads instead of the packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import ChannelError
from .place import Place
from .run import child


def index(place: Place) -> int:
    """Write ``repodata.json`` (and its compressed and sharded forms) of every sub-folder; returns the number of packages.

    A package that the index does not list yet is read whole first: an index that promises a damaged package is worse than none.

    Raises:
        ChannelError: there is no channel, a package is damaged, or the index cannot be written.
    """
    packages = place.packages()
    if not packages:
        raise ChannelError("there is no package to index", found=str(place.channel), fix=f"flexops channel build --channel {place.channel}")
    listed = _listed(place)
    verify(place, [path for path in packages if listed.get(path.name) != path.stat().st_size])
    (place.channel / "noarch").mkdir(parents=True, exist_ok=True)  # every conda asks every channel for it
    try:
        child("index", {"channel": str(place.channel.absolute())}, log=place.logs / "index.log")
    except ChannelError as error:
        raise ChannelError("the channel cannot be indexed", found=error.found, fix=error.fix or "see the log", log=error.log) from error
    return len(packages)


def verify(place: Place, packages: Sequence[Path]) -> None:
    """Read every file of the packages; raises ``ChannelError`` naming those that are damaged."""
    if not packages:
        return
    place.work.mkdir(parents=True, exist_ok=True)
    request = {"packages": [str(path) for path in packages], "work": str(place.work)}
    damaged = child("inspect", request, log=place.logs / "inspect.log")["damaged"]
    if damaged:
        what = "a package of the channel is damaged" if len(damaged) == 1 else f"{len(damaged)} packages of the channel are damaged"
        found = "; ".join(f"{path}: {reason}" for path, reason in damaged)
        raise ChannelError(what, found=found, fix=f"rm {' '.join(path for path, _ in damaged)}   # and build again")


def _listed(place: Place) -> dict[str, int]:
    """File names in the present index, and the sizes they had."""
    sizes: dict[str, int] = {}
    for path in place.channel.glob("*/repodata.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            sizes |= {name: entry["size"] for kind in ("packages", "packages.conda") for name, entry in data.get(kind, {}).items()}
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # whatever this is, writing the index anew mends it
    return sizes
