"""The key that names an artifact: a digest of everything that decides what a build produces, and of
nothing else.

It has two parts, because a compiler reports which headers a source reaches only by compiling it.
The *base key* covers the commands, the compilers, torch's ABI and the sources. Under it, the last
build left the list of headers it saw; the *key* covers their contents too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .plan import BuildPlan

SCHEMA = "flexops-3"
"""Raised when the meaning of a key or the format of an entry changes; older entries then simply
miss."""

SYSTEM_ROOTS = ("/usr/include/", "/usr/lib/", "/lib/")
"""The distribution's own directories. ``/usr/local`` is not: people install what they are working
on there."""

ABSENT = ""
"""In the place of a digest: a file that is missing, and must be."""

SHARED_HEADERS = "shared-headers"
"""Beside the build directories of a run: what ``shared_headers.py`` has precompiled."""

_LARGE_LIBRARY = 2**20
_FEW = 8

Digests = dict[str, str]
"""Relocatable file name -> sha256 of its content."""


def file_digest(path: str | Path) -> str:
    """sha256 of a file's content, in hex; ``OSError`` for a device or pipe, whose content need
    never end."""
    digest = hashlib.sha256()
    # A start digests a dozen small files: a stream for each would take longer than reading it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        while chunk := os.read(descriptor, 1 << 16):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def file_state(path: str | Path) -> str:
    """The digest of a file, ``ABSENT`` for one that is missing."""
    try:
        return file_digest(path)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT


class FileStamp(NamedTuple):
    """What a file was: its content, and what differs where another has taken its place."""

    digest: str
    file: tuple[int, ...] = ()


def file_stamp(path: str | Path) -> FileStamp:
    """Of device, inode, size and both dates; ``ABSENT`` for a file that cannot be read."""
    try:
        seen = os.stat(path)
        file = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        return FileStamp(file_digest(path), file)
    except OSError:
        return FileStamp(ABSENT)


def header_states(recorded: Digests, places: Sequence[str]) -> Digests:
    """Recorded headers as they are now at their places of today; raises ``OSError`` if one that was
    there cannot be read.

    What was absent is hundreds of names in a few directories: reading those takes a tenth of asking
    for each name.
    """
    folders: dict[str, list[tuple[str, str]]] = {}
    states: Digests = {}
    for (name, was), path in zip(recorded.items(), places, strict=True):
        if was == ABSENT:
            folders.setdefault(os.path.dirname(path), []).append((name, path))
        else:
            states[name] = file_digest(path)
    for folder, absent in folders.items():
        there = _names_in(folder) if len(absent) > _FEW else None
        states.update(
            (
                name,
                (
                    ABSENT
                    if there is not None and os.path.basename(path) not in there
                    else file_state(path)
                ),
            )
            for name, path in absent
        )
    return states


def _names_in(folder: str) -> frozenset[str] | None:
    """None if the directory may not be read; files in it may all the same."""
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError:
        return None


def library_state(path: str | Path) -> str:
    """What distinguishes a library from another of its name: its digest, or for one too large to be
    read at every start its size and its date."""
    seen = os.stat(path)
    return (
        file_digest(path)
        if seen.st_size <= _LARGE_LIBRARY
        else f"{seen.st_size} bytes of {seen.st_mtime_ns}"
    )


def digest_fields(fields: Iterable[tuple[str, str]]) -> str:
    """sha256 over labelled, length-prefixed fields, so that no two different lists of fields have
    the same text."""
    digest = hashlib.sha256(SCHEMA.encode())
    for label, value in fields:
        for part in (label.encode(), value.encode("utf-8", "surrogateescape")):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


def source_digests(plan: BuildPlan) -> Digests:
    """The digests of the plan's sources, recipe and libraries; raises ``FileNotFoundError`` naming
    one that is missing."""
    texts = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in plan.texts}
    libraries = {
        plan.relocatable(str(library)): library_state(library) for library in plan.libraries
    }
    return (
        texts
        | libraries
        | {
            plan.relocatable(str(source)): file_digest(source)
            for source in (*plan.sources, *plan.recipe)
        }
    )


def base_key(plan: BuildPlan, sources: Digests) -> str:
    """The part of the key that is known before anything has been compiled."""
    commands = [
        (f"command {step.output}", plan.relocatable("\0".join(step.command))) for step in plan.steps
    ]
    return digest_fields([("name", plan.name), *plan.identity, *commands, *sorted(sources.items())])


def full_key(base: str, headers: Digests) -> str:
    """The artifact's name: the base key with the contents of every header that the build reached,
    and with what it looked for in vain."""
    absent = "\0".join(sorted(name for name, digest in headers.items() if digest == ABSENT))
    present = sorted(item for item in headers.items() if item[1] != ABSENT)
    return digest_fields([("base", base), *present, *([("absent", absent)] if absent else [])])


def reached_headers(plan: BuildPlan, depfiles: Sequence[Path]) -> list[str]:
    """The headers in the compilers' depfiles that neither belong to the system nor are covered by
    the plan's identity."""
    sources = {str(source) for source in plan.sources}
    beside = {depfile.parent.parent for depfile in depfiles}
    # clang gives whole paths; nothing of its own is there
    shared = [
        f"{path / SHARED_HEADERS}/" for path in (*beside, *(path.resolve() for path in beside))
    ]
    skip = (*SYSTEM_ROOTS, *(root.rstrip("/") + "/" for root in plan.trusted_roots), *shared)
    found = {
        name
        for depfile in depfiles
        for name in parse_depfile(depfile.read_text(encoding="utf-8", errors="surrogateescape"))
    }
    return sorted(
        name for name in found - sources if name.startswith("/") and not name.startswith(skip)
    )


def parse_depfile(text: str) -> list[str]:
    """The prerequisites in a make rule as ``-MD`` writes it, with escaped blanks restored."""
    _, _, tail = text.replace("\\\n", " ").partition(": ")
    # other white space is part of a name, and not escaped
    names = tail.replace("\\ ", "\0").replace("\n", " ").split(" ")
    return [
        name.replace("\0", " ").replace("$$", "$").replace("\\#", "#") for name in names if name
    ]
