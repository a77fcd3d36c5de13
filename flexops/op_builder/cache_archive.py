"""Carries cache entries between machines in one file."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path, PurePosixPath

from ..errors import CacheError
from .cache import BuildCache, Entry, replace_file
from .manifest import verify


def export(cache: BuildCache, file: Path) -> list[Entry]:
    """Write every intact entry of the cache to a gzipped tar archive; the archive appears whole or not at all."""
    entries = [entry for entry in cache.entries() if verify(entry.directory, entry.manifest) is None]
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            for entry in entries:
                archive.add(entry.directory, arcname=f"{entry.manifest.name}/{entry.manifest.key}", filter=_anonymous)
                headers = entry.directory.parent / f"{entry.manifest.base}.headers.json"
                if headers.exists():
                    archive.add(headers, arcname=f"{entry.manifest.name}/{headers.name}", filter=_anonymous)
        os.replace(partial, file)
    except OSError as error:
        raise CacheError("the archive cannot be written", found=f"{file}: {error.strerror}", fix="name a file where there is space") from error
    finally:
        partial.unlink(missing_ok=True)
    return entries


def import_archive(cache: BuildCache, file: Path) -> list[Entry]:
    """Add an archive's entries to the cache; each is checked against its manifest, and entries already there stay.

    Raises:
        CacheError: the file cannot be read, is no such archive, or holds a damaged entry; entries before that one are kept.
    """
    with cache.workspace() as workspace:
        try:
            with tarfile.open(file, "r:*") as archive:
                _extract(archive, workspace)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise CacheError("this is no archive of flexops cache entries", found=f"{file}: {error}", fix="make one: flexops cache export FILE") from error
        adopted = []
        for manifest in sorted(workspace.glob("*/*/manifest.json")):
            adopted.append(cache.adopt(manifest.parent))
            _adopt_headers(manifest.parent, adopted[-1])
    return adopted


def _adopt_headers(source: Path, entry: Entry) -> None:
    name = f"{entry.manifest.base}.headers.json"
    try:
        text = (source.parent / name).read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError):
        return
    replace_file(entry.directory.parent / name, text)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _extract(archive: tarfile.TarFile, directory: Path) -> None:
    """Only plain files, only inside ``directory``; written by hand because tarfile's own filters are not in every Python we support."""
    for member in archive:
        path = PurePosixPath(member.name)
        if member.isdir():
            continue
        if not member.isfile() or path.is_absolute() or ".." in path.parts or len(path.parts) > 3:
            raise tarfile.TarError(f"unexpected member {member.name!r}")
        target = directory.joinpath(*path.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = archive.extractfile(member)
        if content is not None:
            target.write_bytes(content.read())
