"""What the probes see of a machine, as plain values. Judged in ``checks``; nothing here looks at
anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from ..settings import Settings
    from ..targets import Target
    from ..toolchain.driver import DriverCuda, DriverRelease
    from ..toolchain.model import Toolchain
    from ..toolchain.nvrtc import DeviceCompiler
    from ..toolchain.resources import Resources
    from ..toolchain.select import Choice

T = TypeVar("T")


@dataclass(frozen=True)
class Unknown:
    """In place of a fact whose probe failed: why."""

    reason: str


class NotKnownError(Exception):
    """A check asked for a fact that its probe could not get."""


def known(fact: T | Unknown) -> T:
    """The fact itself; raises ``NotKnownError`` for an ``Unknown``, which turns the check into a
    warning that says so."""
    if isinstance(fact, Unknown):
        raise NotKnownError(fact.reason)
    return fact


@dataclass(frozen=True)
class PlatformFact:
    """The operating system.

    Attributes:
        libc: such as ``"glibc 2.36"``; empty where it is not the GNU one.
        container: what kind of container this is, ``"docker"`` for example; empty outside one.
        installer: a command line that installs a system package, without its name: ``"sudo apt-get
            install -y"``.
    """

    system: str
    release: str
    machine: str
    distribution: str = ""
    libc: str = ""
    container: str = ""
    installer: str = ""


@dataclass(frozen=True)
class PythonFact:
    """This Python. ``environment`` is venv, conda or system; ``headers``: is Python.h there?

    ``origin`` is the Python below: the distribution's, conda's, or one of its own (uv, pyenv, built
    by hand), whose headers no package of the distribution brings. ``namesake``: the other project's
    distribution called flexops, if it is installed too.
    """

    version: tuple[int, int, int]
    executable: str
    environment: Literal["venv", "conda", "system"]
    headers: bool
    origin: Literal["system", "conda", "other"] = "system"
    namesake: str = ""


@dataclass(frozen=True)
class SettingsFact:
    """The settings, with the values that were not understood left away: ``(what, found, required,
    fix)`` of each in ``problems``. ``misspelled``: variables that nothing reads, each with the name
    that is probably meant."""

    settings: Settings
    problems: tuple[tuple[str, str, str, str], ...] = ()
    misspelled: tuple[tuple[str, str], ...] = ()

    @property
    def left_away(self) -> tuple[str, ...]:
        """The variables whose values were not understood."""
        return tuple(what.split()[0] for what, *_ in self.problems)


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``capability`` is NVIDIA's ``"9.0"``, or AMD's ``"gfx942"``; ``memory_bytes`` is 0
    where it is not known.

    ``slices``: how many MIG slices there are of it; None where MIG is off.
    """

    name: str
    capability: str
    memory_bytes: int = 0
    vendor: Literal["nvidia", "amd"] = "nvidia"
    slices: int | None = None


@dataclass(frozen=True)
class GpuFact:
    """The GPUs that can be used here, their driver, and what stands in the way of others.

    Attributes:
        unusable: GPUs that are on the bus while no driver shows them, such as ``"NVIDIA GPU at
            0000:01:00.0"``.
        problem: what the driver's own library said when it failed.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: DriverRelease | None = None
    driver_cuda: DriverCuda | None = None
    unusable: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class LoadedLibrary:
    """A shared library in a process that has imported torch. ``soname`` as in
    ``libcudart.so.13``."""

    soname: str
    path: str


@dataclass(frozen=True)
class TorchFact:
    """What came of importing torch in another process.

    Attributes:
        state: ``absent``: there is none; ``broken``: the import raised or the process died;
            ``hangs``: no answer in time.
        detail: the error's last line, or how the process died.
        cuda, hip: what it was built for.
        gpu_count: the GPUs that torch can use; ``gpu_error`` is why it cannot use any though it is
            built for one.
        loaded: CUDA and C++ runtime libraries in that process.
        installed: the same kinds of library in torch's own directory and the ``nvidia`` packages
            beside it.
    """

    state: Literal["ok", "absent", "broken", "hangs"]
    detail: str = ""
    version: str = ""
    cuda: str = ""
    hip: str = ""
    cxx11_abi: bool = True
    root: str = ""
    import_seconds: float = 0.0
    gpu_count: int = 0
    gpu_error: str = ""
    loaded: tuple[LoadedLibrary, ...] = ()
    installed: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheFact:
    """The build cache's directory.

    Attributes:
        exists: it will be made at the first build if it can.
        problem: why it may not be read from (``BuildCache.problem``).
        unwritable: why nothing can be stored; empty if it can.
        noexec: its file system forbids to map code, so no library in it can be loaded.
        free_bytes: on its file system.
    """

    root: Path
    exists: bool
    problem: str = ""
    unwritable: str = ""
    noexec: bool = False
    free_bytes: int = 0
    entries: int = 0
    size: int = 0
    max_size: int = 0
    quarantined: int = 0


@dataclass(frozen=True)
class LockFile:
    """A lock file of torch's cpp_extension. ``held``: some live process has it open (None:
    unknown)."""

    path: str
    age_seconds: float
    held: bool | None


@dataclass(frozen=True)
class LibraryFact:
    """An ahead-of-time or cached library of one op: what it is compiled for and by, and why it
    would not be loaded (empty if it would)."""

    op: str
    device: str
    origin: Literal["aot", "cache"]
    architectures: tuple[str, ...] = ()
    refusal: str = ""
    fix: str = ""
    torch_abi: str = ""
    compiler: str = ""


@dataclass(frozen=True)
class TargetFact:
    """The row to judge against, or why there is none; and which row was detected for this
    machine."""

    asked: str | None
    row: Target | None = None
    problem: tuple[str, str, str] = ("", "", "")
    detected: str = ""
    reason: str = ""


@dataclass(frozen=True)
class BuildTrial:
    """What came of building a small op for a device type and loading it again in a new process.

    Attributes:
        skipped: why it was not tried.
        build_seconds: planning, compiling and publishing, from nothing.
        load_seconds: from asking for the op to having it, in a new process, ``import torch`` left
            out.
        max_error: of its result; None if it did not run (no such device here).
        error, fix: of what failed.
    """

    device: str
    skipped: str = ""
    build_seconds: float | None = None
    load_seconds: float | None = None
    max_error: float | None = None
    architectures: tuple[str, ...] = ()
    error: str = ""
    fix: str = ""


@dataclass(frozen=True)
class OpTrial:
    """What came of running an op on a device against its reference. ``error``: it raised, or its
    process died."""

    name: str
    device: str
    backend: str
    reason: str = ""
    fix: str = ""
    max_error: float | None = None
    error: str = ""

    def as_dict(self) -> dict[str, object]:
        """The JSON form, which has no word for NaN and infinity: such an error is left to the
        finding."""
        reason = "; ".join(part for part in (self.error, self.reason) if part)
        error = (
            self.max_error if self.max_error is not None and math.isfinite(self.max_error) else None
        )
        return {
            "name": self.name,
            "device": self.device,
            "backend": self.backend,
            "reason": reason,
            "max_error": error,
        }


@dataclass(frozen=True)
class Facts:
    """Everything that is judged. A fact whose probe failed is ``Unknown``."""

    platform: PlatformFact | Unknown
    python: PythonFact | Unknown
    settings: SettingsFact | Unknown
    environment: dict[str, str] | Unknown
    resources: Resources | Unknown
    gpu: GpuFact | Unknown
    torch: TorchFact | Unknown
    cpu_tools: Toolchain | Unknown
    cuda_tools: Toolchain | Unknown
    device_compiler: Choice[DeviceCompiler] | Unknown
    cache: CacheFact | Unknown
    locks: tuple[LockFile, ...] | Unknown
    libraries: tuple[LibraryFact, ...] | Unknown
    target: TargetFact | Unknown
    unregistered: tuple[tuple[str, str], ...] | Unknown = field(default=())
    builds: tuple[BuildTrial, ...] | Unknown = field(default=())
    ops: tuple[OpTrial, ...] | Unknown = field(default=())
