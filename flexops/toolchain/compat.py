"""The rules of what goes with what, over the facts in ``compat.toml``. Pure: explicit values in, a
verdict with its reason out."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _toml
from ..compute_capability import ComputeCapability
from ..errors import ToolchainError
from .memo import Memo
from .model import HostCompiler, Version

if TYPE_CHECKING:
    from .driver import DriverRelease

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compat.toml")


class Verdict(NamedTuple):
    """Whether two things go together. ``reason`` says why not, or, where they do, what is worth
    knowing (may be empty)."""

    accepted: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.accepted


class ToolkitFacts(NamedTuple):
    """What is known of a CUDA toolkit release: one row of ``compat.toml``.

    Attributes:
        version: of the row, which can be an older release than the one asked for.
        least_driver: the driver this toolkit's release came with; None where that is not known.
        family_driver: the least driver with which minor-version compatibility carries it.
        max_gcc, max_clang: newest major that nvcc accepts.
        capabilities: what nvcc can emit, ascending.
    """

    version: Version
    least_driver: DriverRelease | None
    family_driver: DriverRelease
    max_gcc: int
    max_clang: int
    capabilities: tuple[ComputeCapability, ...]


class Rules:
    """``compat.toml`` in memory."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self.toolkits: tuple[Version, ...] = tuple(
            sorted(Version.parse(name) for name in document["cuda"])
        )
        self.suggested: str = document["suggested"]
        self.mainstream: tuple[str, ...] = tuple(document["mainstream"])
        self.integrated: tuple[str, ...] = tuple(document["integrated"])
        self.pairs: Sequence[Mapping[str, Any]] = document.get("pair", ())

    @property
    def newest(self) -> ComputeCapability:
        """The newest capability that any known toolkit has code for."""
        return max(
            ComputeCapability.parse(name).base
            for row in self._document["cuda"].values()
            for name in row["capabilities"]
        )

    def facts(self, toolkit: Version) -> ToolkitFacts:
        """The facts of this toolkit, or of the next older one known; raises ``ToolchainError`` for
        one older than all."""
        from .driver import DriverRelease

        row_version, row = self._row(toolkit)
        least = row.get("least_driver")
        return ToolkitFacts(
            version=row_version,
            least_driver=DriverRelease.parse(least) if least else None,
            family_driver=DriverRelease.parse(row["family_driver"]),
            max_gcc=row["max_gcc"],
            max_clang=row["max_clang"],
            capabilities=self.capabilities(toolkit),
        )

    def capabilities(self, toolkit: Version) -> tuple[ComputeCapability, ...]:
        """What this toolkit's nvcc can emit, ascending."""
        return tuple(sorted(map(ComputeCapability.parse, self._row(toolkit)[1]["capabilities"])))

    def toolkit_for_torch(self, toolkit: Version, torch_cuda: Version | None) -> Verdict:
        """May code of this toolkit run in a process with that torch? The same major may; a minor
        mismatch is worth a note."""
        if toolkit < self.toolkits[0]:
            return Verdict(
                False,
                f"CUDA {toolkit} is older than {self.toolkits[0]}, the oldest that flexops"
                " supports",
            )
        if torch_cuda is None:
            return Verdict(True)
        for pair in self.pairs:
            if _covers(pair["toolkit"], toolkit) and _covers(pair["torch"], torch_cuda):
                return Verdict(bool(pair["accept"]), str(pair["reason"]))
        if toolkit.major != torch_cuda.major:
            return Verdict(
                False,
                f"CUDA {toolkit} is of another major than torch's CUDA {torch_cuda.major_minor}",
            )
        if toolkit.minor != torch_cuda.minor:
            reason = (
                f"CUDA {toolkit} compiles for a torch built with CUDA {torch_cuda.major_minor}:"
                " another minor of the same major, which is fine"
            )
            return Verdict(True, reason)
        return Verdict(True)

    def compiler_for_nvcc(self, compiler: HostCompiler, toolkit: Version) -> Verdict:
        """Does this toolkit's nvcc accept that host compiler?"""
        _, row = self._row(toolkit)
        newest: int = row["max_gcc" if compiler.kind == "gcc" else "max_clang"]
        if compiler.version.major <= newest:
            return Verdict(True)
        return Verdict(
            False,
            f"{compiler.kind} {compiler.version} is newer than nvcc {toolkit} accepts"
            f" ({compiler.kind} {newest} at most)",
        )

    def compiler_for_standard(self, compiler: HostCompiler, standard: int) -> Verdict:
        """Can this compiler read headers of that C++ standard (17 or 20), as torch writes them?"""
        known = self._document[f"least_{compiler.kind}"]
        if str(standard) not in known:
            what = f"there is no rule for C++{standard} as the standard of torch's headers"
            required = ", ".join(f"C++{one}" for one in known)
            raise ToolchainError(
                what, found=str(standard), required=required, fix="correct the C++ standard"
            )
        least = Version.parse(known[str(standard)])
        if compiler.version >= least:
            return Verdict(True)
        return Verdict(
            False,
            f"{compiler.kind} {compiler.version} is too old for torch's C++{standard} headers"
            f" ({compiler.kind} {least} at least)",
        )

    def newest_gcc(self, toolkit: Version) -> int:
        gcc: int = self._row(toolkit)[1]["max_gcc"]
        return gcc

    def _row(self, toolkit: Version) -> tuple[Version, Mapping[str, Any]]:
        wanted = Version((toolkit.major, toolkit.minor))
        known = [version for version in self.toolkits if version <= wanted]
        if not known:
            raise ToolchainError(
                f"CUDA {toolkit} is not supported",
                found=f"CUDA {toolkit}",
                required=f"CUDA {self.toolkits[0]} or newer",
            )
        return known[-1], self._document["cuda"][str(known[-1])]


def rules(memo: Memo | None = None) -> Rules:
    """The rules that ship with flexops; read once in a process. A ``memo`` saves parsing the TOML,
    which takes milliseconds."""
    held = _held()
    if not held:
        held.append(Rules(memo.recall("toml", PATH, _toml.load) if memo else _toml.load(PATH)))
    return held[0]


def supported_capabilities(toolkit: Version) -> tuple[ComputeCapability, ...]:
    """What this toolkit's nvcc can emit, ascending; raises ``ToolchainError`` for a toolkit older
    than all known ones."""
    return rules().capabilities(toolkit)


def driver_supports(driver: DriverRelease, toolkit: Version) -> Verdict:
    """Can a machine with this driver run what that toolkit compiled? The reason says when only
    machine code will (no PTX)."""
    facts = rules().facts(toolkit)
    if driver.version < facts.family_driver.version:
        return Verdict(
            False,
            f"driver {driver} is older than {facts.family_driver}, the least for CUDA"
            f" {toolkit.major}.x",
        )
    if facts.least_driver and driver.version < facts.least_driver.version:
        return Verdict(
            True,
            f"driver {driver} is older than CUDA {toolkit}'s own ({facts.least_driver}): machine"
            " code runs, PTX of this toolkit does not",
        )
    return Verdict(True)


@functools.cache
def _held() -> list[Rules]:
    return []


def _covers(pattern: str, version: Version) -> bool:
    wanted = Version.parse(pattern).parts
    return version.parts[: len(wanted)] == wanted
