"""A remote cache behind the local one: what is missing here is looked for there before it is
compiled, and what is compiled is put there.

    <url>/<name>/<key>.tar.gz            an entry as of `flexops cache export`; it never changes
    <url>/<name>/<base>.headers.json     the headers of the last build under this base key
    <url>/<name>/<made of>.entry.json    the key of a family's library, by its inputs: for machines
                                         without a compiler
    <url>/<name>/<key>.claim.json        the process that compiles it, and its deadline
                                         (``election``)

Nothing of this is believed: an entry goes through what `flexops cache import` does before it is in
the local cache, and only from there it is opened.

A store may be slow, full, forbidden or lying. Each request has a limit. One that fails closes the
store for a while, which grows with each failure in a row; then one tries again. It costs that much
time, and never a failure.
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
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _fork, _json
from ...errors import CacheError, FlexopsError, RemoteError
from ...redaction import redacted, scrubbed
from ...toolchain.proc import JsonChild
from . import cache_archive, counters
from .manifest import is_plain

if TYPE_CHECKING:
    from ...settings import Settings
    from ..plan.cache_key import Digests
    from .cache import BuildCache, Entry
    from .manifest import Manifest

SUFFIX = ".tar.gz"
CLAIM = "claim"
"""The kind of document by which processes agree who compiles (``election``)."""
_WORKER = Path(__file__).resolve().with_name("remote_worker.py")
_START_SECONDS = 60.0  # of a Python with its client library, where all processors are busy
_GRACE_SECONDS = 5.0  # beyond the limit, which the client enforces itself
_QUICK_SECONDS = 0.25  # a miss that fast is what a store in good health takes
_FIRST_PAUSE, _LONGEST_PAUSE = 30.0, 600.0
_READS, _READ_NAP = 3, 0.25  # of a claim that is being written
_NO_PLACE = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
_FIXES = (
    ("Connection refused|failed to lookup", "start its server, or correct its address"),
    ("UnknownIssuer", "export SSL_CERT_FILE=<the certificates of its authority>"),
    ("Account must be specified", "export FLEXOPS_CACHE_REMOTE=az://account/container"),
    ("no credentials", "give its client some: docs/clusters.md names the variables"),
    (r"answers (401|403)", "correct its credentials, or what they may read"),
)
"""Of what ``flexops cache remote check`` finds."""
_SHORTEST_SETTLE = 2.0
_HINT_BYTES = 4 << 20
_CLAIM_BYTES = 512


class Object(NamedTuple):
    """What a store lists. ``changed`` is in seconds since the epoch, 0 where the store does not
    tell."""

    name: str
    size: int
    changed: float


class Check(NamedTuple):
    """One thing that was tried, what came of it, and what fixes it; ``ok`` is None if untested."""

    what: str
    ok: bool | None
    found: str
    fix: str = ""


def of(chosen: Settings) -> Remote | None:
    """The remote cache that the settings name, one for the life of the process; None if they name
    none. Touches nothing.
    """
    if not chosen.cache_remote:
        return None
    return _of(
        chosen.cache_remote.reveal(), chosen.cache_remote_write, chosen.cache_remote_timeout,
        chosen.cache_remote_http,
    )  # fmt: skip


@functools.cache
def _of(url: str, write: bool, limit: float, plain: bool) -> Remote:
    return Remote(url, write=write, limit=limit, plain=plain)


class Gate:
    """Whether requests of one kind are made: not for a pause after one failed. Each failure in a
    row doubles the pause.
    """

    def __init__(self) -> None:
        self._why, self._until, self._pause = "", 0.0, _FIRST_PAUSE

    @property
    def why(self) -> str:
        """Why no request is made now; "" if one may be."""
        return self._why if time.monotonic() < self._until else ""

    def close(self, why: str, *, forever: bool = False) -> float:
        """Returns for how many seconds."""
        pause = float("inf") if forever else self._pause
        self._why, self._until = why, time.monotonic() + pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return pause

    def opened(self) -> None:
        """A request succeeded: the next pause is a short one again."""
        self._pause = _FIRST_PAUSE


class Remote:
    """A remote cache. Constructing one touches nothing.

    Args:
        write: what is compiled here is put there.
        limit: seconds that a request may take, and that look-ups in vain may take together.
        plain: HTTP without encryption is allowed to other machines, too.

    Attributes:
        conditional: whether the store makes an object on the condition that there is none; None
            while that is unknown.
    """

    def __init__(
        self, url: str, *, write: bool = False, limit: float = 10.0, plain: bool = False
    ) -> None:
        self.url, self.limit, self.plain = url, limit, plain
        self.writes = write
        self.conditional: bool | None = True if url.startswith("file://") else None
        self._asking, self._writing = Gate(), Gate()
        self._left = limit
        self._unconditional = False  # of the last put: made without a condition
        self._root: Path | None = None
        self._worker: JsonChild | None = None
        self._lock = _fork.Lock()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def problem(self) -> str:
        """Why it is not asked at present; "" while it is."""
        return self._asking.why

    @property
    def unwritten(self) -> str:
        """Why nothing is put there at present, or this process may not; "" while it is."""
        return self._writing.why if self.writes else "FLEXOPS_CACHE_REMOTE_WRITE is not 1"

    @property
    def name(self) -> str:
        """The URL, without secrets."""
        return redacted(self.url)

    @property
    def claims(self) -> bool:
        """Whether processes can agree through it: whether claims can be put there."""
        return not self.problem and not self.unwritten

    # ---- entries ----

    def fetch(self, cache: BuildCache, name: str, key: str) -> Entry | None:
        """Bring an entry into the local cache, verified as an import is; None if that fails.
        Raises nothing."""
        if self.problem:
            return None
        self._root = cache.root
        started = time.monotonic()
        try:
            with cache.workspace() as workspace:
                file = workspace / "fetched"
                if self._get(entry_name(name, key), file, cache.max_bytes) is None:
                    counters.count(
                        "remote", cache.root, hit=False, seconds=time.monotonic() - started
                    )
                    return None
                size = file.stat().st_size
                seconds, only = max(self._left, 0.01), (name, key)
                entry = cache_archive.import_archive(cache, file, only=only, seconds=seconds)[0]
        except (FlexopsError, OSError) as error:
            why = f"{entry_name(name, key)} is rejected: {_words(error)}"
            self._note(why)
            self._wasted(time.monotonic() - started, why)
            counters.count("remote", cache.root, hit=False, seconds=time.monotonic() - started)
            return None
        counters.count(
            "remote", cache.root, hit=True, size=size, seconds=time.monotonic() - started
        )
        return entry

    def publish(self, cache: BuildCache, entry: Entry) -> bool:
        """Put an entry there, unless one of its name is; whether it is there now. Raises
        nothing."""
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
            return (
                not headers.exists()
                or self._put(_file_name(known.name, known.base, "headers"), headers, replace="")
                is not None
            )
        return False

    def headers(self, cache: BuildCache, name: str, base: str) -> Digests | None:
        """What the last build under a base key reached; None if unknown."""
        found = self.hint(cache, name, base, "headers")
        return (
            found[0]
            if found and all(isinstance(digest, str) for digest in found[0].values())
            else None
        )

    # ---- hints: small documents that lead to entries ----

    def hint(
        self, cache: BuildCache, name: str, digest: str, kind: str
    ) -> tuple[dict[str, Any], str] | None:
        """A document and what distinguishes it from its successors; None if there is none."""
        if self.problem:
            return None
        self._root = cache.root
        with contextlib.suppress(FlexopsError, OSError, ValueError), cache.workspace() as workspace:
            tag = self._get(_file_name(name, digest, kind), workspace / "hint", _HINT_BYTES)
            if tag is not None and isinstance(found := _json.load(workspace / "hint"), dict):
                return found, tag
        if kind != CLAIM:
            counters.count("remote", cache.root, hit=False)
        return None

    def leave(
        self,
        cache: BuildCache,
        name: str,
        digest: str,
        kind: str,
        value: dict[str, Any],
        *,
        replace: str | None = None,
    ) -> bool | None:
        """Write a document: a first one, or (``replace``) instead of the one with that tag, "" for
        any. Whether that was done; None if it failed."""
        if self.problem or self.unwritten:
            return None
        with contextlib.suppress(FlexopsError, OSError), cache.workspace() as workspace:
            file = workspace / "hint"
            # of one length: a server that writes two into one file at once keeps one of them whole
            file.write_text(json.dumps(value).ljust(_CLAIM_BYTES if kind == CLAIM else 0))
            return self._put(_file_name(name, digest, kind), file, replace=replace)
        return None

    def claim(
        self, cache: BuildCache, name: str, digest: str, value: dict[str, Any],
        *, looked: float, replace: str | None = None,
    ) -> bool | None:  # fmt: skip
        """As ``leave`` of a claim, but at most one of many processes that do so at the same time
        gets True.

        ``value["by"]`` is different in each of them. Where the store has no conditional puts, or
        ignores the condition, the last of those that write at the same time keeps the claim: it
        is read again after a pause (Fischer's algorithm; Lamport, "A Fast Mutual Exclusion
        Algorithm", 1987, section 2). At most one gets True if the pause is longer than any of them
        takes from its look-up to its last put. One that is stopped in between for longer costs a
        second compile.

        Args:
            looked: when (``time.monotonic``) the look-up began that found no claim, or the one to
                replace.
        """
        made = self.leave(cache, name, digest, CLAIM, value, replace=replace)
        if not made:
            return made
        if self.conditional is None:
            again = self.leave(cache, name, digest, CLAIM, value)
            self.conditional = None if again is None else not again
            if again:
                self._note(
                    "it ignores the condition of a put. Processes agree who compiles by reading "
                    "claims again after a pause"
                )
        if self.conditional and not self._unconditional:
            return True
        self._settle(time.monotonic() - looked)
        found = self.claimed(cache, name, digest)
        return bool(found[0].get("by") == value["by"]) if found else None

    def claimed(
        self, cache: BuildCache, name: str, digest: str
    ) -> tuple[dict[str, Any], str] | None:
        """As ``hint`` of a claim that was there before: a simple server shows nothing while it
        writes."""
        for _ in range(_READS):
            if found := self.hint(cache, name, digest, CLAIM):
                return found
            if self.problem:
                break
            time.sleep(_READ_NAP)
        return None

    def _settle(self, spent: float) -> None:
        """Let the others put their claims, who may be some times slower than this process was. A
        look-up and two puts take at most three times the limit."""
        time.sleep(max(_SHORTEST_SETTLE, min(4 * spent, 3 * self.limit)))

    # ---- for the command line: failures are raised ----

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
        if not self._ask({"do": "get", "name": name, "file": str(file), "most": most}, 600.0)[
            "found"
        ]:
            raise RemoteError(f"{self.name} has no {name}", fix="flexops cache remote list")

    def check(self) -> Iterator[Check]:
        """Try all that a build does, with an object of its own that is removed at the end."""
        token = os.urandom(8).hex()
        name = f"flexops-check/{token}.check.json"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "object")
            file.write_text(token)
            get = {"do": "get", "name": name, "file": str(Path(folder, "read")), "most": 1 << 20}
            started = time.monotonic()
            answer = yield from self._checked("client, credentials and read", get)
            if answer is None:
                return
            if _NO_PLACE.search(str(answer.get("why", ""))):
                yield Check("place", False, scrubbed(answer["why"]), "make the bucket")
                return
            if answer["found"]:
                found = f"it has {name}, which was never written: a login page, or a proxy's"
                yield Check("place", False, found, "open the address in a browser")
                return
            first = time.monotonic() - started
            later = sorted(self._ask(get, self.limit)["seconds"] for _ in range(5))[2]
            fast = later < _QUICK_SECONDS
            found = f"{1e3 * later:.0f} ms for a look-up; {first:.1f} s with the client's start"
            yield Check("latency", fast, found, "" if fast else "use a store that is nearer")
            if not self.writes:
                fix = "export FLEXOPS_CACHE_REMOTE_WRITE=1"
                yield Check("write", None, self.unwritten, fix)
                return
            yield from self._check_writes(name, file, get)

    def _check_writes(self, name: str, file: Path, get: dict[str, Any]) -> Iterator[Check]:
        create = {"do": "create", "name": name, "file": str(file)}
        if (yield from self._checked("write", create)) is None:
            return
        answer = yield from self._checked("read back", get)
        if answer and not (answer["found"] and _same(get["file"], file)):
            yield Check("read back", False, "another content than was written")
        answer = self._ask(create, self.limit + _GRACE_SECONDS)
        if not answer["conditional"]:
            found = "none: processes agree who compiles by reading claims again after a pause"
        elif answer["made"]:
            found = "ignored: processes agree who compiles by reading claims again after a pause"
        else:
            found = "honoured"
        yield Check("conditional put", True, found)
        yield from self._checked("remove", {"do": "remove", "name": name}, needed=False)

    def _checked(
        self, what: str, asked: dict[str, Any], *, needed: bool = True
    ) -> Generator[Check, None, dict[str, Any] | None]:
        try:
            answer = self._ask(asked, 2 * self.limit + _GRACE_SECONDS)
        except RemoteError as error:
            own = error.fix != "flexops cache remote check"
            fix = error.fix if own else _fix_of(error.found)
            yield Check(what, False if needed else None, error.found, fix)
            return None
        except TimeoutError:
            yield Check(what, False, f"no answer within {self.limit:g} s", "see its server's log")
            return None
        yield Check(what, True, f"{answer['seconds']:.3f} s")
        return answer

    # ---- requests ----

    def _get(self, name: str, file: Path, most: int) -> str | None:
        """An object's tag, its content in a file; None if it is missing, or the store failed."""
        answer = self._try({"do": "get", "name": name, "file": str(file), "most": most})
        if answer is None:
            return None
        if not answer["found"]:
            if (spent := answer.get("seconds", 0.0)) > _QUICK_SECONDS:
                self._wasted(spent, "it is slow, and does not have what is asked for")
            return None
        self._left = self.limit
        return str(answer["tag"])

    def _put(self, name: str, file: Path, *, replace: str | None = None) -> bool | None:
        asked = {"do": "create"} if replace is None else {"do": "replace", "tag": replace}
        answer = self._try({**asked, "name": name, "file": str(file)}, writes=True)
        if answer is None:
            return None
        self._unconditional = not answer.get("conditional", True)
        if self._unconditional and replace is None:
            self.conditional = False
        return bool(answer["made"])

    def _try(self, asked: dict[str, Any], *, writes: bool = False) -> dict[str, Any] | None:
        """An answer; or None, and requests of this kind pause. A client that does not start, or
        hangs, lets all of them pause.
        """
        if self.problem or (writes and self.unwritten):
            return None
        try:
            answer = self._ask(asked, 2 * self.limit + _GRACE_SECONDS)
        except TimeoutError:
            self._pause(f"no answer within {self.limit:g} s (FLEXOPS_CACHE_REMOTE_TIMEOUT)")
        except ClientError as error:
            self._pause(error.found, forever=error.missing)
        except RemoteError as error:
            if writes:
                pause = self._writing.close(error.found)
                self._note(f"nothing can be put there: {error.found}; tried again in {pause:g} s")
            else:
                self._pause(error.found)
        else:
            (self._writing if writes else self._asking).opened()
            return answer
        return None

    def _ask(self, asked: dict[str, Any], limit: float) -> dict[str, Any]:
        """Raises ``RemoteError``, or ``TimeoutError``."""
        with self._lock.held():
            if self._worker is None or not self._worker.alive:
                self._worker = _worker(self.url, self.limit, self.plain)
            try:
                answer = self._worker.ask(asked, limit)
            except BrokenPipeError:  # it ended while it was idle
                self._worker = _worker(self.url, self.limit, self.plain)
                answer = self._worker.ask(asked, limit)
        if "error" in answer:
            found, fix = scrubbed(str(answer["error"])), "flexops cache remote check"
            raise RemoteError(f"the remote cache {self.name} failed", found=found, fix=fix)
        return answer

    def _wasted(self, seconds: float, why: str) -> None:
        self._left -= seconds
        if self._left <= 0:
            self._pause(why)

    def _pause(self, why: str, *, forever: bool = False) -> None:
        pause, self._left = self._asking.close(why, forever=forever), self.limit
        then = "not asked any more" if forever else f"asked again in {pause:g} s"
        self._note(f"{why}; {then}")
        if self._root:
            counters.count_event("remote_given_up", self._root)
        if self._worker:
            self._worker.stop()

    def _note(self, what: str) -> None:
        logging.getLogger("flexops").warning("remote cache %s: %s", self.name, what)

    def _forget(self) -> None:
        """In a forked child: the worker is its parent's."""
        if self._worker:
            self._worker.forget()
        self._worker = None


class ClientError(RemoteError):
    """The client of a store does not start. ``missing``: for lack of a package."""

    missing = False


def _worker(url: str, limit: float, plain: bool) -> JsonChild:
    """The child process that talks to a store; raises ``ClientError`` if it does not start."""
    child = JsonChild(_WORKER, hears=False)
    where = {"path": sys.path, "url": url, "seconds": limit, "plain": plain}
    try:
        answer = child.ask(where, _START_SECONDS)
    except BrokenPipeError:
        answer = {"error": "its client does not start"}
    except TimeoutError:
        answer = {"error": f"its client does not start within {_START_SECONDS:.0f} s"}
    if "error" not in answer:
        return child
    child.stop()
    found = scrubbed(str(answer["error"]))
    fix = str(answer.get("fix", "flexops cache remote check"))
    if missing := answer.get("missing"):
        fix = 'pip install "flexops-torch[remote]"'
        found = f"the package {missing} is not installed ({fix})"
    what = f"the remote cache {redacted(url)} cannot be used"
    error = ClientError(what, found=found, fix=fix)
    error.missing = bool(missing)
    raise error


def _fix_of(found: str) -> str:
    return next((fix for pattern, fix in _FIXES if re.search(pattern, found)), "")


def _same(one: str, other: Path) -> bool:
    return Path(one).read_bytes() == other.read_bytes()


def entry_name(name: str, key: str) -> str:
    """The object that holds an entry."""
    return f"{_safe(name)}/{key}{SUFFIX}"


def _file_name(name: str, digest: str, kind: str) -> str:
    return f"{_safe(name)}/{digest}.{kind}.json"


def _safe(name: str) -> str:
    """A name that every store takes, also in a registry's tag (128 letters, digits and ``_.-``)."""
    return (
        name
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}", name)
        else f"x{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    )


def is_named_right(name: str, manifest: Manifest) -> bool:
    """Whether an object of that name may hold that entry."""
    return is_plain(manifest.name) and name == entry_name(manifest.name, manifest.key)


def _words(error: Exception) -> str:
    if isinstance(error, FlexopsError):
        return scrubbed(error.reason)
    return scrubbed(str(error))


def required(chosen: Settings) -> Remote:
    """The remote cache; raises ``CacheError`` if the settings name none."""
    found = of(chosen)
    if found is None:
        raise CacheError(
            "no remote cache is named",
            required="FLEXOPS_CACHE_REMOTE",
            fix="export FLEXOPS_CACHE_REMOTE=s3://bucket/prefix",
        )
    return found
