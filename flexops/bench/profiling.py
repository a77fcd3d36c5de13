"""What a call's kernels do on the GPU, by NVIDIA's ncu or by torch's profiler: ``flexops
profile``."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import FlexopsError
from ..toolchain import proc
from .profile_child import REFUSED

METRICS: dict[str, str] = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, % of peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "processors, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident, % of what fits",
    "launch__registers_per_thread": "registers",
}
"""What ncu is asked for: what bounds a kernel is memory or the processors, and if neither is busy,
too few warps."""

_CHILD = Path(__file__).with_name("profile_child.py")


def by_ncu(ncu: str, request: dict[str, Any]) -> list[dict[str, str]]:
    """Each kernel of one call, with ``METRICS``.

    Raises:
        FlexopsError: what ncu says, such as that this user may not read the counters.
    """
    # --clock-control none: with the clocks that the GPU has in use, which are not ours to set.
    command = [
        ncu,
        "--csv",
        "--target-processes",
        "all",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--metrics",
        ",".join(METRICS),
    ]
    done = _run([*command, *_child(request)])
    if done.status or "ERR_NVGPUCTRPERM" in done.output:
        permission = "ERR_NVGPUCTRPERM" in done.output + done.errors
        fix = (
            "run as root, or NVreg_RestrictProfilingToAdminUsers=0; or flexops profile --by torch"
            if permission
            else "flexops profile --by torch"
        )
        raise FlexopsError(
            "ncu could not profile", found=_last_lines(done.output + done.errors), fix=fix
        )
    return list(_kernels(done.output))


def _kernels(text: str) -> Iterator[dict[str, str]]:
    """ncu's rows, a metric each, as a row for each launch."""
    start = text.find('"ID"')
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(text[start:])) if start >= 0 else ():
        one = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            one[METRICS[row["Metric Name"]]] = (
                f"{row['Metric Value']} {row['Metric Unit']}".strip()
                if row["Metric Unit"] != "%"
                else row["Metric Value"]
            )
    yield from launches.values()


def by_torch(request: dict[str, Any]) -> list[dict[str, str]]:
    """Each kernel of one call (on a CPU: each operator), with what torch's profiler reports."""
    done = _run(_child({**request, "torch": True}))
    if done.status:
        raise FlexopsError(
            "the case could not be profiled", found=_last_lines(done.errors), fix="run it alone"
        )
    found: list[dict[str, str]] = json.loads(done.output.strip().splitlines()[-1])
    return found


def lines(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """A block for each kernel: its name, then what is known of it on one line."""
    for row in rows:
        yield row["kernel"]
        yield "  " + "; ".join(f"{name} {value}" for name, value in row.items() if name != "kernel")


def _child(request: dict[str, Any]) -> list[str]:
    return [sys.executable, str(_CHILD), json.dumps(request)]


def _run(command: Sequence[str]) -> proc.Ended:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            entry
            for entry in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
            if entry
        ),
    }
    done = proc.run(command, apart=True, environment=environment)
    if done.status and REFUSED in done.errors:
        kind, what, found, required, fix = json.loads(
            done.errors.rpartition(REFUSED)[2].splitlines()[0]
        )
        raise getattr(errors, kind, FlexopsError)(what, found=found, required=required, fix=fix)
    return done


def _last_lines(text: str) -> str:
    return "\n         ".join([line for line in text.strip().splitlines() if line.strip()][-4:])
