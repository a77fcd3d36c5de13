"""Gives a library the kernels that it launches, at the first launch of each on a GPU: compiled at
install, from the cache, or compiled now.

The library calls in here from C++ (``obtain`` in ``csrc/common/launch.h``), on whatever thread
launches; afterwards it keeps the kernel's handle and no Python runs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ... import _fork, settings, toolchain
from ...compute_capability import Architecture, ComputeCapability
from ...errors import NO_CODE, CompileError, FlexopsError, NativeUnavailableError
from ...toolchain import libcuda
from ...toolchain.libcuda import NOT_CODE, DriverError
from ...toolchain.version import Version
from ..describe import layout
from ..describe.spec import OpSpec
from ..plan import kernel_names
from ..plan.cache_key import Digests
from ..store import counters
from ..store.cache import Entry, read_entry
from ..store.manifest import Rejection
from ..store.opening import open_cache
from . import freshness, provider_texts

if TYPE_CHECKING:
    from ...toolchain.nvrtc import DeviceCompiler
    from ..plan.kernel_plan import KernelPlan, TextKernel
    from ..plan.program import Program
    from .extension_installed import InstalledProgram

_TRIES = 3  # the local cache's, the remote cache's or another process's, and what is compiled here
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)

_lock = _fork.Lock()
_kept: list[Any] = []  # callbacks: C++ holds their addresses


class FamilyKernel(NamedTuple):
    """A kernel of a family's headers. ``made``: flexops' headers that its launcher was compiled
    with, if today's may be others (a project's)."""

    spec: OpSpec
    expression: str
    made: tuple[tuple[str, str], ...] = ()
    text: str = ""  # that its code is compiled with besides

    def name(self, architecture: str) -> str:
        return kernel_names.artifact_name(self.spec.name, architecture, self.text + self.expression)

    def plan(self, architecture: Architecture, compiler: DeviceCompiler) -> KernelPlan:
        return plan_kernel(self.spec, self.expression, architecture, compiler, self.text)

    def apart(self, files: Digests) -> Rejection | None:
        """Launcher and kernel hand each other structs: those of one and the same header."""
        return other_headers(self.spec, self.made, files)

    def fix_for(self, capability: ComputeCapability) -> str:
        return f'flexops build {self.spec.name} --arch "{capability}" --rare'


AnyKernel: TypeAlias = "FamilyKernel | TextKernel | Program | InstalledProgram"


def attach(library: Path, spec: OpSpec, made: tuple[tuple[str, str], ...] = ()) -> None:
    """Let a library that is loaded ask for its kernels."""
    give(library, lambda name, capability: load(_called(spec, name, made), capability))


def give(library: Path, find: Callable[[bytes, ComputeCapability], int]) -> None:
    """Let a library that is loaded ask ``find`` for its kernels: each once for GPUs of one
    capability."""
    handles: dict[tuple[bytes, ComputeCapability], int] = {}

    def provide(name: bytes, device: int, error: int, error_size: int) -> int | None:
        try:
            capability = libcuda.driver().capability(device)
            with _lock.held():
                known = handles.get((name, capability))
                if known is None:
                    known = handles[name, capability] = find(name, capability)
            return known
        except BaseException as problem:  # an interrupt, too: C++ must hear of it, and raises
            text = (str(problem) or type(problem).__name__).encode(errors="replace")[
                : error_size - 1
            ] + b"\0"
            ctypes.memmove(error, text, len(text))
            return None

    callback = _Callback(provide)
    _kept.append(callback)
    ctypes.CDLL(str(library)).flexops_set_provider(callback)


def _called(spec: OpSpec, name: bytes, made: tuple[tuple[str, str], ...]) -> FamilyKernel:
    """The kernel that a library asks for: its name, or ``<name>#<number of a text>``."""
    kernel, _, number = name.partition(b"#")
    return FamilyKernel(
        spec,
        kernel_names.expression_of(kernel),
        made,
        provider_texts.of(int(number)) if number else "",
    )


def incomplete(
    library: Path,
    spec: OpSpec,
    capabilities: tuple[ComputeCapability, ...],
    made: tuple[tuple[str, str], ...] = (),
    *,
    some: bool = False,
) -> Rejection | None:
    """None if every kernel of a library that is built ahead of time (``some``: at least one) is
    there for every GPU here; else how many are not."""
    names = kernel_names.names_in(library)
    return _lacking(lambda one: kernel_names.ahead(names, one), spec, capabilities, made, some=some)


def lacks_rare(
    library: Path,
    spec: OpSpec,
    capabilities: tuple[ComputeCapability, ...],
    made: tuple[tuple[str, str], ...] = (),
) -> bool:
    """Whether any of its kernels, those that few calls launch included, is not compiled for a GPU
    here."""
    names = (*kernel_names.names_in(library), *kernel_names.rare_names_in(library))
    return (
        _lacking(
            lambda one: [name for name in names if kernel_names.fitted(name, one)],
            spec,
            capabilities,
            made,
        )
        is not None
    )


def _lacking(
    names: Callable[[Architecture], list[str]],
    spec: OpSpec,
    capabilities: tuple[ComputeCapability, ...],
    made: tuple[tuple[str, str], ...],
    *,
    some: bool = False,
) -> Rejection | None:
    for capability in capabilities:
        wanted = names(Architecture(capability))
        architectures = [*machine_code(capability), *ptx(capability)]
        kernels = [FamilyKernel(spec, name, made) for name in wanted]
        there = (
            bool(next(_ready(kernel, architectures, []), None) or _fetched(kernel, capability))
            for kernel in kernels
        )
        lacking = len(kernels) * (not any(there)) if some else sum(not one for one in there)
        if lacking:
            fix = f'flexops build {spec.name} --arch "{capability}"'
            return Rejection(
                f"{lacking} of the {len(wanted)} kernels of {spec.name} are not compiled for a GPU"
                f" of capability {capability}",
                fix,
            )
    return None


def machine_code(capability: ComputeCapability) -> Iterator[str]:
    """The architectures whose machine code runs on a GPU, as artifacts are named, best first: its
    own, and older ones of its major."""
    yield f"{capability.sm}a"
    yield from (f"sm_{capability.major}{minor}" for minor in range(capability.minor, -1, -1))


def ptx(capability: ComputeCapability) -> Iterator[str]:
    """The architectures whose PTX the driver can compile for a GPU, the newest first."""
    rules = toolchain.compat.rules()
    known = rules.capabilities(rules.toolkits[-1])
    yield from (one.compute for one in reversed(known) if not one.suffix and one <= capability)


def load(kernel: AnyKernel, capability: ComputeCapability) -> int:
    """A CUkernel for GPUs of one capability; raises as ``load_all``."""
    return load_all(kernel, capability)[0]


def load_all(kernel: AnyKernel, capability: ComputeCapability) -> list[int]:
    """The CUkernels of a program, for GPUs of one capability: of code that is there, or is compiled
    now.

    Raises:
        NativeUnavailableError: there is none, for the reasons that it names.
        CompileError: a kernel of a user's text does not compile.
    """
    refusals: list[Rejection] = []
    newest_fix = ""
    for entry, compiled in _entries(kernel, capability, refusals):
        try:
            # PTX is a text, and ends so
            loaded = libcuda.driver().load(
                entry.library.read_bytes() + b"\0", entry.manifest.symbol.split("\n")
            )
            if settings.current().record:
                _record(kernel, capability)
            return loaded
        except (OSError, DriverError) as error:
            refused = _refused(entry, kernel, capability, error, compiled=compiled)
            refusals.append(refused)
            # the fix of the newest code, rather than of what is old in the cache
            newest_fix = newest_fix or refusals[-1].fix
    fix = newest_fix or next(
        (refusal.fix for refusal in reversed(refusals) if refusal.fix), "flexops doctor"
    )
    found = "; ".join(dict.fromkeys(refusal.reason for refusal in refusals))
    raise NativeUnavailableError(
        f"{NO_CODE} {kernel.expression} for a GPU of capability {capability}", found=found, fix=fix
    )


def _record(kernel: AnyKernel, capability: ComputeCapability) -> None:
    """Write down a kernel that another machine can compile from what it is called, or its text."""
    from ..plan.kernel_plan import TextKernel  # few runs are recorded
    from . import record

    named = isinstance(kernel, FamilyKernel) and not kernel.text
    if named or isinstance(kernel, TextKernel):
        record.kernel(kernel, capability)


def _refused(
    entry: Entry,
    kernel: AnyKernel,
    capability: ComputeCapability,
    error: OSError | DriverError,
    *,
    compiled: bool,
) -> Rejection:
    """Why code is not used. What is whole and yet not what it was filed as is put aside.

    Otherwise it would be found each time.

    Args:
        compiled: this process has just compiled it, and would compile the same again.
    """
    if too_new := _too_new(entry):
        return too_new
    reason = f"{entry.library}: the driver rejects it: {error}"
    useless = isinstance(error, DriverError) and error.status in NOT_CODE
    if not useless or compiled or entry.directory.is_relative_to(kernel.spec.project.aot):
        return Rejection(reason, "flexops doctor")
    open_cache(settings.current()).reject(entry)
    return Rejection(f"{reason}; it was put aside", kernel.fix_for(capability))


def _entries(
    kernel: AnyKernel, capability: ComputeCapability, refusals: list[Rejection]
) -> Iterator[tuple[Entry, bool]]:
    """Code to try, best first, and whether it was compiled now.

    What is ruled out on the way goes to ``refusals``. PTX, which the driver has to compile first,
    comes last.
    """
    for entry in _ready(kernel, machine_code(capability), refusals):
        installed = entry.directory.is_relative_to(kernel.spec.project.aot)
        counters.count(
            "installed" if installed else "cache",
            settings.current().cache_dir,
            hit=True,
            size=entry.manifest.size,
        )
        yield entry, False
    counters.count("cache", settings.current().cache_dir, hit=False)
    if settings.current().jit:
        yield from _compiled(kernel, capability, refusals)
    elif fetched := _fetched(kernel, capability):
        yield fetched, False
    else:
        refusals.append(
            Rejection(
                "it is not compiled, and FLEXOPS_JIT=0 rules out compiling",
                kernel.fix_for(capability),
            )
        )
    yield from ((entry, False) for entry in _ready(kernel, ptx(capability), refusals))


def _ready(
    kernel: AnyKernel, architectures: Iterable[str], refusals: list[Rejection]
) -> Iterator[Entry]:
    """What was compiled before, from these very sources, for one of these architectures: at
    install, or in the cache."""
    cache = open_cache(settings.current())
    usable = not cache.problem()
    for architecture in architectures:
        name = kernel.name(architecture)
        entry, damage = read_entry(kernel.spec.project.aot / name)
        if damage:
            refusals.append(damage)
        for one in [*([entry] if entry else []), *(cache.candidates(name) if usable else ())]:
            whole: Entry | None = one
            refusal = (
                freshness.stale(one, kernel.spec)
                or _apart(kernel, one.manifest.files)
                or _too_new(one)
            )
            if not refusal and one is not entry:
                whole, refusal = cache.verified(one)
            if refusal:
                refusals.append(refusal)
            elif whole:
                yield whole


def _compiled(
    kernel: AnyKernel, capability: ComputeCapability, refusals: list[Rejection]
) -> Iterator[tuple[Entry, bool]]:
    """Code of the caches or another process; if the driver rejects that, code compiled here."""
    from ..compile import device_code  # a start that compiles nothing does without

    chosen = settings.current()
    try:
        plan, notes = _plan(kernel, capability)
        for note in notes:
            logging.getLogger("flexops").warning("%s", note)
        cached, tries = True, 0
        while cached and tries < _TRIES:
            cache = open_cache(chosen)
            result = device_code.obtain([plan], cache, time_limit=chosen.compile_timeout)[0]
            cached, tries = result.cached, tries + 1
            entry = result.require()
            yield entry, not cached
            if entry.directory.exists():
                return  # it was not put aside: another reason than the code
    except FlexopsError as error:
        if isinstance(error, CompileError) and not isinstance(kernel, FamilyKernel):
            raise
        refusals.append(Rejection(error.reason, error.fix))


def plan_kernel(
    spec: OpSpec,
    expression: str,
    architecture: Architecture,
    compiler: DeviceCompiler,
    text: str = "",
) -> KernelPlan:
    from ..plan import kernel_plan

    csrc = layout.csrc_root()
    return kernel_plan.plan_kernel(
        spec.name,
        spec.cuda_sources,
        expression,
        architecture,
        compiler,
        csrc,
        roots=spec.project.roots(csrc),
        text=text,
    )


def _fetched(kernel: AnyKernel, capability: ComputeCapability) -> Entry | None:
    """A kernel's code from the remote cache, where nothing may be compiled."""
    cache = open_cache(settings.current())
    if cache.remote is None or cache.problem():
        return None
    try:
        plan, _ = _plan(kernel, capability)
    except FlexopsError:
        return None
    return cache.fetch_key(plan.name, plan.key)


def _plan(kernel: AnyKernel, capability: ComputeCapability) -> tuple[KernelPlan, tuple[str, ...]]:
    choice = compiler_for(settings.current(), (capability,))
    plan = kernel.plan(choice.architectures[0], choice.compiler)
    if refusal := _apart(kernel, plan.files):
        raise NativeUnavailableError(refusal.reason, fix=refusal.fix)
    return plan, choice.notes


def _apart(kernel: AnyKernel, files: Digests) -> Rejection | None:
    return kernel.apart(files) if isinstance(kernel, FamilyKernel) else None


def other_headers(
    spec: OpSpec, made: tuple[tuple[str, str], ...], files: Digests
) -> Rejection | None:
    """Why what is made of ``files`` does not go with a launcher that was compiled with the headers
    in ``made``; None if it does."""
    name = next((name for name, digest in made if files.get(name, digest) != digest), None)
    if name is None:
        return None
    return Rejection(
        f"{spec.name} was compiled with another flexops' {name.partition('>/')[2]} than this one's",
        f"install {spec.project.name} anew",
    )


def _too_new(entry: Entry) -> Rejection | None:
    """A driver runs machine code of any CUDA of its own major, or an older one; PTX only of its own
    version or an older one."""
    made, runs = Version.parse(entry.manifest.cuda_version), libcuda.driver().cuda()
    if made > runs if entry.manifest.library.endswith(".ptx") else made.major > runs.major:
        toolkit = toolchain.compat.rules().facts(made)
        least = (
            toolkit.least_driver or toolkit.family_driver
            if made.major == runs.major
            else toolkit.family_driver
        )
        reason = (
            f"{entry.library} is of CUDA {made}, which needs the NVIDIA driver {least} or newer;"
            f" this one runs CUDA {runs}"
        )
        return Rejection(
            reason, "update the driver, or take a torch of an older CUDA: flexops target detect"
        )
    return None


class CompilerChoice(NamedTuple):
    """What compiles kernels here, and for which architectures."""

    compiler: DeviceCompiler
    architectures: tuple[Architecture, ...]
    notes: tuple[str, ...]


def compiler_for(
    chosen: settings.Settings,
    capabilities: tuple[ComputeCapability, ...],
    *,
    asked: str | None = None,
) -> CompilerChoice:
    """The device compiler of this machine, and what it makes for these GPUs, or for the list of
    architectures that was asked for.

    Raises:
        ToolchainError: there is none that matches torch.
        ArchitectureError: it can make nothing that would serve.
    """
    found = toolchain.device_compiler(chosen)
    if found.taken is None:
        raise toolchain.no_device_compiler(found, toolchain.torch_build())
    compiler = found.taken.value
    resolved = toolchain.architectures.resolve(
        asked, compiler.version, detected=capabilities, known=toolchain.compat.rules()
    )
    return CompilerChoice(compiler, resolved.architectures, found.notes + resolved.notes)
