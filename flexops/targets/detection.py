"""Which target is best for a machine. Pure: a ``Machine`` goes in, a ``Detection`` with its reason
comes out; ``probe.py`` looks at the real one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import compute_capability
from ..compute_capability import ComputeCapability
from ..errors import ArchitectureError
from ..toolchain.version import Version
from .model import Matrix, Target


@dataclass(frozen=True)
class Machine:
    """What decides about the target.

    Attributes:
        system, architecture: as ``platform`` says: ``"Linux"``, ``"x86_64"``.
        python: ``"3.12"``, the Python that the environment will have; empty if any is available
            (conda).
        driver: NVIDIA driver release, ``"580.65.06"``; empty if unknown.
        capabilities: of the NVIDIA GPUs, one for each: ``("8.9", "8.9")``.
        rocm: architectures of the AMD GPUs: ``("gfx90a",)``.
        problems: what could not be found out, and why.
    """

    system: str = "Linux"
    architecture: str = "x86_64"
    python: str = ""
    driver: str = ""
    capabilities: tuple[str, ...] = ()
    rocm: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Detection:
    """The best target, why it is, and what else is worth knowing."""

    target: Target
    reason: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.target.id,
            "reason": self.reason,
            "notes": list(self.notes),
            "target": self.target.to_dict(),
        }


def choose(matrix: Matrix, machine: Machine) -> Detection:
    """The best target: one that runs on all of the machine's GPUs, of the newest toolkit that its
    driver carries, for the closest capability."""
    if not (machine.capabilities or machine.rocm):
        return Detection(matrix.cpu, "no GPU was found", machine.problems)
    rows = [target for target in matrix.targets if target.accelerator != "cpu"]
    if machine.system != "Linux" or not any(
        machine.architecture in target.machines for target in rows
    ):
        machines = " or ".join(_unique(one for target in rows for one in target.machines))
        reason = (
            f"GPU targets are pinned for Linux on {machines}, and this is {machine.system} on"
            f" {machine.architecture}"
        )
        return Detection(matrix.cpu, reason, machine.problems)
    cuda = _choose_cuda(matrix, machine) if machine.capabilities else None
    rocm = _choose_rocm(matrix, machine) if machine.rocm else None
    found = [detection for detection in (cuda, rocm) if detection]
    with_gpu = [detection for detection in found if detection.target.accelerator != "cpu"]
    return (with_gpu or found)[0]


def runs_on(target: Target, capability: str) -> bool:
    """Whether this CUDA target's machine code runs on a GPU of that capability."""
    return compute_capability.runs_on(target.capabilities, ComputeCapability.parse(capability))


def _choose_cuda(matrix: Matrix, machine: Machine) -> Detection:
    gpus, odd = _understood(machine.capabilities)
    notes = (*machine.problems, *odd)
    rows = [
        target
        for target in matrix.targets
        if target.accelerator == "cuda" and machine.architecture in target.machines
    ]
    fitting = [target for target in rows if any(runs_on(target, gpu) for gpu in gpus)]
    if not fitting:
        known = ", ".join(
            _unique(capability for target in rows for capability in target.capabilities)
        )
        fix = (
            f'`flexops build --arch "{";".join(_unique(gpus))}"` still compiles for it'
            if gpus
            else "see the notes"
        )
        return Detection(
            matrix.cpu,
            f"no target's code runs on a GPU of capability {_list(gpus)} (there are {known});"
            f" {fix}",
            notes,
        )
    carried = [target for target in fitting if _carries(machine.driver, target, rows)]
    if not carried:
        least = min((target.least_driver for target in fitting), key=Version.parse)
        reason = (
            f"a GPU of capability {_list(gpus)} is here, but its driver {machine.driver} is older"
            f" than {least}, the least of any target; update the driver"
        )
        return Detection(matrix.cpu, reason, notes)
    installable = [target for target in carried if _has_wheels(target, machine.python)]
    if not installable:
        return Detection(
            matrix.cpu,
            f"no target that the GPU and driver can run has a torch for Python {machine.python}",
            notes,
        )
    best = max(installable, key=lambda target: _rank(target, gpus))
    return Detection(
        best,
        _cuda_reason(best, gpus, machine),
        (*notes, *_passed_over(best, carried, gpus, machine), *_left_out(best, gpus)),
    )


def _understood(capabilities: Iterable[str]) -> tuple[list[str], list[str]]:
    gpus, odd = [], []
    for text in capabilities:
        try:
            gpus.append(str(ComputeCapability.parse(text)))
        except ArchitectureError:
            odd.append(f"the capability {text!r} of a GPU is not understood")
    return gpus, odd


def _carries(driver: str, target: Target, rows: Sequence[Target]) -> bool:
    """Minor-version compatibility. An unknown driver counts as the oldest that any target takes."""
    known = (
        Version.parse(driver) if driver else min(Version.parse(row.least_driver) for row in rows)
    )
    return known >= Version.parse(target.least_driver)


def _has_wheels(target: Target, python: str) -> bool:
    if not python:
        return True
    oldest, newest = map(Version.parse, target.python_range)
    return oldest <= Version.parse(python) <= newest


def _rank(target: Target, gpus: Sequence[str]) -> tuple[int, Version, ComputeCapability]:
    served = sum(runs_on(target, gpu) for gpu in gpus)
    return (
        served,
        Version.parse(target.toolkit),
        max(map(ComputeCapability.parse, target.capabilities)),
    )


def _cuda_reason(best: Target, gpus: Sequence[str], machine: Machine) -> str:
    served = _unique(gpu for gpu in gpus if runs_on(best, gpu))
    driver = (
        f"driver {machine.driver}"
        if machine.driver
        else f"the driver is unknown, so it is taken for {best.least_driver}, which"
    )
    reason = (
        f"GPU of capability {_list(served)}; {driver} carries CUDA {best.toolkit_minor} (it needs"
        f" {best.least_driver})"
    )
    older = [gpu for gpu in served if gpu not in best.capabilities]
    return reason + (
        f"; no target is for {_list(older)} itself, and code for {best.arch_list} runs on it"
        if older
        else ""
    )


def _passed_over(
    best: Target, carried: Sequence[Target], gpus: Sequence[str], machine: Machine
) -> list[str]:
    first = max(carried, key=lambda target: _rank(target, gpus))
    if first == best:
        return []
    return [
        f"{first.id} would be newer, but its torch {first.torch} is for Python"
        f" {' to '.join(first.python_range)}, not {machine.python}"
    ]


def _left_out(best: Target, gpus: Sequence[str]) -> list[str]:
    others = _unique(gpu for gpu in gpus if not runs_on(best, gpu))
    return (
        [
            f"GPUs of capability {_list(others)} are not served by it; for one library that serves"
            " all, `flexops build --arch`"
        ]
        if others
        else []
    )


def _choose_rocm(matrix: Matrix, machine: Machine) -> Detection:
    rows = [target for target in matrix.targets if target.accelerator == "rocm"]
    served = [
        (_rocm_rank(target, machine), target)
        for target in rows
        if set(target.capabilities) & set(machine.rocm)
    ]
    if not served:
        known = ", ".join(
            _unique(capability for target in rows for capability in target.capabilities)
        )
        return Detection(
            matrix.cpu,
            f"no target is for an AMD GPU of architecture {_list(machine.rocm)} (there are"
            f" {known})",
            machine.problems,
        )
    fitting = [(rank, target) for rank, target in served if _has_wheels(target, machine.python)]
    if not fitting:
        return Detection(
            matrix.cpu,
            f"no target for {_list(machine.rocm)} has a torch for Python {machine.python}",
            machine.problems,
        )
    best = max(fitting, key=lambda pair: pair[0])[1]
    return Detection(best, f"AMD GPU of architecture {best.arch_list}", machine.problems)


def _rocm_rank(target: Target, machine: Machine) -> tuple[int, Version]:
    return sum(gpu in target.capabilities for gpu in machine.rocm), Version.parse(target.toolkit)


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def _list(items: Iterable[str]) -> str:
    return ", ".join(_unique(items)) or "(none understood)"
