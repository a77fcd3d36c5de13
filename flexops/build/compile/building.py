"""Plan in, artifact out: from the cache, or built and published. AOT, JIT and user extensions all
come through here."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import _json
from ...errors import CacheError, CompileError, FlexopsError
from ..plan import cache_key, edits, search
from ..plan.cache_key import Digests
from ..plan.plan import BuildPlan
from ..store import counters, election, objects
from ..store.cache import BuildCache, Entry, places_today, replace_file
from ..store.manifest import needed_versions
from . import ninja
from .device_code import KernelResult
from .diagnose import Diagnosis, diagnose
from .ninja import Progress

_LAUNCHER_FAILED = re.compile(r"^s?ccache: error: ", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What came of one plan: an entry, or the error that says why there is none.

    ``seconds`` is the time that the build took, 0.0 if the entry was already there (``cached``).
    ``kernels`` is the device code of a library for CUDA, where that was built too,
    ``architectures`` what it is for, and ``notes`` which of those that were asked for it could not
    be.
    """

    plan: BuildPlan
    entry: Entry | None = None
    error: FlexopsError | None = None
    seconds: float = 0.0
    cached: bool = False
    kernels: tuple[KernelResult, ...] = ()
    architectures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def require(self) -> Entry:
        """The entry; raises the error if there is none."""
        if self.entry is None or self.error:
            raise self.error or CompileError(f"{self.plan.name} could not be built")
        return self.entry


def obtain(
    plans: Sequence[BuildPlan],
    cache: BuildCache,
    *,
    progress: Progress | None = None,
    debug: bool = False,
) -> list[Result]:
    """The artifacts of the plans, in their order; those that are missing are built together.

    Another process building the same is waited for, and its failure is taken over rather than
    repeated.

    Raises:
        CacheError: the cache cannot be written. Failed compiles do not raise: they are in the
            results.
    """
    results = {
        plan.name: Result(plan, entry, cached=True)
        for plan in plans
        if (entry := cache.lookup(plan))
    }
    missing = sorted(
        (plan for plan in plans if plan.name not in results), key=lambda plan: plan.name
    )
    if missing:
        cache.require_writable()
        earlier = {plan.name: _failure(plan, cache) for plan in missing}
        with contextlib.ExitStack() as locks:
            # in one order everywhere, so that two processes never wait for each other
            for plan in missing:
                locks.enter_context(cache.compile_lock(f"{plan.name}-{_digest(plan)}"))
            for plan in missing:
                if entry := cache.lookup(plan):
                    results[plan.name] = Result(plan, entry, cached=True)
                elif error := _failure_since(earlier[plan.name], plan, cache):
                    results[plan.name] = Result(plan, error=error)
            todo = [plan for plan in missing if plan.name not in results]
            if todo:
                results |= {
                    result.plan.name: result for result in _make(todo, cache, progress, debug)
                }
    return [results[plan.name] for plan in plans]


def _make(
    plans: list[BuildPlan], cache: BuildCache, progress: Progress | None, debug: bool
) -> list[Result]:
    """What this machine lacks: from the remote cache, from another one that makes it now, or
    built here."""
    results = [Result(plan, entry, cached=True) for plan in plans if (entry := cache.fetch(plan))]
    there = {result.plan.name for result in results}
    ballot = election.between(cache)
    turns = [(plan, _turn(plan, cache, ballot)) for plan in plans if plan.name not in there]
    results += [
        Result(plan, turn, cached=True) for plan, turn in turns if not isinstance(turn, str)
    ]
    if mine := [plan for plan, turn in turns if turn == "make"]:
        results += _build_for_all(mine, cache, ballot, progress, debug)
    for plan in [plan for plan, turn in turns if turn == "wait"]:
        assert ballot is not None
        entry = ballot.receive(
            plan.name,
            _digest(plan),
            functools.partial(cache.lookup, plan),
            functools.partial(cache.fetch, plan),
        )
        results += (
            [Result(plan, entry, cached=True)]
            if entry
            else _build_for_all([plan], cache, ballot, progress, debug)
        )
    return results


def _turn(
    plan: BuildPlan, cache: BuildCache, ballot: election.Election | None
) -> Entry | election.Turn:
    return (
        ballot.begin(plan.name, _digest(plan), functools.partial(cache.fetch, plan))
        if ballot
        else "make"
    )


def _digest(plan: BuildPlan) -> str:
    return cache_key.base_key(plan, cache_key.source_digests(plan))


def _build_for_all(
    plans: list[BuildPlan],
    cache: BuildCache,
    ballot: election.Election | None,
    progress: Progress | None,
    debug: bool,
) -> list[Result]:
    """Build, and let other machines have it."""
    digests = {plan.name: _digest(plan) for plan in plans}
    made: dict[str, Entry] = {}
    try:
        cache.require_signer()
        results = _build(plans, cache, progress, debug)
        made = {result.plan.name: result.entry for result in results if result.entry}
        for result in results:
            counters.count(
                "compiler",
                cache.root,
                hit=result.entry is not None,
                size=result.entry.size if result.entry else 0,
                seconds=result.seconds,
            )
            if result.entry and cache.remote:
                cache.remote.publish(cache, result.entry)
        return results
    finally:
        for name, digest in digests.items() if ballot else ():
            ballot.deliver(name, digest, made.get(name))  # type: ignore[union-attr]


class _Unclear(Exception):
    """One of these headers, which a build has read, may have been another file while it did."""

    def __init__(self, headers: list[str]) -> None:
        super().__init__()
        self.headers = headers


def _build(
    plans: list[BuildPlan], cache: BuildCache, progress: Progress | None, debug: bool,
    known: Sequence[str] | None = None,
) -> list[Result]:  # fmt: skip
    """Build; what then is not known to be of today's files once more, with all of them known."""
    before = edits.Before(plans, known or ())
    sources = {plan.name: cache_key.source_digests(plan) for plan in plans}
    started = time.monotonic()
    unclear: dict[str, list[str]] = {}
    try:
        with cache.workspace() as workspace:
            keepers = [plan for plan in plans if plan.keep_objects]
            restored = {
                plan.name: objects.restore(plan, workspace / plan.name, cache) for plan in keepers
            }
            outcome = _compile(plans, workspace, progress, debug)
            seconds = time.monotonic() - started
            for plan in keepers:
                folder, mine = workspace / plan.name, sources[plan.name]
                objects.keep(plan, folder, cache, mine, before, restored[plan.name])
            results = []
            for plan in plans:
                directory = workspace / plan.name
                if outcome.failed(plan) or not (directory / plan.library).exists():
                    error = _record_failure(
                        plan, directory, cache, outcome, sources[plan.name], before
                    )
                    results.append(Result(plan, error=error))
                    continue
                try:
                    entry = _publish(plan, directory, cache, sources[plan.name], before)
                    results.append(Result(plan, entry, seconds=seconds))
                except _Unclear as reason:
                    if known is not None:
                        results.append(Result(plan, error=_changed(plan)))
                    else:
                        unclear[plan.name] = reason.headers
                except FlexopsError as error:
                    results.append(Result(plan, error=error))
    except OSError as error:
        raise CacheError(
            "the build's files cannot be written",
            found=f"{error.filename or cache.root}: {error.strerror}",
            fix="free some space, or set FLEXOPS_CACHE_DIR",
        ) from error
    # what was built is there; that something old cannot be removed is no reason to withhold it
    with contextlib.suppress(CacheError):
        cache.prune(keep=tuple(result.entry.directory for result in results if result.entry))
    if unclear:
        again = [plan for plan in plans if plan.name in unclear]
        every = [header for headers in unclear.values() for header in headers]
        results += _build(again, cache, progress, debug, every)
    return results


def _compile(
    plans: list[BuildPlan], workspace: Path, progress: Progress | None, debug: bool
) -> ninja.Outcome:
    outcome = ninja.run(plans, workspace, progress=progress, debug=debug)
    if outcome.returncode and _LAUNCHER_FAILED.search(outcome.output):
        # Its own directory cannot be written, say. It is there to save time, not to cost the build.
        outcome = ninja.run(
            [plan._replace(launcher="") for plan in plans],
            workspace,
            progress=progress,
            debug=debug,
        )
    return outcome


def _publish(
    plan: BuildPlan, directory: Path, cache: BuildCache, sources: Digests, before: edits.Before
) -> Entry:
    """Raises ``CompileError`` or ``_Unclear`` where the code may be of other files than today's."""
    reached = cache_key.reached_headers(plan, ninja.depfiles(plan, directory))
    try:
        headers = search.header_states(plan, directory, reached)
        same = cache_key.source_digests(plan) == sources
    except FileNotFoundError:
        raise _changed(plan) from None
    # What changed while the compiler ran would file the old code under the new content's key.
    seen = places_today(plan, search.present(headers))
    verdict = before.verdict([*map(str, plan.sources), *seen]) if same else "changed"
    if verdict == "changed":
        raise _changed(plan)
    if verdict == "unclear":
        raise _Unclear(seen)
    glibc, glibcxx = needed_versions(directory / plan.library)
    manifest = objects.manifest_of(plan, directory, sources, headers)._replace(
        cuda_version=plan.cuda_version,
        architectures=plan.architectures,
        isa_levels=plan.isa_levels,
        glibc=glibc,
        glibcxx=glibcxx,
    )
    for item in directory.iterdir():  # objects and dependency files have served their purpose
        if item.suffix in (".o", ".d"):
            item.unlink()
    return cache.publish(directory, manifest, headers)


def _changed(plan: BuildPlan) -> CompileError:
    what = f"the sources of {plan.name} changed while they were being compiled"
    return CompileError(what, fix="run it again")


def _failure_file(plan: BuildPlan, cache: BuildCache, sources: Digests) -> Path:
    return cache.root / plan.name / f"{cache_key.base_key(plan, sources)}.failure.json"


def _record_failure(
    plan: BuildPlan, directory: Path, cache: BuildCache, outcome: ninja.Outcome, sources: Digests,
    before: edits.Before,
) -> CompileError:  # fmt: skip
    own = _own_output(plan, outcome.output)
    found = _launcher_trouble(plan, directory, own) or diagnose(own)
    log = cache.root / plan.name / "failed-build.log"
    record = {
        "what": f"{plan.name} could not be built: {found.cause}",
        "found": found.error,
        "fix": found.fix,
        "log": str(log),
    }
    # on a full disk the diagnosis itself must still come through
    with contextlib.suppress(OSError):
        cache.make_name(plan.name)
        replace_file(log, own)
        if outcome.complete:  # a build that was killed says nothing about the next
            depfiles = [path for path in ninja.depfiles(plan, directory) if path.exists()]
            headers = search.header_states(
                plan, directory, cache_key.reached_headers(plan, depfiles)
            )
            if before.verdict(places_today(plan, search.present(headers))) == "same":
                told_to_others = {**record, "number": os.urandom(8).hex(), "headers": headers}
                replace_file(_failure_file(plan, cache, sources), json.dumps(told_to_others))
    return _error(record)


def _launcher_trouble(plan: BuildPlan, directory: Path, output: str) -> Diagnosis | None:
    if not plan.texts:
        return None
    from .launcher_mismatch import explain

    # the header first: a binding may have declarations in macros
    return explain(output, "\n".join(text for _, text in reversed(plan.texts)), directory)


def _failure(plan: BuildPlan, cache: BuildCache) -> dict[str, Any]:
    """The last build of these sources that failed; empty if there is none on record."""
    try:
        record = _json.load(_failure_file(plan, cache, cache_key.source_digests(plan)))
    except (OSError, ValueError):
        return {}
    texts = ("what", "found", "fix", "log", "number")
    whole = (
        isinstance(record, dict)
        and isinstance(record.get("headers"), dict)
        and all(isinstance(record.get(name), str) for name in texts)
    )
    return record if whole else {}


def _failure_since(
    earlier: dict[str, Any], plan: BuildPlan, cache: BuildCache
) -> CompileError | None:
    """The failure of a build that ended while this process waited for it, with the headers as they
    are now. Told by its number: no clock is asked."""
    record = _failure(plan, cache)
    if not record or record["number"] == earlier.get("number"):
        return None
    try:
        today = [cache_key.file_state(path) for path in places_today(plan, record["headers"])]
    except OSError:
        return None
    return _error(record) if today == list(record["headers"].values()) else None


def _error(record: dict[str, Any]) -> CompileError:
    return CompileError(
        record["what"], found=record["found"], fix=record["fix"], log=Path(record["log"])
    )


def _own_output(plan: BuildPlan, output: str) -> str:
    """What ninja said of this plan's steps, when several plans were built together."""
    parts = output.split("FAILED: ")
    own = [part for part in parts[1:] if f"{plan.name}/" in part.split("\n", 1)[0]]
    return "".join(f"FAILED: {part}" for part in own) or output
