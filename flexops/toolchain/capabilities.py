"""The compute capabilities of the GPUs that this process may use. Apart from ``gpus``, because
every warm start on a GPU asks for them."""

from __future__ import annotations

import sys

from ..compute_capability import ComputeCapability
from .device_node import has_device_node


def local_capabilities() -> tuple[ComputeCapability, ...]:
    """The capabilities of the GPUs that this process may use, ascending, each once; empty when
    there are none.

    Asks torch only when CUDA is initialised already. ``CUDA_VISIBLE_DEVICES`` is respected; where
    it could mean either of two different GPUs (numbers under ``CUDA_DEVICE_ORDER=FASTEST_FIRST`` on
    a mixed machine), all are given.
    """
    if initialised := _from_torch():
        return initialised
    if not has_device_node():
        return ()
    from .. import settings
    from . import gpus

    wishes = settings.current()
    shown = gpus.visible(gpus.machine().gpus, wishes.cuda_visible_devices, wishes.cuda_device_order)
    return tuple(sorted({gpu.capability for gpu in shown}))


def _from_torch() -> tuple[ComputeCapability, ...]:
    torch = sys.modules.get("torch")
    try:
        if torch is None or torch.version.cuda is None or not torch.cuda.is_initialized():
            return ()
        found = {
            torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
        }
    except (AttributeError, RuntimeError):
        return ()
    return tuple(sorted(ComputeCapability(major, minor) for major, minor in found))
