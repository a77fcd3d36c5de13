"""The build-time ladder: one op, built the conventional way with more and more of the usual advice, then by flexops.

Every rung runs in fresh processes and fresh directories. What is timed is what a user waits for between asking for the op and having it loaded;
importing torch is not in it, on either side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .. import toolchain
from ..errors import CompileError, ToolchainError
from ..settings import Settings
from . import machine
from .build_runner import OP, Runner

DEFAULT_ARCHITECTURE = "9.0"

Side = Literal["torch", "flexops"]
Report = Callable[[int, int, str], None]
"""Called with (rungs finished, rungs in all, the label of the one that starts)."""


@dataclass(frozen=True)
class Rung:
    """One way to build the op. ``quick`` rungs are those that a quick run keeps."""

    id: str
    side: Side
    label: str
    quick: bool = True


RUNGS: tuple[Rung, ...] = (
    Rung("torch-baseline", "torch", "setuptools, all architectures, one job, no ninja", quick=False),
    Rung("torch-ninja", "torch", "+ ninja (cpp_extension.load)", quick=False),
    Rung("torch-one-arch", "torch", "+ one architecture", quick=False),
    Rung("torch-all-jobs", "torch", "+ all jobs"),
    Rung("torch-ccache", "torch", "+ ccache hit", quick=False),
    Rung("torch-warm", "torch", "again in a new process (nothing to build)", quick=True),
    Rung("flexops-all-archs", "flexops", "cold, all architectures"),
    Rung("flexops-cold", "flexops", "cold, one architecture"),
    Rung("flexops-ccache", "flexops", "ccache hit, one architecture"),
    Rung("flexops-warm", "flexops", "warm, in a new process"),
    Rung("flexops-aot", "flexops", "all operators ahead of time, CPU and one architecture"),
    Rung("flexops-import", "flexops", "import flexops, beyond torch"),
)
_FAIR = "torch-all-jobs"
"""What flexops is compared with: all the usual advice followed, and as flexops cold, nothing cached."""


@dataclass(frozen=True)
class Measurement:
    """One rung's time in seconds; None if it was left out, and ``note`` says why."""

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
            {"id": item.rung.id, "side": item.rung.side, "label": item.rung.label, "seconds": item.seconds, "note": item.note}
            for item in self.measurements
        ]
        return {
            "benchmark": "build", "op": self.op, "architecture": self.architecture, "architectures": list(self.architectures),
            "machine": self.machine.as_dict(), "rungs": rungs,
            "ratios": {name: self.ratio(slow, fast) for name, slow, fast in COMPARISONS},
        }  # fmt: skip


COMPARISONS: tuple[tuple[str, str, str], ...] = (
    ("cold, one architecture: cpp_extension.load / flexops", _FAIR, "flexops-cold"),
    ("cold, all architectures: cpp_extension.load / flexops", "torch-ninja", "flexops-all-archs"),
    ("ccache hit: cpp_extension.load / flexops", "torch-ccache", "flexops-ccache"),
    ("warm, new process: cpp_extension.load / flexops", "torch-warm", "flexops-warm"),
    ("flexops: all architectures / one", "flexops-all-archs", "flexops-cold"),
)
"""(what is compared, the rung that is expected to be slower, the faster one)."""


def run(settings: Settings, *, architecture: str = DEFAULT_ARCHITECTURE, quick: bool = False, report: Report | None = None) -> Ladder:
    """Climb the ladder. A full run compiles the conventional source for all architectures twice: about ten minutes on two cores.

    Args:
        architecture: the one architecture, as in ``TORCH_CUDA_ARCH_LIST``.
        quick: leave out the rungs that take minutes.

    A rung that does not build has no time, and a note that holds the end of what the compiler said.

    Raises:
        ToolchainError: there is no torch, host compiler, ninja or CUDA toolkit here.
    """
    tools = toolchain.discover(settings, device="cuda")
    if error := toolchain.missing(tools, "cuda"):
        raise error
    if tools.cuda is None:
        raise ToolchainError("the build ladder compares CUDA builds, and torch here is for ROCm")
    choice = toolchain.resolve_architectures(replace(settings, arch_list=None), tools.cuda, detected=())
    architectures = tuple(map(str, choice.architectures))
    results: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="flexops-bench-") as scratch:
        runner = Runner(tools, Path(scratch), architecture, ";".join(architectures))
        for number, rung in enumerate(RUNGS):
            if report:
                report(number, len(RUNGS), f"{rung.side}: {rung.label}")
            results.append(_measure(runner, rung, quick))
    return Ladder(OP, architecture, architectures, machine.describe(tools), tuple(results))


def _measure(runner: Runner, rung: Rung, quick: bool) -> Measurement:
    if quick and not rung.quick:
        return Measurement(rung, None, "left out by --quick")
    if rung.id.endswith("-ccache") and runner.launcher is None:
        return Measurement(rung, None, "no ccache here")
    try:
        return Measurement(rung, runner.measure(rung.id))
    except CompileError as error:  # minutes of other rungs must not be lost with it
        return Measurement(rung, None, f"failed: {error.what} {error.found}".strip())
