"""Timing calls on a device: interleaved contenders, medians, and the copy bandwidth to hold them
against."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from .._torch import keep_gpu_busy

Call = Callable[[], object]
Contenders = Mapping[str, Call]
Measure = Literal["device", "queued", "call", "graph"]

COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""How much a copy reads for the bandwidth figure: many times what caches hold."""

_LEAST_ROUNDS = 3
_LEAST_CALLS, _MOST_CALLS, _TURN_SECONDS = 3, 20, 2e-3
_LONGEST_HEAD_START, _CYCLES = 0.02, 2e9  # seconds; of a GPU's clock in a second, about


def warm_up(call: Call, device: str) -> float:
    """Call, and call again and again unless it takes long, so that what is made or compiled once is
    there; seconds of the first call."""
    started = time.perf_counter()
    call()
    _wait(device)
    seconds = time.perf_counter() - started
    for _ in range(3 if seconds < 0.3 else 0):
        call()
    _wait(device)
    return seconds


def medians(
    contenders: Contenders, device: str, *, ahead: bool = False, budget: float = 1.5
) -> dict[str, float]:
    """Median seconds of one call of each contender, over up to 30 rounds (15 on CUDA).

    The contenders take turns, in an order drawn anew in every round, so that a machine whose speed
    drifts treats them alike. ``budget`` bounds the whole, in seconds: who has used up an equal
    share of it takes no more turns after the third.

    On CUDA, a turn is a number of calls queued without waiting, as a training loop queues them,
    between two events on the device: host work counts where the device has to wait for it. With
    ``ahead`` it never has to, because the host gets a head start, as it has in a training loop that
    is not bound by it. An untimed call comes first, because a call inherits a cache full of what
    its predecessor wrote and has not yet reached memory: writing that back takes as long as a tenth
    of a call, and should be paid by who wrote it.
    """
    turn, rounds = (
        (functools.partial(_device_turn, ahead=ahead), 15) if device == "cuda" else (_host_turn, 30)
    )
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0)
    used = dict.fromkeys(contenders, 0.0)
    for number in range(rounds):
        order = [
            name
            for name in order
            if number < _LEAST_ROUNDS or used[name] < budget / len(contenders)
        ]
        shuffle.shuffle(order)
        for name in order:
            started = time.perf_counter()
            samples[name].append(turn(contenders[name]))
            used[name] += time.perf_counter() - started
    return {name: statistics.median(values) for name, values in samples.items()}


def per_call(contenders: Contenders, device: str, *, calls: int = 50) -> dict[str, float]:
    """Median seconds of a call among ``calls`` in a row, host and device together: what a loop of
    small calls costs."""

    def many(call: Call) -> Call:
        def repeat() -> None:
            for _ in range(calls):
                call()
            _wait(device)

        return repeat

    seconds = medians({name: many(call) for name, call in contenders.items()}, "cpu")
    return {name: value / calls for name, value in seconds.items()}


def in_a_graph(contenders: Contenders, device: str, *, calls: int = 20) -> dict[str, float]:
    """Median seconds of a call among ``calls`` captured in one CUDA graph: what the device alone
    takes."""
    graphs: dict[str, Call] = {}
    for name, call in contenders.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graphs[name] = graph.replay
    for replay in graphs.values():
        replay()
    return {name: seconds / calls for name, seconds in medians(graphs, device).items()}


MEASURES: dict[Measure, Callable[[Contenders, str], dict[str, float]]] = {
    "device": functools.partial(medians, ahead=True),
    "queued": medians,
    "call": per_call,
    "graph": in_a_graph,
}


def extra_memory(call: Call) -> int:
    """Bytes that torch's allocator holds at the worst moment of a call on CUDA, beyond what it held
    before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a large copy moves, each byte read and each written counted."""
    source = torch.randint(0, 255, (COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = {"copy": lambda: target.copy_(source)}
    warm_up(copy["copy"], device)
    return 2 * source.numel() / medians(copy, device)["copy"]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _host_turn(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _device_turn(call: Call, ahead: bool) -> float:
    """Twenty calls, or as many as fit into two milliseconds, but three at least, because only then
    is the host as far ahead as it gets."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    queueing = time.perf_counter() - started
    torch.cuda.synchronize()
    calls = max(
        _LEAST_CALLS, min(_MOST_CALLS, int(_TURN_SECONDS / (time.perf_counter() - started)))
    )
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    if ahead:
        keep_gpu_busy(int(min(1.5 * (calls + 2) * queueing, _LONGEST_HEAD_START) * _CYCLES))
    call()
    events[0].record()
    for _ in range(calls):
        call()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1000 / calls
