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
ATTRIBUTE = struct.Struct("=I4x3I52x")
COOPERATIVE, CLUSTER = 2, 4  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, ..._CLUSTER_DIMENSION
_LEAST_ALIGNMENT = 16  # of a kernel's parameters
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
        letter, size, alignment = _measures(one)
        padding = -offset % alignment
        text += f"{padding}x{letter}" if padding else letter
        offset += padding + size
    return text


def _measures(one: str) -> tuple[str, int, int]:
    """The letter, size and alignment of what :func:`layout` takes."""
    letter, _, alignment = one.partition("@")
    size = struct.calcsize("=" + letter)
    return letter, size, int(alignment or size)


def _offsets(letters: Sequence[str]) -> list[int]:
    """Where :func:`layout` has each parameter, behind the configuration."""
    offsets, end = [], 0
    for _, size, alignment in map(_measures, letters):
        offsets.append(end + -end % alignment)
        end = offsets[-1] + size
    return offsets


class Buffers(threading.local):
    """A thread's buffers, made at its first launch; ``all`` is what the generated call reads:
    memory, address of the configuration and of its attributes, and the two ways to show the driver
    where the parameters are: address by address, or as one piece."""

    def __init__(
        self, letters: Sequence[str], cluster: Sequence[int], *, cooperative: bool = False
    ) -> None:
        self._memory = ctypes.create_string_buffer(struct.calcsize(layout(letters)))
        config = ctypes.addressof(self._memory)
        attributes = [ATTRIBUTE.pack(COOPERATIVE, 1, 0, 0)] if cooperative else []
        attributes.append(ATTRIBUTE.pack(CLUSTER, *cluster))
        self._attribute = ctypes.create_string_buffer(
            b"".join(attributes), ATTRIBUTE.size * len(attributes)
        )
        self._size = ctypes.c_size_t(len(self._memory) - _CONFIG_SIZE)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, config + _CONFIG_SIZE, _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )
        parameters = extra = None
        if any(alignment > _LEAST_ALIGNMENT for _, _, alignment in map(_measures, letters)):
            # the compiler may put such a parameter behind the beginning of one piece
            addresses = [config + _CONFIG_SIZE + offset for offset in _offsets(letters)]
            self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
            parameters = ctypes.c_void_p(ctypes.addressof(self._parameters))
        elif self._size.value:
            extra = ctypes.c_void_p(ctypes.addressof(self._extra))
        self.all = (
            self._memory, ctypes.c_void_p(config), ctypes.addressof(self._attribute), parameters,
            extra,
        )  # fmt: skip


def driver_call() -> Callable[[Pointer, Pointer, Pointer, Pointer], int]:
    """``cuLaunchKernelEx(config, kernel, parameters, extra)`` of the driver. It declares no types
    of arguments, by which ctypes would convert each of them at each call: that is a tenth of the
    call, so pointers are made once."""
    # of our own: types belong to a function object
    function = ctypes.CDLL(libcuda.driver().library._name).cuLaunchKernelEx
    function.restype = ctypes.c_int
    found: Callable[[Pointer, Pointer, Pointer, Pointer], int] = function
    return found
