"""Looks at this machine for ``detection``. CUDA is never initialised."""

from __future__ import annotations

import platform
import sys

from ..toolchain import gpus
from ..toolchain.device_node import has_device_node
from .detection import Machine


def machine(python: str | None = None) -> Machine:
    """This machine. ``python`` is the environment's, ``"3.12"``; None means the running one, empty
    means that any is available."""
    seen = gpus.machine()
    silent = has_device_node() and seen.driver is None
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=".".join(map(str, sys.version_info[:2])) if python is None else python,
        driver=str(seen.driver.release) if seen.driver else "",
        capabilities=tuple(str(gpu.capability) for gpu in seen.gpus),
        rocm=gpus.local_gfx_targets(),
        problems=("an NVIDIA device is here, and its driver does not answer: nvidia-smi",) * silent,
    )
