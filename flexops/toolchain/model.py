"""What a build is done with, as plain values. Nothing here looks at the machine.

NamedTuples, not dataclasses: every warm start imports this, and a frozen dataclass takes 0.8 ms to
define where this was measured, a NamedTuple 0.1 ms. ``value._replace(...)`` makes a changed copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from .installed_torch import TorchBuild as TorchBuild
from .version import Version as Version

T = TypeVar("T")


class Found(Generic[T]):
    """Something a find step came upon, and how: ``found_via`` names the step, for example
    ``"CUDA_HOME"`` or ``"site-packages"``."""

    def __init__(self, value: T, found_via: str) -> None:
        self.value = value
        self.found_via = found_via

    def __repr__(self) -> str:
        return f"Found({self.value!r}, {self.found_via!r})"


class Rejected(NamedTuple):
    """Something that was found and not taken: what, where, why."""

    what: str
    path: Path
    reason: str


class Tool(NamedTuple):
    """An executable. ``identity`` is the text that enters a cache key: what the tool says of its
    own version, never its path."""

    path: Path
    version: Version
    identity: str


class HostCompiler(NamedTuple):
    """A C++ compiler: the one for host code, and what nvcc gets as ``-ccbin``. Otherwise as
    ``Tool``.

    ``kind`` zig is clang with a C library of its own for every ``target``, such as
    ``aarch64-linux-gnu.2.28``, and without a C++ runtime library.
    """

    path: Path
    version: Version
    identity: str
    kind: Literal["gcc", "clang", "zig"]
    target: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """What a command that compiles begins with; zig would write debug information, which is
        stripped, unless told not to."""
        return (
            (str(self.path), "c++", "-target", self.target, "-g0")
            if self.kind == "zig"
            else (str(self.path),)
        )

    @property
    def linker(self) -> tuple[str, ...]:
        """What a command that links begins with."""
        return (
            (str(self.path), "cc", "-target", self.target)
            if self.kind == "zig"
            else (str(self.path),)
        )


class CudaToolkit(NamedTuple):
    """One CUDA toolkit: a directory tree with nvcc, its headers and the static CUDA runtime.

    Attributes:
        root: the directory that holds bin/ and include/ (``.../nvidia/cu13``,
            ``/usr/local/cuda-13.0``, a conda prefix).
        version: the toolkit version, as nvcc reports it.
        nvcc: the compiler driver.
        include_dirs: what a host compile of code using the CUDA runtime API needs on its include
            path.
        library_dirs: where libcudart_static.a is.
    """

    root: Path
    version: Version
    nvcc: Tool
    include_dirs: tuple[Path, ...]
    library_dirs: tuple[Path, ...]


class RocmToolkit(NamedTuple):
    """One ROCm installation: hipcc, headers and runtime library."""

    root: Path
    version: Version
    hipcc: Tool
    include_dirs: tuple[Path, ...]
    library_dirs: tuple[Path, ...]


class Toolchain(NamedTuple):
    """Everything a build uses. What could not be had is None, and ``rejected`` says what was found
    instead.

    Attributes:
        torch: the torch to build against.
        host: the C++ compiler for host code; for CUDA builds one that ``cuda``'s nvcc accepts.
        cuda: the toolkit that matches torch.
        rocm: the ROCm installation that matches torch.
        ninja: the build tool.
        launcher: ccache or sccache.
        found_via: for each field that is set, the find step that found it.
        rejected: what was found and rejected, with reasons.
        notes: what was taken though it is not quite what one would choose, for example a toolkit of
            another minor than torch's.
        environment: the variables that are set and that compilers and linkers read by themselves.
        wished: why the compiler that CXX names is none, if it does: then no other is taken in its
            place.
        tried: for each thing looked for and not had, ``(field, where it was looked for)``, one
            entry for each place.
        image: the row whose image this is in; empty elsewhere.
        machine: what is compiled for, as ``uname -m`` says.
    """

    torch: TorchBuild | None = None
    host: HostCompiler | None = None
    cuda: CudaToolkit | None = None
    rocm: RocmToolkit | None = None
    ninja: Tool | None = None
    launcher: Tool | None = None
    found_via: tuple[tuple[str, str], ...] = ()
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    tried: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    image: str = ""
    wished: str = ""
    machine: str = "x86_64"
