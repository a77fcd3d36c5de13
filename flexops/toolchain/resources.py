"""How many processors and how much memory a build may use: what this process is allowed, not what
the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

from .probe import read_text

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number of pages
_V1_CPU_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


class Resources(NamedTuple):
    """What may be used now: processors (at least 1) and bytes of memory that are free (0 where that
    is not known)."""

    cpus: int
    memory_bytes: int


def detect(root: str = "", *, affinity: int | None = None) -> Resources:
    """From the affinity mask, the cgroup's quota and limit (v1 and v2, every level up to the root)
    and ``MemAvailable``.

    Args:
        root: prefixed to ``/proc`` and ``/sys``; empty on a real machine.
        affinity: number of processors this process may run on; asked of the system by default.
    """
    allowed = affinity or _affinity()
    quota = min(_quotas(root), default=math.inf)
    free = [amount for amount in (_available(root), *_headrooms(root)) if amount is not None]
    return Resources(
        max(1, min(allowed, math.ceil(quota) if quota < allowed else allowed)),
        max(0, min(free, default=0)),
    )


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available(root: str) -> int | None:
    for line in read_text(f"{root}/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _quotas(root: str) -> Iterator[float]:
    """CPU quotas, in processors, of every cgroup this process is in."""
    for directory in _v2_directories(root):
        words = read_text(f"{directory}/cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])
    for directory in _v1_directories(root, "cpu", _V1_CPU_MOUNTS):
        quota = _number(f"{directory}/cpu.cfs_quota_us")
        period = _number(f"{directory}/cpu.cfs_period_us")
        if quota and period and quota > 0:
            yield quota / period


def _headrooms(root: str) -> Iterator[int]:
    """Memory left below the limit of every cgroup this process is in. Page cache counts as free: it
    is given up under pressure."""
    for directory in _v2_directories(root):
        yield from _headroom(directory, "memory.max", "memory.current", "inactive_file")
    for directory in _v1_directories(root, "memory", ("memory",)):
        yield from _headroom(
            directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        )


def _headroom(directory: str, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    limit, usage = _number(f"{directory}/{limit_file}"), _number(f"{directory}/{usage_file}")
    if limit is None or usage is None or limit >= _UNLIMITED:
        return
    cached = next(
        (
            int(line.split()[1])
            for line in read_text(f"{directory}/memory.stat").splitlines()
            if line.startswith(f"{reclaimable} ")
        ),
        0,
    )
    yield max(0, limit - max(0, usage - cached))


def _v2_directories(root: str) -> Iterator[str]:
    path = next((path for controllers, path in _memberships(root) if controllers == ""), None)
    if path is not None:
        for mount in (f"{root}/sys/fs/cgroup", f"{root}/sys/fs/cgroup/unified"):
            yield from _upwards(mount, path)


def _v1_directories(root: str, controller: str, mounts: tuple[str, ...]) -> Iterator[str]:
    path = next(
        (path for controllers, path in _memberships(root) if controller in controllers.split(",")),
        None,
    )
    if path is not None:
        for mount in mounts:
            yield from _upwards(f"{root}/sys/fs/cgroup/{mount}", path)


def _memberships(root: str) -> Iterator[tuple[str, str]]:
    """(controllers, path) of each line of /proc/self/cgroup; v2 has no controllers there."""
    for line in read_text(f"{root}/proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[1], fields[2]


def _upwards(mount: str, path: str) -> Iterator[str]:
    """The cgroup's directory and all above it. In a container the path may be the host's, of which
    only the mount itself is seen."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for length in range(len(parts), -1, -1):
        yield "/".join([mount, *parts[:length]])


def _number(path: str) -> int | None:
    text = read_text(path).strip()
    try:
        return int(text)
    except ValueError:
        return None  # "max", or no such file
