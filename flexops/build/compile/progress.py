"""How a build shows itself: a bar on a terminal, one quiet line otherwise."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator

from ...settings import LogLevel, current
from ..store.election import job_rank
from .ninja import Progress


def say(text: str, log: LogLevel) -> None:
    """A line for people, on standard error; nothing with ``quiet``."""
    if log != "quiet" and sys.stderr is not None:  # None: its descriptor is closed
        print(f"flexops: {text}", file=sys.stderr)


@contextlib.contextmanager
def shown(what: str, log: LogLevel) -> Iterator[Progress | None]:
    """A progress callback while ``what`` is built. Writes to standard error only, and nothing at
    all with ``quiet``.

    Without a terminal it writes one line, in the process that compiled: of all that wait for the
    same artifact only one does.
    """
    if log == "quiet" or sys.stderr is None:
        yield None
        return
    if not sys.stderr.isatty():
        started, steps = time.monotonic(), 0

        def count(_finished: int, _total: int, _step: str) -> None:
            nonlocal steps
            steps += 1

        try:
            yield count
        finally:
            if steps:
                seconds = f"{time.monotonic() - started:.1f} s"
                print(f"flexops: compiling {what} took {seconds}{place()}", file=sys.stderr)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:  # rich is a convenience; a build does not need it
        print(f"flexops: building {what}", file=sys.stderr)
        yield None
        return
    columns = (
        TextColumn("flexops: {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"building {what}", total=None)

        def report(finished: int, total: int, step: str) -> None:
            bar.update(task, completed=finished, total=total, description=step)

        yield report


def place() -> str:
    """``" (rank 3 of 8 on node7)"``, ``" (on node7)"`` with a remote cache alone, otherwise ""."""
    if rank := job_rank():
        return f" (rank {rank[0]} of {rank[1]} on {socket.gethostname()})"
    return f" (on {socket.gethostname()})" if current().cache_remote else ""
