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

    The contenders take turns, so that a machine whose speed drifts treats them alike. On CUDA, events on the device time each call, and calls are
    queued without waiting, as a training loop queues them: host work counts where the device has to wait for it. ``budget`` bounds the whole, in
    seconds; there are at least five rounds.
    """
    measure = _device_rounds if device == "cuda" else _host_rounds
    for call in contenders.values():
        call()
        call()
    started = time.perf_counter()
    samples = measure(contenders, 5)
    left = min(rounds - 5, int((budget / max(time.perf_counter() - started, 1e-9) - 1) * 5))
    if left > 0:
        more = measure(contenders, left)
        samples = {name: values + more[name] for name, values in samples.items()}
    return {name: statistics.median(values) for name, values in samples.items()}


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a large copy moves, each byte read and each written counted."""
    source = torch.randint(0, 255, (COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = medians({"copy": lambda: target.copy_(source)}, device)["copy"]
    return 2 * source.numel() / seconds


def _host_rounds(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            started = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - started)
    return samples


def _device_rounds(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [float(start.elapsed_time(end)) / 1000 for start, end in pairs] for name, pairs in events.items()}
