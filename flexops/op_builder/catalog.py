"""The ops that flexops ships: the one list that AOT, JIT, doctor and the benchmarks walk."""

from __future__ import annotations

from ..errors import FlexopsError
from .spec import OpSpec

CATALOG: tuple[OpSpec, ...] = (
    OpSpec("adam", ops=("adam_", "adam_copy_"), cpu_sources=("adam/adam_cpu.cpp",), cuda_sources=("adam/adam.cu",)),
    OpSpec("quant", ops=("quantize", "dequantize"), cpu_sources=("quant/quant_cpu.cpp",), cuda_sources=("quant/quant.cu",)),
)


def find(name: str) -> OpSpec:
    """The spec called ``name``; raises ``FlexopsError`` naming the ones there are."""
    for spec in CATALOG:
        if spec.name == name:
            return spec
    raise FlexopsError(f"there is no op called {name!r}", required=", ".join(spec.name for spec in CATALOG), fix="flexops build --help")


def select(names: tuple[str, ...]) -> tuple[OpSpec, ...]:
    """The specs of ``names``, in catalogue order; no names, or ``all`` (or ``1``), means every op."""
    if not names or set(names) & {"all", "1"}:
        return CATALOG
    wanted = [find(name) for name in names]
    return tuple(spec for spec in CATALOG if spec in wanted)
