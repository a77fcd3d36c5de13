"""The packed launch: a kernel's configuration and its parameters in one buffer of each thread,
handed to the driver by one call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence

from ..toolchain import libcuda

Pointer = ctypes.c_void_p | None

# CUlaunchConfig: grid, block, bytes of dynamic shared memory, stream, attributes and how many they
# are. The parameters follow.
CONFIG = "3I3II4xQQI4x"
_CONFIG_SIZE = struct.calcsize("=" + CONFIG)
# CUlaunchAttribute: behind the kind are 64 bytes, of which a cluster takes 12
_ATTRIBUTE = struct.Struct("=I4x3I52x")
_COOPERATIVE, _CLUSTER = 2, 4  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, ..._CLUSTER_DIMENSION
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_...
NO_CONTEXT = (3, 201)  # not initialized, invalid context
OUT_OF_RESOURCES = 701
SHARED_WITHOUT_ASKING = 40000
"""Bytes of dynamic shared memory that every kernel may have: of 48 KiB, less what it has beside."""


def layout(letters: Sequence[str]) -> str:
    """The format of a buffer with parameters of these ``struct`` letters, each aligned to its size,
    as C++ has them; or to what follows an @: a struct's bytes, ``24s@8``."""
    text, offset = "=" + CONFIG, 0
    for one in letters:
        letter, _, alignment = one.partition("@")
        size = struct.calcsize("=" + letter)
        padding = -offset % int(alignment or size)
        text += f"{padding}x{letter}" if padding else letter
        offset += padding + size
    return text


class Buffers(threading.local):
    """A thread's buffers, made at its first launch; ``all`` is what the generated call reads:
    memory, address of the configuration and of its attributes, and of what shows the driver where
    the parameters are."""

    def __init__(self, format_: str, cluster: Sequence[int], *, cooperative: bool = False) -> None:
        self._memory = ctypes.create_string_buffer(struct.calcsize(format_))
        config = ctypes.addressof(self._memory)
        attributes = [_ATTRIBUTE.pack(_COOPERATIVE, 1, 0, 0)] if cooperative else []
        attributes.append(_ATTRIBUTE.pack(_CLUSTER, *cluster))
        self._attribute = ctypes.create_string_buffer(
            b"".join(attributes), _ATTRIBUTE.size * len(attributes)
        )
        self._size = ctypes.c_size_t(len(self._memory) - _CONFIG_SIZE)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, config + _CONFIG_SIZE, _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )
        extra = ctypes.c_void_p(ctypes.addressof(self._extra)) if self._size.value else None
        self.all = (self._memory, ctypes.c_void_p(config), ctypes.addressof(self._attribute), extra)


def driver_call() -> Callable[[Pointer, Pointer, None, Pointer], int]:
    """``cuLaunchKernelEx(config, kernel, parameters, extra)`` of the driver. It declares no types
    of arguments, by which ctypes would convert each of them at each call: that is a tenth of the
    call, so pointers are made once."""
    # of our own: types belong to a function object
    function = ctypes.CDLL(libcuda.driver().library._name).cuLaunchKernelEx
    function.restype = ctypes.c_int
    found: Callable[[Pointer, Pointer, None, Pointer], int] = function
    return found
