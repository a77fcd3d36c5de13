"""What an op is, to the builder: its sources and what they need. Nothing is resolved or looked up here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceType = Literal["cpu", "cuda"]
"""torch's device type. A ROCm build's is ``"cuda"`` too, as in torch."""


@dataclass(frozen=True)
class OpSpec:
    """One folder of ``csrc/``, built into one library per device type.

    The folder ``csrc/<name>/`` holds ``<name>_binding.cpp`` (compiled once per device type with ``FLEXOPS_DEVICE_CPU`` or
    ``FLEXOPS_DEVICE_CUDA`` defined to 1), ``<name>_cpu.cpp`` (compiled once per ISA level with ``FLEXOPS_ISA`` defined to
    ``baseline``, ``avx2`` or ``avx512``), ``<name>_cuda.cpp`` (the launchers, host code) and ``<name>.cuh`` (the kernels).

    Attributes:
        name: folder, library and cache name.
        ops: the torch operators (without the ``flexops::`` namespace) that its libraries implement.
        cpu_sources: relative to ``csrc/``; empty if there is no CPU kernel.
        cuda_sources: the launchers, relative to ``csrc/``. Which kernels there are, the built library says (``device_code``).
        isa_levels: the ISA levels of the CPU sources.
    """

    name: str
    ops: tuple[str, ...]
    cpu_sources: tuple[str, ...] = ()
    cuda_sources: tuple[str, ...] = ()
    isa_levels: tuple[str, ...] = field(default=("baseline", "avx2", "avx512"))

    @property
    def binding(self) -> str:
        return f"{self.name}/{self.name}_binding.cpp"

    @property
    def devices(self) -> tuple[DeviceType, ...]:
        """The device types that a library can be built for."""
        cpu: tuple[DeviceType, ...] = ("cpu",) if self.cpu_sources else ()
        cuda: tuple[DeviceType, ...] = ("cuda",) if self.cuda_sources else ()
        return cpu + cuda
