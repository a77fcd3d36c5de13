"""What a fork must not find half done: a child has only the thread that forked, and waits for ever
for what another one held.

Python's own locks of modules being imported, and those of the dynamic linker and of torch's
registry, are not ours to free in a child. So a fork waits while a thread of ours imports or opens
something, or starts a process (whose pipes a child would hold open, while the thread waits for
their end and the child for the thread's lock). That takes milliseconds; compiling, which takes
long, lets forks pass. Our own locks are new in a child.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
# a foreign module may fork, or wait for one that does, while it is imported
_LONGEST = 10.0

_calm = threading.RLock()
_waited = False


class Lock:
    """A reentrant lock that a child finds free."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        # and no other: if this very thread forks, the child has to leave the lock that it entered
        with self._lock:
            yield


class kept(Generic[_T]):
    """``functools.cached_property`` without its lock: before Python 3.12 all objects of a class
    share one, and a child would wait for a thread that had it."""

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, one: Any, _: Any = None) -> _T:
        if one is None:
            return self  # type: ignore[return-value]
        value = self._compute(one)
        one.__dict__[self._name] = value
        return value


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """While a thread is in here, forks of others wait."""
    with _calm:
        yield


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """In ``postponed``: for as long as this lasts, they do not."""
    calm = _calm
    calm.release()
    try:
        yield
    finally:
        calm.acquire()


def _before() -> None:
    global _waited
    _waited = _calm.acquire(timeout=_LONGEST)


def _after_in_parent() -> None:
    if _waited:
        _calm.release()


def _after_in_child() -> None:
    global _calm
    if _waited:
        _calm.release()
    else:
        _calm = threading.RLock()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
