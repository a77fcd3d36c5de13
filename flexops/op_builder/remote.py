"""A remote cache behind the local one: what is missing here is looked for there before it is compiled, and what is compiled is put there.

    <url>/<name>/<key>.tar.gz               an entry as `flexops cache export` writes it; never changed once it is there
    <url>/<name>/<base>.headers.json        which headers the last build under this base key reached: look-ups start from it, as in the local cache
    <url>/<name>/<made of>.entry.json       the key of a family's library, by what it is made from: for machines without a compiler
    <url>/<name>/<key>.claim.json           who is compiling it now, and until when that is believed (``election``)

Nothing of this is believed: an entry goes through what `flexops cache import` does before it is in the local cache, and only from there it is opened.

A store may be slow, full, forbidden or lying. Each request has a limit, seconds that came to nothing are counted, and when a limit's worth of them is
spent the store is not asked any more in this process: it costs that much once, and never a failure.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _fork, _json
from ..errors import CacheError, FlexopsError, RemoteError
from ..redaction import redacted, scrubbed
from . import cache_archive, counters
from .json_child import JsonChild
from .manifest import is_plain

if TYPE_CHECKING:
    from ..settings import Settings
    from .cache import BuildCache, Entry
    from .cache_key import Digests
    from .manifest import Manifest

SUFFIX = ".tar.gz"
_WORKER = Path(__file__).resolve().with_name("remote_worker.py")
_START_SECONDS = 20.0  # of a Python and its client library on a machine that is busy starting a thousand others: not the store's fault
_QUICK_SECONDS = 0.25  # a miss that fast is what a store in good health takes
_HINT_BYTES = 4 << 20


class Object(NamedTuple):
    """What a store lists. ``changed`` is in seconds since the epoch, 0 where the store does not tell."""

    name: str
    size: int
    changed: float


def of(chosen: Settings) -> Remote | None:
    """The remote cache that the settings name, one for the life of the process; None if they name none. Touches nothing."""
    if not chosen.cache_remote:
        return None
    return _of(chosen.cache_remote.reveal(), chosen.cache_remote_write, chosen.cache_remote_timeout)


@functools.cache
def _of(url: str, write: bool, limit: float) -> Remote:
    return Remote(url, write=write, limit=limit)


class Remote:
    """A remote cache. Constructing one touches nothing.

    Args:
        write: what is compiled here is put there.
        limit: seconds that a request may take, and that all that come to nothing may take together.

    Attributes:
        problem: why it is not asked any more; "" while it is.
        unwritten: why nothing is put there any more, or this process may not; "" while it is.
    """

    def __init__(self, url: str, *, write: bool = False, limit: float = 1.0) -> None:
        self.url, self.limit = url, limit
        self.problem = ""
        self.unwritten = "" if write else "FLEXOPS_CACHE_REMOTE_WRITE is not 1"
        self._left = limit
        self._worker: JsonChild | None = None
        self._lock = _fork.Lock()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def name(self) -> str:
        """The URL, without what nobody else should read."""
        return redacted(self.url)

    @property
    def claims(self) -> bool:
        """Whether an object can be made on the condition that there is none."""
        return not self.problem and not self.unwritten and not self.url.startswith(("oci://", "http://", "https://"))

    # ---- entries ------------------------------------------------------------------------------------------------------------------------

    def fetch(self, cache: BuildCache, name: str, key: str) -> Entry | None:
        """Bring an entry into the local cache, verified as an import is; None if it cannot be had. Raises nothing."""
        if self.problem:
            return None
        started = time.monotonic()
        try:
            with cache.workspace() as workspace:
                file = workspace / "fetched"
                if self._get(entry_name(name, key), file, cache.max_bytes) is None:
                    counters.count("remote", cache.root, hit=False, seconds=time.monotonic() - started)
                    return None
                size = file.stat().st_size
                entry = cache_archive.import_archive(cache, file, only=(name, key))[0]
        except (FlexopsError, OSError) as error:
            self._wasted(time.monotonic() - started, f"{entry_name(name, key)} is refused: {_words(error)}")
            counters.count("remote", cache.root, hit=False, seconds=time.monotonic() - started)
            return None
        counters.count("remote", cache.root, hit=True, size=size, seconds=time.monotonic() - started)
        return entry

    def publish(self, cache: BuildCache, entry: Entry) -> bool:
        """Put an entry there, unless one of its name is; whether it is there now. Raises nothing."""
        if self.problem or self.unwritten:
            return False
        known = entry.manifest
        with contextlib.suppress(FlexopsError, OSError), cache.workspace() as workspace:
            file = workspace / "archive"
            if not cache_archive.export(cache, file, [entry]):
                return False
            if self._put(entry_name(known.name, known.key), file) is None:
                return False
            counters.count("published", cache.root, hit=True, size=file.stat().st_size)
            headers = entry.directory.parent / f"{known.base}.headers.json"
            return not headers.exists() or self._put(_file_name(known.name, known.base, "headers"), headers, replace="") is not None
        return False

    def headers(self, cache: BuildCache, name: str, base: str) -> Digests | None:
        """What the last build under a base key reached; None if nobody knows."""
        found = self.hint(cache, name, base, "headers")
        return found[0] if found and all(isinstance(digest, str) for digest in found[0].values()) else None

    # ---- hints: small documents that lead to entries ------------------------------------------------------------------------------------

    def hint(self, cache: BuildCache, name: str, digest: str, kind: str) -> tuple[dict[str, Any], str] | None:
        """A document and what tells it from its successors; None if there is none."""
        if self.problem:
            return None
        with contextlib.suppress(FlexopsError, OSError, ValueError), cache.workspace() as workspace:
            tag = self._get(_file_name(name, digest, kind), workspace / "hint", _HINT_BYTES)
            if tag is not None and isinstance(found := _json.load(workspace / "hint"), dict):
                return found, tag
        return None

    def leave(self, cache: BuildCache, name: str, digest: str, kind: str, value: dict[str, Any], *, replace: str | None = None) -> bool | None:
        """Write a document: a first one, or (``replace``) instead of the one with that tag, "" for any. Whether that was done; None if it failed."""
        if self.problem or self.unwritten:
            return None
        with contextlib.suppress(FlexopsError, OSError), cache.workspace() as workspace:
            file = workspace / "hint"
            file.write_text(json.dumps(value))
            return self._put(_file_name(name, digest, kind), file, replace=replace)
        return None

    # ---- for the command line: failures are told ----------------------------------------------------------------------------------------

    def list(self) -> list[Object]:
        """Everything in the store.

        Raises:
            RemoteError: the store cannot be listed.
        """
        found = self._ask({"do": "list"}, 600.0)["objects"]
        return sorted(Object(str(name), int(size), float(changed)) for name, size, changed in found)

    def remove(self, name: str) -> None:
        """Raises ``RemoteError``."""
        self._ask({"do": "remove", "name": name}, 60.0)

    def download(self, name: str, file: Path, most: int) -> None:
        """Raises ``RemoteError``, also if there is no such object."""
        if not self._ask({"do": "get", "name": name, "file": str(file), "most": most}, 600.0)["found"]:
            raise RemoteError(f"{self.name} has no {name}", fix="flexops cache remote list")

    # ---- requests -----------------------------------------------------------------------------------------------------------------------

    def _get(self, name: str, file: Path, most: int) -> str | None:
        """An object's tag, its content in a file; None if it is not there, or the store failed."""
        started = time.monotonic()
        answer = self._try({"do": "get", "name": name, "file": str(file), "most": most})
        if answer is None:
            return None
        if not answer["found"]:
            if (spent := time.monotonic() - started) > _QUICK_SECONDS:
                self._wasted(spent, "it is slow, and does not have what is asked for")
            return None
        return str(answer["tag"])

    def _put(self, name: str, file: Path, *, replace: str | None = None) -> bool | None:
        asked = {"do": "create"} if replace is None else {"do": "replace", "tag": replace}
        answer = self._try({**asked, "name": name, "file": str(file)}, writes=True)
        return None if answer is None else bool(answer["made"])

    def _try(self, asked: dict[str, Any], *, writes: bool = False) -> dict[str, Any] | None:
        """An answer within what is left of the limit; a failure is the last request of its kind, a store that is silent the last of all."""
        if self.problem:
            return None
        try:
            return self._ask(asked, max(self._left, 0.01))
        except TimeoutError:
            self._close(f"no answer within {self.limit:g} s (FLEXOPS_CACHE_REMOTE_TIMEOUT)")
        except RemoteError as error:
            if writes:
                self._note(f"nothing can be put there: {error.found}")
                self.unwritten = error.found
            else:
                self._close(error.found)
        return None

    def _ask(self, asked: dict[str, Any], limit: float) -> dict[str, Any]:
        """Raises ``RemoteError``, or ``TimeoutError``."""
        with self._lock.held():
            if self._worker is None or not self._worker.alive:
                self._worker = _worker(self.url, self.limit)
            try:
                answer = self._worker.ask(asked, limit)
            except BrokenPipeError:  # it went home
                self._worker = _worker(self.url, self.limit)
                answer = self._worker.ask(asked, limit)
        if "error" in answer:
            raise RemoteError(f"the remote cache {self.name} failed", found=scrubbed(str(answer["error"])), fix="flexops cache remote list")
        return answer

    def _wasted(self, seconds: float, why: str) -> None:
        self._left -= seconds
        if self._left <= 0:
            self._close(why)
        elif "refused" in why:
            self._note(why)

    def _close(self, why: str) -> None:
        self.problem = why
        self._note(f"{why}; it is not asked any more")
        if self._worker:
            self._worker.stop()

    def _note(self, what: str) -> None:
        logging.getLogger("flexops").warning("remote cache %s: %s", self.name, what)

    def _forget(self) -> None:
        """In a forked child: the worker is its parent's."""
        if self._worker:
            self._worker.forget()
        self._worker = None


def _worker(url: str, limit: float) -> JsonChild:
    """The child process that talks to a store; raises ``RemoteError`` if it does not start."""
    child = JsonChild(_WORKER, hears=False)
    try:
        answer = child.ask({"path": sys.path, "url": url, "seconds": limit}, _START_SECONDS)
    except BrokenPipeError:
        answer = {"error": "its client does not start"}
    except TimeoutError:
        answer = {"error": f"its client does not start within {_START_SECONDS:.0f} s"}
    if "error" in answer:
        child.stop()
        missing = answer.get("missing")
        fix = 'pip install "flexops-torch[remote]"' if missing else "check FLEXOPS_CACHE_REMOTE"
        found = f"the package {missing} is not installed ({fix})" if missing else scrubbed(str(answer["error"]))
        raise RemoteError(f"the remote cache {redacted(url)} cannot be used", found=found, fix=fix)
    return child


def entry_name(name: str, key: str) -> str:
    """The object that holds an entry."""
    return f"{_safe(name)}/{key}{SUFFIX}"


def _file_name(name: str, digest: str, kind: str) -> str:
    return f"{_safe(name)}/{digest}.{kind}.json"


def _safe(name: str) -> str:
    """A name that every store takes, also in a registry's tag (128 letters, digits and ``_.-``)."""
    return name if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}", name) else f"x{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def is_named_right(name: str, manifest: Manifest) -> bool:
    """Whether an object of that name may hold that entry."""
    return is_plain(manifest.name) and name == entry_name(manifest.name, manifest.key)


def _words(error: Exception) -> str:
    if isinstance(error, FlexopsError):
        return scrubbed("; ".join(part for part in (error.what, error.found) if part))
    return scrubbed(str(error))


def required(chosen: Settings) -> Remote:
    """The remote cache; raises ``CacheError`` if the settings name none."""
    found = of(chosen)
    if found is None:
        raise CacheError("no remote cache is named", required="FLEXOPS_CACHE_REMOTE", fix="export FLEXOPS_CACHE_REMOTE=s3://bucket/prefix")
    return found
