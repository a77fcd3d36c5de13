"""The build cache: finished artifacts under their keys.

    <root>/<name>/<key>/                  an entry, which never changes: <library>, manifest.json,
                                          build.ninja, build.log
    <root>/<name>/<base>.headers.json     the headers of the last build under this base key
    <root>/.tmp/<random>/                 a build in progress; renamed into place when complete (in
                                          TMPDIR if other users could rename it here; then copied)
    <root>/.quarantine/                   damaged entries, and those of other users
    <root>/.locks/                        flock files: they only avoid duplicate work

There is no "does it exist": look-ups return the entry or None, because check-then-read is a race. A
look-up writes nothing; the least recently used entry is found by the file times that the kernel
keeps. docs/security.md documents whose entries are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _json, trust
from ...errors import CacheError
from ..plan import cache_key
from ..plan.cache_key import Digests
from . import lock
from .entry import Demands as Demands
from .entry import Entry as Entry
from .entry import read_entry as read_entry
from .entry import read_manifest as read_manifest
from .entry import size_of
from .manifest import FILE_NAME, Manifest, Rejection

if TYPE_CHECKING:
    from ..plan.plan import BuildPlan
    from .remote import Remote

OWNER_LOCK = "owner.lock"
_STARTING_SECONDS = 60.0
_ABANDONED_SECONDS = 86400.0
_CHUNK = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


_rejected: set[tuple[str, str]] = set()
"""Name and key of what this process has rejected: the remote cache may have it still."""


class CacheInfo(NamedTuple):
    """The state of a cache: its place, what it holds and what is wrong with it."""

    root: Path
    entries: int
    size: int
    max_size: int
    quarantined: int
    problem: str


class BuildCache:
    """A directory of artifacts. Constructing one touches nothing.

    Args:
        shared: other users can write to it, and are trusted; otherwise entries that another user
            could have written are rejected.
        signing_key: what is published is signed with it.
        trusted_keys: only what is signed with one of the keys in this ``allowed_signers`` file is
            opened.
        copies: where others may write and ``trusted_keys`` vouch, verified copies are kept here and
            opened instead of what others could still swap.
        remote: what is missing here is looked for there before it is compiled; look-ups do not
            touch it.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = 5 * 2**30,
        shared: bool = False,
        signing_key: Path | None = None,
        trusted_keys: Path | None = None,
        copies: Path | None = None,
        remote: Remote | None = None,
    ) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.shared = shared
        self.signing_key = signing_key
        self.trusted_keys = trusted_keys
        self.remote = remote
        self._copies = (
            BuildCache(copies, max_bytes=max_bytes, trusted_keys=trusted_keys)
            if copies and shared and trusted_keys
            else None
        )
        self._whole = Demands(own=not shared, sha256=shared)

    # ---- looking up ----

    def lookup(self, plan: BuildPlan) -> Entry | None:
        """The entry of this very plan and the headers it reaches, verified; None if there is none,
        or no safe cache. Writes nothing on a hit."""
        if self.problem():
            return None
        base = cache_key.base_key(plan, cache_key.source_digests(plan))
        try:
            recorded = _json.load(
                self.root / plan.name / f"{base}.headers.json",
                accept=None if self.shared else trust.problem,
            )
        except (OSError, ValueError):
            return None
        key = _key_today(plan, base, recorded)
        return _as_planned(plan, self.read(plan.name, key)) if key else None

    def fetch(self, plan: BuildPlan) -> Entry | None:
        """The entry of this very plan from the remote cache, which is then here; None if there is
        none."""
        if self.remote is None or self.problem():
            return None
        base = cache_key.base_key(plan, cache_key.source_digests(plan))
        key = _key_today(plan, base, self.remote.headers(self, plan.name, base))
        return _as_planned(plan, self.fetch_key(plan.name, key)) if key else None

    def fetch_key(self, name: str, key: str) -> Entry | None:
        """The entry under a key from the remote cache, which is then here; None if there is
        none."""
        if self.remote is None or (name, key) in _rejected:
            return None
        return self.read(name, key) if self.remote.fetch(self, name, key) else None

    def read(self, name: str, key: str) -> Entry | None:
        """The entry under a key, verified; a damaged one is put aside and counts as absent."""
        directory = self.root / name / key
        entry, refusal = read_entry(directory, self._whole)
        if refusal or (entry and not _is_filed_right(entry)):
            self._quarantine(directory)
            return None
        return self.verified(entry)[0] if entry and self.trusted_keys else entry

    def candidates(self, name: str) -> Iterator[Entry]:
        """Every readable entry called ``name``, the most recently made first; ``verified`` says
        whether one may be opened."""
        yield from sorted(self._entries(self.root / name), key=lambda entry: -entry.made)

    def verified(self, entry: Entry) -> tuple[Entry | None, Rejection | None]:
        """What to open for one of ``candidates``, or why not: that entry, or a copy of it that
        no other user can reach."""
        if self._copies is None:
            refusal = self._whole._replace(trusted_keys=self.trusted_keys).refuse(entry)
            return (None, refusal) if refusal else (entry, None)
        known = entry.manifest
        if problem := self._copies.problem():
            return None, Rejection(
                f"verified copies cannot be kept: {problem}",
                "export XDG_CACHE_HOME=<a directory of your own>",
            )
        if copy := self._copies.read(known.name, known.key):
            return copy, None
        try:
            copy = self._copies.adopt(entry.directory)
            self._copies.prune(keep=(copy.directory,))
        except CacheError as error:
            return None, Rejection(error.reason, error.fix)
        return (
            (copy, None)
            if _is_filed_right(copy)
            else (None, Rejection(f"{entry.directory} changed while it was read", "run it again"))
        )

    def problem(self) -> str:
        """Why this directory must not be read from: another user could have put code there; "" if
        it is fine or absent."""
        try:
            if not self.shared:
                return trust.path_problem(str(self.root))
            self.root.stat()
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"{self.root} cannot be looked at: {error.strerror}"
        return ""

    def reject(self, entry: Entry) -> None:
        """Put aside an entry that is whole and yet useless. This process fetches it no more."""
        name, key = entry.manifest.name, entry.manifest.key
        _rejected.add((name, key))
        for cache in (self, self._copies):
            if cache and (cache.root / name / key).is_dir():
                cache._quarantine(cache.root / name / key)

    # ---- adding ----

    def require_writable(self) -> None:
        """Make the root if need be; raises ``CacheError`` where nothing can be stored, or nothing
        that is had in this way would be opened."""
        if self.remote is None:
            self.require_signer()
        self._prepare()

    def require_signer(self) -> None:
        """Raises ``CacheError`` where nothing that is built here would be opened."""
        if self.trusted_keys and not self.signing_key:
            raise CacheError(
                "what would be built here could not be opened: it would not be signed",
                found=(
                    f"FLEXOPS_CACHE_TRUSTED_KEYS={self.trusted_keys}, and nothing in {self.root}"
                    " that fits and is signed with one of these keys"
                ),
                required="a build signed by such a key, or FLEXOPS_CACHE_SIGNING_KEY",
                fix="unset FLEXOPS_CACHE_TRUSTED_KEYS   # to build for yourself",
            )

    def _prepare(self) -> None:
        fix = "export FLEXOPS_CACHE_DIR=<a directory of your own>"
        if problem := self.problem():
            raise CacheError(
                "the build cache is not safe to use",
                found=problem,
                required="your own directory, or FLEXOPS_CACHE_SHARED=1",
                fix=fix,
            )
        try:
            self._make(self.root)
            for directory in (self.root / ".tmp", self.root / ".locks"):
                if not self.shared and _is_foreign(directory):  # made while others could write here
                    directory.unlink() if directory.is_symlink() else self._quarantine(directory)
                self._make(directory, 0o700)  # or anybody could take a lock, for ever
                # made by an older flexops
                if not self.shared and (mode := stat.S_IMODE(directory.stat().st_mode)) & 0o077:
                    os.chmod(directory, mode & 0o700)
            with tempfile.TemporaryFile(dir=self.root / ".tmp"):
                pass
        except OSError as error:
            raise CacheError(
                "the build cache cannot be written",
                found=f"{self.root}: {error.strerror}",
                required="a writable directory",
                fix=fix,
            ) from error

    def _make(self, directory: Path, mode: int = 0o755) -> None:
        """Make a directory that no other user can write to, whatever the umask; in a shared cache,
        every user who can write to the root can."""
        there = directory.is_dir()
        trust.make_directory(str(directory), mode)
        if self.shared and directory != self.root and not there:
            os.chmod(directory, stat.S_IMODE(self.root.stat().st_mode))

    def make_name(self, name: str) -> Path:
        """The directory that holds all that is called so; one that another user could write to is
        put aside with what is in it."""
        directory = self.root / name
        with contextlib.suppress(OSError):
            if not self.shared and trust.problem(directory.lstat()):
                self._quarantine(directory)
        self._make(directory)
        return directory

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory to build in that no other user can reach or rename, removed afterwards.

        It is on the cache's file system, or in TMPDIR where other users could rename what is in
        the cache. What dead processes left is swept first.

        Raises:
            CacheError: there is no such place, or the cache cannot be written.
        """
        self._prepare()
        self._sweep()
        if trust.path_problem(str(self.root / ".tmp"), passage=True):
            with _own_place().workspace() as path:
                yield path
            return
        path, owner = Path(tempfile.mkdtemp(dir=self.root / ".tmp")), os.getpid()
        try:
            with lock.held(path / OWNER_LOCK):
                yield path
        finally:
            if os.getpid() == owner:  # not in a child forked meanwhile
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def compile_lock(self, name: str) -> Iterator[None]:
        """Hold the advisory lock of one build."""
        with lock.held(self.root / ".locks" / f"{name}.lock"):
            yield

    def publish(self, built: Path, manifest: Manifest, headers: Digests) -> Entry:
        """As ``store``, for a build whose headers the compiler reported: the next look-up knows
        them."""
        entry = self.store(built, manifest)
        self.record_headers(manifest, headers)
        return entry

    def store(self, built: Path, manifest: Manifest) -> Entry:
        """Move a finished directory under its key. If another process was first, its entry is the
        result.

        Raises:
            CacheError: it cannot be stored, or not be signed.
        """
        try:
            if self.signing_key and (problem := trust.path_problem(str(built.parent))):
                what = "what was built is not signed: another user could have changed it"
                raise CacheError(what, found=problem)
            manifest = manifest._replace(sha256=cache_key.file_digest(built / manifest.library))
            (built / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
            if self.signing_key:
                from . import signing

                signing.sign(built / FILE_NAME, self.signing_key)
            for name in (FILE_NAME, manifest.library):
                with open(built / name, "rb") as stream:
                    os.fsync(stream.fileno())
        except OSError as error:
            raise _not_stored(built, error) from error
        return self._place(built, manifest)

    def record_headers(self, manifest: Manifest, headers: Digests) -> None:
        """Write down which headers a build reached; look-ups start from them."""
        path = self.root / manifest.name / f"{manifest.base}.headers.json"
        try:
            replace_file(path, json.dumps(headers, indent=1, sort_keys=True))
        except OSError as error:
            raise _not_stored(path, error) from error

    def _place(self, built: Path, manifest: Manifest) -> Entry:
        """Move a whole directory to its key, unless a whole entry is there already."""
        final = self.root / manifest.name / manifest.key
        refused: OSError | Rejection | None = None
        placed = False
        # again if what was in the way proves damaged, or `cache clear` removes the parent at this
        # moment
        for attempt in range(3):
            try:
                self.make_name(manifest.name)
                self._move(built, final)
                placed = True
            except OSError as error:
                refused = error
            if entry := self.read(manifest.name, manifest.key):
                return entry
            found, _ = read_entry(final, self._whole)
            # whole, but not signed by a trusted key
            if found and (refusal := self.verified(found)[1]):
                refused = refusal
                if not placed and attempt < 2:
                    self._quarantine(final)
        raise _not_stored(final, refused)

    def _move(self, built: Path, final: Path) -> None:
        """Rename a directory to its place; of one that was built elsewhere, a copy."""
        if built.is_relative_to(self.root):
            for path in (built, *built.iterdir()):
                status = path.lstat()
                if not stat.S_ISLNK(status.st_mode):
                    os.chmod(path, self._mode(status))
            os.rename(built, final)
            return
        # Copied within the cache, for the group that its directories may hand down.
        copy = Path(tempfile.mkdtemp(dir=self.root / ".tmp"))
        try:
            self._copy_into(built, copy)
            os.rename(copy, final)
        except OSError:
            shutil.rmtree(copy, ignore_errors=True)
            raise

    def _copy_into(self, built: Path, copy: Path) -> None:
        """Copy plain files by the directory's descriptor: others can change what its name is of."""
        directory = os.open(copy, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(directory).st_uid != os.geteuid():
                raise OSError(errno.EPERM, "another user's directory is in its place", str(copy))
            for path in sorted(built.iterdir()):
                if path.is_file() and not path.is_symlink():
                    mode = self._mode(path.lstat())
                    _copy_file(path, path.name, self.max_bytes, directory=directory, mode=mode)
            os.fchmod(directory, self._mode(built.lstat()))
        finally:
            os.close(directory)

    def _mode(self, status: os.stat_result) -> int:
        """The mode of what is published: others may not write to it, whatever the umask.

        In a shared cache they get the root's right to read.
        """
        mode = stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE
        if not self.shared:
            return mode
        root = stat.S_IMODE(self.root.stat().st_mode)
        if stat.S_ISDIR(status.st_mode):
            return root
        return mode | (root & (0o555 if mode & stat.S_IXUSR else 0o444))

    def adopt(self, source: Path) -> Entry:
        """Copy the files of a whole entry from elsewhere into the cache. The copy is verified.

        Raises:
            CacheError: it is not whole, not signed by one of the trusted keys, or cannot be stored.
        """
        with self.workspace() as workspace:
            copy = workspace / "entry"
            try:
                copy.mkdir(mode=0o700)
                # The manifest first: it names the library.
                for path in sorted(source.iterdir(), key=lambda path: path.name != FILE_NAME):
                    if path.name == FILE_NAME or path.name in self._kept(copy):
                        _copy_file(path, copy / path.name, self.max_bytes)
            except OSError as error:
                raise _not_stored(copy, error) from error
            return self.take(copy, source)

    def take(self, directory: Path, source: Path) -> Entry:
        """Move an entry from a ``workspace`` into the cache, verified, and without other files.

        Args:
            source: what errors name.

        Raises:
            CacheError: as ``adopt``.
        """
        entry, refusal = read_entry(directory, Demands(sha256=True, trusted_keys=self.trusted_keys))
        if entry is None:
            reason = refusal.reason.replace(str(directory), str(source)) if refusal else str(source)
            fix = (refusal.fix if refusal else "") or "build it again"
            raise CacheError("this build is not intact", found=reason, fix=fix)
        kept = self._kept(directory)
        for path in directory.iterdir():
            if path.name not in kept:
                path.unlink()
        return self._place(directory, entry.manifest)

    def _kept(self, directory: Path) -> tuple[str, ...]:
        """The files that are kept of an entry from elsewhere; with trusted keys, those signed."""
        entry = read_manifest(directory)
        if entry is None:
            return ()
        return entry.signed_files if self.trusted_keys else entry.files

    # ---- keeping house ----

    def entries(self, prefixes: tuple[str, ...] = ("",)) -> list[Entry]:
        """Every readable entry (whose name begins like one of ``prefixes``), the least recently
        used first. One that was used in the future, by another clock, counts as never used."""
        latest = time.time() + _ABANDONED_SECONDS
        names = [
            path
            for path in _subdirectories(self.root)
            if not path.name.startswith(".") and path.name.startswith(prefixes)
        ]
        return sorted(
            (entry for name in names for entry in self._entries(name)),
            key=lambda entry: used if (used := entry.last_used) < latest else 0.0,
        )

    def _entries(self, directory: Path) -> Iterator[Entry]:
        for path in _subdirectories(directory):
            if (entry := read_manifest(path, own=not self.shared)) and _is_filed_right(entry):
                yield entry

    def info(self) -> CacheInfo:
        entries = self.entries()
        return CacheInfo(
            root=self.root,
            entries=len(entries),
            size=sum(entry.size for entry in entries),
            max_size=self.max_bytes,
            quarantined=len(_subdirectories(self.root / ".quarantine")),
            problem=self.problem(),
        )

    def prune(self, *, keep: tuple[Path, ...] = (), max_bytes: int | None = None) -> list[Entry]:
        """Remove the least recently used entries until the cache is within its bound; returns what
        was removed."""
        limit = self.max_bytes if max_bytes is None else max_bytes
        if self._is_within(limit):
            return []
        entries, removed = self.entries(), []
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= limit:
                break
            if entry.directory in keep:
                continue
            total -= entry.size
            self.remove(entry.directory)
            removed.append(entry)
        return removed

    def _is_within(self, limit: int) -> bool:
        """Whether all that lies where entries are takes no more bytes; reads no manifest, as after
        each build of a cache with thousands of entries."""
        for name in _subdirectories(self.root):
            if not name.name.startswith("."):
                limit -= sum(size_of(path) for path in _subdirectories(name))
                if limit < 0:
                    return False
        return True

    def clear(self, names: tuple[str, ...] = ()) -> list[Entry]:
        """Remove every entry, or those called ``names``, and with "every" what was quarantined;
        returns what was removed."""
        removed = [entry for entry in self.entries() if not names or entry.manifest.name in names]
        for directory in (
            [entry.directory for entry in removed] if names else _subdirectories(self.root)
        ):
            self.remove(directory) if directory.name not in (".locks", ".tmp") else None
        self._sweep()
        return removed

    def remove(self, directory: Path) -> None:
        """Rename first: a reader either has the whole entry or none."""
        try:
            self._make(self.root / ".tmp", 0o700)
            aside = Path(tempfile.mkdtemp(dir=self.root / ".tmp"))
            os.rename(directory, aside / "removed")
            shutil.rmtree(aside, ignore_errors=True)
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            raise CacheError(
                "a cache entry cannot be removed",
                found=f"{directory}: {error.strerror}",
                fix=f"check the owner of {self.root}, and that it is mounted writable",
            ) from error

    def _quarantine(self, directory: Path) -> None:
        """Put a directory aside; with all of its name, if another user can change those entries."""
        # a read-only cache keeps its damage, and each look-up still counts as a miss
        with contextlib.suppress(OSError):
            if (
                directory.parent != self.root
                and not self.shared
                and trust.problem(directory.parent.lstat())
            ):
                directory = directory.parent
            self._make(self.root / ".quarantine")
            aside = tempfile.mkdtemp(
                prefix=f"{directory.parent.name}-", dir=self.root / ".quarantine"
            )
            try:
                os.rename(directory, aside)
            except PermissionError:  # only its owner may move it to another directory
                os.rmdir(aside)
                os.rename(directory, tempfile.mkdtemp(prefix=".refused-", dir=directory.parent))

    def _sweep(self) -> None:
        """Remove the workspaces of dead processes: a live one holds the lock in its own."""
        for path in _subdirectories(self.root / ".tmp"):
            with contextlib.suppress(OSError):
                # one of the future is of another clock, and as dead
                age = abs(time.time() - path.stat().st_mtime)
                owner = path / OWNER_LOCK
                if age > _ABANDONED_SECONDS or (
                    age > _STARTING_SECONDS and owner.exists() and not lock.is_held(owner)
                ):
                    shutil.rmtree(path, ignore_errors=True)


def _own_place() -> BuildCache:
    """A directory in TMPDIR that only this user can change, for caches that others can change."""
    temporary = tempfile.gettempdir()
    place = BuildCache(Path(temporary) / f"flexops-builds-{os.geteuid()}")
    if place.problem():  # another user may have made one of that name
        fix = "export TMPDIR=<a directory of your own>"
        if problem := trust.path_problem(temporary, passage=True):
            what = "there is no place to build in that only you can change"
            raise CacheError(what, found=problem, required="such a TMPDIR", fix=fix)
        what = "the place to build in is not yours"
        required = "a directory that only you can change"
        raise CacheError(what, found=place.problem(), required=required, fix=fix)
    return place


def _is_foreign(directory: Path) -> bool:
    """Whether a directory is another user's, or a link."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISLNK(status.st_mode) or status.st_uid not in (os.geteuid(), 0)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside it, which takes its place when the block has written it: whole or not at
    all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    with _removed_on_error(temporary):
        yield Path(temporary)
        os.replace(temporary, path)


@contextlib.contextmanager
def _removed_on_error(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with _removed_on_error(temporary):
        # Not by its name: in a shared cache another user may have put a link there.
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(handle, 0o644)
        os.replace(temporary, path)


def places_today(plan: BuildPlan, recorded: Iterable[str]) -> list[str]:
    """Recorded header names as paths: the anchor's place today instead of the place at build
    time."""
    places = {name: path for path, name in plan.anchors}
    paths = []
    for name in recorded:
        anchor, separator, rest = name.partition(">")
        paths.append(places[anchor + ">"] + rest if separator and anchor + ">" in places else name)
    return paths


def _key_today(plan: BuildPlan, base: str, recorded: Any) -> str:
    """The key, with the headers as they are now that the last build under this base key reached, or
    looked for in vain; "" if they are unknown or gone."""
    try:
        return (
            cache_key.full_key(
                base, cache_key.header_states(recorded, places_today(plan, recorded))
            )
            if isinstance(recorded, dict)
            else ""
        )
    except (OSError, ValueError):
        return ""


def _as_planned(plan: BuildPlan, entry: Entry | None) -> Entry | None:
    """The entry, if its library has the plan's name for it: by that name it is installed."""
    return entry if entry and entry.manifest.library == plan.library else None


def _is_filed_right(entry: Entry) -> bool:
    """Whether an entry is where its manifest says: another's whole entry in its place is not what
    was asked for."""
    return (entry.manifest.name, entry.manifest.key) == (
        entry.directory.parent.name,
        entry.directory.name,
    )


def _subdirectories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as scan:
            return sorted(Path(item.path) for item in scan if item.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _not_stored(where: Path, why: OSError | Rejection | None) -> CacheError:
    fix = "free some space, or set FLEXOPS_CACHE_DIR"
    if isinstance(why, Rejection):
        return CacheError(
            "the finished build could not be stored", found=why.reason, fix=why.fix or fix
        )
    return CacheError(
        "the finished build could not be stored",
        found=f"{where}: {why.strerror or why}" if why else str(where),
        fix=fix,
    )


def _copy_file(
    source: Path, target: Path | str, limit: int, *, directory: int | None = None, mode: int = 0
) -> None:
    """Copy a plain file of at most so many bytes; a link or device raises ``OSError``.

    Args:
        directory: descriptor of the directory that ``target`` is in.
        mode: of the copy; 0: as what it was is copied, an executable or not.
    """
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    plain = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with (
        open(os.open(source, plain), "rb") as reader,
        open(os.open(target, new, 0o600, dir_fd=directory), "wb") as writer,
    ):
        status = os.fstat(reader.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise OSError(
                errno.EINVAL, "not a plain file, or larger than the cache may be", str(source)
            )
        for _ in range(0, status.st_size, _CHUNK):
            writer.write(reader.read(_CHUNK))
        writer.flush()
        if directory is not None:
            os.fsync(writer.fileno())
        os.fchmod(writer.fileno(), mode or (0o755 if status.st_mode & stat.S_IXUSR else 0o644))
