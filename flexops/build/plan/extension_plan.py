"""The build of a user's extension: ``Request + Toolchain + PythonBuild -> BuildPlan``, by pure
functions.

The flags are those that ``torch.utils.cpp_extension`` gives, in its order, so that a source means
here what it means there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ToolchainError
from ..describe.layout import csrc_root
from .plan import (
    HOST_STEP_BYTES,
    MIB,
    TORCH_HEADER_STEP_BYTES,
    BuildPlan,
    Step,
    anchors,
    compiler_roots,
    environment_identity,
    for_nvcc,
)

if TYPE_CHECKING:
    from ...compute_capability import Architecture
    from ...toolchain.model import CudaToolkit, Toolchain, TorchBuild

NVCC_TORCH_STEP_BYTES = 4608 * MIB  # nvcc 13.0 on a source with torch/extension.h: 3065 MB measured
CUDA_SUFFIXES = (".cu", ".cuh")
SUFFIXES = (
    *(*CUDA_SUFFIXES, ".hip", ".c", ".i", ".ii", ".cc", ".cp", ".cxx", ".cpp", ".CPP", ".c++"),
    *(".C", ".s", ".S", ".sx"),
)
"""Of what nvcc, hipcc and g++ compile; g++ gives other files to the linker."""

_EXTENSION_DEFINE = "-DTORCH_API_INCLUDE_EXTENSION_H"
NVCC_DEFINES = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)
_NVCC_FLAGS = (*NVCC_DEFINES, "--expt-relaxed-constexpr")


class PythonBuild(NamedTuple):
    """The Python that an extension is built for.

    Attributes:
        identity: its version and what its extension modules are called, which enters the key.
        include: the directory with Python.h.
        abi_flags: what pybind11 needs to share types with torch's own bindings; empty for a torch
            of today.
    """

    identity: str
    include: Path
    abi_flags: tuple[str, ...] = ()


class Request(NamedTuple):
    """What ``load`` and ``load_inline`` were asked for, with paths made absolute and flags split
    into arguments.

    Attributes:
        name: the extension's; for a Python module the one in its ``PyInit_`` function.
        sources: files to compile.
        texts: (file name, content) of sources given as text.
        cflags, cuda_cflags, ldflags: the user's extra arguments.
        include_dirs: the user's, absolute.
        with_cuda: whether CUDA's (or HIP's) headers and libraries are used.
        is_python_module, is_standalone: as in torch.
        keep_objects: whether objects are kept for the next build.
        device_compiler: ``nvcc`` or ``nvrtc`` for the CUDA sources; "" leaves it to the settings.
        halves, halves_cflags: the texts that are the host's halves of CUDA sources, and what they
            are compiled with in the place of ``cflags``.
    """

    name: str
    sources: tuple[Path, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_dirs: tuple[str, ...] = ()
    with_cuda: bool = False
    is_python_module: bool = True
    is_standalone: bool = False
    keep_objects: bool = True
    device_compiler: str = ""
    halves: tuple[str, ...] = ()
    halves_cflags: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        """File name of the result, as torch names it."""
        return self.name if self.is_standalone else f"{self.name}.so"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every source as a compiler gets it: absolute, or a name in the build directory."""
        return (*map(str, self.sources), *(name for name, _ in self.texts))


def listed(what: str, given: Any) -> tuple[str, ...]:
    """The text and paths of a list that a user gave.

    Raises:
        TypeError: it is no list of such.
    """
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
    items = tuple(given) if several else () if given is None else (None,)
    if not all(isinstance(one, (str, os.PathLike)) for one in items):
        example = [str(given)] if isinstance(given, (str, os.PathLike)) else ["-O2"]
        raise TypeError(f"{what} must be a list of text, such as {example}, got {given!r}")
    return tuple(map(str, items))


def arguments(name: str, flags: Sequence[str] | None) -> tuple[str, ...]:
    """A user's flags as separate arguments. torch joins them into a ninja file, so one string may
    hold several, quoted for ninja and shell."""
    import shlex

    return tuple(
        argument
        for flag in listed(name, flags)
        for argument in shlex.split(flag.replace("$$", "$"))
    )


def is_cuda(source: str, torch: TorchBuild | None = None) -> bool:
    """Whether a source is for nvcc (or hipcc), by its name."""
    suffix = os.path.splitext(source)[1]
    return suffix in CUDA_SUFFIXES or (
        suffix == ".hip" and torch is not None and torch.hip is not None
    )


def torch_identity(torch: TorchBuild) -> str:
    """Which torch a user's extension runs with: this very build, since it may use any of its
    C++."""
    commit = torch.git_version[:12] or "unknown"
    return f"torch-{torch.version}-{commit}-cxx11abi{int(torch.cxx11_abi)}"


def plan_extension(
    request: Request,
    toolchain: Toolchain,
    python: PythonBuild,
    *,
    architectures: tuple[Architecture, ...] = (),
) -> BuildPlan:
    """The build of an extension. How many jobs it may use is left at one: that does not enter the
    key, and a warm start need not know.

    Raises:
        ToolchainError: a part of the toolchain that this build needs is missing.
    """
    torch, cuda = _require(request, toolchain)
    steps = _compile_steps(request, toolchain, torch, cuda, python, architectures)
    steps.append(_link_step(request, toolchain, torch, cuda, [step.output for step in steps]))
    if cuda is None:
        return base_plan(request, toolchain, torch, python, steps, [])
    listed = tuple(map(str, architectures))
    plan = base_plan(
        request,
        toolchain,
        torch,
        python,
        steps,
        [("nvcc", cuda.nvcc.identity), ("architectures", " ".join(listed))],
    )
    return plan._replace(
        device="cuda",
        cuda_version=cuda.version.major_minor,
        architectures=listed,
        trusted_roots=(*plan.trusted_roots, str(cuda.root)),
    )


def base_plan(
    request: Request,
    toolchain: Toolchain,
    torch: TorchBuild,
    python: PythonBuild,
    steps: list[Step],
    identity: list[tuple[str, str]],
) -> BuildPlan:
    """The plan with those steps, for the CPU; ``identity`` is added to what every extension's key
    covers."""
    host = toolchain.host
    assert host is not None  # the caller that made the steps has looked
    places = _anchors(request, toolchain, python)
    facts = [
        ("host compiler", host.identity),
        ("torch", torch_identity(torch)),
        ("python", python.identity),
        *_wishes(request),
        *identity,
    ]
    return BuildPlan(
        name=request.name,
        steps=tuple(steps),
        library=request.library,
        sources=request.sources,
        libraries=linked_files(request, toolchain),
        anchors=places,
        identity=(*facts, *environment_identity(toolchain, places)),
        trusted_roots=_trusted_roots(toolchain, python),
        jobs=1,
        nvcc_threads=1,
        device="cpu",
        torch_abi=torch_identity(torch),
        launcher=str(toolchain.launcher.path) if toolchain.launcher else "",
        ninja=str(toolchain.ninja.path) if toolchain.ninja else "ninja",
        texts=request.texts,
        keep_objects=request.keep_objects and len(request.inputs) > 1,
        watched=True,
        # Their quick look-ups trust the list of headers of an earlier compile, which a new header
        # can make wrong.
        environment=(("CCACHE_NODIRECT", "1"), ("SCCACHE_DIRECT", "false")),
    )


def precompilable_flags(
    request: Request, toolchain: Toolchain, python: PythonBuild
) -> tuple[str, ...]:
    """The host flags less the extension's name and the user's include path: what its compile shares
    with other extensions'."""
    torch, cuda = _require(request, toolchain)
    return (
        *defines(request, with_name=False),
        *_system_includes(torch, cuda, python),
        *arguments_for_torch(torch, python),
        *request.cflags,
    )


def _trusted_roots(toolchain: Toolchain, python: PythonBuild) -> tuple[str, ...]:
    """Directories whose headers the key's identity covers: torch's, Python's and the compiler's
    own."""
    roots = [str(python.include)]
    if toolchain.torch:
        roots.append(str(toolchain.torch.root))
    if toolchain.host:
        roots += compiler_roots(toolchain.host)
    return tuple(roots)


def _require(request: Request, toolchain: Toolchain) -> tuple[TorchBuild, CudaToolkit | None]:
    if (
        request.with_cuda
        and toolchain.torch
        and not toolchain.torch.cuda
        and not toolchain.torch.hip
    ):
        raise ToolchainError(
            f"extension {request.name} has CUDA sources (or with_cuda=True), and this torch is"
            " built without CUDA",
            found=f"torch {toolchain.torch.version}",
            required="a torch built for CUDA or ROCm",
            fix=(
                "install one (`flexops target list` shows which), or pass with_cuda=False and no"
                " .cu sources"
            ),
        )
    cuda = toolchain.cuda if request.with_cuda else None
    if toolchain.torch and toolchain.host and toolchain.ninja and (cuda or not request.with_cuda):
        return toolchain.torch, cuda
    from ...toolchain import missing  # imported for its message only

    raise missing(toolchain, "cuda" if request.with_cuda else "cpu") or ToolchainError(
        "the toolchain is incomplete", fix="flexops doctor"
    )


def _wishes(request: Request) -> list[tuple[str, str]]:
    """The user's own arguments, word for word: a path in them may end up in the binary, so it is
    not made relocatable."""
    groups = (
        ("cflags", request.cflags),
        ("cuda cflags", request.cuda_cflags),
        ("ldflags", request.ldflags),
    )
    return [(label, "\0".join(flags)) for label, flags in groups]


def linked_files(request: Request, toolchain: Toolchain) -> tuple[Path, ...]:
    """The files that the user's arguments name by path, and every library that a ``-l`` can mean in
    the user's directories (``-L``, ``LIBRARY_PATH``)."""
    arguments = [*request.cflags, *request.cuda_cflags, *request.ldflags]
    pieces = [piece for argument in arguments for piece in argument.replace("=", ",").split(",")]
    named = [piece.lstrip("@") for piece in pieces if piece.lstrip("@").startswith("/")]
    words = [piece for argument in request.ldflags for piece in argument.split(",")]
    directories = _values(words, "-L", "--library-path")
    searched = [
        part
        for name, value in toolchain.environment
        if name == "LIBRARY_PATH"
        for part in value.split(":")
    ]
    # gcc looks there, too
    directories += [
        f"{part}{further}" for part in searched for further in ("", "/../lib64", "/../lib")
    ]
    for name in _values(words, "-l", "--library"):
        files = (name[1:],) if name.startswith(":") else (f"lib{name}.so", f"lib{name}.a")
        named += [
            f"{directory}/{file}"
            for directory in directories
            for file in files
            if os.path.isabs(directory)
        ]
    return tuple(Path(path) for path in dict.fromkeys(named) if os.path.isfile(path))


def _values(words: list[str], short: str, long: str) -> list[str]:
    """The values of an option that is written ``-Lx``, ``-L x`` or ``--library-path=x``."""
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in (short, long):
            found.append(following)
        elif word.startswith(f"{long}="):
            found.append(word[len(long) + 1 :])
        elif word.startswith(short):
            found.append(word[len(short) :])
    return found


def _anchors(
    request: Request, toolchain: Toolchain, python: PythonBuild
) -> tuple[tuple[str, str], ...]:
    directories = dict.fromkeys(
        [*(str(source.parent) for source in request.sources), *request.include_dirs]
    )
    own = [(csrc_root(), "<csrc>")] if request.halves else []
    own += [
        (Path(path), f"<dir{number}>") for number, path in enumerate(directories) if path != "/"
    ]
    return anchors(
        toolchain, "cuda" if request.with_cuda else "cpu", *own, (python.include, "<python>")
    )


def defines(request: Request, *, with_name: bool = True) -> tuple[str, ...]:
    """The macros by which a source knows that it is an extension, and which."""
    if request.is_standalone:
        return ()
    return (*((f"-DTORCH_EXTENSION_NAME={request.name}",) if with_name else ()), _EXTENSION_DEFINE)


def _user_includes(request: Request) -> tuple[str, ...]:
    return tuple(f"-I{path}" for path in request.include_dirs)


def _system_includes(
    torch: TorchBuild, cuda: CudaToolkit | None, python: PythonBuild
) -> tuple[str, ...]:
    # g++ minds that one being named
    extra = [path for path in (cuda.include_dirs if cuda else ()) if str(path) != "/usr/include"]
    return system_includes((*torch.include_dirs, *extra, python.include))


def system_includes(directories: Iterable[Path]) -> tuple[str, ...]:
    """``-isystem`` flags, in two arguments each: nvcc understands no other form."""
    return tuple(argument for directory in directories for argument in ("-isystem", str(directory)))


def arguments_for_torch(torch: TorchBuild, python: PythonBuild) -> tuple[str, ...]:
    """The C++ standard and ABI that go with torch's headers."""
    return (
        "-fPIC",
        f"-std=c++{torch.cxx_standard}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
        *python.abi_flags,
    )


def _compile_steps(
    request: Request,
    toolchain: Toolchain,
    torch: TorchBuild,
    cuda: CudaToolkit | None,
    python: PythonBuild,
    architectures: tuple[Architecture, ...],
) -> list[Step]:
    assert toolchain.host is not None  # _require() has looked
    common = (*defines(request), *_user_includes(request), *_system_includes(torch, cuda, python))
    host = (str(toolchain.host.path), *common, *arguments_for_torch(torch, python))
    device = (
        _nvcc_command(request, toolchain, torch, cuda, python, common, architectures)
        if cuda
        else ()
    )
    steps = []
    for source, output in zip(request.inputs, object_names(request.inputs, torch), strict=True):
        tail = ("-c", source, "-o", output)
        if device and is_cuda(source):
            steps.append(Step("device", output, (source,), (*device, *tail), NVCC_TORCH_STEP_BYTES))
        else:
            # Where CUDA's own are torch's: those have neither crt/ nor nv/, which its headers
            # include.
            stand_ins = ("-idirafter", str(csrc_root())) if request.halves else ()
            own = (
                *stand_ins,
                *(request.halves_cflags if source in request.halves else request.cflags),
            )
            steps.append(
                Step("host", output, (source,), (*host, *own, *tail), TORCH_HEADER_STEP_BYTES)
            )
    return steps


def _nvcc_command(
    request: Request,
    toolchain: Toolchain,
    torch: TorchBuild,
    cuda: CudaToolkit | None,
    python: PythonBuild,
    common: tuple[str, ...],
    architectures: tuple[Architecture, ...],
) -> tuple[str, ...]:
    assert cuda is not None
    assert toolchain.host is not None
    mine = request.cuda_cflags
    from ...compute_capability import gencodes

    chosen = () if any("arch" in flag for flag in mine) else gencodes(architectures)
    compiler = (
        ()
        if any(flag.startswith(("-ccbin", "--compiler-bindir")) for flag in mine)
        else ("-ccbin", str(toolchain.host.path))
    )
    standard = (
        ()
        if any(flag.startswith(("-std", "--std")) for flag in mine)
        else (f"-std=c++{torch.cxx_standard}",)
    )
    abi = (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}", *python.abi_flags)
    return (
        str(cuda.nvcc.path),
        *compiler,
        *map(for_nvcc, common),
        *_NVCC_FLAGS,
        *abi,
        *chosen,
        "--compiler-options",
        "-fPIC",
        *mine,
        *standard,
    )


def object_names(sources: Iterable[str], torch: TorchBuild | None = None) -> list[str]:
    """An object file name for each source, no two alike."""
    names: list[str] = []
    for source in sources:
        # a linker would take -x.o for an option
        stem = os.path.splitext(os.path.basename(source))[0].lstrip("-") or "source"
        suffix = ".cuda.o" if is_cuda(source, torch) else ".o"
        number, name = 1, stem + suffix
        while name in names:
            number, name = number + 1, f"{stem}_{number + 1}{suffix}"
        names.append(name)
    return names


def _link_step(
    request: Request,
    toolchain: Toolchain,
    torch: TorchBuild,
    cuda: CudaToolkit | None,
    objects: list[str],
) -> Step:
    assert toolchain.host is not None
    shared = () if request.is_standalone else ("-shared",)
    flags = (
        *request.ldflags,
        *torch_libraries(request, torch),
        *(_runtime_library(cuda) if cuda else ()),
    )
    command = (str(toolchain.host.path), *objects, *shared, *flags, "-o", request.library)
    return Step("link", request.library, tuple(objects), command, HOST_STEP_BYTES)


def torch_libraries(request: Request, torch: TorchBuild) -> tuple[str, ...]:
    """The torch libraries that torch's own builder links an extension with, in its order."""
    accelerator = ("hip" if torch.hip else "cuda") if request.with_cuda else ""
    names = [
        "c10",
        f"c10_{accelerator}",
        "torch_cpu",
        f"torch_{accelerator}",
        "torch",
        "" if request.is_standalone else "torch_python",
    ]
    rpath = (f"-Wl,-rpath,{torch.library_dir}",) if request.is_standalone else ()
    return (
        f"-L{torch.library_dir}",
        *(f"-l{name}" for name in names if name and not name.endswith("_")),
        *rpath,
    )


def _runtime_library(cuda: CudaToolkit) -> tuple[str, ...]:
    """The shared CUDA runtime that torch has loaded already. NVIDIA's wheels have it under its
    versioned name only."""
    for directory in cuda.library_dirs:
        for name in ("libcudart.so", f"libcudart.so.{cuda.version.major}"):
            if (directory / name).exists():
                return (f"-L{directory}", f"-l:{name}")
    return (*(f"-L{directory}" for directory in cuda.library_dirs), "-lcudart")
