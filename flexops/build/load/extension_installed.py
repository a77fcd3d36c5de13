"""The kernels of an extension in a wheel: stored beside its library, and given to it at its first
launch. ``flexops.builder.BuildExtension`` writes them; the library calls ``attach``
(csrc/common/extension_launch.h).

    mypkg/_C.cpython-311-x86_64-linux-gnu.so    host code
    mypkg/_C.flexops/programs.json              the device code, for GPUs that come later
    mypkg/_C.flexops/_aot/                      its machine code
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ... import settings, toolchain
from ...errors import ToolchainError
from ..describe.spec import OpSpec, Project
from ..plan.kernel_names import artifact_name
from ..plan.kernel_plan import KernelPlan
from ..plan.program import Program
from . import extension_nvrtc

if TYPE_CHECKING:
    from ...compute_capability import Architecture, ComputeCapability
    from ...toolchain.nvrtc import DeviceCompiler

PROGRAMS = "programs.json"


class InstalledProgram(NamedTuple):
    """A program whose code was compiled with a wheel. ``digest``: in the names of its artifacts;
    the headers of the machine that built them need not be here."""

    program: Program
    folder: Path
    digest: str

    @property
    def expression(self) -> str:
        return self.program.expression

    @property
    def number(self) -> int:
        return self.program.number

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.program.symbols

    @property
    def spec(self) -> OpSpec:
        project = Project(self.program.extension, self.folder)
        return OpSpec(self.program.spec.family, project, files=())

    def name(self, architecture: str) -> str:
        return artifact_name(self.program.spec.family, architecture, self.digest)

    def plan(self, architecture: Architecture, compiler: DeviceCompiler) -> KernelPlan:
        """Of code for a GPU that the wheel has none for."""
        return self.program._replace(roots=_roots()).plan(architecture, compiler)

    def fix_for(self, capability: ComputeCapability) -> str:
        name = self.program.extension
        return f'unset FLEXOPS_JIT, or build {name} with TORCH_CUDA_ARCH_LIST="{capability}"'


def folder_of(library: Path) -> Path:
    """Where a library's kernels lie."""
    return library.with_name(f"{library.name.partition('.')[0]}.flexops")


def attach(library: str) -> None:
    """Give a library that Python has opened the kernels that lie beside it."""
    folder = folder_of(Path(library))
    programs = []
    for one in json.loads((folder / PROGRAMS).read_text(encoding="utf-8")):
        digest = one.pop("digest")
        fields = {
            name: tuple(value) if isinstance(value, list) else value for name, value in one.items()
        }
        program = Program(**fields | {"words": frozenset(one["words"])})
        programs.append(InstalledProgram(program, folder, digest))
    extension_nvrtc.attach(Path(library), programs)


def _roots() -> tuple[tuple[str, Path], ...]:
    from ...toolchain import runtime_headers

    torch = toolchain.torch_build()
    assert torch is not None  # its library is open
    cuda = runtime_headers.find(settings.current(), torch)
    if cuda is None:
        raise ToolchainError(
            "the headers of CUDA's runtime are missing, for which a kernel is to be compiled",
            required="torch's own wheel for CUDA, which brings them",
            fix="pip install torch, or a wheel of the extension that was built for this GPU",
        )
    return extension_nvrtc.roots_of(torch, cuda)
