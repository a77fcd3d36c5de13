"""Whether the NVIDIA driver shows itself: the one question that is asked before anything of it is
touched."""

from __future__ import annotations

import os

_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Without one of these there is no NVIDIA GPU here (``/dev/dxg``: WSL)."""


def has_device_node(root: str = "") -> bool:
    """Whether there is one of the driver's device nodes below ``root``."""
    return any(os.path.exists(root + node) for node in _NODES)
