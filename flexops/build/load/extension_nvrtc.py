"""People's `.cu` without nvcc: the host compiler takes the host's half of each, NVRTC the kernels
that it launches, the driver has them at their first launch.

Which kernels those are the built library says, as families' libraries do: each instantiation of a
kernel has a type of its own, whose name has the kernel's in it, as compilers mangle it. NVRTC has
to give each of its kernels that very name, or the build fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ... import toolchain
from ...errors import CompileError, NativeUnavailableError, ToolchainError
from ..describe import layout
from ..describe.cuda_declarations import Unsplittable
from ..describe.cuda_names import ACCESSORS, HALVES
from ..describe.cuda_source import STUB, split
from ..plan.extension_plan import NVCC_DEFINES, Request, is_cuda
from ..plan.kernel_names import demangled, single
from ..plan.program import TORCH_TYPES, Program

if TYPE_CHECKING:
    from ...compute_capability import ComputeCapability
    from ...settings import Settings
    from ...toolchain.model import CudaToolkit, Toolchain, TorchBuild
    from ..plan.kernel_plan import KernelPlan
    from ..store.cache import BuildCache
    from .extension_installed import InstalledProgram

_FIX = 'device_compiler="nvcc" (or FLEXOPS_DEVICE_COMPILER=nvcc), on a machine that has one'
_LAUNCH_HEADER = "common/extension_launch.h"
_STUB_NAME = re.compile(rb"[\w.$*]*E\d+" + STUB.encode() + rb"_\d+(?=\0)")
# ---- nvcc's arguments ----

# what says for which GPUs, which is known when a kernel is launched; how fast nvcc is, and how much
# it talks
_NO_MATTER = re.compile(
    r"--?(?:expt-relaxed-constexpr|expt-extended-lambda|extended-lambda|allow-unsupported-compiler|res-usage|resource-usage|verbose|v|time|split-compile|keep|w)"
    r"|(?:--threads|-t|-arch|--gpu-architecture|-gencode|--generate-code|-code|--gpu-code|-Xcudafe|-Xfatbin|--fatbin-options|-diag-suppress|--diag-suppress)=.*"
)
_NO_MATTER_WITH_VALUE = (
    "-gencode",
    "--generate-code",
    "-arch",
    "--gpu-architecture",
    "-code",
    "--gpu-code",
    "--threads",
    "-t",
    "-Xcudafe",
    "-Xfatbin",
    "--fatbin-options",
)
_WITH_VALUE = (
    "-Xcompiler",
    "--compiler-options",
    "-Xptxas",
    "--ptxas-options",
    "-I",
    "-D",
    "-U",
    "-std",
    "--std",
    "-maxrregcount",
    "--maxrregcount",
)
_FOR_DEVICE = re.compile(
    r"--?(?:use_fast_math|ftz=\w+|prec-div=\w+|prec-sqrt=\w+|fmad=\w+|maxrregcount=\d+|lineinfo|generate-line-info|extra-device-vectorization)"
)
_NVRTC_NAMES = {"lineinfo": "generate-line-info"}
_FOR_BOTH = re.compile(r"-[DU]\w.*")
_FOR_HOST = re.compile(r"-O[0-3]|-g")
# whose instructions no other GPU has; and no other family of GPUs
_OWN_ARCHITECTURE = re.compile(r"(?:sm|compute|lto)_(\d+a)\b")
_FAMILY_ARCHITECTURE = re.compile(r"(?:sm|compute|lto)_\d+f\b")
# which nvcc's launches heed
_LAUNCHES_ELSEWHERE = re.compile(r"-DCUDA_API_PER_THREAD_DEFAULT_STREAM\b")
_NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_FOR_THE_PREPROCESSOR = re.compile(
    r"-I|-include|-imacros|-i(?:system|quote|dirafter|prefix)|-[DU]$"
)


class Flags(NamedTuple):
    """nvcc's arguments, by what they are for."""

    host: tuple[str, ...]
    device: tuple[str, ...]
    include_dirs: tuple[str, ...]
    own: tuple[str, ...]  # architectures that are asked for with the suffix: 90a


def flags_of(arguments: Sequence[str]) -> Flags:
    """Which of nvcc's arguments the host compiler gets, and which NVRTC.

    Raises:
        ToolchainError: one is not known to do the same there.
    """
    host: list[str] = []
    device: list[str] = []
    include: list[str] = []
    own: list[str] = []
    rest = iter(arguments)
    for one in rest:
        if one in (*_WITH_VALUE, *_NO_MATTER_WITH_VALUE):
            value = next(rest, "")
            one = f"{one}{value}" if one in ("-I", "-D", "-U") else f"{one}={value}"
        name, _, value = one.partition("=")
        if name in ("-Xcompiler", "--compiler-options"):
            pieces = [piece for piece in value.strip("\"'").split(",") if piece]
            if strange := next(
                (
                    piece
                    for piece in pieces
                    if _FOR_THE_PREPROCESSOR.match(piece) or _LAUNCHES_ELSEWHERE.search(piece)
                ),
                "",
            ):
                raise ToolchainError(
                    f"the argument {one}: {strange} would change what the host alone reads",
                    required="it without -Xcompiler",
                )
            host += pieces
            device += [piece for piece in pieces if _FOR_BOTH.fullmatch(piece)]  # so does nvcc
        elif name in ("-Xptxas", "--ptxas-options"):
            device += [f"--ptxas-options={piece}" for piece in value.split(",") if piece]
        elif name in ("-std", "--std"):
            host.append(f"-std={value}")
            device.append(f"--std={value}")
        elif one.startswith("-I"):
            include.append(os.path.abspath(one[2:]))
        elif _FOR_BOTH.fullmatch(one) and not _LAUNCHES_ELSEWHERE.search(one):
            host.append(one)
            device.append(one)
        elif _FOR_DEVICE.fullmatch(one):
            device.append(f"--{_NVRTC_NAMES.get(option := one.lstrip('-'), option)}")
        elif _FOR_HOST.fullmatch(one):
            host.append(one)
        elif _NO_MATTER.fullmatch(one) and not _FAMILY_ARCHITECTURE.search(one):
            own += _OWN_ARCHITECTURE.findall(one)
        else:
            raise ToolchainError(
                f"the argument {one} is nvcc's, and NVRTC has no equivalent",
                required="nvcc, or to do without it",
            )
    return Flags(tuple(host), tuple(device), tuple(include), tuple(dict.fromkeys(own)))


# ---- the request, split ----


class Prepared(NamedTuple):
    """What there is to build in the place of a request: host code alone, and the programs of its
    device code."""

    request: Request
    tools: Toolchain
    programs: tuple[Program, ...]


def prepare(
    request: Request, tools: Toolchain, torch: TorchBuild, cuda: CudaToolkit, asked: str = ""
) -> Prepared:
    """Everything that is known before the host code is built. ``asked``: the list of architectures.

    Raises:
        ToolchainError: a source or an argument is nvcc's.
    """
    if variable := next((name for name, _ in tools.environment if name in _NVCC_VARIABLES), ""):
        raise ToolchainError(
            f"{variable} is set, which nvcc reads and NVRTC does not",
            required="nvcc, or to do without it",
        )
    flags = flags_of(request.cuda_cflags)
    include = (*request.include_dirs, *flags.include_dirs)
    if request.is_standalone:
        raise ToolchainError(
            f"extension {request.name} is an executable of its own, whose kernels flexops could not"
            " provide",
            required="nvcc",
        )
    listed = [major + minor for major, minor in re.findall(r"(\d+)\.(\d+a)\b", asked)]
    own = (*flags.own, *listed, *_OWN_ARCHITECTURE.findall(asked))
    texts, programs, files = [], [], []
    roots = roots_of(torch, cuda)
    version = _version_macros(torch)
    standard = (
        ()
        if any(flag.startswith("--std") for flag in flags.device)
        else (f"--std=c++{torch.cxx_standard}",)
    )
    options = (
        *standard,
        "--device-as-default-execution-space",
        *NVCC_DEFINES,
        *version,
        *flags.device,
    )
    defined = frozenset(
        flag[2:].partition("=")[0] for flag in (*flags.device, *version) if flag.startswith("-D")
    )
    for number, source in enumerate(one for one in request.inputs if is_cuda(one)):
        text = dict(request.texts).get(source) or Path(source).read_text(
            encoding="utf-8", errors="surrogateescape"
        )
        try:
            halves = split(source, text, include, number, defined)
        except Unsplittable as problem:
            raise ToolchainError(
                f"extension {request.name}: {os.path.basename(problem.path)}, line {problem.line},"
                f" needs nvcc: {problem.what}",
                found=(
                    f"{problem.path}:{problem.line}, which NVRTC would not surely compile to what"
                    " it means"
                ),
                required="nvcc for such a source",
            ) from None
        label = f"{Path(source).stem}_{number}.cu.cpp"
        accessors = (
            "#include <common/extension_accessors.h>\n"
            if "RestrictPtrTraits" in halves.host
            else ""
        )
        texts.append((label, f"#include <{_LAUNCH_HEADER}>\n{accessors}{halves.host}"))
        programs.append(
            Program(
                request.name,
                number,
                source,
                halves.device,
                options,
                roots,
                halves.words,
                f"{torch.version} {torch.git_version}",
                own=own,
            )
        )
        files.append(label)
    host = request._replace(
        sources=tuple(path for path in request.sources if not is_cuda(str(path))),
        texts=(*(one for one in request.texts if not is_cuda(one[0])), *texts),
        include_dirs=include,
        cuda_cflags=(),
        halves=tuple(files),
        halves_cflags=flags.host,
    )
    return Prepared(host, tools._replace(cuda=cuda), tuple(programs))


def roots_of(torch: TorchBuild, cuda: CudaToolkit) -> tuple[tuple[str, Path], ...]:
    """Where device code's includes are looked for, each with its name."""
    return (
        ("<csrc>", layout.csrc_root()),
        ("<torch>", torch.include_dirs[0]),
        *((f"<cuda {number}>", path) for number, path in enumerate(cuda.include_dirs)),
    )


def _version_macros(torch: TorchBuild) -> tuple[str, ...]:
    numbers = [*re.findall(r"\d+", torch.version.partition("+")[0])[:3], "0", "0"][:3]
    return tuple(
        f"-DTORCH_VERSION_{part}={number}"
        for part, number in zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)
    )


# ---- the kernels of a library ----


def kernel_of(stub: str) -> tuple[int, str] | None:
    """The number of a kernel's source and its symbol, from the name of the type that is local to
    it; None of what is no such name.

    In a library's file other bytes may stand before it: it is the longest end that has a meaning.
    """
    stub = stub.removeprefix("_ZTS").removeprefix("_ZTI")  # symbols, where the library has them
    starts = (
        [match.start() for match in re.finditer("Z", stub)] if not stub.startswith("_Z") else []
    )
    name = next(
        (
            stub[start:]
            for start in starts
            if demangled(f"_{stub[start:]}").endswith(stub[stub.rindex(STUB) :])
        ),
        "",
    )
    if not name:
        return None
    encoding = re.sub(rf"E\d+{STUB}_\d+$", "", name[1:])
    mangled = f"_Z{encoding}"
    # a function of C's has no parameters in its name
    return int(name.rpartition("_")[2]), (
        mangled if "(" in demangled(mangled) else demangled(mangled)
    )


def expression_of(symbol: str) -> str:
    """A kernel as C++ names it: ``ns::scale<float, 4>`` of ``_ZN2ns5scaleIfLi4EEEvPT_``."""
    text = demangled(symbol).replace("(anonymous namespace)::", "")
    depth = 0
    end = len(text)
    for position in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[position], 0)
        if depth == 0 and text[position] == "(":
            end = position
            break
    return text[:end].removeprefix("void ") if symbol.startswith("_Z") else symbol


def wanted_of(programs: Sequence[Program], library: Path) -> tuple[Program, ...]:
    """The programs with the kernels that a library launches; without those that it launches none
    of.

    Raises:
        CompileError: a type of torch's is among a kernel's arguments that device code has no
            definition of.
    """
    kernels: dict[int, set[str]] = {}
    for match in _STUB_NAME.finditer(library.read_bytes()):
        if kernel := kernel_of(match[0].decode()):
            kernels.setdefault(kernel[0], set()).add(kernel[1])
    wanted = []
    for number, program in enumerate(programs):
        symbols = sorted(kernels.get(number, ()))
        expressions = [expression_of(symbol) for symbol in symbols]
        for expression in expressions:
            if unknown := [
                one for one in TORCH_TYPES.findall(expression) if one not in HALVES | ACCESSORS
            ]:
                found = f"torch's type {unknown[0]} is no part of what NVRTC is given"
                raise CompileError(
                    f"{program.source}: the kernel {expression} cannot be compiled without nvcc",
                    found=found,
                    fix=_FIX,
                )
        if symbols:
            wanted.append(program._replace(expressions=tuple(expressions), symbols=tuple(symbols)))
    return tuple(wanted)


def compile_kernels(programs: Sequence[Program], cache: BuildCache, chosen: Settings) -> None:
    """Have the kernels' code, for the architectures that were asked for, or the GPUs here; where
    neither is known, for one: to see that it compiles.

    Raises:
        CompileError: it does not, or the two compilers do not mean the same kernel.
        ToolchainError: there is no NVRTC.
    """
    if not programs:
        return
    from ..compile import device_code, progress

    plans = kernel_plans(programs, chosen)
    missing = [plan for plan in plans if cache.read(plan.name, plan.key) is None]
    if missing:
        if not chosen.jit:
            found = ", ".join(sorted({plan.name for plan in missing}))
            what = (
                "an extension's kernels are not in the cache, and FLEXOPS_JIT=0 rules out compiling"
            )
            raise NativeUnavailableError(what, found=found, fix="unset FLEXOPS_JIT")
        cache.require_writable()
        progress.say(_line(missing), chosen.log)
        jobs = device_code.choose_jobs(toolchain.resources.detect(), chosen.max_jobs)
        for result in device_code.obtain(
            missing, cache, jobs=jobs, time_limit=chosen.compile_timeout
        ):
            result.require()


def kernel_plans(programs: Sequence[Program], chosen: Settings) -> list[KernelPlan]:
    """The code of these programs, for the architectures that were asked for, or the GPUs here.

    Raises:
        ToolchainError: there is no NVRTC.
    """
    from . import provider

    detected = toolchain.local_capabilities()
    choice = provider.compiler_for(chosen, detected, asked=chosen.arch_list)
    if choice.compiler.kind != "nvrtc":
        raise ToolchainError(
            "there is no NVRTC, and nvcc is not to be used",
            fix=toolchain.nvrtc_fix(choice.compiler.version),
        )
    architectures = list(single(choice.architectures))
    if not detected and not chosen.arch_list:
        architectures = [one for one in architectures if one.sass][-1:]
    plans = [program.plan(one, choice.compiler) for program in programs for one in architectures]
    return list({plan.name: plan for plan in plans}.values())


def _line(plans: Sequence[KernelPlan]) -> str:
    sources = ", ".join(dict.fromkeys(plan.expression for plan in plans))
    architectures = ", ".join(dict.fromkeys(plan.architecture.code for plan in plans))
    return (
        f"{plans[0].compiler}, and no nvcc, compiles the kernels of {sources} for {architectures}"
    )


# ---- in the process ----


def attach(library: Path, programs: Sequence[Program | InstalledProgram]) -> None:
    """Let a library that is loaded ask for its kernels. A source's are of one module: they share
    its variables."""
    from . import provider

    numbered = {program.number: program for program in programs}
    modules: dict[tuple[int, ComputeCapability], dict[str, int]] = {}

    def find(name: bytes, capability: ComputeCapability) -> int:
        kernel = kernel_of(name.decode())
        if kernel is None or kernel[0] not in numbered:
            raise RuntimeError(
                f"{library} asks for {name.decode()}, which is no kernel of its sources"
            )
        number, symbol = kernel
        if (number, capability) not in modules:
            handles = provider.load_all(numbered[number], capability)
            modules[number, capability] = dict(zip(numbered[number].symbols, handles, strict=True))
        return modules[number, capability][symbol]

    if programs:
        provider.give(library, find)
