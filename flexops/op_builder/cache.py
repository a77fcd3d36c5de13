"""The build cache: finished artifacts under their keys.

    <root>/<name>/<key>/{<library>, manifest.json, build.ninja, build.log}     an entry; never changed once it is there
    <root>/<name>/<base>.headers.json                                         which headers the last build under this base key reached
    <root>/.tmp/<random>/                                                     a build in progress; renamed into place when it is whole
    <root>/.quarantine/                                                       entries found damaged
    <root>/.locks/                                                            flock files: they only save duplicate work

There is no "does it exist": look-ups return the entry or None, because check-then-read is a race. A look-up writes nothing; what was used least
recently is told from the file times that the kernel keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CacheError
from . import cache_key, lock
from .cache_key import Digests
from .manifest import FILE_NAME, Manifest, Refusal, verify

if TYPE_CHECKING:
    from .plan import BuildPlan

OWNER_LOCK = "owner.lock"
_STARTING_SECONDS = 60.0
_ABANDONED_SECONDS = 86400.0


@dataclass(frozen=True)
class Entry:
    """One artifact in the cache, or in an ahead-of-time directory of the same form."""

    directory: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.directory / self.manifest.library

    @property
    def last_used(self) -> float:
        """Seconds since the epoch, as the file system tells it (to the day, where it is mounted with relatime); 0 if the entry is gone.

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
        try:
            with os.scandir(self.directory) as files:
                return sum(file.stat(follow_symlinks=False).st_size for file in files)
        except OSError:
            return 0


@dataclass(frozen=True)
class CacheInfo:
    """The state of a cache: its place, what it holds and what is wrong with it."""

    root: Path
    entries: int
    size: int
    max_size: int
    quarantined: int
    problem: str


class BuildCache:
    """A directory of artifacts. Constructing one touches nothing."""

    def __init__(self, root: Path, *, max_bytes: int = 5 * 2**30, shared: bool = False) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.shared = shared

    # ---- looking up ---------------------------------------------------------------------------------------------------------------------

    def lookup(self, plan: BuildPlan) -> Entry | None:
        """The entry of this very plan and the headers it reaches, verified; None if there is none, or no safe cache. Writes nothing on a hit."""
        if self.problem():
            return None
        base = cache_key.base_key(plan, cache_key.source_digests(plan))
        headers = self._current_headers(plan, base)
        return None if headers is None else self.read(plan.name, cache_key.full_key(base, headers))

    def read(self, name: str, key: str) -> Entry | None:
        """The entry under a key, verified; a damaged one is put aside and counts as absent."""
        directory = self.root / name / key
        entry, refusal = read_entry(directory)
        swapped = entry is not None and (entry.manifest.name, entry.manifest.key) != (name, key)
        if refusal or swapped:
            self._quarantine(directory)
            return None
        return entry

    def candidates(self, name: str) -> Iterator[Entry]:
        """Every readable entry called ``name``, the most recently made first; their libraries are not verified."""
        found = [entry for directory in _subdirectories(self.root / name) if (entry := read_manifest(directory))]
        yield from sorted(found, key=lambda entry: -entry.made)

    def problem(self) -> str:
        """Why this directory must not be read from: someone else could have put code there; "" if it is fine or absent."""
        try:
            status = self.root.stat()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.root} cannot be looked at: {error.strerror}"
        if self.shared:
            return ""
        if status.st_uid not in (os.geteuid(), 0):
            return f"{self.root} belongs to user id {status.st_uid}, not to you ({os.geteuid()}) or root"
        if status.st_mode & stat.S_IWOTH:  # the sticky bit would not help: it lets everybody add entries
            return f"{self.root} can be written by everybody (mode {stat.filemode(status.st_mode)})"
        return ""

    def _current_headers(self, plan: BuildPlan, base: str) -> Digests | None:
        """Digests, as they are now, of the headers that the last build under this base key reached; None if unknown or gone."""
        try:
            recorded: dict[str, str] = json.loads((self.root / plan.name / f"{base}.headers.json").read_text(encoding="utf-8"))
            return {plan.relocatable(path): cache_key.file_digest(path) for path in places_today(plan, recorded)}
        except (OSError, ValueError, TypeError):
            return None

    # ---- adding -------------------------------------------------------------------------------------------------------------------------

    def require_writable(self) -> None:
        """Make the root if need be; raises ``CacheError`` where nothing can be stored."""
        fix = "export FLEXOPS_CACHE_DIR=<a directory of your own>"
        if problem := self.problem():
            raise CacheError("the build cache is not safe to use", found=problem, required="your own directory, or FLEXOPS_CACHE_SHARED=1", fix=fix)
        try:
            for directory in (self.root, self.root / ".tmp", self.root / ".locks"):
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root / ".tmp"):
                pass
        except OSError as error:
            raise CacheError("the build cache cannot be written", found=f"{self.root}: {error.strerror}", required="a writable directory", fix=fix) from error

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A private directory on the cache's file system to build in, removed afterwards. What dead processes left is swept first."""
        self.require_writable()
        self._sweep()
        path = Path(tempfile.mkdtemp(dir=self.root / ".tmp"))
        try:
            with lock.held(path / OWNER_LOCK):
                yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the advisory lock of one build."""
        with lock.held(self.root / ".locks" / f"{name}.lock"):
            yield

    def publish(self, built: Path, manifest: Manifest, headers: Digests) -> Entry:
        """Move a finished directory under its key. If another process was first, its entry is the result."""
        try:
            _write_synced(built / FILE_NAME, manifest.to_json())
            _sync(built / manifest.library)
        except OSError as error:
            raise _not_stored(built, error) from error
        entry = self._place(built, manifest)
        try:
            replace_file(entry.directory.parent / f"{manifest.base}.headers.json", json.dumps(headers, indent=1, sort_keys=True))
        except OSError as error:
            raise _not_stored(entry.directory, error) from error
        return entry

    def _place(self, built: Path, manifest: Manifest) -> Entry:
        """Rename a whole directory to its key, unless a whole entry is there already."""
        final = self.root / manifest.name / manifest.key
        refused: OSError | None = None
        for _ in range(3):  # again if what was in the way proves damaged, or `cache clear` removes the parent at this moment
            try:
                final.parent.mkdir(parents=True, exist_ok=True)
                os.rename(built, final)
            except OSError as error:
                refused = error
            if entry := self.read(manifest.name, manifest.key):
                return entry
        raise _not_stored(final, refused)

    def adopt(self, source: Path) -> Entry:
        """Copy a whole entry from elsewhere (an import, an ahead-of-time directory) into the cache."""
        entry, refusal = read_entry(source)
        if entry is None:
            raise CacheError("this is no intact build", found=refusal.reason if refusal else str(source), fix="build it again")
        with self.workspace() as workspace:
            copy = workspace / "entry"
            try:
                shutil.copytree(source, copy)
            except OSError as error:  # shutil.Error is one
                raise _not_stored(copy, error) from error
            return self._place(copy, entry.manifest)

    # ---- keeping house ------------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Every readable entry, the least recently used first."""
        names = [path for path in _subdirectories(self.root) if not path.name.startswith(".")]
        found = [entry for name in names for directory in _subdirectories(name) if (entry := read_manifest(directory))]
        return sorted(found, key=lambda entry: entry.last_used)

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
        """Remove the least recently used entries until the cache is within its bound; returns what was removed."""
        limit = self.max_bytes if max_bytes is None else max_bytes
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

    def clear(self, names: tuple[str, ...] = ()) -> list[Entry]:
        """Remove every entry, or those called ``names``, and with "every" what was quarantined; returns what was removed."""
        removed = [entry for entry in self.entries() if not names or entry.manifest.name in names]
        for directory in [entry.directory for entry in removed] if names else _subdirectories(self.root):
            self.remove(directory) if directory.name not in (".locks", ".tmp") else None
        self._sweep()
        return removed

    def remove(self, directory: Path) -> None:
        """Rename first: a reader either has the whole entry or none."""
        try:
            (self.root / ".tmp").mkdir(exist_ok=True)
            aside = Path(tempfile.mkdtemp(dir=self.root / ".tmp"))
            os.rename(directory, aside / "removed")
            shutil.rmtree(aside, ignore_errors=True)
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            raise CacheError("a cache entry cannot be removed", found=f"{directory}: {error.strerror}", fix=f"check the owner of {self.root}") from error

    def _quarantine(self, directory: Path) -> None:
        with contextlib.suppress(OSError):  # a read-only cache keeps its damage, and each look-up still counts as a miss
            (self.root / ".quarantine").mkdir(exist_ok=True)
            os.rename(directory, tempfile.mkdtemp(prefix=f"{directory.parent.name}-", dir=self.root / ".quarantine"))

    def _sweep(self) -> None:
        """Remove the workspaces of dead processes: a live one holds the lock in its own."""
        for path in _subdirectories(self.root / ".tmp"):
            with contextlib.suppress(OSError):
                age = time.time() - path.stat().st_mtime
                owner = path / OWNER_LOCK
                if age > _ABANDONED_SECONDS or (age > _STARTING_SECONDS and owner.exists() and not lock.is_held(owner)):
                    shutil.rmtree(path, ignore_errors=True)


def read_manifest(directory: Path) -> Entry | None:
    """The entry in a directory by its manifest alone; None if there is no readable one."""
    try:
        return Entry(directory, Manifest.from_json((directory / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_entry(directory: Path) -> tuple[Entry | None, Refusal | None]:
    """The verified entry in a directory; (None, None) if there is none, (None, why) if there is a damaged one."""
    if not os.path.isdir(directory):
        return None, None
    entry = read_manifest(directory)
    if entry is None:
        return None, Refusal(f"{directory / FILE_NAME} is missing or damaged", "flexops cache clear")
    refusal = verify(directory, entry.manifest)
    return (None, refusal) if refusal else (entry, None)


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def places_today(plan: BuildPlan, recorded: Iterable[str]) -> list[str]:
    """Recorded header names as paths: the anchor's place today instead of the place at build time."""
    places = {name: path for path, name in plan.anchors}
    paths = []
    for name in recorded:
        anchor, separator, rest = name.partition(">")
        paths.append(places[anchor + ">"] + rest if separator and anchor + ">" in places else name)
    return paths


def _subdirectories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as scan:
            return sorted(Path(item.path) for item in scan if item.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _not_stored(where: Path, error: OSError | None) -> CacheError:
    found = f"{where}: {error.strerror or error}" if error else str(where)
    return CacheError("the finished build could not be stored", found=found, fix="free some space, or set FLEXOPS_CACHE_DIR")


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
