"""Carries cache entries between machines in one file."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import stat
import tarfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ... import _json
from ...errors import CacheError
from . import lock
from .cache import BuildCache, Demands, Entry
from .manifest import is_plain

MAX_MEMBERS = 100_000
MAX_RATIO = 200
"""Of unpacked to packed. Libraries reach 10, a manifest 30; what is made to fill a disk reaches
1000."""
MAX_SECONDS = 600.0
_FREE_BYTES = 16 * 2**20  # so small an archive may have any ratio
_BLOCK = 512
_CHUNK = 1 << 20


def export(cache: BuildCache, file: Path, chosen: Sequence[Entry] | None = None) -> list[Entry]:
    """Write every intact entry of the cache, or of those chosen, to a gzipped tar archive; it
    appears whole or not at all. Returns what it holds."""
    given = cache.entries() if chosen is None else chosen
    entries = [
        entry
        for entry in given
        if entry.manifest.sha256
        and Demands(own=not cache.shared, sha256=True).refuse(entry) is None
    ]
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with lock.held(partial):
            _remove_abandoned(file)
            _write(partial, entries)
            os.replace(partial, file)
    except (OSError, ValueError) as error:  # ValueError: a name too long for the format
        found = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise CacheError(
            "the archive cannot be written", found=found, fix="name a file where there is space"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return entries


def _write(file: Path, entries: Sequence[Entry]) -> None:
    with tarfile.open(file, "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for entry in entries:
            place = f"{entry.manifest.name}/{entry.manifest.key}"
            headers = entry.directory.parent / f"{entry.manifest.base}.headers.json"
            for path in (*(entry.directory / name for name in sorted(entry.files)), headers):
                if path.is_file() and not path.is_symlink():
                    name = (
                        f"{entry.manifest.name}/{path.name}"
                        if path == headers
                        else f"{place}/{path.name}"
                    )
                    archive.add(path, arcname=name, recursive=False, filter=_anonymous)


def _remove_abandoned(file: Path) -> None:
    """Remove what killed exports to this file left: a live one holds the lock of its own."""
    partial = re.compile(rf"\.{re.escape(file.name)}\.\d+")
    for path in file.parent.iterdir():
        if partial.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                if not lock.is_held(path):
                    path.unlink()


def import_archive(
    cache: BuildCache,
    file: Path,
    *,
    only: tuple[str, str] | None = None,
    seconds: float = MAX_SECONDS,
) -> list[Entry]:
    """Add an archive's entries to the cache; each is checked against its manifest, and entries
    already there stay.

    Args:
        only: the name and key of what it must hold, and nothing else.
        seconds: that unpacking may take.

    Raises:
        CacheError: the file cannot be read, is no such archive, holds more than the cache may, or a
            damaged entry; entries before that one are kept.
    """
    with cache.workspace() as workspace:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as packed:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise tarfile.TarError("not a plain file")
                _extract(_Bounded(_Timed(packed, seconds), cache.max_bytes), workspace)
        except (OSError, ValueError, tarfile.TarError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise CacheError(
                "this is not an archive of flexops cache entries",
                found=f"{file}: {reason}",
                fix="make one: flexops cache export FILE",
            ) from error
        adopted = []
        found = sorted(workspace.glob("*/*/manifest.json"))
        if only and [(path.parts[-3], path.parts[-2]) for path in found] != [only]:
            raise CacheError(
                "this is not the archive that was asked for",
                found=f"{len(found)} entries",
                required="/".join(only),
            )
        for manifest in found:
            adopted.append(cache.take(manifest.parent, manifest.parent.relative_to(workspace)))
            _adopt_headers(cache, manifest.parent, adopted[-1])
    return adopted


def _adopt_headers(cache: BuildCache, source: Path, entry: Entry) -> None:
    try:
        headers = _json.load(source.parent / f"{entry.manifest.base}.headers.json")
    except (OSError, ValueError):
        return  # the next build writes them
    cache.record_headers(entry.manifest, headers)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


class _Timed:
    """A file that can be read for so many seconds."""

    def __init__(self, file: BinaryIO, seconds: float) -> None:
        self._file, self._seconds, self._until = file, seconds, time.monotonic() + seconds

    def read(self, size: int) -> bytes:
        self.check()  # here, too: a gzip file may have a million empty parts, which are one read
        return self._file.read(size)

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def check(self) -> None:
        if time.monotonic() > self._until:
            raise tarfile.TarError(f"takes more than {self._seconds:.3g} s to unpack")


class _Bounded:
    """The content of a gzip file, read once from start to end, as far as the bounds allow."""

    def __init__(self, packed: _Timed, max_bytes: int) -> None:
        self._packed, self._max_bytes = packed, max_bytes
        self._unpacked = gzip.GzipFile(fileobj=packed, mode="rb")
        self._count = 0

    def read(self, size: int) -> bytes:
        """So many bytes (a mebibyte at most), or fewer at the end."""
        data = self._unpacked.read(size)
        self._count += len(data)
        if self._count > self._max_bytes:
            raise tarfile.TarError(
                f"more than the {self._max_bytes} bytes that the cache may hold"
                " (FLEXOPS_CACHE_MAX_SIZE)"
            )
        if self._count > max(_FREE_BYTES, MAX_RATIO * self._packed.tell()):
            raise tarfile.TarError(
                f"unpacks to more than {MAX_RATIO} times its size, as no libraries do"
            )
        self._packed.check()
        return data


def _extract(archive: _Bounded, directory: Path) -> None:
    """Only plain files with plain names, only inside ``directory``. Read by hand: ``tarfile`` takes
    a name or a list of members of any length into memory, for any count of members, and its filters
    are not in every Python that we support.
    """
    for _ in range(MAX_MEMBERS):
        member = _next(archive)
        if member is None:
            return
        parts = member.name.split("/")
        if not 2 <= len(parts) <= 3 or not all(map(is_plain, parts)):
            raise tarfile.TarError(f"unexpected name {member.name[:200]!r}")
        target = directory.joinpath(*parts)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(target, "xb") as stream:
            left = member.size
            while left > 0:
                data = archive.read(min(left, _CHUNK))
                if not data:
                    raise EOFError("it ends in the middle of a file")
                stream.write(data)
                left -= len(data)
            os.fchmod(stream.fileno(), 0o755 if member.mode & stat.S_IXUSR else 0o644)
        archive.read(-member.size % _BLOCK)
    raise tarfile.TarError(f"more than {MAX_MEMBERS} files")


def _next(archive: _Bounded) -> tarfile.TarInfo | None:
    """The header of the next file; None at the end."""
    while True:
        block = archive.read(_BLOCK)
        if block == bytes(_BLOCK):
            return None
        if len(block) < _BLOCK:
            raise EOFError("it has no end marker")
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        if member.type == tarfile.DIRTYPE and member.size == 0:
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not member.size >= 0:
            raise tarfile.TarError(
                f"{member.name[:200]!r} is not a plain file (type {member.type!r})"
            )
        return member
