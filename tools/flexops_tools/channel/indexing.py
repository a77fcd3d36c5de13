"""The index of a channel: what conda reads instead of the packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from flexops.errors import ChannelError

from .place import Place
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
    if not packages and not place.address:
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
    """Read the index as clients will, and every package called ``name``, whole; returns those
    packages, relative to the channel.

    Raises:
        ChannelError: the channel cannot be read, has no such package, or its index and its packages
            do not agree: which, and how.
    """
    # a build that failed leaves an empty folder
    if not place.address and not (place.channel / "noarch").is_dir():
        command = "index" if place.packages() else "build"
        raise ChannelError(
            "there is no channel",
            found=f"{place.channel}, without an index",
            fix=f"flexops channel {command} --channel {place.channel}",
        )
    place.work.mkdir(parents=True, exist_ok=True)
    request = {
        "folder": str(place.channel.absolute()),
        "address": place.address,
        "name": name,
        "work": str(place.work),
    }
    # read from a server on this machine
    local = {} if place.address else {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    try:
        audited = child("audit", request, log=place.logs / "audit.log", environment=local)
    except ChannelError as error:
        raise ChannelError(
            f"the index of {place.url} cannot be read",
            found=error.found,
            fix=error.fix or "see the log",
            log=error.log,
        ) from error
    unlisted = sorted({_name(path) for path in place.packages(name)} - set(audited["listed"]))
    faults = [*audited["faults"], *(f"{path} is not listed under {name}" for path in unlisted)]
    if faults:
        found = "".join(f"\n    {fault}" for fault in faults)
        raise ChannelError(
            "the channel and its index do not agree",
            found=found,
            required="an index of just the packages that are there",
            fix=_mend(place),
        )
    if not audited["listed"]:
        raise ChannelError(
            f"the channel has no {name}", found=place.url, fix="flexops channel build"
        )
    return [Path(path) for path in audited["listed"]]


def _mend(place: Place) -> str:
    if place.address:
        return "copy the channel to the server again, packages first (docs/conda.md, Publishing)"
    where = f"--channel {place.channel}"
    return (
        f"put back what was published; flexops channel index {where} lists what is new, and with"
        " --force whatever is there"
    )


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
