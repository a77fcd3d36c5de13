"""What a build is done with: finding it (``discover``), what goes with what (``compat``), and what
is missing (``missing``).

Everything here is imported when it is first asked for: a warm start needs ``torch_build``, nothing
else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compute_capability import gencodes, runs_on
    from . import architectures, compat, gpus, resources
    from .architectures import ArchitectureChoice, resolve_architectures
    from .capabilities import local_capabilities
    from .compat import driver_supports, supported_capabilities
    from .diagnosis import missing, no_device_compiler, nvrtc_fix, toolkit_fix
    from .discovery import device_compiler, discover
    from .installed_torch import torch_build

_HOME = {
    "ArchitectureChoice": ".architectures",
    "device_compiler": ".discovery",
    "discover": ".discovery",
    "driver_supports": ".compat",
    "gencodes": "..compute_capability",
    "local_capabilities": ".capabilities",
    "missing": ".diagnosis",
    "no_device_compiler": ".diagnosis",
    "nvrtc_fix": ".diagnosis",
    "resolve_architectures": ".architectures",
    "runs_on": "..compute_capability",
    "supported_capabilities": ".compat",
    "toolkit_fix": ".diagnosis",
    "torch_build": ".installed_torch",
}

__all__ = [
    "ArchitectureChoice",
    "architectures",
    "compat",
    "device_compiler",
    "discover",
    "driver_supports",
    "gencodes",
    "gpus",
    "local_capabilities",
    "missing",
    "no_device_compiler",
    "nvrtc_fix",
    "resolve_architectures",
    "resources",
    "runs_on",
    "supported_capabilities",
    "toolkit_fix",
    "torch_build",
]


_MODULES = ("architectures", "compat", "diagnosis", "discovery", "gpus", "model", "resources")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = found
    return found
