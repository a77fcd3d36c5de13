"""What each tier of the cache gave: hits, misses, bytes and seconds, of this process, and of all
that used a cache directory.

Only what is not a warm start is written down (``<cache>/.stats.jsonl``, a line each): a warm start
writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any, Literal

from ... import _json, trust

Tier = Literal["installed", "cache", "remote", "ranks", "compiler", "published"]
TIERS: tuple[Tier, ...] = ("installed", "cache", "remote", "ranks", "compiler", "published")
FIELDS = ("hits", "misses", "bytes", "seconds")
_MOST_BYTES = 4 << 20
WRITTEN: tuple[Tier, ...] = ("remote", "ranks", "compiler", "published")
"""Those that are no warm start."""
Event = Literal["fallbacks", "remote_given_up"]
EVENTS: dict[Event, str] = {
    "fallbacks": "Operators and device types that run as plain PyTorch",
    "remote_given_up": "Pauses after a failure of the remote cache",
}

Totals = dict[str, dict[str, float]]

_lock = threading.Lock()


def _none() -> Totals:
    tiers: Totals = {tier: dict.fromkeys(FIELDS, 0) for tier in TIERS}
    return tiers | {event: {"count": 0} for event in EVENTS}


_totals = _none()


def count(tier: Tier, root: Path, *, hit: bool, size: int = 0, seconds: float = 0.0) -> None:
    """Count one look-up (of ``compiler``: one artifact made, or one that failed; of ``published``:
    one put into the remote cache)."""
    event = {"tier": tier, "hit": hit, "bytes": size, "seconds": round(seconds, 4)}
    with _lock:
        _add(_totals, event)
    if tier in WRITTEN:
        with contextlib.suppress(OSError):
            _append(root / ".stats.jsonl", json.dumps(event))


def count_event(event: Event, root: Path, *, make: bool = False) -> None:
    """Count what is no look-up. ``make``: the cache's directory, if it is missing."""
    with _lock:
        _add(_totals, {"event": event})
    with contextlib.suppress(OSError):
        if make:
            trust.make_directory(str(root))
        _append(root / ".stats.jsonl", json.dumps({"event": event}))


def cache_stats() -> Totals:
    """What this process got from where: for each tier of the cache ``hits``, ``misses``, ``bytes``
    and ``seconds``.

    ``fallbacks`` and ``remote_given_up`` have a ``count``: how often an operator runs as plain
    PyTorch, and how often the remote cache was not asked for a while after a failure.

    The tiers are in the order in which they are asked: ``installed``, ``cache``, ``remote``,
    ``ranks`` (another process of the job), ``compiler``; what was put into the remote cache is
    ``published``.
    """
    with _lock:
        return {tier: dict(row) for tier, row in _totals.items()}


def of_cache(root: Path) -> Totals:
    """The sums of what every process that used this cache has written down."""
    totals = _none()
    for name in (".stats.old.jsonl", ".stats.jsonl"):
        try:
            lines = _json.read(root / name).splitlines()
        except OSError:
            continue
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                _add(totals, _json.parse(line))
    return totals


def prometheus(totals: Totals) -> str:
    """The counters in Prometheus' text format, which OpenTelemetry collectors read, too."""
    described = {
        "hits": "Look-ups that found it",
        "misses": "Look-ups that did not",
        "bytes": "Bytes of what was found",
        "seconds": "Seconds spent",
    }
    lines = []
    for field, what in described.items():
        metric = f"flexops_cache_{field}_total"
        lines += [f"# HELP {metric} {what}, by tier of the cache.", f"# TYPE {metric} counter"]
        lines += [f'{metric}{{tier="{tier}"}} {totals[tier][field]:g}' for tier in TIERS]
    for event, what in EVENTS.items():
        metric = f"flexops_{event}_total"
        lines += [f"# HELP {metric} {what}.", f"# TYPE {metric} counter"]
        lines += [f"{metric} {totals[event]['count']:g}"]
    return "\n".join(lines) + "\n"


def _add(totals: Totals, event: dict[str, Any]) -> None:
    if "event" in event:
        totals[event["event"]]["count"] += 1
        return
    row = totals[event["tier"]]
    row["hits" if event["hit"] else "misses"] += 1
    row["bytes"] += event["bytes"]
    row["seconds"] += event["seconds"]


def _append(path: Path, line: str) -> None:
    """One write of less than a page: lines of several processes do not mix."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
    )
    try:
        os.write(descriptor, line.encode() + b"\n")
        large = os.fstat(descriptor).st_size > _MOST_BYTES
    finally:
        os.close(descriptor)
    if large:
        os.replace(path, path.with_name(".stats.old.jsonl"))
