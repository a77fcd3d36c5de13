"""Judging where builds go and what they are for: cache, locks, libraries, architectures, jobs, and
the trials."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...settings import size_in_words
from ..facts import BuildTrial, CacheFact, Gpu, LibraryFact, LockFile, OpTrial
from ..finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from ...settings import Settings
    from ...toolchain.nvrtc import DeviceCompiler
    from ...toolchain.resources import Resources

LEAST_FREE = 2**30
STALE_SECONDS = 120.0
"""A lock without a visible holder that is older than this is reported as left over."""
MANY_ARCHITECTURES = 3
TOLERANCE = 1e-3
"""The most that an op on random numbers of size 1 may differ from its reference."""
_OWN_CACHE = "export FLEXOPS_CACHE_DIR=<a directory of your own>"


def cache(fact: CacheFact, *, needed: bool) -> Finding:
    """The build cache's directory. ``needed``: some op is neither compiled at install nor in the
    cache."""
    found = (
        f"{fact.root}, {fact.entries} entries, {size_in_words(fact.size)} of at most"
        f" {size_in_words(fact.max_size)}, {size_in_words(fact.free_bytes)} free"
    )
    if fact.problem:
        fix = f"{_OWN_CACHE}   # or FLEXOPS_CACHE_SHARED=1 if you trust who owns it"
        return fail(
            "cache", fact.problem, "your own directory, which no other user can write to", fix
        )
    if fact.noexec:
        found = f"{fact.root} is on a file system mounted noexec: no library in it can be loaded"
        return fail("cache", found, "a file system that allows execution", _OWN_CACHE)
    if fact.unwritable:
        judge = fail if needed else warn
        return judge(
            "cache",
            fact.unwritable,
            "a directory that can be written to, for what has to be compiled",
            _OWN_CACHE,
        )
    if fact.free_bytes < LEAST_FREE:
        return warn(
            "cache",
            found,
            f"{size_in_words(LEAST_FREE)} free",
            "flexops cache prune --max-size 500M",
        )
    return ok(
        "cache",
        (
            found
            if fact.exists
            else f"{fact.root} (made at the first build), {size_in_words(fact.free_bytes)} free"
        ),
    )


def quarantine(fact: CacheFact) -> Finding:
    if fact.quarantined:
        return warn(
            "cache-damage",
            f"damaged entries that were put aside: {fact.quarantined}",
            "none; a disk or a copy that went wrong",
            "flexops cache clear",
        )
    return ok("cache-damage", "no damaged entries")


def stale_locks(locks: Iterable[LockFile]) -> Finding:
    """Left-over lock files of torch's cpp_extension, which make its next build wait for ever."""
    stale = [lock.path for lock in locks if not lock.held and lock.age_seconds > STALE_SECONDS]
    if stale:
        found = (
            f"{len(stale)} left over by builds that died:"
            f" {', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}"
        )
        return warn(
            "torch-locks",
            found,
            "none: torch's cpp_extension waits for them for ever (flexops does not)",
            f"rm {shlex.join(stale)}",
        )
    return ok("torch-locks", "no left-over lock of torch's cpp_extension")


def libraries(facts: Sequence[LibraryFact], ops: Sequence[str], *, jit: bool) -> Iterator[Finding]:
    """The libraries that are compiled already, at install or into the cache."""
    refused = [one for one in facts if one.refusal and one.origin == "aot"]
    for one in refused:
        yield warn(
            "libraries",
            f"{one.op}-{one.device}: {one.refusal}",
            "a library that fits this torch and GPU",
            one.fix or "flexops build",
        )
    usable = [one for one in facts if not one.refusal]
    if not usable and not jit:
        yield warn(
            "libraries",
            "none, and FLEXOPS_JIT=0 rules out compiling",
            "compiled operators",
            "flexops build",
        )
    elif not refused:
        names = sorted({f"{one.op}-{one.device}" for one in usable})
        origin = sorted(
            {"compiled at install" if one.origin == "aot" else "in the cache" for one in usable}
        )
        yield ok(
            "libraries",
            (
                f"{', '.join(names)} ({' and '.join(origin)})"
                if names
                else f"none yet; {', '.join(ops)} are compiled at first use"
            ),
        )


def architectures(
    chosen: Settings,
    compiler: DeviceCompiler | None,
    gpus: Sequence[Gpu],
    *,
    builds: bool,
    suggested: str = "",
) -> Finding:
    """What ``TORCH_CUDA_ARCH_LIST`` says, against the GPU and what the device compiler can emit.

    Args:
        builds: sources for GPUs may be built here, flexops' or anybody's: torch is built for CUDA,
            and there is a C++ compiler.
        suggested: the architectures to propose where there is no GPU.
    """
    from ...compute_capability import ComputeCapability, runs_on
    from ...errors import FlexopsError
    from ...toolchain.architectures import resolve
    from ...toolchain.compat import rules

    here = [ComputeCapability.parse(one.capability) for one in gpus if one.vendor == "nvidia"]
    asked = chosen.arch_list
    if compiler is None:
        return _without_compiler(asked, here)
    try:
        choice = resolve(asked, compiler.version, detected=here, known=rules())
    except FlexopsError as error:
        return fail(
            "architectures",
            f"TORCH_CUDA_ARCH_LIST={asked}: {error.what}",
            error.required,
            error.fix,
        )
    compiled = ";".join(map(str, choice.architectures))
    named = ";".join(sorted({str(one) for one in here})) or suggested or "9.0"
    exact = f'export TORCH_CUDA_ARCH_LIST="{named}"'
    if asked is None and not here:
        if not builds:
            return ok(
                "architectures",
                f"not set and no GPU here; a build for GPUs would be for {compiled}",
            )
        found = f"TORCH_CUDA_ARCH_LIST is not set and no GPU is here: builds are for {compiled}"
        required = (
            "the GPUs that this will run on: fewer compile faster, and torch's own cpp_extension"
            " stops with an IndexError here"
        )
        return warn("architectures", found, required, f"{exact}   # the capability of your GPU")
    if asked is None:
        return ok("architectures", f"{compiled}, the GPU's own" + _notes(choice.notes))
    if uncovered := sorted({str(one) for one in here if not runs_on(choice.architectures, one)}):
        judge = fail if len(uncovered) == len(set(here)) else warn
        found = f"TORCH_CUDA_ARCH_LIST={asked}: no code for the GPU here ({', '.join(uncovered)})"
        return judge("architectures", found, "the GPU's capability in the list", exact)
    if choice.notes:
        return warn(
            "architectures",
            f"TORCH_CUDA_ARCH_LIST={asked}: {'; '.join(choice.notes)}",
            f"architectures that {compiler} can emit",
            exact,
        )
    if here and len(choice.architectures) > max(MANY_ARCHITECTURES, len(set(here))):
        found = (
            f"TORCH_CUDA_ARCH_LIST={asked}: {len(choice.architectures)} architectures, the GPUs"
            f" here have {len(set(here))}"
        )
        return warn(
            "architectures",
            found,
            "only the GPU's own while developing: each one adds its compile time",
            exact,
        )
    return ok(
        "architectures",
        f"TORCH_CUDA_ARCH_LIST={asked}" + (", which covers the GPU" if here else ""),
    )


def _notes(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def _without_compiler(asked: str | None, here: Sequence[object]) -> Finding:
    from ...compute_capability import parse_arch_list
    from ...errors import ArchitectureError

    if asked is None:
        return ok(
            "architectures",
            "not set; there is no NVRTC to compile with"
            + (", the GPU's own would be taken" if here else ""),
        )
    try:
        parse_arch_list(asked, native=list, supported=[])
    except ArchitectureError as error:
        if "not understood" in error.what:
            return warn(
                "architectures",
                f"TORCH_CUDA_ARCH_LIST={asked}: {error.what}",
                error.required,
                error.fix,
            )
    return ok("architectures", f"TORCH_CUDA_ARCH_LIST={asked}; there is no NVRTC to compile with")


def jobs(chosen: Settings, resources: Resources) -> Finding:
    """``MAX_JOBS`` against processors and memory. flexops never runs more than memory holds;
    torch's cpp_extension does what it says."""
    from ...build.plan.plan import TORCH_HEADER_STEP_BYTES

    machine = f"{resources.cpus} processors, {size_in_words(resources.memory_bytes)} free"
    holds = (
        max(1, resources.memory_bytes // TORCH_HEADER_STEP_BYTES)
        if resources.memory_bytes
        else resources.cpus
    )
    best = max(1, min(resources.cpus, holds))
    if chosen.max_jobs is None:
        return ok("jobs", f"MAX_JOBS is not set: as many compilers as {machine} allow")
    found = f"MAX_JOBS={chosen.max_jobs} on {machine}"
    if resources.memory_bytes and chosen.max_jobs > holds and chosen.max_jobs > 1:
        need = chosen.max_jobs * TORCH_HEADER_STEP_BYTES
        return warn(
            "jobs",
            found,
            f"memory for all of them: {size_in_words(need)} with torch's headers",
            f"export MAX_JOBS={best}",
        )
    if chosen.max_jobs > resources.cpus:
        return warn("jobs", found, "no more jobs than processors", f"export MAX_JOBS={best}")
    threads = chosen.nvcc_threads or 1
    if threads * chosen.max_jobs > 2 * resources.cpus:
        return warn(
            "jobs",
            f"{found}, NVCC_THREADS={threads}",
            "jobs times nvcc threads within the processors",
            "unset NVCC_THREADS",
        )
    return ok("jobs", found)


def build_trial(fact: BuildTrial) -> Finding:
    """A small op, built from nothing and loaded again."""
    name = f"build-{fact.device}"
    if fact.skipped:
        return ok(name, f"not tried: {fact.skipped}")
    target = f" for {';'.join(fact.architectures)}" if fact.architectures else ""
    if fact.error and fact.build_seconds is None:
        return fail(
            name,
            f"a small op cannot be built: {fact.error}",
            "a build that works",
            fact.fix or "FLEXOPS_LOG=debug flexops build",
        )
    built = f"a small op{target} built in {fact.build_seconds:.2f} s"
    if fact.error or fact.load_seconds is None:
        return fail(
            name,
            f"{built}, but it cannot be loaded: {fact.error}",
            "a library that can be loaded",
            fact.fix or "flexops cache clear && flexops build",
        )
    text = f"{built}, loaded again in {fact.load_seconds * 1e3:.1f} ms"
    if fact.max_error is None:
        return ok(name, f"{text}; not run: no GPU is here" if fact.device == "cuda" else text)
    if not fact.max_error <= TOLERANCE:
        fix = "FLEXOPS_LOG=debug flexops build   # and please report it with this output"
        return fail(
            name, f"{text}, but its result is off by {fact.max_error:g}", "the right result", fix
        )
    return ok(name, f"{text}, right result")


def unregistered(found: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Libraries that nothing here looks at, because nothing says that they are there."""
    for distribution, package in found:
        said = (
            f"{distribution} is installed with kernels in {package}/csrc, and has no entry point:"
            " not tried here"
        )
        entry = f'[project.entry-points."flexops.libraries"] {package} = "{package}"'
        fix = f"add {entry} to its pyproject.toml, and install it again"
        yield warn("op-unregistered", said, "an entry point of the group flexops.libraries", fix)


def op_trial(fact: OpTrial, fallback: str) -> Finding:
    """One op on one device. ``fallback``: what FLEXOPS_FALLBACK says."""
    name = f"op-{fact.name}-{fact.device.replace(':', '-')}"
    if fact.error:
        return fail(
            name,
            "; ".join(filter(None, (fact.error, fact.reason))),
            "a run to the end",
            fact.fix or "flexops cache clear && flexops build",
        )
    error = (
        "not compared"
        if fact.max_error is None
        else f"differs from its reference by {fact.max_error:.2g}"
    )
    if fact.max_error is not None and not fact.max_error <= TOLERANCE:
        return fail(
            name,
            f"{fact.backend} kernel {error}",
            f"at most {TOLERANCE:g}",
            "FLEXOPS_JIT=0 flexops doctor   # and report it with both outputs",
        )
    if fact.backend == "reference":
        judge = fail if fallback == "forbid" else warn
        return judge(
            name,
            f"runs as plain PyTorch: {fact.reason}",
            "a native kernel",
            fact.fix or "flexops build",
        )
    backend = _BACKENDS.get(fact.backend, fact.backend)
    return ok(
        name,
        f"{backend}, {error}" + (f" ({fact.reason})" if fact.reason not in ("", backend) else ""),
    )


_BACKENDS = {"aot": "compiled at install", "jit": "compiled here"}
