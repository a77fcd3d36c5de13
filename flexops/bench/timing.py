"""Timing calls on a device: interleaved contenders, medians, and the copy bandwidth to hold them against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""How much a copy reads for the bandwidth figure: many times what caches hold."""


def medians(contenders: Mapping[str, Callable[[], object]], device: str, *, rounds: int = 30, budget: float = 20.0) -> dict[str, float]:
    """Median seconds of one call of each contender, after warming each up.

    The contenders take turns, so that a machine whose speed drifts treats them alike. On CUDA a call is timed by events on the device, from an idle
    stream, so host work that the device waits for counts. ``budget`` bounds the whole, in seconds; there are at least five rounds.
    """
    timer = _cuda_seconds if device == "cuda" else _host_seconds
    for call in contenders.values():
        timer(call)
        timer(call)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    started = time.perf_counter()
    for done in range(rounds):
        if done >= 5 and time.perf_counter() - started > budget:
            break
        for name, call in contenders.items():
            samples[name].append(timer(call))
    return {name: statistics.median(values) for name, values in samples.items()}


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a large copy moves, each byte read and each written counted."""
    source = torch.randint(0, 255, (COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = medians({"copy": lambda: target.copy_(source)}, device)["copy"]
    return 2 * source.numel() / seconds


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
