"""Looks at this machine for ``detection``: stdlib only, every probe guarded, no GPU library loaded,
CUDA never initialised."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable

from ..toolchain.probe import output, read_text
from .detection import Machine

_SMI_PLACES = ("/usr/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi", "/opt/bin/nvidia-smi")
_DRIVER_FILE = "/proc/driver/nvidia/version"
_KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"


def machine(python: str | None = None) -> Machine:
    """This machine. ``python`` is the environment's, ``"3.12"``; None means the running one, empty
    means that any is available."""
    driver, capabilities, problems = nvidia()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=".".join(map(str, sys.version_info[:2])) if python is None else python,
        driver=driver,
        capabilities=capabilities,
        rocm=amd(),
        problems=problems,
    )


def nvidia() -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Driver release, capability of every GPU, and what went wrong; all empty where there is no
    NVIDIA driver."""
    smi = shutil.which("nvidia-smi") or next(filter(os.path.exists, _SMI_PLACES), None)
    loaded = read_text(_DRIVER_FILE)
    if smi is None:
        return (
            _release(loaded),
            (),
            (
                ("an NVIDIA driver is loaded, but nvidia-smi, which names the GPUs, is not found",)
                if loaded
                else ()
            ),
        )
    try:
        text = output(smi, "--query-gpu=compute_cap,driver_version", "--format=csv,noheader")
    except (OSError, ValueError) as error:
        return _release(loaded), (), (f"{smi} gives no answer: {error}",)
    return read_smi(text)


def read_smi(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """From lines such as ``8.9, 580.65.06``; a line that is not of this form becomes a problem."""
    driver, capabilities, problems = "", [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := re.fullmatch(r"(\d+\.\d+), *(\d+(?:\.\d+)+)", line):
            capabilities.append(match[1])
            driver = match[2]
        else:
            problems.append(f"nvidia-smi says {line[:120]!r}")
    return driver, tuple(capabilities), tuple(problems)


def amd() -> tuple[str, ...]:
    """Architectures of the AMD GPUs that the kernel's compute driver shows."""
    try:
        nodes = sorted(os.listdir(_KFD_NODES))
    except OSError:
        return ()
    return read_kfd(read_text(f"{_KFD_NODES}/{node}/properties") for node in nodes)


def read_kfd(properties: Iterable[str]) -> tuple[str, ...]:
    """From each node's ``properties``: ``gfx_target_version 90010`` is gfx90a; a CPU's node has
    0."""
    found = (re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE) for text in properties)
    versions = (int(match[1]) for match in found if match)
    return tuple(
        f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        for version in versions
        if version
    )


def _release(text: str) -> str:
    match = re.search(r"\b(\d{3}(?:\.\d+)+)\b", text)
    return match[1] if match else ""
