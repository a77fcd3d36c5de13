"""The processes that a process has started, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator


def of(parent: int) -> Iterator[tuple[int, int, float]]:
    """Its children: process id, process group, and the seconds that each has run."""
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            now = float(file.read().split()[0])
        processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except (OSError, ValueError):
        return
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                # the name before may hold anything
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == parent:
            yield process, int(fields[2]), now - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def below(parent: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = [process for process, _, _ in of(parent)]
    return [*found, *(process for child in found for process in below(child))]


def command(process: int) -> str:
    """How it was started, its arguments separated by blanks; empty if it has ended."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "surrogateescape")
    except OSError:
        return ""
