"""The only policy in the code base: where an op's native library comes from, and what happens when
there is none.

    already loaded -> ahead-of-time library in the package -> cache -> JIT build -> reference

Every rejection on the way is kept as a reason; ``status()`` returns them. What builds is imported
only when something is built, because a warm start should cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ... import _fork, settings, toolchain
from ..._warning import warn
from ...errors import FlexopsError, NativeUnavailableError
from .. import load
from ..describe import catalog, layout
from ..describe.spec import DeviceType, OpSpec
from ..plan import cache_key
from ..store import counters
from ..store.cache import BuildCache, Entry, read_entry
from ..store.entry import cannot_run
from ..store.manifest import Rejection, judge
from ..store.opening import open_cache as open_cache
from .freshness import stale

if TYPE_CHECKING:
    from ...toolchain.model import TorchBuild
    from ..plan.plan import BuildPlan

DISPATCHED = ("cpu", "cuda")
Backend = Literal["aot", "jit", "reference", "unasked"]


class FallbackWarning(UserWarning):
    """An op runs as plain PyTorch because no native library could be had; the message says why and
    what to do."""


class OpStatus(NamedTuple):
    """Where one op family stands on one device type.

    Attributes:
        op: name in the catalogue.
        device: ``cpu`` or ``cuda``.
        backend: ``aot`` (compiled at install), ``jit`` (compiled at first use, or found in the
            cache), ``reference`` (plain PyTorch), or ``unasked`` while no call has needed it.
        reason: why it is not native, or how the library came to be.
        fix: what would make it native.
        path: the library that is loaded.
    """

    op: str
    device: str
    backend: Backend
    reason: str = ""
    fix: str = ""
    path: Path | None = None


_lock = _fork.Lock()
_INSTALLED, _CACHED = "compiled at install", "found in the cache"
_statuses: dict[tuple[str, str], OpStatus] = {}
_declined: dict[tuple[str, str, str], OpStatus] = {}
_lacking: set[str] = set()


def ensure(op: str, device: str) -> bool:
    """Load the native kernels of ``op`` for a device type if they are available; True if they are
    loaded.

    The work is done at the first call for an op and device type; the answer is kept for the life of
    the process.

    Raises:
        NativeUnavailableError: there are none, and ``FLEXOPS_FALLBACK=forbid``.
    """
    status = _statuses.get((op, device))
    if status is None:
        with _lock.held(), _fork.postponed():
            status = _statuses.get((op, device))
            if status is None:
                status = _statuses[op, device] = _resolve(catalog.find(op), device)
                _announce(status)
                if status.backend != "reference" and op in _lacking and load.when_lacking:
                    load.when_lacking(op)
    if status.backend == "reference" and settings.current().fallback == "forbid":
        raise NativeUnavailableError(
            f"flexops has no native {op} kernels for {device}, and FLEXOPS_FALLBACK=forbid",
            found=status.reason,
            fix=status.fix or "export FLEXOPS_FALLBACK=warn",
        )
    return status.backend != "reference"


def decline(op: str, device: str, reason: str, fix: str = "docs/attention.md") -> None:
    """Record that native kernels do not take what a call gave, and what computes it instead. Said
    once, as a fallback is.

    Raises:
        NativeUnavailableError: ``FLEXOPS_FALLBACK=forbid``.
    """
    if (op, device, reason) not in _declined:
        _announce(
            _declined.setdefault((op, device, reason), OpStatus(op, device, "reference", reason))
        )
    if settings.current().fallback == "forbid":
        raise NativeUnavailableError(
            f"flexops has no native {op} kernels for this, and FLEXOPS_FALLBACK=forbid",
            found=reason,
            fix=fix,
        )


def status() -> tuple[OpStatus, ...]:
    """Where every op stands on every device type, in catalogue order; then what some calls gave
    that native kernels do not take."""
    pairs = [(spec.name, device) for spec in catalog.specs() for device in spec.devices]
    extra = [pair for pair in _statuses if pair not in pairs]
    unasked = "no call has needed it yet"
    return tuple(
        _statuses.get(pair) or OpStatus(*pair, backend="unasked", reason=unasked)
        for pair in [*pairs, *extra]
    ) + tuple(_declined.values())


def _announce(status: OpStatus) -> None:
    if status.backend != "reference":
        return
    from ..store import election

    chosen = settings.current()  # FLEXOPS_JIT=0 makes no directory
    counters.count_event("fallbacks", chosen.cache_dir, make=chosen.jit)
    topic = f"fallback {status.op} {status.device} {status.reason}"
    if chosen.fallback == "warn" and election.speaks(topic):
        fix = f"\n  fix: {status.fix}" if status.fix else ""
        message = (
            f"flexops: {status.op} on {status.device} runs as plain PyTorch: {status.reason}{fix}\n"
            "  silence: FLEXOPS_FALLBACK=allow"
        )
        warn(message, FallbackWarning)


def _resolve(spec: OpSpec, device: str) -> OpStatus:
    if device not in spec.devices:
        return OpStatus(spec.name, device, "reference", *_no_sources(spec, device))
    torch = toolchain.torch_build()
    if device == "cuda" and not spec.hip and torch and torch.hip:
        return OpStatus(
            spec.name, device, "reference", f"flexops has no {spec.name} kernels for AMD GPUs"
        )
    refusals: list[Rejection] = []
    try:
        for entry, backend, reason in _sources(spec, device, refusals):
            if refusal := _open(entry, spec):
                refusals.append(refusal)
                continue
            tier: counters.Tier = "installed" if backend == "aot" else "cache"
            counters.count(
                tier,
                settings.current().cache_dir,
                hit=reason in (_INSTALLED, _CACHED),
                size=entry.manifest.size,
            )
            if settings.current().record and backend != "aot":
                from . import record

                record.library(spec.name, device)
            return OpStatus(spec.name, device, backend, reason, path=entry.library)
    except OSError as error:  # such as a source removed meanwhile: no reason to stop training
        refusals.append(Rejection(str(error), "flexops doctor"))
    # first the reason that the fix is for
    fixable = next((refusal for refusal in reversed(refusals) if refusal.fix), refusals[-1])
    return OpStatus(
        spec.name,
        device,
        "reference",
        "; ".join(dict.fromkeys(refusal.reason for refusal in (fixable, *refusals))),
        fixable.fix,
    )


def _no_sources(spec: OpSpec, device: str) -> tuple[str, str]:
    """Why a family has nothing for a device type, and its fix."""
    package = spec.project.package
    if package and not package.is_dir():
        reason = (
            f"{package} is no directory: a package imported from a zip archive has no sources to"
            " compile and no libraries that can be opened"
        )
        return reason, f"install {spec.project.name} as files (pip does)"
    if device not in DISPATCHED:
        return f"{spec.name} has no kernels for device type {device!r}", ""
    folder = spec.project.csrc / spec.family
    there = "there is no such folder" if not folder.is_dir() else "the folder has no such file"
    fix = f"write it, or correct family={spec.family!r} of its declaration" if package else ""
    return (
        (
            f"{spec.name} has no kernels for {device}: {folder}/{spec.family}_{device}.cpp or"
            f" another *_{device}.cpp: {there}"
        ),
        fix,
    )


def _sources(
    spec: OpSpec, device: DeviceType, refusals: list[Rejection]
) -> Iterator[tuple[Entry, Backend, str]]:
    """Libraries to try, best first; what is ruled out on the way goes to ``refusals``."""
    chosen = settings.current()
    torch = toolchain.torch_build()
    if torch is None:
        refusals.append(Rejection("torch was not found", "pip install torch"))
        return
    entry, refusal = _ahead_of_time(spec, device, torch)
    if entry:
        yield entry, "aot", _INSTALLED
    refusals.append(refusal or Rejection("no ahead-of-time library"))
    cache = open_cache(chosen)
    if problem := cache.problem():
        refusals.append(
            Rejection(f"cache: {problem}", "export FLEXOPS_CACHE_DIR=<a directory of your own>")
        )
    else:
        for entry in _intact(cache, _fitting(spec, device, torch, cache, refusals), refusals):
            yield entry, "jit", _CACHED
        for entry in _intact(cache, _remote(spec, device, torch, cache, refusals), refusals):
            yield entry, "jit", "found in the remote cache"
    if chosen.jit:
        yield from _compiled(spec, device, chosen, cache, refusals)
    else:
        refusals.append(
            Rejection(
                "no fitting library in the cache, and FLEXOPS_JIT=0 rules out compiling",
                f"flexops build {spec.name}",
            )
        )


def _intact(cache: BuildCache, entries: list[Entry], refusals: list[Rejection]) -> Iterator[Entry]:
    for entry in entries:
        verified, refusal = cache.verified(entry)
        if verified:
            yield verified
        elif refusal:
            refusals.append(refusal)


def _ahead_of_time(
    spec: OpSpec, device: DeviceType, torch: TorchBuild
) -> tuple[Entry | None, Rejection | None]:
    entry, damage = read_entry(spec.project.aot / f"{spec.name}-{device}")
    if entry is None:
        return None, damage
    if refusal := judge(entry.manifest, torch) or stale(entry, spec):
        return None, Rejection(f"ahead-of-time library: {refusal.reason}", refusal.fix)
    return entry, None


def _fitting(
    spec: OpSpec,
    device: DeviceType,
    torch: TorchBuild,
    cache: BuildCache,
    refusals: list[Rejection],
) -> list[Entry]:
    """Cache entries made from these very sources that can run here, by their manifests alone.

    This is not a look-up by key: that would need the compilers, which a machine that only runs need
    not have, and which take longer to find than all the rest. So an entry from another machine's
    compiler serves as well.
    """
    judged = [
        (entry, judge(entry.manifest, torch) or stale(entry, spec))
        for entry in cache.candidates(f"{spec.name}-{device}")
    ]
    fitting = [entry for entry, refusal in judged if refusal is None]
    if judged and not fitting and (newest := judged[0][1]):
        refusals.append(Rejection(f"cached library: {newest.reason}", newest.fix))
    return fitting


def _remote(
    spec: OpSpec,
    device: DeviceType,
    torch: TorchBuild,
    cache: BuildCache,
    refusals: list[Rejection],
) -> list[Entry]:
    """The library from the remote cache, made from these sources, if its
    manifest shows that it can run here."""
    if cache.remote is None:
        return []
    from ..store import source_index

    with _fork.allowed():
        entry = source_index.fetch(spec, device, torch, cache)
    if cache.remote.problem:
        refusals.append(Rejection(f"remote cache {cache.remote.name}: {cache.remote.problem}"))
    refusal = entry and (judge(entry.manifest, torch) or stale(entry, spec))
    if refusal:
        refusals.append(Rejection(f"library of the remote cache: {refusal.reason}", refusal.fix))
    return [entry] if entry and not refusal else []


def _compiled(
    spec: OpSpec,
    device: DeviceType,
    chosen: settings.Settings,
    cache: BuildCache,
    refusals: list[Rejection],
) -> Iterator[tuple[Entry, Backend, str]]:
    from ..compile import building, progress

    try:
        plan = local_plan(spec, device, chosen)
        with progress.shown(plan.name, chosen.log) as report, _fork.allowed():
            result = building.obtain([plan], cache, progress=report, debug=chosen.log == "debug")[0]
            entry = result.require()
            share(spec, device, cache, None if result.cached else entry)
    except FlexopsError as error:
        refusals.append(Rejection(error.reason, error.fix))
        return
    trouble = (
        f"; remote cache {cache.remote.name}: {cache.remote.problem}"
        if cache.remote and cache.remote.problem
        else ""
    )
    yield (
        entry,
        "jit",
        (
            "made by another process"
            if result.cached
            else f"compiled in {result.seconds:.1f} s{trouble}"
        ),
    )


def share(spec: OpSpec, device: DeviceType, cache: BuildCache, entry: Entry | None) -> None:
    """Let machines without a compiler find a library that was built now in the remote cache."""
    torch = toolchain.torch_build()
    if cache.remote and entry and torch:
        from ..store import source_index

        source_index.publish(spec, device, torch, cache, entry)


def local_plan(spec: OpSpec, device: DeviceType, chosen: settings.Settings) -> BuildPlan:
    """The plan for this machine: its toolchain, its processors and memory; for AMD GPUs also the
    architectures.

    Raises:
        ToolchainError, ArchitectureError: something that the build needs is missing or does not
            match.
    """
    from ..plan.plan import plan_op

    resources, torch = toolchain.resources.detect(), toolchain.torch_build()
    if device == "cuda" and torch and torch.hip:
        from ..plan.hip import plan_hip_op

        tools = toolchain.discover(chosen, device="cuda")
        gfx = toolchain.gpus.gfx_targets(chosen.rocm_arch_list)
        plan = plan_hip_op(
            spec,
            tools,
            csrc=layout.csrc_root(),
            resources=resources,
            max_jobs=chosen.max_jobs,
            architectures=gfx,
        )
    else:
        # no toolkit: a library for CUDA holds host code only
        tools = toolchain.discover(chosen, device="cpu")
        plan = plan_op(
            spec,
            device,
            tools,
            csrc=layout.csrc_root(),
            resources=resources,
            max_jobs=chosen.max_jobs,
        )
    return plan._replace(timeout=chosen.compile_timeout)


def _open(entry: Entry, spec: OpSpec) -> Rejection | None:
    """Open a library, if its kernels are available."""
    torch = toolchain.torch_build()
    # for AMD GPUs the kernels are in it
    asks = entry.manifest.device == "cuda" and not (torch and torch.hip)
    if asks and (refusal := _no_kernels(entry, spec)):
        return refusal
    try:
        open_library(entry.library, spec if asks else None, _headers(entry, spec))
    except (
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError: torch rejects what the library registers
        from ..compile.diagnose import load_trouble, with_cause

        trouble = load_trouble(with_cause(error))
        why = f"{trouble.cause}: {trouble.error}" if trouble else with_cause(error)
        return cannot_run(entry.library) or Rejection(
            f"{entry.library} cannot be opened: {why}", "flexops doctor"
        )
    return None


def _headers(entry: Entry, spec: OpSpec) -> tuple[tuple[str, str], ...]:
    """flexops' headers that a project's library was compiled with."""
    return (
        ()
        if spec.project.own
        else tuple(
            (name, digest)
            for name, digest in entry.manifest.files.items()
            if name.startswith("<csrc>/")
        )
    )


def open_library(
    library: Path, asks: OpSpec | None, made: tuple[tuple[str, str], ...] = ()
) -> None:
    """Open a library, whose operators torch then knows.

    Args:
        asks: of which family it is, if it asks for its kernels when they are launched.
        made: flexops' headers that it was compiled with, if today's may be others.
    """
    import torch

    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call, unused-ignore]
    if asks:
        from . import provider

        provider.attach(library, asks, made)


def _no_kernels(entry: Entry, spec: OpSpec) -> Rejection | None:
    """Why a library's kernels are not available for the GPUs here, neither compiled when they are
    launched nor compiled already."""
    capabilities = toolchain.local_capabilities()
    # it will not be called: a build for another machine, or a look at what was built
    if not capabilities:
        return None
    from . import provider

    if older := [one for one in capabilities if not spec.runs_on(one)]:
        return Rejection(
            f"{spec.name} kernels need GPUs of capability"
            f" {'.'.join(map(str, spec.least_capability))} or newer; one here has {older[0]}"
        )
    why = Rejection("FLEXOPS_JIT=0 rules out compiling kernels")
    made = _headers(entry, spec)
    today = {
        name: cache_key.file_state(layout.csrc_root() / name.partition(">/")[2]) for name, _ in made
    }
    if apart := provider.other_headers(spec, made, today):
        why = apart
    elif settings.current().jit:
        try:
            provider.compiler_for(settings.current(), capabilities)
            return None
        except FlexopsError as error:
            why = Rejection(error.reason, error.fix)
    # Where nothing can stand in for a kernel, one that is missing is an error in any case: at its
    # launch, if it is launched.
    refusal = provider.incomplete(
        entry.library, spec, capabilities, made, some=settings.current().fallback == "forbid"
    )
    if refusal:
        return Rejection(f"{refusal.reason}; {why.reason}", why.fix or refusal.fix)
    if provider.lacks_rare(entry.library, spec, capabilities, made):
        _lacking.add(spec.name)
    return None
