"""Who of a cluster compiles: one process, while the others wait for what it makes; for a while, and then they go on alone.

Ranks of one job use the store that ``torch.distributed`` has made for them, which also carries the artifact: no remote cache is needed. Other processes
use the remote cache, where a claim is an object that only one of them can make. Where there is neither, everybody compiles.

Waiting is a matter of time only. Whatever is received goes through what `flexops cache import` does, and whoever receives nothing compiles.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .. import settings
from ..errors import FlexopsError
from . import cache_archive, counters

if TYPE_CHECKING:
    from .cache import BuildCache, Entry
    from .remote import Remote

_MOST_BYTES = 64 << 20
_FIRST_NAP, _LONGEST_NAP = 0.02, 0.5
_CLAIMED = "claim"

Look = Callable[[], "Entry | None"]
"""Looks for the entry where it comes to be: in the local cache, or in the remote one."""


Turn = Literal["make", "wait"]


class Election(Protocol):
    """Decides who makes an artifact, known by a name and a digest."""

    def begin(self, name: str, digest: str, remote: Look) -> Entry | Turn:
        """Whether this process is to make it or to wait, asked once; or the entry, if it came to be meanwhile."""
        ...

    def deliver(self, name: str, digest: str, entry: Entry | None) -> None:
        """Tell the others what came of it; None: nothing."""
        ...

    def receive(self, name: str, digest: str, local: Look, remote: Look) -> Entry | None:
        """After ``begin`` said so, wait for what another one makes; None: this process is to make it, after all."""
        ...


def between(cache: BuildCache) -> Election | None:
    """The way in which processes that share no directory can agree here; None if there is none, or nobody is to be waited for."""
    seconds = settings.current().compile_wait
    if not seconds or (cache.trusted_keys and not cache.signing_key):  # who could not open what it makes makes nothing
        return None
    if store := _ranks():
        return _Ranks(store, cache, seconds)
    if cache.remote and cache.remote.claims:
        return _Claims(cache.remote, cache, seconds)
    return None


def _ranks() -> Any:
    """The store of this process's job; None where ``torch.distributed`` is not initialised, or this is its only process."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        from .._torch import store_of_ranks

        return store_of_ranks()
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None


class _Ranks:
    """Asks in naps, not with the store's own ``wait``: that would keep the connection from whoever else needs it, such as a collective's set-up."""

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
                    if cache_archive.export(self.cache, file, [entry]) and file.stat().st_size <= _MOST_BYTES:
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
        counters.count("ranks", self.cache.root, hit=entry is not None, size=len(content), seconds=time.monotonic() - started)
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
    """A claim is believed until the time that stands in it, by the clocks of those who read it: a wrong clock costs a second compile, or a longer wait."""

    def __init__(self, remote: Remote, cache: BuildCache, seconds: float) -> None:
        self.remote, self.cache, self.seconds = remote, cache, seconds

    def begin(self, name: str, digest: str, remote: Look) -> Entry | Turn:
        if self.remote.leave(self.cache, name, digest, _CLAIMED, self._claim()) is False:
            found = self.remote.hint(self.cache, name, digest, _CLAIMED)
            if found and not found[0].get("failed") and (_is_held(found[0]) or self._take(name, digest, found[1]) is False):
                return "wait"
        entry = remote()  # its maker may have been done between our look and our claim
        if entry:
            self.deliver(name, digest, entry)
        return entry or "make"

    def deliver(self, name: str, digest: str, entry: Entry | None) -> None:
        """Of a failure the claim tells: or each of a thousand would try in turn what cannot be compiled. It is not removed: not who may write may do that."""
        value = {**self._claim(), "until": 0} if entry else {**self._claim(), "failed": True}
        self.remote.leave(self.cache, name, digest, _CLAIMED, value, replace="")

    def receive(self, name: str, digest: str, _local: Look, remote: Look) -> Entry | None:
        for _ in _naps(self.seconds):
            found = self.remote.hint(self.cache, name, digest, _CLAIMED)
            if found and _is_held(found[0]) and not found[0].get("failed"):
                continue
            entry = remote()
            if not entry and found and not found[0].get("failed"):
                self._take(name, digest, found[1])  # so that who comes now waits for this process
            return entry
        return remote()

    def _take(self, name: str, digest: str, tag: str) -> bool | None:
        """Take over the claim of one who is late; False: another one did."""
        return self.remote.leave(self.cache, name, digest, _CLAIMED, self._claim(), replace=tag)

    def _claim(self) -> dict[str, Any]:
        return {"until": time.time() + self.seconds, "by": f"{socket.gethostname()}:{os.getpid()}"}


def _is_held(claim: dict[str, Any]) -> bool:
    until = claim.get("until")
    return isinstance(until, int | float) and until > time.time()


def _naps(seconds: float) -> Iterator[None]:
    """Once at the start, then after naps that grow, each of another length than other processes', until so many seconds have passed."""
    until, nap = time.monotonic() + seconds, _FIRST_NAP
    while time.monotonic() < until:
        yield
        time.sleep(min(nap * random.uniform(0.5, 1.5), max(0.0, until - time.monotonic())))
        nap = min(nap * 1.5, _LONGEST_NAP)
