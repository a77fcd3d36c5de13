"""Advisory locks that die with their holder.

``flock`` and nothing else: a lock *file* would outlive a killed process and hang the next build for
ever. Where the file system rejects locks (some NFS mounts), a build goes on without one: locks only
save duplicate work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LONGEST_NAP = 0.1
_PATIENCE = 3600.0
"""A holder that takes longer than any build (stopped by a debugger, say) is not waited for: then
this process builds, too."""

_held: set[int] = set()
"""Descriptors of the locks that this process holds or waits for."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it."""
    try:
        descriptor: int | None = _open(path)
    except OSError:
        descriptor = None
    if descriptor is not None:
        _held.add(descriptor)
    try:
        if descriptor is not None:
            _wait(descriptor)
        yield
    finally:
        if descriptor in _held:  # not in a child forked meanwhile
            _held.discard(descriptor)
            _release(descriptor)


def _let_go_after_fork() -> None:
    """In a child: the locks are its parent's. With these descriptors open it would hold them on
    when the parent dies, even against itself."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock; True also if that is unknown."""
    try:
        descriptor = _open(path)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        _release(descriptor)
    return False


def _wait(descriptor: int) -> None:
    """Until the lock is held, or fails here. In naps: a signal need not end a wait
    in the kernel (``compiler._lines`` says why)."""
    nap, until = 0.001, time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(nap)
            nap = min(nap * 2, _LONGEST_NAP)
        except OSError:
            return
        else:
            return


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except (
        PermissionError
    ):  # another user's, in a shared cache: most file systems also lock read-only files
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _release(descriptor: int) -> None:
    # Unlocked, not only closed: a child forked meanwhile shares the descriptor and would go on
    # holding the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
