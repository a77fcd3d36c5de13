"""The GPUs of this machine, without initialising CUDA in this process (which would break a later
fork).

NVML through ctypes (``nvidia-smi`` requires it, too). Without a device node it is not tried.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..compute_capability import ComputeCapability
from .device_node import has_device_node
from .driver import DriverCuda, DriverRelease
from .version import Version

_NVML = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")


class Gpu(NamedTuple):
    """One NVIDIA GPU: ``ordinal`` in PCI bus order, ``memory_bytes`` in all.

    ``slices``: the UUIDs of its MIG devices; None where MIG is off. A GPU that is to be sliced and
    has no slice yet runs nothing.
    """

    ordinal: int
    uuid: str
    name: str
    capability: ComputeCapability
    memory_bytes: int
    slices: tuple[str, ...] | None = None


class Driver(NamedTuple):
    """The NVIDIA driver: its release, and the CUDA version it supports."""

    release: DriverRelease
    cuda: DriverCuda | None


class Machine(NamedTuple):
    """What the driver says: itself, and all GPUs that it shows to this process's container."""

    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()


def visible(gpus: Sequence[Gpu], devices: str | None, order: str) -> tuple[Gpu, ...]:
    """Those GPUs that ``CUDA_VISIBLE_DEVICES`` shows, read as CUDA does: up to the first entry that
    is not valid."""
    if devices is None:
        return tuple(gpus)
    ambiguous = order != "PCI_BUS_ID" and len({gpu.capability for gpu in gpus}) > 1
    shown: list[Gpu] = []
    for entry in (piece.strip() for piece in devices.split(",")):
        if entry.isdigit() and ambiguous and int(entry) < len(gpus):
            return tuple(gpus)
        matching = [gpu for gpu in gpus if _names(entry, gpu)]
        if len(matching) != 1:
            break
        shown += matching
    return tuple(shown)


def machine(root: str = "") -> Machine:
    """The driver and its GPUs; empty without a device node. One real query in a process."""
    if not has_device_node(root):
        return Machine()
    return _query()


@functools.cache
def _query() -> Machine:
    return _from_nvml() or Machine()


def local_gfx_targets(root: str = "") -> tuple[str, ...]:
    """AMD GPUs here, as compiler targets (``gfx90a``), from the kernel driver's topology; each
    once."""
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    try:
        names = sorted(os.listdir(nodes))
    except OSError:
        return ()
    numbers = (_gfx_number(f"{nodes}/{name}/properties") for name in names)
    return tuple(dict.fromkeys(gfx_name(number) for number in numbers if number))


def gfx_targets(asked: str | None) -> tuple[str, ...]:
    """The AMD GPUs to compile for: those in a list such as ``PYTORCH_ROCM_ARCH`` holds, else those
    of this machine."""
    return tuple((asked or "").replace(";", " ").replace(",", " ").split()) or local_gfx_targets()


def gfx_name(number: int) -> str:
    """``gfx90a`` for the kernel's 90010: two decimal digits each for minor and stepping, which the
    name has in hexadecimal."""
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def _names(entry: str, gpu: Gpu) -> bool:
    if entry.isdigit():
        return int(entry) == gpu.ordinal
    # as drivers before 470 named a slice: MIG-GPU-<the GPU's>/<GPU instance>/<compute instance>
    if entry.startswith("MIG-GPU-"):
        return gpu.uuid == entry.removeprefix("MIG-").partition("/")[0]
    return (entry.startswith("GPU-") and gpu.uuid.startswith(entry)) or (
        entry.startswith("MIG-") and entry in (gpu.slices or ())
    )


def _gfx_number(path: str) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            return next(
                (int(line.split()[1]) for line in file if line.startswith("gfx_target_version ")), 0
            )
    except (OSError, ValueError, IndexError):
        return 0


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlError(Exception):
    pass


def _from_nvml() -> Machine | None:
    """What NVML says; None when its library is missing or does not answer."""
    try:
        with _nvml() as library:
            return Machine(
                _nvml_driver(library),
                tuple(_nvml_gpu(library, index) for index in range(_nvml_count(library))),
            )
    except (OSError, AttributeError, _NvmlError, ValueError):
        return None


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL]:
    library = _open_first(_NVML)
    _check(library.nvmlInit_v2())
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _open_first(names: Sequence[str]) -> ctypes.CDLL:
    for name in names[:-1]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return ctypes.CDLL(names[-1])


def _check(status: int) -> None:
    if status != 0:
        raise _NvmlError(status)


def _nvml_driver(library: ctypes.CDLL) -> Driver:
    release, cuda = ctypes.create_string_buffer(96), ctypes.c_int()
    _check(library.nvmlSystemGetDriverVersion(release, ctypes.c_uint(96)))
    _check(library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)))
    return Driver(
        DriverRelease.parse(release.value.decode()),
        DriverCuda(Version((cuda.value // 1000, cuda.value % 1000 // 10))),
    )


def _nvml_count(library: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    return count.value


def _nvml_gpu(library: ctypes.CDLL, index: int) -> Gpu:
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    _check(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
    _check(
        library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    _check(library.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)))
    _check(library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(96)))
    # rejected on some integrated GPUs: their memory stays 0
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    capability = ComputeCapability(major.value, minor.value)
    return Gpu(
        index,
        uuid.value.decode(),
        name.value.decode(),
        capability,
        memory.total,
        _nvml_slices(library, handle),
    )


def _nvml_slices(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> tuple[str, ...] | None:
    """The UUIDs of a GPU's MIG devices; None where MIG is off, or not known to this GPU or
    driver."""
    now, later, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if (
        not hasattr(library, "nvmlDeviceGetMigMode")
        or library.nvmlDeviceGetMigMode(gpu, ctypes.byref(now), ctypes.byref(later))
        or not now.value
    ):
        return None
    _check(library.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(most)))
    uuids: list[str] = []
    for index in range(most.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        # else: none has this number
        if (
            library.nvmlDeviceGetMigDeviceHandleByIndex(
                gpu, ctypes.c_uint(index), ctypes.byref(handle)
            )
            == 0
        ):
            _check(library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(96)))
            uuids.append(uuid.value.decode())
    return tuple(uuids)
