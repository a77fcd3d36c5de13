"""One artifact: a directory with a manifest, the file that it speaks of, and what they were made
by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ... import _json, trust
from .manifest import FILE_NAME, Manifest, Rejection, verify

UNSIGNED = ("build.ninja", "build.log")
"""What an entry may have besides its library, manifest and signature, which covers neither."""


class Entry(NamedTuple):
    """One artifact in the cache, or in an ahead-of-time directory of the same form."""

    directory: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.directory / self.manifest.library

    @property
    def signed_files(self) -> tuple[str, ...]:
        """The names of the manifest, its signature and the library."""
        from . import signing

        return (FILE_NAME, FILE_NAME + signing.SUFFIX, self.manifest.library)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that an entry's files may have. No others are installed or carried."""
        return (*self.signed_files, *UNSIGNED)

    @property
    def last_used(self) -> float:
        """Seconds since the epoch, as the file system records it (to the day, where it is mounted
        with relatime); 0 if the entry is gone.

        Of the library: manifests are also read by those who only look around.
        """
        try:
            status = self.library.stat()
        except OSError:  # another process removed it
            return 0.0
        return max(status.st_atime, status.st_mtime)

    @property
    def made(self) -> float:
        """Seconds since the epoch; 0 if the entry is gone."""
        try:
            return (self.directory / FILE_NAME).stat().st_mtime
        except OSError:
            return 0.0

    @property
    def size(self) -> int:
        """Bytes of all its files; 0 if the entry is gone."""
        return size_of(self.directory)


def size_of(directory: Path) -> int:
    """Bytes of the files in an entry's directory; 0 if it is gone."""
    try:
        with os.scandir(directory) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return 0


class Demands(NamedTuple):
    """What an entry must satisfy before its library is opened.

    Attributes:
        own: only this user and root could have written it, or could now.
        sha256: its library is verified by SHA-256.
        trusted_keys: an ``allowed_signers`` file: its manifest is signed with one of those keys.
    """

    own: bool = False
    sha256: bool = False
    trusted_keys: Path | None = None

    def refuse(self, entry: Entry) -> Rejection | None:
        """None if the entry may be opened."""
        if self.trusted_keys is not None:
            from . import signing  # starts processes, which no other warm start does

            path = entry.directory / FILE_NAME
            try:
                content = _json.read(path)
                same = Manifest.from_json(content.decode()) == entry.manifest
            except (OSError, ValueError) as error:
                return Rejection(f"{path} cannot be read: {error}", "flexops cache clear")
            if refusal := signing.check(path, content, self.trusted_keys):
                return refusal
            if not same:
                return Rejection(f"{path} has changed since it was read", "run it again")
        return verify(
            entry.directory,
            entry.manifest,
            strict=self.sha256 or self.trusted_keys is not None,
            own=self.own,
        )


def read_manifest(directory: Path, *, own: bool = False) -> Entry | None:
    """The entry in a directory by its manifest alone; None if there is no readable one, or
    (``own``) another user could change it."""
    try:
        if own and any(trust.problem(path.lstat()) for path in (directory.parent, directory)):
            return None
        text = _json.read(directory / FILE_NAME, accept=trust.problem if own else None).decode()
        return Entry(directory, Manifest.from_json(text))
    except (OSError, ValueError):
        return None


def read_entry(
    directory: Path, demands: Demands | None = None
) -> tuple[Entry | None, Rejection | None]:
    """The entry in a directory, its library verified. Both None: there is nothing there; only a
    rejection: it is damaged."""
    if not directory.is_dir():
        return None, None
    demands = demands or Demands()
    entry = read_manifest(directory, own=demands.own)
    if entry is None:
        return None, Rejection(
            f"{directory / FILE_NAME} is missing, damaged or another user's", "flexops cache clear"
        )
    refusal = demands.refuse(entry)
    return (None, refusal) if refusal else (entry, None)


def cannot_run(library: Path) -> Rejection | None:
    """Why no library can be opened where this one is; None if that is not the reason."""
    try:
        noexec = bool(os.statvfs(library).f_flag & os.ST_NOEXEC)
    except OSError:
        return None
    if not noexec:
        return None
    fix = "export FLEXOPS_CACHE_DIR=<a directory on another file system>"
    return Rejection(
        f"{library} is on a file system mounted noexec: nothing there can be loaded", fix
    )
