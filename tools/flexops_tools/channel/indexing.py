"""The index of a channel: what conda reads instead of the packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flexops.errors import ChannelError

from .place import Place, distribution
from .run import child
from .sealing import sha256


def index(place: Place, *, force: bool = False) -> int:
    """Write ``repodata.json`` (and its compressed and sharded forms) of every sub-folder; returns
    the number of packages.

    A package that the index does not list yet is read whole first: an index that promises a damaged
    package is worse than none. One that it lists must be the file that it was: whoever has it
    cached keeps the old one, and the others reject it for its digest.

    Args:
        force: the packages are right, whatever the index says: read them all, and write it anew.

    Raises:
        ChannelError: there is no channel, a package is damaged, misnamed or not what it was, or the
            index cannot be written.
    """
    packages = place.packages()
    if not packages:
        raise ChannelError(
            "there is no package to index",
            found=str(place.channel),
            fix=f"flexops channel build --channel {place.channel}",
        )
    place.require_folder()
    listed = {} if force else _listed(place)
    if changed := [
        path for path in packages if listed.get(_name(path), digest := sha256(path)) != digest
    ]:
        raise ChannelError(
            (
                "a published package never changes"
                if len(changed) == 1
                else f"{len(changed)} published packages changed"
            ),
            found=f"{', '.join(map(str, changed))}: not what the index lists",
            required="the file that was published, or a new one with a higher build number",
            fix=(
                "put the old file back; or, if it is the index that is wrong: flexops channel"
                f" index --force --channel {place.channel}"
            ),
        )
    verify(place, [path for path in packages if _name(path) not in listed])
    # every conda asks every channel for it
    (place.channel / "noarch").mkdir(parents=True, exist_ok=True)
    try:
        child(
            "index",
            {"channel": str(place.channel.absolute()), "force": force},
            log=place.logs / "index.log",
        )
    except ChannelError as error:
        raise ChannelError(
            "the channel cannot be indexed",
            found=error.found,
            fix=error.fix or "see the log",
            log=error.log,
        ) from error
    return len(packages)


def audit(place: Place, name: str) -> list[Path]:
    """Compare the index with every package called ``name``, and read those whole; returns them.

    Raises:
        ChannelError: there is no channel, it has no such package, its index and its packages do
            not agree, or a package is damaged.
    """
    packages = place.packages(name)
    if not packages:
        raise ChannelError(
            f"the channel has no {name}",
            found=str(place.channel),
            fix=f"flexops channel build --channel {place.channel}",
        )
    listed = _listed(place)
    there = {_name(path): path for path in packages}
    faults = [
        f"{one} is not listed" if one not in listed else f"{one} is not the file that is listed"
        for one, path in there.items()
        if listed.get(one) != sha256(path)
    ]
    faults += [
        f"{one} is listed, but missing"
        for one in listed
        if distribution(Path(one))[0] == name and one not in there
    ]
    if faults:
        raise ChannelError(
            "the channel and its index do not agree",
            found="".join(f"\n    {fault}" for fault in faults),
            required="an index of just the packages that are there",
            fix=(
                f"put back what was published; flexops channel index --channel {place.channel}"
                " lists what is new, and with --force whatever is there"
            ),
        )
    verify(place, packages)
    return packages


def _name(path: Path) -> str:
    """As the index calls it, of every sub-folder."""
    return f"{path.parent.name}/{path.name}"


def verify(place: Place, packages: Sequence[Path]) -> None:
    """Read every file of the packages; raises ``ChannelError`` naming those that are damaged."""
    if not packages:
        return
    place.work.mkdir(parents=True, exist_ok=True)
    request = {"packages": [str(path) for path in packages], "work": str(place.work)}
    damaged = child("inspect", request, log=place.logs / "inspect.log")["damaged"]
    if damaged:
        what = (
            "a package of the channel is damaged"
            if len(damaged) == 1
            else f"{len(damaged)} packages of the channel are damaged"
        )
        found = "; ".join(f"{path}: {reason}" for path, reason in damaged)
        raise ChannelError(
            what, found=found, fix=f"rm {' '.join(path for path, _ in damaged)}   # and build again"
        )


def _listed(place: Place) -> dict[str, str]:
    """Packages in the present index, and their sha256."""
    digests: dict[str, str] = {}
    for path in place.channel.glob("*/repodata.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            entries = [*data.get("packages", {}).items(), *data.get("packages.conda", {}).items()]
            digests |= {f"{path.parent.name}/{name}": entry["sha256"] for name, entry in entries}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue  # whatever this is, writing the index anew fixes it
    return digests
