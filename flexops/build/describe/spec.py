"""What an op is, to the builder: its folder, and what is in it. Nothing is resolved here; a folder
is read when it is first asked about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..._fork import kept
from . import layout

if TYPE_CHECKING:
    from ...compute_capability import ComputeCapability
    from .declaration import Declared
    from .schema import Signature

BINDING, DECLARATIONS = "binding.cpp", "launchers.h"
"""What the builder writes where a family has no binding of its own."""

DeviceType = Literal["cpu", "cuda"]
"""torch's device type. A ROCm build's is ``"cuda"`` too, as in torch."""


class Project(NamedTuple):
    """Whose kernels are built: flexops' own, or those of a package that uses ``flexops.builder``.

    Attributes:
        name: the namespace of its operators in torch and of its launchers in C++.
        package: the directory of its Python package; None for flexops, whose places ``layout``
            knows.
    """

    name: str
    package: Path | None = None

    @property
    def own(self) -> bool:
        """Whether these are flexops' own."""
        return self.package is None

    @property
    def csrc(self) -> Path:
        """Its sources: a folder for each family."""
        return layout.csrc_root() if self.package is None else self.package / "csrc"

    @property
    def aot(self) -> Path:
        """The libraries that an install compiled in: ``<aot>/<label>-<device>/{manifest.json,
        lib.so}``; it need not exist."""
        return layout.aot_root() if self.package is None else self.package / layout.AOT

    def roots(self, common: Path) -> tuple[tuple[str, Path], ...]:
        """Where includes are looked for, and the names under which keys and manifests record what
        was found: its own sources, then flexops' (``common``)."""
        return (
            (("<csrc>", common),)
            if self.package is None
            else ((f"<{self.name}>", self.csrc), ("<csrc>", common))
        )

    def label(self, family: str) -> str:
        """What a family is called among all projects'."""
        return family if self.package is None else f"{self.name}.{family}"


FLEXOPS = Project("flexops")


class _Fields(NamedTuple):
    family: str
    project: Project = FLEXOPS
    isa_levels: tuple[str, ...] = ("baseline", "avx2", "avx512")
    files: tuple[str, ...] | None = None
    hip: bool = True
    least_capability: tuple[int, int] = (0, 0)
    apart: bool = False
    signatures: tuple[Signature, ...] = ()
    declared: tuple[Declared, ...] = ()


class OpSpec(_Fields):
    """One folder of a project's sources, built into one library per device type.

    The folder ``csrc/<family>/`` holds ``<family>_binding.cpp`` (compiled once per device type with
    ``FLEXOPS_DEVICE_CPU`` or ``FLEXOPS_DEVICE_CUDA`` defined to 1), ``*_cpu.cpp`` (compiled once
    per ISA level with ``FLEXOPS_ISA`` defined to ``baseline``, ``avx2`` or ``avx512``),
    ``*_cuda.cpp`` (the launchers, host code) and ``*.cuh`` (the kernels).

    Attributes:
        family: the folder's name.
        project: whose it is.
        isa_levels: the ISA levels of the CPU sources.
        files: what the folder has, if it is not to be read.
        hip: whether its CUDA sources compile for AMD GPUs too.
        least_capability: of the NVIDIA GPUs that its kernels run on.
        apart: whether its CPU sources keep multiplications and additions apart, as torch does, so
            that results are those of the formulas bit for bit.
        signatures: of the operators, where they are declared: from them the binding is written,
            unless the folder has one.
        declared: flexops' own operators, whose signatures are made when they are asked for.
    """

    @kept
    def every_signature(self) -> tuple[Signature, ...]:
        if not self.declared:
            return self.signatures
        from . import schema

        return tuple(schema.signature_of(one) for one in self.declared)

    @property
    def name(self) -> str:
        """What it is called among all projects': in the cache, in ``status()``, on the command
        line."""
        return self.project.label(self.family)

    @property
    def binding(self) -> str:
        """Relative to ``csrc``; "" if it is written by the builder."""
        name = f"{self.family}_binding.cpp"
        made = self.signatures or self.declared
        return "" if made and name not in self._files else f"{self.family}/{name}"

    @property
    def one_binding(self) -> bool:
        """Whether one object of its binding serves every device type. Other projects' functions
        before launchers may ask for theirs by ``#if``."""
        return self.project.own and not self.binding

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """The sources that the builder writes, by name."""
        if self.binding:
            return ()
        from . import binding

        namespace, signatures = self.project.name, self.every_signature
        return (
            (BINDING, binding.binding(namespace, self.family, signatures, self.isa_levels)),
            (DECLARATIONS, binding.declarations(namespace, signatures)),
        )

    @kept
    def _files(self) -> tuple[str, ...]:
        if self.files is not None:
            return self.files
        try:
            return tuple(sorted(path.name for path in (self.project.csrc / self.family).iterdir()))
        except OSError:
            return ()

    @kept
    def ops(self) -> tuple[str, ...]:
        """The torch operators that its libraries implement, without namespace and overloads: those
        that are declared, or those that a project's own binding registers."""
        if self.declared or not self.binding:
            declared = (
                one.name.partition(".")[0] + more
                for one in self.declared
                for more in ("", *(("_plain",) if one.plain else ()))
            )
            made = (signature.schema.name for signature in self.signatures)
            return tuple(dict.fromkeys((*declared, *made)))
        try:
            text = (self.project.csrc / self.binding).read_text(encoding="utf-8")
        except OSError:
            return ()
        return tuple(dict.fromkeys(re.findall(r'FLEXOPS_IMPL\(\s*\w+,\s*"(\w+)', text)))

    @property
    def cpu_sources(self) -> tuple[str, ...]:
        """Relative to ``csrc``; empty if there is no CPU kernel."""
        return self._ending("_cpu.cpp")

    @property
    def cuda_sources(self) -> tuple[str, ...]:
        """The launchers, relative to ``csrc``. Which kernels there are, the built library says
        (``kernel_names``)."""
        return self._ending("_cuda.cpp")

    def _ending(self, suffix: str) -> tuple[str, ...]:
        return tuple(f"{self.family}/{name}" for name in self._files if name.endswith(suffix))

    def runs_on(self, capability: ComputeCapability) -> bool:
        """Whether its kernels run on GPUs of that capability, so that it is worth compiling them
        for it."""
        return (capability.major, capability.minor) >= self.least_capability

    @property
    def devices(self) -> tuple[DeviceType, ...]:
        """The device types that a library can be built for."""
        cpu: tuple[DeviceType, ...] = ("cpu",) if self.cpu_sources else ()
        cuda: tuple[DeviceType, ...] = ("cuda",) if self.cuda_sources else ()
        return cpu + cuda
