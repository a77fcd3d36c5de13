"""Which of the things found is taken. Pure: explicit values in, the choice and its reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .compat import Rules, Verdict
from .model import CudaToolkit, Found, HostCompiler, Rejected, RocmToolkit, TorchBuild, Version

T = TypeVar("T")

CUDA_WISH, ROCM_WISH, CXX_WISH = "CUDA_HOME", "ROCM_HOME", "CXX"


class Choice(Generic[T]):
    """What was selected, what was rejected and why, what is worth knowing about what was taken, and
    where it was looked for."""

    def __init__(
        self,
        taken: Found[T] | None = None,
        rejected: tuple[Rejected, ...] = (),
        notes: tuple[str, ...] = (),
        tried: tuple[str, ...] = (),
    ) -> None:
        self.taken = taken
        self.rejected = rejected
        self.notes = notes
        self.tried = tried

    @property
    def value(self) -> T | None:
        return self.taken.value if self.taken else None


def choose_cuda(
    usable: Sequence[Found[CudaToolkit]], torch: TorchBuild | None, rules: Rules
) -> Choice[CudaToolkit]:
    """The toolkit that matches torch; an explicit CUDA_HOME wins among those that do.

    Then: the same minor as torch's, else the nearest (the newer of two), else the first found. A
    torch without CUDA takes the newest.
    """
    torch_cuda = Version.parse(torch.cuda) if torch and torch.cuda else None
    judged = [(found, rules.toolkit_for_torch(found.value.version, torch_cuda)) for found in usable]
    rejected = tuple(
        Rejected("CUDA toolkit", found.value.root, verdict.reason)
        for found, verdict in judged
        if not verdict
    )
    fitting = [(found, verdict) for found, verdict in judged if verdict]
    if not fitting:
        return Choice(None, rejected)

    def rank(item: tuple[Found[CudaToolkit], Verdict]) -> tuple[bool, int, int, int]:
        version = item[0].value.version
        distance = abs(version.minor - torch_cuda.minor) if torch_cuda else 0
        return (item[0].found_via != CUDA_WISH, distance, -version.major, -version.minor)

    taken, verdict = min(fitting, key=rank)
    return Choice(taken, rejected, (verdict.reason,) if verdict.reason else ())


def choose_rocm(
    usable: Sequence[Found[RocmToolkit]], torch: TorchBuild | None
) -> Choice[RocmToolkit]:
    """The ROCm that matches torch's: the same major, of these ROCM_HOME, else the nearest minor. A
    torch without HIP takes the newest."""
    hip = Version.parse(torch.hip) if torch and torch.hip else None
    other = [found.value for found in usable if hip and found.value.version.major != hip.major]
    reason = f"another major than torch's HIP {hip.major_minor}" if hip else ""
    rejected = tuple(
        Rejected("ROCm", rocm.root, f"ROCm {rocm.version} is of {reason}") for rocm in other
    )
    fitting = [found for found in usable if found.value not in other]
    if not fitting:
        return Choice(None, rejected)

    def rank(found: Found[RocmToolkit]) -> tuple[bool, int, int, int]:
        version = found.value.version
        return (
            found.found_via != ROCM_WISH,
            abs(version.minor - hip.minor) if hip else 0,
            -version.major,
            -version.minor,
        )

    taken = min(fitting, key=rank)
    version = taken.value.version
    if hip is None or version.minor == hip.minor:
        return Choice(taken, rejected)
    note = (
        f"ROCm {version.major_minor} compiles for a torch built with HIP {hip.major_minor}: another"
        " minor of the same major"
    )
    return Choice(taken, rejected, (note,))


def choose_host(
    usable: Sequence[Found[HostCompiler]], cuda: CudaToolkit | None, standard: int, rules: Rules
) -> Choice[HostCompiler]:
    """CXX's compiler, else conda's, else the newest g++, else the newest clang++: the first that
    nvcc and torch's headers accept."""
    rejected: list[Rejected] = []
    for found in sorted(usable, key=_host_rank):
        verdicts = [rules.compiler_for_standard(found.value, standard)]
        if cuda:
            verdicts.append(rules.compiler_for_nvcc(found.value, cuda.version))
        reasons = [verdict.reason for verdict in verdicts if not verdict]
        if not reasons:
            return Choice(found, tuple(rejected), _wish_note(found, rejected, usable))
        rejected.append(Rejected("C++ compiler", found.value.path, "; ".join(reasons)))
    return Choice(None, tuple(rejected))


def _host_rank(found: Found[HostCompiler]) -> tuple[int, tuple[int, ...]]:
    by_origin = {CXX_WISH: 0, "conda": 1}.get(
        found.found_via, 2 if found.value.kind == "gcc" else 3
    )
    return by_origin, tuple(-part for part in found.value.version.parts)


def _wish_note(
    taken: Found[HostCompiler], rejected: Sequence[Rejected], usable: Sequence[Found[HostCompiler]]
) -> tuple[str, ...]:
    wished: list[Path] = [found.value.path for found in usable if found.found_via == CXX_WISH]
    refused = [one for one in rejected if one.path in wished]
    return tuple(
        f"CXX={one.path} is not used ({one.reason}); {taken.value.path} is" for one in refused
    )
