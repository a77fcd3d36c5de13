"""What a target is, as plain frozen values. Nothing here reads a file or looks at the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..errors import TargetError

Accelerator = Literal["cpu", "cuda", "rocm"]

NVCC_REQUIREMENT = "cuda-toolkit[nvcc,cudart,cccl]=={version}"
"""The package index's complete nvcc (CUDA 13 and newer): compiler, static runtime and C++ core
libraries."""


@dataclass(frozen=True)
class Target:
    """One row of the matrix, with what it shares with its CUDA or ROCm release filled in.

    Attributes:
        id: the target's name, which is also the image tag: ``cu130-sm90``.
        accelerator: ``cpu``, ``cuda`` or ``rocm``.
        toolkit: release of CUDA or ROCm, ``"13.0.3"``; empty for cpu.
        toolkit_source: where an nvcc (for people's own sources) or hipcc is available, best first:
            ``index``, ``conda``, ``image``, ``system``.
        capabilities: what is compiled for: ``("9.0",)``, ``("gfx90a",)``; empty for cpu.
        gpus: names of GPUs this runs on, for people.
        torch: the pinned release, ``"2.14.1"``.
        cxx_standard: the C++ standard of that torch's headers.
        python: of images and conda environments, ``"3.12"``.
        python_range: oldest and newest Python that flexops runs on and this torch has wheels for.
        ninja: the pinned release.
        machines: processors that there is a torch for, as ``platform.machine()`` says: ``("x86_64",
            "aarch64")``.
        host_compiler: oldest and newest GCC; ``""`` is no bound.
        least_driver: the GPU driver's least release; empty for cpu.
        build_base, runtime_base: base images, by tag.
        build_digest, runtime_digest: ``sha256:…`` of the base images, or empty.
        index: URL of another package index with wheels for this target, or empty.
        index_required: only that index has them.
    """

    id: str
    accelerator: Accelerator
    toolkit: str
    toolkit_source: tuple[str, ...]
    capabilities: tuple[str, ...]
    gpus: str
    torch: str
    cxx_standard: int
    python: str
    python_range: tuple[str, str]
    ninja: str
    machines: tuple[str, ...]
    host_compiler: tuple[str, str]
    least_driver: str
    build_base: str
    runtime_base: str
    build_digest: str
    runtime_digest: str
    index: str
    index_required: bool

    @property
    def arch_list(self) -> str:
        """The text of ``TORCH_CUDA_ARCH_LIST`` (``PYTORCH_ROCM_ARCH`` for rocm)."""
        return ";".join(self.capabilities)

    @property
    def toolkit_name(self) -> str:
        """``"cu130"`` of ``cu130-sm90``: what the rows of one CUDA or ROCm release share."""
        return self.id.partition("-")[0]

    @property
    def toolkit_minor(self) -> str:
        """``"13.0"`` of ``"13.0.3"``."""
        return ".".join(self.toolkit.split(".")[:2])

    @property
    def torch_requirement(self) -> str:
        """What pip is asked for. The local version keeps pip from taking the default index's CUDA
        wheel for a ROCm machine."""
        return (
            f"torch=={self.torch}+rocm{self.toolkit_minor}"
            if self.accelerator == "rocm"
            else f"torch=={self.torch}"
        )

    @property
    def toolkit_requirement(self) -> str:
        """The toolkit's pin on the package index, or empty where the index has no compiler for
        it."""
        return (
            NVCC_REQUIREMENT.format(version=self.toolkit) if "index" in self.toolkit_source else ""
        )

    @property
    def requirements(self) -> tuple[str, ...]:
        """Every pip pin: torch, ninja and, where the index has it, the toolkit."""
        pins = (self.torch_requirement, f"ninja=={self.ninja}", self.toolkit_requirement)
        return tuple(pin for pin in pins if pin)

    def to_dict(self) -> dict[str, Any]:
        """Everything about the target, for JSON."""
        return {
            **asdict(self),
            "arch_list": self.arch_list,
            "requirements": list(self.requirements),
        }


@dataclass(frozen=True)
class Matrix:
    """All targets in the order of the file; ``conda`` has the variants of the conda package."""

    targets: tuple[Target, ...]
    conda: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(target.id for target in self.targets)

    def find(self, target_id: str) -> Target:
        """The target called that; raises ``TargetError`` naming the ones there are."""
        for target in self.targets:
            if target.id == target_id:
                return target
        raise TargetError(
            f"there is no target called {target_id!r}",
            required=", ".join(self.ids),
            fix="flexops target list",
        )

    @property
    def cpu(self) -> Target:
        """The target that needs no GPU."""
        return next(target for target in self.targets if target.accelerator == "cpu")
