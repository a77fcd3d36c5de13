"""The build-time ladder: one op, built the conventional way with more and more of the usual advice,
then by flexops.

Every rung runs in fresh processes and fresh directories. What is timed is what a user waits for
between asking for the op and having it loaded; importing torch is not in it, on either side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flexops import toolchain
from flexops.build.describe import catalog
from flexops.compute_capability import parse_arch_list
from flexops.errors import (
    ArchitectureError,
    CompileError,
    FlexopsError,
    SettingsError,
    ToolchainError,
)
from flexops.settings import Settings

from . import machine
from .build_runner import OP, Runner

DEFAULT_ARCHITECTURE = "9.0"

Side = Literal["torch", "flexops"]
Report = Callable[[int, int, str], None]
"""Called with (rungs finished, rungs in all, the label of the one that starts)."""


@dataclass(frozen=True)
class Rung:
    """One way to build the op. ``quick`` rungs are those that a quick run keeps; a ``family`` rung
    builds that family instead of the one op."""

    id: str
    side: Side
    label: str
    quick: bool = True
    family: str = ""


RUNGS: tuple[Rung, ...] = (
    Rung(
        "torch-baseline", "torch", "setuptools, all architectures, one job, no ninja", quick=False
    ),
    Rung("torch-ninja", "torch", "+ ninja (cpp_extension.load)", quick=False),
    Rung("torch-one-arch", "torch", "+ one architecture", quick=False),
    Rung("torch-all-jobs", "torch", "+ all jobs"),
    Rung("torch-ccache", "torch", "+ ccache hit", quick=False),
    Rung("torch-warm", "torch", "again in a new process (nothing to build)", quick=True),
    Rung("torch-edit-cpp", "torch", "an edit of a pybind11 .cpp (processor time)", quick=False),
    Rung(
        "torch-edit-cu",
        "torch",
        "a .cu with torch/extension.h edited (processor time)",
        quick=False,
    ),
    Rung("flexops-all-archs", "flexops", "cold, every kernel, all architectures"),
    Rung("flexops-cold", "flexops", "cold, every kernel, one architecture"),
    Rung("flexops-ccache", "flexops", "ccache hit, one architecture (kernels anew)"),
    Rung("flexops-first-use", "flexops", "library there, one kernel (a first call)"),
    Rung("flexops-warm", "flexops", "warm, in a new process"),
    Rung(
        "flexops-edit-cpp",
        "flexops",
        "an edit of that .cpp by flexops.load (processor time)",
        quick=False,
    ),
    Rung(
        "flexops-edit-cu",
        "flexops",
        "an edit of that .cu by flexops.load (processor time)",
        quick=False,
    ),
    Rung(
        "nvrtc-edit-cu", "flexops", "the kernel edited, without nvcc (processor time)", quick=False
    ),
    Rung(
        "nvrtc-edit-cu-host", "flexops", "the host code, without nvcc (processor time)", quick=False
    ),
    Rung("flexops-aot", "flexops", "all operators ahead of time, CPU and one architecture"),
    Rung("flexops-import", "flexops", "import flexops, beyond torch"),
    *(
        Rung(
            f"family-{spec.name}",
            "flexops",
            f"{spec.name}, cold, one architecture",
            quick=False,
            family=spec.name,
        )
        for spec in catalog.CATALOG
    ),
)
_FAIR = "torch-all-jobs"
"""What flexops is compared with: all the usual advice followed, and as flexops cold, nothing
cached."""


@dataclass(frozen=True)
class Measurement:
    """One rung's time in seconds; None if it was left out, and ``note`` says why. Of an edit,
    ``note`` says what it took by the clock, and the first build."""

    rung: Rung
    seconds: float | None
    note: str = ""


@dataclass(frozen=True)
class Ladder:
    """All that was measured, and on what."""

    op: str
    architecture: str
    architectures: tuple[str, ...]
    machine: machine.Machine
    measurements: tuple[Measurement, ...]

    def seconds(self, rung_id: str) -> float | None:
        return next((item.seconds for item in self.measurements if item.rung.id == rung_id), None)

    def ratio(self, slow: str, fast: str) -> float | None:
        """How many times faster ``fast`` is than ``slow``; None unless both were measured."""
        a, b = self.seconds(slow), self.seconds(fast)
        return a / b if a and b else None

    def as_dict(self) -> dict[str, object]:
        rungs = [
            {
                "id": item.rung.id,
                "side": item.rung.side,
                "label": item.rung.label,
                "family": item.rung.family,
                "seconds": item.seconds,
                "note": item.note,
            }
            for item in self.measurements
        ]
        return {
            "benchmark": "build",
            "op": self.op,
            "architecture": self.architecture,
            "architectures": list(self.architectures),
            "machine": self.machine.as_dict(),
            "rungs": rungs,
            "ratios": {name: self.ratio(slow, fast) for name, slow, fast in COMPARISONS},
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Ladder:
        """What ``as_dict`` made; ``KeyError`` or ``TypeError`` if it did not."""
        measurements = tuple(
            Measurement(
                Rung(item["id"], item["side"], item["label"], family=item.get("family", "")),
                item["seconds"],
                item["note"],
            )
            for item in data["rungs"]
        )
        return Ladder(
            data["op"],
            data["architecture"],
            tuple(data["architectures"]),
            machine.Machine(**data["machine"]),
            measurements,
        )


COMPARISONS: tuple[tuple[str, str, str], ...] = (
    ("cold, one architecture: cpp_extension.load / flexops", _FAIR, "flexops-cold"),
    ("cold, all architectures: cpp_extension.load / flexops", "torch-ninja", "flexops-all-archs"),
    ("ccache hit: cpp_extension.load / flexops", "torch-ccache", "flexops-ccache"),
    ("first call: cpp_extension.load, cold / flexops, library there", _FAIR, "flexops-first-use"),
    ("warm, new process: cpp_extension.load / flexops", "torch-warm", "flexops-warm"),
    (
        "an edit of a pybind11 .cpp, processor time: cpp_extension.load / flexops.load",
        "torch-edit-cpp",
        "flexops-edit-cpp",
    ),
    (
        (
            "an edit of a .cu with torch/extension.h, processor time: cpp_extension.load /"
            " flexops.load"
        ),
        "torch-edit-cu",
        "flexops-edit-cu",
    ),
    (
        (
            "an edit of that .cu's kernel, processor time: cpp_extension.load / flexops.load"
            " without nvcc"
        ),
        "torch-edit-cu",
        "nvrtc-edit-cu",
    ),
    (
        (
            "an edit of the rest of that .cu, processor time: cpp_extension.load / flexops.load"
            " without nvcc"
        ),
        "torch-edit-cu",
        "nvrtc-edit-cu-host",
    ),
    ("flexops: all architectures / one", "flexops-all-archs", "flexops-cold"),
)
"""(what is compared, the rung that is expected to be slower, the faster one)."""


def run(
    settings: Settings,
    *,
    architecture: str = DEFAULT_ARCHITECTURE,
    quick: bool = False,
    only: Sequence[str] = (),
    earlier: Ladder | None = None,
    report: Report | None = None,
    keep: Callable[[Ladder], None] | None = None,
) -> Ladder:
    """Climb the ladder. A full run compiles the conventional source for all architectures twice: a
    quarter of an hour on two cores.

    Args:
        architecture: the one architecture, as in ``TORCH_CUDA_ARCH_LIST``.
        quick: leave out the rungs that take minutes.
        only: ids of the rungs to climb; none: all.
        earlier: what a run that was interrupted had measured; that is not measured again unless
            ``only`` names it.
        keep: called with everything so far after each rung.

    A rung that does not build has no time, and a note that holds the end of what the compiler said.

    Raises:
        FlexopsError: there is no rung of that id, or ``earlier`` was measured on something else.
        ArchitectureError: ``architecture`` is not understood, or several.
        ToolchainError: there is no torch, host compiler or ninja here, or nothing that compiles
            device code. nvcc is needed for torch's rungs only.
    """
    if unknown := set(only) - {rung.id for rung in RUNGS}:
        raise SettingsError(
            f"there is no rung called {', '.join(sorted(unknown))}",
            required=", ".join(rung.id for rung in RUNGS),
        )
    if len(chosen := parse_arch_list(architecture)) != 1:
        raise ArchitectureError(
            "the rungs with one architecture are for one",
            found=" ".join(map(str, chosen)),
            required="such as 9.0",
        )
    tools = toolchain.discover(settings, device="cuda")
    if error := toolchain.missing(tools, "cpu"):
        raise error
    if tools.torch and tools.torch.hip:
        raise ToolchainError("the build ladder compares CUDA builds, and torch here is for ROCm")
    ladder = Ladder(
        OP, architecture, _all_architectures(settings, tools), machine.describe(tools), ()
    )
    known = _known(earlier, ladder, only)
    rungs = [rung for rung in RUNGS if not only or rung.id in only or rung.id in known]
    with tempfile.TemporaryDirectory(prefix="flexops-bench-") as scratch:
        runner = Runner(tools, Path(scratch), architecture, ";".join(ladder.architectures))
        runner.only = only
        for number, rung in enumerate(rungs):
            if report and rung.id not in known:
                report(number, len(rungs), f"{rung.side}: {rung.label}")
            ladder = replace(
                ladder,
                measurements=(
                    *ladder.measurements,
                    known.get(rung.id) or _measure(runner, rung, quick),
                ),
            )
            if keep:
                keep(ladder)
    return ladder


def _all_architectures(settings: Settings, tools: toolchain.Toolchain) -> tuple[str, ...]:
    """What both sides can compile for: the mainstream architectures of the nvcc here or, where
    there is none, of the NVRTC."""
    if tools.cuda is not None:
        version = tools.cuda.version
    else:
        found = toolchain.device_compiler(settings)
        if found.taken is None:
            raise toolchain.diagnosis.no_device_compiler(found, tools.torch)
        version = found.taken.value.version
    choice = toolchain.architectures.resolve(
        None, version, detected=(), known=toolchain.compat.rules()
    )
    return tuple(map(str, choice.architectures))


def _known(earlier: Ladder | None, ladder: Ladder, only: Sequence[str]) -> dict[str, Measurement]:
    """What need not be measured again, by the rung's id."""
    if earlier is None:
        return {}
    mine, theirs = (
        replace(one, machine=replace(one.machine, date=""), measurements=())
        for one in (ladder, earlier)
    )
    if mine != theirs:
        raise FlexopsError(
            "the earlier results are of another machine, other versions or another architecture",
            found=str(earlier.machine), required=str(ladder.machine), fix="name another file",
        )  # fmt: skip
    return {
        item.rung.id: item
        for item in earlier.measurements
        if item.seconds is not None and item.rung.id not in only
    }


def _measure(runner: Runner, rung: Rung, quick: bool) -> Measurement:
    if quick and not rung.quick:
        return Measurement(rung, None, "left out by --quick")
    if (rung.side == "torch" or rung.id == "flexops-edit-cu") and runner.cuda is None:
        return Measurement(rung, None, "no nvcc here")
    if rung.id.endswith("-ccache") and runner.launcher is None:
        return Measurement(rung, None, "no ccache here")
    try:
        return (
            Measurement(rung, runner.family(rung.family))
            if rung.family
            else Measurement(rung, *runner.measure(rung.id))
        )
    except CompileError as error:  # minutes of other rungs must not be lost with it
        return Measurement(rung, None, f"failed: {error.what} {error.found}".strip())
    except OSError as error:  # a full disk, say
        return Measurement(rung, None, f"failed: {error}")
