"""Which architectures a build is for: what was asked for, as far as this CUDA version can emit
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..compute_capability import (
    Architecture,
    ComputeCapability,
    format_arch_list,
    merge,
    parse_arch_list,
)
from ..errors import ArchitectureError
from ..settings import Settings
from .compat import Rules, rules
from .model import CudaToolkit, Version


class ArchitectureChoice(NamedTuple):
    """The architectures to compile, and what is worth saying about how they differ from what was
    asked for."""

    architectures: tuple[Architecture, ...]
    notes: tuple[str, ...] = ()


def resolve_architectures(
    settings: Settings, toolkit: CudaToolkit, *, detected: Sequence[ComputeCapability]
) -> ArchitectureChoice:
    """``TORCH_CUDA_ARCH_LIST``, else the GPUs here, else every mainstream architecture; each as far
    as ``toolkit`` can emit it.

    Args:
        detected: the capabilities of the GPUs here, as ``local_capabilities`` gives them.

    Raises:
        ArchitectureError: the list is not understood, or the toolkit can emit nothing that would
            serve any of it.
    """
    return resolve(settings.arch_list, toolkit.version, detected=detected, known=rules())


def resolve(
    asked: str | None, toolkit: Version, *, detected: Sequence[ComputeCapability], known: Rules
) -> ArchitectureChoice:
    """The same on plain values."""
    supported = known.capabilities(toolkit)
    if asked:
        wanted = parse_arch_list(asked, native=lambda: detected, supported=supported)
        if beyond := [
            one
            for one in wanted
            if one.capability.base > known.newest and one.capability not in detected
        ]:
            raise _no_such_gpu(beyond, known.newest, toolkit)
    elif detected:
        wanted = merge(Architecture(capability) for capability in detected)
    else:
        return _mainstream(known.mainstream, supported)
    plain = [one for one in supported if not one.suffix and str(one) not in known.integrated]
    served = [
        (one, "") if one.capability in supported else _stand_in(one, toolkit, plain)
        for one in wanted
    ]
    architectures = merge(one for one, _ in served if one)
    notes = tuple(note for _, note in served if note)
    if not architectures:
        raise _nothing_left(wanted, toolkit, supported, notes)
    return ArchitectureChoice(architectures, notes)


def _stand_in(
    wanted: Architecture, toolkit: Version, plain: Sequence[ComputeCapability]
) -> tuple[Architecture | None, str]:
    """For what this toolkit cannot emit: the nearest older machine code that runs there, PTX of its
    newest, or nothing; and the note."""
    capability = wanted.capability
    older = [one for one in plain if one <= capability.base]
    if not older:
        return None, f"{wanted}: CUDA {toolkit} emits nothing older than {plain[0]}; left out"
    nearest = older[-1]
    if nearest.major == capability.major and wanted.sass:
        return (
            Architecture(nearest, ptx=wanted.ptx),
            (
                f"{wanted}: CUDA {toolkit} cannot emit it; {nearest} is compiled instead, which"
                " runs there"
            ),
        )
    return (
        Architecture(nearest, ptx=True, sass=False),
        (
            f"{wanted}: newer than CUDA {toolkit} knows; the driver will compile it from PTX of"
            f" {nearest}"
        ),
    )


def _mainstream(
    mainstream: Sequence[str], supported: Sequence[ComputeCapability]
) -> ArchitectureChoice:
    capabilities = [one for one in map(ComputeCapability.parse, mainstream) if one in supported]
    architectures = tuple(Architecture(one, ptx=one == capabilities[-1]) for one in capabilities)
    listed = format_arch_list(architectures)
    return ArchitectureChoice(
        architectures,
        (
            (
                f"no architecture was asked for and no GPU is here: compiled for {listed};"
                " TORCH_CUDA_ARCH_LIST makes it fewer"
            ),
        ),
    )


def _no_such_gpu(
    beyond: Sequence[Architecture], newest: ComputeCapability, toolkit: Version
) -> ArchitectureError:
    return ArchitectureError(
        f"there is no GPU of capability {format_arch_list(beyond)} (is it the CUDA version?)",
        found=f"{format_arch_list(beyond)} asked for; this toolkit is CUDA {toolkit}",
        required=f"capabilities of GPUs: {newest} is the newest that is known; newer ones run PTX",
        fix=(
            'export TORCH_CUDA_ARCH_LIST="9.0+PTX"   # the capability of the GPU that this will run'
            " on: nvidia-smi --query-gpu=compute_cap --format=csv"
        ),
    )


def _nothing_left(
    wanted: Sequence[Architecture],
    toolkit: Version,
    supported: Sequence[ComputeCapability],
    notes: Sequence[str],
) -> ArchitectureError:
    newest = [one for one in supported if not one.suffix][-1]
    return ArchitectureError(
        f"CUDA {toolkit} cannot compile for {format_arch_list(wanted)}",
        found="; ".join(notes),
        required=f"one or more of {', '.join(map(str, supported))}, or an older CUDA toolkit",
        fix=(
            f'export TORCH_CUDA_ARCH_LIST="{newest}"   # the capability of the GPU that this will'
            " run on"
        ),
    )
