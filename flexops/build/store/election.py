"""Who of a cluster compiles: one process, while the others wait for what it makes; for a while, and
then they go on alone.

Ranks of one job use the store that ``torch.distributed`` has made for them, which also carries the
artifact: no remote cache is needed. Other processes use the remote cache, where a claim is an
object that only one of them can make. Where there is neither, everybody compiles.

Waiting is a matter of time only. Whatever is received goes through what `flexops cache import`
does, and a process that receives nothing compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ... import settings
from ...errors import FlexopsError
from . import cache_archive, counters

if TYPE_CHECKING:
    from .cache import BuildCache, Entry
    from .remote import Remote

_MOST_BYTES = 64 << 20
_FIRST_NAP, _LONGEST_NAP, _NAP_SHARE = 0.05, 5.0, 0.15
_CLAIMED = "claim"

Look = Callable[[], "Entry | None"]
"""Looks for the entry where it comes to be: in the local cache, or in the remote one."""


Turn = Literal["make", "wait"]


class Election(Protocol):
    """Decides who makes an artifact, known by a name and a digest."""

    def begin(self, name: str, digest: str, remote: Look) -> Entry | Turn:
        """Whether this process is to make it or to wait, asked once; or the entry, if it came to be
        meanwhile."""
        ...

    def deliver(self, name: str, digest: str, entry: Entry | None) -> None:
        """Report the result to the others; None: nothing."""
        ...

    def receive(self, name: str, digest: str, local: Look, remote: Look) -> Entry | None:
        """After ``begin`` said so, wait for what another one makes; None: this process is to make
        it, after all."""
        ...


def between(cache: BuildCache) -> Election | None:
    """The way in which processes that share no directory can agree here; None if there is none, or
    there is no process to wait for."""
    seconds = settings.current().compile_wait
    # who could not open what it makes makes nothing
    if not seconds or (cache.trusted_keys and not cache.signing_key):
        return None
    if store := _ranks():
        return _Ranks(store, cache, seconds)
    if cache.remote and cache.remote.claims:
        return _Claims(cache.remote, cache, seconds)
    return None


def speaks(topic: str) -> bool:
    """Whether this process is the one of its job that warns of something.

    The ranks of ``torch.distributed`` agree: the first one does. Before it is initialised rank 0
    does. A process that is no rank of a job always does.
    """
    if store := _ranks():
        with contextlib.suppress(RuntimeError):
            key = hashlib.sha256(topic.encode()).hexdigest()
            return bool(store.add(f"flexops/said/{key}", 1) == 1)
    rank = job_rank()
    return rank is None or rank[0] == "0"


def job_rank() -> tuple[str, str] | None:
    """This process's rank and its job's size, of torchrun or Slurm; None if it is alone."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if os.environ.get(rank) and os.environ.get(size, "1") != "1":
            return os.environ[rank], os.environ[size]
    return None


def _ranks() -> Any:
    """The store of this process's job; None where ``torch.distributed`` is not initialised, or this
    is its only process."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() < 2
        ):
            return None
        from ..._torch import store_of_ranks

        return store_of_ranks()
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None


class _Ranks:
    """Asks in naps, not with the store's own ``wait``: that would block the connection for
    others, such as a collective's set-up."""

    def __init__(self, store: Any, cache: BuildCache, seconds: float) -> None:
        self.store, self.cache, self.seconds = store, cache, seconds

    def begin(self, name: str, digest: str, _remote: Look) -> Entry | Turn:
        try:
            return "make" if self.store.add(self._key(name, digest, _CLAIMED), 1) == 1 else "wait"
        except RuntimeError:  # rank 0 is gone, say
            return "make"

    def deliver(self, name: str, digest: str, entry: Entry | None) -> None:
        content = b""
        with contextlib.suppress(FlexopsError, OSError, RuntimeError):
            if entry:
                with self.cache.workspace() as workspace:
                    file = workspace / "archive"
                    if (
                        cache_archive.export(self.cache, file, [entry])
                        and file.stat().st_size <= _MOST_BYTES
                    ):
                        content = file.read_bytes()
        with contextlib.suppress(RuntimeError):
            self.store.set(self._key(name, digest, "done"), content or b"-")

    def receive(self, name: str, digest: str, local: Look, _remote: Look) -> Entry | None:
        started = time.monotonic()
        key, content = self._key(name, digest, "done"), b""
        try:
            for _ in _naps(self.seconds):
                if self.store.check([key]):
                    content = self.store.get(key)
                    break
        except RuntimeError:
            pass
        entry = self._taken(content, local) if len(content) > 1 else local()
        counters.count(
            "ranks",
            self.cache.root,
            hit=entry is not None,
            size=len(content),
            seconds=time.monotonic() - started,
        )
        return entry

    def _taken(self, content: bytes, local: Look) -> Entry | None:
        with contextlib.suppress(FlexopsError, OSError), self.cache.workspace() as workspace:
            file = workspace / "received"
            file.write_bytes(content)
            cache_archive.import_archive(self.cache, file)
            return local()
        return None

    def _key(self, name: str, digest: str, what: str) -> str:
        return f"flexops/{name}/{digest}/{what}"


class _Claims:
    """A claim is believed until the time that stands in it, by the clocks of those who read it: a
    wrong clock costs a second compile, or a longer wait.
    """

    def __init__(self, remote: Remote, cache: BuildCache, seconds: float) -> None:
        self.remote, self.cache, self.seconds = remote, cache, seconds

    def begin(self, name: str, digest: str, remote: Look) -> Entry | Turn:
        looked = time.monotonic()
        found = self.remote.hint(self.cache, name, digest, _CLAIMED)
        if found and _is_held(found[0]):
            return "wait"
        failed = found and found[0].get("failed")
        if not failed and self._take(name, digest, found, looked) is False:
            return "wait"
        entry = remote()  # its maker may have been done between our look and our claim
        if entry:
            self.deliver(name, digest, entry)
        return entry or "make"

    def deliver(self, name: str, digest: str, entry: Entry | None) -> None:
        """A failure is written into the claim, or each of a thousand machines would try in turn
        what cannot be compiled. The claim is not removed: that takes a permission of its own.
        """
        value = self._claim() | ({"until": 0} if entry else {"failed": True})
        self.remote.leave(self.cache, name, digest, _CLAIMED, value, replace="")

    def receive(self, name: str, digest: str, _local: Look, remote: Look) -> Entry | None:
        for _ in _naps(self.seconds):
            looked = time.monotonic()
            found = self.remote.claimed(self.cache, name, digest)
            if found and _is_held(found[0]):
                continue
            entry = remote()
            if entry or not found or found[0].get("failed"):
                return entry
            if self._take(name, digest, found, looked) is not False:
                return None  # this process makes it, and others wait for that
        return remote()

    def _take(
        self, name: str, digest: str, found: tuple[dict[str, Any], str] | None, looked: float
    ) -> bool | None:
        """Claim it, or take over the claim of a process that is late; False: another one did."""
        tag = found[1] if found else None
        value = self._claim()
        return self.remote.claim(self.cache, name, digest, value, looked=looked, replace=tag)

    def _claim(self) -> dict[str, Any]:
        by = f"{_machine()}:{os.getpid()}:{os.urandom(6).hex()}"
        return {"until": time.time() + self.seconds, "by": by}


def _is_held(claim: dict[str, Any]) -> bool:
    until = claim.get("until")
    in_time = isinstance(until, int | float) and until > time.time()
    return in_time and not claim.get("failed") and not _is_dead(str(claim.get("by")))


def _is_dead(by: str) -> bool:
    """Whether a claim is that of a process of this machine that has ended, killed perhaps. Signal 0
    finds other users' processes too, which /proc hides if it is mounted with hidepid."""
    machine, _, process = by.rpartition(":")[0].rpartition(":")
    if machine != _machine() or not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, ValueError):  # another user's, or no number of a process
        pass
    return False


def _machine() -> str:
    """The same for processes that see each other: containers of one host may have its name, hosts
    may have the same name, and all of them the same number of the first PID namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}:{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    return os.urandom(6).hex()


def _naps(seconds: float) -> Iterator[None]:
    """Once at the start, then after naps of about a seventh of the time waited so far, each of
    another length than other processes', until so many seconds have passed.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) < seconds:
        yield
        nap = min(max(_FIRST_NAP, _NAP_SHARE * waited), _LONGEST_NAP) * random.uniform(0.5, 1.5)
        time.sleep(min(nap, max(0.0, seconds - (time.monotonic() - started))))
