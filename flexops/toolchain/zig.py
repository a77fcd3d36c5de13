"""zig as a C++ compiler: of the package index, complete in itself, and for any machine and any
glibc.

What it makes for the wheel runs with every torch that has the stable ABI, wherever glibc is as old
as ``GLIBC`` or newer.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import ToolchainError
from ..settings import Settings
from . import discovery, probe
from .model import HostCompiler, Toolchain, TorchBuild

REQUIREMENT = "ziglang==0.17.1"
GLIBC = "2.28"
TORCH = TorchBuild(
    version="2.11.0",
    cuda=None,
    hip=None,
    git_version="",
    cxx11_abi=True,
    root=Path("/nonexistent/torch"),
)
"""The oldest torch that the wheel's libraries run with; none is installed."""


def platform_tag(machine: str) -> str:
    """What such a wheel is called."""
    return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"


def toolchain_for(chosen: Settings) -> Toolchain:
    """What makes libraries for ``chosen.wheel`` and any torch with the stable ABI: zig, and the
    ninja that is here.

    Raises:
        ToolchainError: there is no ziglang in this environment.
    """
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.origin:
        raise ToolchainError(
            "FLEXOPS_WHEEL compiles with zig, which is not installed",
            found="no package ziglang",
            required=REQUIREMENT,
            fix=f"pip install {REQUIREMENT}",
        )
    path = Path(found.origin).with_name("zig")
    version, identity = probe.read_plain(f"zig {probe.output(str(path), 'version')}", "zig")
    target = f"{chosen.wheel}-linux-gnu.{GLIBC}"
    host = HostCompiler(path, version, f"{identity} {target}", "zig", target)
    return discovery.discover(chosen, device="cpu")._replace(
        torch=TORCH, host=host, launcher=None, machine=chosen.wheel
    )
