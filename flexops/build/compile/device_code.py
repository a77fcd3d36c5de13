"""Device code: one kernel for one architecture is one artifact, a cubin (or PTX), compiled by NVRTC
and kept in the cache as libraries are."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...compute_capability import Architecture, ComputeCapability
from ...errors import CompileError, FlexopsError
from ..plan import cache_key
from ..plan.kernel_names import HOPPER, ahead
from ..plan.kernel_plan import KernelPlan, place_of
from ..store import counters
from ..store.cache import BuildCache, Entry
from ..store.manifest import Manifest, file_crc32

if TYPE_CHECKING:
    from ...toolchain.resources import Resources
    from ..store import election
    from .kernel_compiler import Worker

MIB = 2**20
STEP_BYTES = 600 * MIB
"""A bound on what one NVRTC takes: three times what the largest kernel of ours took."""


class KernelResult(NamedTuple):
    """What came of one plan; as ``builder.Result``."""

    plan: KernelPlan
    entry: Entry | None = None
    error: FlexopsError | None = None
    seconds: float = 0.0
    cached: bool = False

    def require(self) -> Entry:
        if self.entry is None:
            raise self.error or CompileError(f"{self.plan.expression} could not be compiled")
        return self.entry


def obtain(
    plans: Sequence[KernelPlan],
    cache: BuildCache,
    *,
    jobs: int = 1,
    time_limit: float = 0.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[KernelResult]:
    """The code of the plans, in their order; what is missing is compiled, ``jobs`` at a time.

    Another process compiling the same is waited for.

    Args:
        time_limit: seconds for one kernel; 0 for none.

    Raises:
        CacheError: the cache cannot be written. Failed compiles are in the results.
    """
    found = [cache.read(plan.name, plan.key) for plan in plans]
    results: list[KernelResult | None] = [
        KernelResult(plan, entry, cached=True) if entry else None
        for plan, entry in zip(plans, found, strict=True)
    ]
    todo = [number for number, result in enumerate(results) if result is None]
    if todo:
        cache.require_writable()
        _Pool(plans, results, todo, cache, time_limit, progress).run(min(jobs, len(todo)))
        with contextlib.suppress(FlexopsError):
            cache.prune(
                keep=tuple(result.entry.directory for result in results if result and result.entry)
            )
    return [result or KernelResult(plan) for plan, result in zip(plans, results, strict=True)]


def kept_for(cache: BuildCache, family: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The architectures for which a cache has the code of all these kernels, by the CUDA version
    that made it. Looks at manifests only."""
    wanted = set(names)
    hopper = str(HOPPER)
    made: dict[tuple[str, str], set[str]] = {}
    for entry in cache.entries((f"{family}-sm_", f"{family}-compute_")):
        known = entry.manifest
        if known.kernel in wanted:
            made.setdefault((known.cuda_version, known.architectures[0]), set()).add(known.kernel)
    complete: dict[str, list[str]] = {}
    for (version, architecture), kernels in sorted(made.items()):
        one = Architecture(
            ComputeCapability.parse(architecture), sass=not architecture.startswith("compute_")
        )
        there = kernels | (
            made.get((version, hopper), set()) if one.capability.base == HOPPER.base else set()
        )
        if set(ahead(names, one)) <= there:
            complete.setdefault(version, []).append(architecture)
    return complete


def choose_jobs(resources: Resources, max_jobs: int | None) -> int:
    """How many compilers may run at once: bounded by processors, memory and the user."""
    return max(
        1, min(resources.cpus, resources.memory_bytes // STEP_BYTES, max_jobs or resources.cpus)
    )


class _Pool:
    """Threads that share a queue of plans; each has a compiler of its own."""

    def __init__(
        self,
        plans: Sequence[KernelPlan],
        results: list[KernelResult | None],
        todo: list[int],
        cache: BuildCache,
        time_limit: float,
        progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self.plans = plans
        self.results = results
        self.cache = cache
        self.time_limit = time_limit
        self.progress = progress
        self.total, self.done = len(todo), 0
        from ..store import election
        from . import kernel_compiler  # a start that compiles nothing does without

        self.ballot, self.worker_for = election.between(cache), kernel_compiler.Worker
        self.queue: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        for number in todo:
            self.queue.put((number, False))
        self.stopped = False
        self.failure: BaseException | None = None
        self.workers: list[Worker] = []

    def run(self, jobs: int) -> None:
        if jobs == 1:
            self._one_thread()
        else:
            self._in_threads(jobs)
        if self.failure:
            raise self.failure

    def _in_threads(self, jobs: int) -> None:
        threads = [threading.Thread(target=self._one_thread, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # in naps, so that Ctrl-C is heard
        except BaseException:
            self.stopped = True
            for worker in self.workers:
                worker.stop()
            raise

    def _one_thread(self) -> None:
        worker: Worker | None = None
        try:
            while not self.stopped:
                try:
                    number, waits = self.queue.get_nowait()
                except queue.Empty:
                    return
                plan = self.plans[number]
                if worker is None or worker.compiler != plan.compiler or not worker.alive:
                    worker = self.worker_for(plan.compiler)
                    self.workers.append(worker)
                result = _single_flight(
                    plan, self.cache, worker, self.time_limit, self.ballot, waits
                )
                if result is None:  # another machine makes it: what no process makes comes first
                    self.queue.put((number, True))
                    continue
                self.results[number] = result
                self.done += 1
                if self.progress:
                    self.progress(self.done, self.total, plan.expression)
        except BaseException as error:
            self.failure, self.stopped = error, True
        finally:
            if worker:
                worker.stop()


def _single_flight(
    plan: KernelPlan,
    cache: BuildCache,
    worker: Worker,
    time_limit: float,
    ballot: election.Election | None,
    waits: bool,
) -> KernelResult | None:
    """One kernel's code; None if another machine makes it and this one is not to wait for that
    yet."""
    started = time.monotonic()
    remote = functools.partial(cache.fetch_key, plan.name, plan.key)
    with cache.compile_lock(f"{plan.name}-{plan.key}"):
        entry = cache.read(plan.name, plan.key)
        if entry is None and waits and ballot:
            entry = ballot.receive(
                plan.name, plan.key, functools.partial(cache.read, plan.name, plan.key), remote
            )
        elif entry is None:
            entry = remote()
            turn = ballot.begin(plan.name, plan.key, remote) if ballot and entry is None else entry
            if turn == "wait":
                return None
            entry = None if isinstance(turn, str) else turn
        if entry:
            return KernelResult(plan, entry, cached=True)
        try:
            cache.require_signer()
            with cache.workspace() as workspace:
                entry = _publish(plan, workspace / "kernel", cache, worker, time_limit)
            if cache.remote:
                cache.remote.publish(cache, entry)
        except CompileError as error:
            return KernelResult(plan, error=error)
        finally:
            counters.count(
                "compiler",
                cache.root,
                hit=entry is not None,
                size=entry.size if entry else 0,
                seconds=time.monotonic() - started,
            )
            if ballot:
                ballot.deliver(plan.name, plan.key, entry)
    return KernelResult(plan, entry, seconds=time.monotonic() - started)


def _compiled(
    plan: KernelPlan, code: Path, worker: Worker, time_limit: float
) -> tuple[str, dict[str, int]]:
    """Compile the headers that the plan is of; once more, if one may have been another for a
    time."""
    for _ in range(2):
        before = _stamps(plan)
        if any(before[name].digest != digest for name, digest in plan.files.items()):
            break
        made = worker.compile(plan, code, time_limit)
        if _stamps(plan) == before:
            return made
    what = f"the headers of {plan.expression} changed while it was being compiled"
    raise CompileError(what, fix="run it again")


def _stamps(plan: KernelPlan) -> dict[str, cache_key.FileStamp]:
    return {name: cache_key.file_stamp(place_of(name, plan.roots)) for name in plan.files}


def _publish(
    plan: KernelPlan, directory: Path, cache: BuildCache, worker: Worker, time_limit: float
) -> Entry:
    directory.mkdir()
    code = directory / plan.file_name
    symbol, resources = _compiled(plan, code, worker, time_limit)
    manifest = Manifest(
        name=plan.name,
        key=plan.key,
        base=plan.key,
        device="cuda",
        library=plan.file_name,
        size=code.stat().st_size,
        crc32=file_crc32(code),
        torch_abi="",
        cuda_version=plan.compiler.version.major_minor,
        architectures=(str(plan.architecture),),
        files=plan.files,
        kernel=plan.expression,
        symbol=symbol,
        compiler=str(plan.compiler),
        resources=resources,
    )
    return cache.store(directory, manifest)
