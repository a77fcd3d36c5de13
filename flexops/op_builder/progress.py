"""How a build shows itself: a bar on a terminal, one quiet line otherwise."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from ..settings import LogLevel
from .compiler import Progress


def say(text: str, log: LogLevel) -> None:
    """A line for people, on standard error; nothing with ``quiet``."""
    if log != "quiet":
        print(f"flexops: {text}", file=sys.stderr)


@contextlib.contextmanager
def shown(what: str, log: LogLevel) -> Iterator[Progress | None]:
    """A progress callback while ``what`` is built. Writes to standard error only, and nothing at all with ``quiet``."""
    if log == "quiet":
        yield None
        return
    if not sys.stderr.isatty():
        started = time.monotonic()
        yield None
        print(f"flexops: compiling {what} took {time.monotonic() - started:.1f} s", file=sys.stderr)  # whether or not it went well
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:  # rich is a convenience; a build does not need it
        print(f"flexops: building {what}", file=sys.stderr)
        yield None
        return
    columns = (TextColumn("flexops: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"building {what}", total=None)

        def report(finished: int, total: int, step: str) -> None:
            bar.update(task, completed=finished, total=total, description=step)

        yield report
