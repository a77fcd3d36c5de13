"""What a figure was measured on: without it, a figure says nothing."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from flexops import __version__
from flexops.toolchain import resources
from flexops.toolchain.model import Tool, Toolchain


@dataclass(frozen=True)
class Machine:
    """The machine, the versions and the time of a measurement; "" for what is missing."""

    date: str
    cpu: str
    cpus: int
    memory_gib: float
    system: str
    python: str
    flexops: str
    torch: str
    nvcc: str
    host_compiler: str
    ninja: str
    launcher: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        versions = (
            f"torch {self.torch}, nvcc {self.nvcc or '-'}, {self.host_compiler or '-'}, ninja"
            f" {self.ninja or '-'}, {self.launcher or 'no ccache'}"
        )
        return (
            f"{self.date}: {self.cpu}, {self.cpus} CPUs, {self.memory_gib:.0f} GiB, {self.system},"
            f" Python {self.python}\n{versions}, flexops {self.flexops}"
        )


def describe(tools: Toolchain) -> Machine:
    """This machine, as the benchmark's processes see it."""
    here = resources.detect()
    return Machine(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=_cpu_model(),
        cpus=here.cpus,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{_distribution()}, {platform.machine()}",
        python=platform.python_version(),
        flexops=__version__,
        torch=tools.torch.version if tools.torch else "",
        nvcc=_version(tools.cuda.nvcc if tools.cuda else None),
        host_compiler=f"{tools.host.kind} {tools.host.version}" if tools.host else "",
        ninja=_version(tools.ninja),
        launcher=f"{tools.launcher.path.name} {tools.launcher.version}" if tools.launcher else "",
    )


def _version(tool: Tool | None) -> str:
    return str(tool.version) if tool else ""


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", stream.read(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()
