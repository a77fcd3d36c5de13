"""What happens when an extension is not in the cache. Imported only then: a warm start needs none
of it."""

from __future__ import annotations

import os
import re

from ... import toolchain
from ...errors import CompileError
from ...settings import Settings
from ...toolchain.model import Toolchain
from ...toolchain.resources import Resources
from ..describe.cpp_text import reaches_first
from ..plan import search
from ..plan.extension_plan import PythonBuild, Request, precompilable_flags, torch_identity
from ..plan.plan import BuildPlan, Step, choose_jobs, spare_threads
from ..store.cache import BuildCache
from . import building, pch
from .building import Result
from .ninja import Progress

# g++ frees memory as it goes, which takes a third of the time of a compile through torch's headers
# (measured: 28.7 s of processor time with, 19.5 s without, for 0.4 GB more). In kilobytes: below
# this it does not bother.
_HEAP_KILOBYTES = 2 * 2**20
# On two processors the making of a precompiled header beside a compile slowed that by a quarter and
# more (they share caches): there it comes after.
_SPARE_CPUS = 2
_PCH_TROUBLE = re.compile(r"\bPCH\b|\.gch\b|precompiled|internal compiler error", re.IGNORECASE)


def build(
    request: Request,
    plan: BuildPlan,
    tools: Toolchain,
    python: PythonBuild,
    cache: BuildCache,
    chosen: Settings,
    progress: Progress | None,
) -> Result:
    """Build the plan as fast as this machine allows.

    Raises:
        CacheError: the cache cannot be written. A failed compile does not raise: it is in the
            result.
    """
    cache.require_writable()
    resources = toolchain.resources.detect()
    plan = _with_jobs(plan, resources, chosen)
    if tools.host is not None and tools.host.kind == "gcc":
        plan = plan._replace(steps=tuple(_unhurried(step) for step in plan.steps))
    header = _header(request, plan, tools, python, cache, chosen)
    debug = chosen.log == "debug"
    if header is None:
        return building.obtain([plan], cache, progress=progress, debug=debug)[0]
    if chosen.pch == "1" and not header.is_there():
        pch.make(header, cache, wait=True, timeout=chosen.compile_timeout, log=chosen.log)
    if not header.is_there():
        return _build_before(header, plan, cache, resources, progress, chosen)
    result = building.obtain(
        [_with_header(plan, request, header)], cache, progress=progress, debug=debug
    )[0]
    if _header_failed(result):
        pch.drop(header, cache)
        result = building.obtain([plan], cache, progress=progress, debug=debug)[0]
    return result


def _build_before(
    header: pch.PrecompiledHeader,
    plan: BuildPlan,
    cache: BuildCache,
    resources: Resources,
    progress: Progress | None,
    chosen: Settings,
) -> Result:
    """Build without the header, which is missing, and have it made for the next one."""
    compiles = sum(step.kind != "link" for step in plan.steps)
    room = resources.memory_bytes > plan.memory_bytes + pch.PEAK_BYTES
    beside = room and resources.cpus >= min(plan.jobs, compiles) + _SPARE_CPUS
    if beside:
        pch.make(header, cache, wait=False, timeout=plan.timeout, log=chosen.log)
    result = building.obtain([plan], cache, progress=progress, debug=chosen.log == "debug")[0]
    if room and not beside and result.error is None:
        pch.make(header, cache, wait=False, timeout=plan.timeout, log=chosen.log)
    return result


def _with_jobs(plan: BuildPlan, resources: Resources, chosen: Settings) -> BuildPlan:
    threads = chosen.nvcc_threads or spare_threads(plan.steps, resources, len(plan.architectures))
    return plan._replace(
        jobs=choose_jobs(plan.steps, resources, chosen.max_jobs),
        nvcc_threads=threads,
        timeout=chosen.compile_timeout,
    )


def _unhurried(step: Step) -> Step:
    """Without garbage collection in g++, also in the one that nvcc calls."""
    flag = f"ggc-min-heapsize={_HEAP_KILOBYTES}"
    if step.kind == "host":
        return step._replace(speed=(*step.speed, "--param", flag))
    # nvcc with our g++; neither hipcc nor the user's own choice need know the flag
    if step.kind == "device" and "-ccbin" in step.command:
        return step._replace(speed=(*step.speed, "-Xcompiler", f"--param,{flag}"))
    return step


def _header(
    request: Request,
    plan: BuildPlan,
    tools: Toolchain,
    python: PythonBuild,
    cache: BuildCache,
    chosen: Settings,
) -> pch.PrecompiledHeader | None:
    """The precompiled header that this build could use, be it there or not.

    None is signed: what is signed is built without another member's.
    """
    if chosen.pch == "0" or tools.host is None or tools.torch is None:
        return None
    if chosen.cache_trusted_keys or (chosen.cache_shared and chosen.cache_signing_key):
        return None
    if not _users(plan, request) or pch.shadowed(request.include_dirs):
        return None
    flags = precompilable_flags(request, tools, python)
    header = pch.describe(
        cache.root,
        flags,
        tools.host,
        tools.torch,
        torch_identity(tools.torch),
        tools.environment,
        own=not cache.shared,
    )
    return None if header and _hides(request, tools, header) else header


def _hides(request: Request, tools: Toolchain, header: pch.PrecompiledHeader) -> bool:
    """Whether the user's directories have other headers than the precompiled ones: those that were
    before them then, and those that are now."""
    path = [
        part
        for name, value in tools.environment
        if name.endswith(("CPATH", "INCLUDE_PATH"))
        for part in value.split(":")
    ]
    mine = [
        os.path.normpath(part)
        for part in (*request.include_dirs, *search.directories(request.cflags), *path)
        if os.path.isabs(part)
    ]
    if not mine or not header.is_there():
        return False
    return search.hides(
        mine, header.depfile.read_text(encoding="utf-8", errors="surrogateescape"), header.command
    )


def _users(plan: BuildPlan, request: Request) -> frozenset[str]:
    """The outputs of the steps whose source reaches torch/extension.h before anything that could
    change its meaning."""
    compiles = {
        step.output: search.text_of(plan, step.inputs[0])
        for step in plan.steps
        if step.kind == "host"
    }
    return frozenset(
        output
        for output, source in compiles.items()
        if reaches_first(pch.HEADER, *source, request.include_dirs) == "reached"
    )


def _with_header(plan: BuildPlan, request: Request, header: pch.PrecompiledHeader) -> BuildPlan:
    """Compile those steps through the precompiled header. ccache is left out: it would read the 790
    MB to know them."""
    users = _users(plan, request)
    use = ("-include", str(header.header), "-fpch-deps")
    steps = tuple(
        step._replace(speed=(*step.speed, *use), launched=False) if step.output in users else step
        for step in plan.steps
    )
    return plan._replace(steps=steps, trusted_roots=(*plan.trusted_roots, str(header.directory)))


def _header_failed(result: Result) -> bool:
    """Whether a build failed for reasons that may lie in the precompiled header."""
    error = result.error
    if not isinstance(error, CompileError) or error.log is None:
        return False
    try:
        log = error.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    commands_left_out = "\n".join(line for line in log.splitlines() if "-include" not in line)
    return _PCH_TROUBLE.search(commands_left_out) is not None
