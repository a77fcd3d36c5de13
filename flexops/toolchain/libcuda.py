"""The calls that flexops makes of the NVIDIA driver, ``libcuda.so.1``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

from ..compute_capability import ComputeCapability
from ..errors import NativeUnavailableError
from .version import Version

# The driver's numbers: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR,
# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_NOT_INITIALIZED.
_MAJOR, _MINOR = 75, 76
_MAX_DYNAMIC_SHARED = 8
_NOT_INITIALIZED = 3
NOT_CODE = (200, 209, 218, 500)
"""CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX and NOT_FOUND (a kernel).

The code is not what it was filed as.
"""
_NOT_STARTED = (
    " (a process that was forked after its parent had used CUDA cannot use it: "
    'multiprocessing.set_start_method("spawn"))'
)


class DriverError(RuntimeError):
    """The driver has rejected a call, with a number of ``CUDA_ERROR_...``."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Driver:
    """What is called of libcuda.so.1."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(library)

    def capability(self, device: int) -> ComputeCapability:
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self._check(self.library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device))
            self._check(self.library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device))
        except DriverError as error:
            raise NativeUnavailableError(
                f"the driver does not report what GPU {device} is",
                found=str(error),
                fix="flexops doctor",
            ) from None
        return ComputeCapability(major.value, minor.value)

    def cuda(self) -> Version:
        """The newest CUDA version that this driver supports."""
        version = ctypes.c_int()
        self.library.cuDriverGetVersion(ctypes.byref(version))  # needs no device, and cannot fail
        return Version((version.value // 1000, version.value % 1000 // 10))

    def load(self, code: bytes, symbols: Iterable[str]) -> list[int]:
        """A CUkernel for each symbol: valid on every GPU that can run the code, each of which loads
        it at its first launch."""
        library = ctypes.c_void_p()
        self._check(
            self.library.cuLibraryLoadData(
                ctypes.byref(library), code, None, None, 0, None, None, 0
            )
        )
        try:
            return [self._kernel(library, symbol) for symbol in symbols]
        except DriverError:
            self.library.cuLibraryUnload(library)
            raise

    def _kernel(self, library: ctypes.c_void_p, symbol: str) -> int:
        kernel = ctypes.c_void_p()
        self._check(self.library.cuLibraryGetKernel(ctypes.byref(kernel), library, symbol.encode()))
        return kernel.value or 0

    def allow_shared(self, kernel: int, size: int, device: int) -> None:
        """Let a kernel have so many bytes of dynamic shared memory."""
        self._check(
            self.library.cuKernelSetAttribute(
                _MAX_DYNAMIC_SHARED, size, ctypes.c_void_p(kernel), device
            )
        )

    def enter_context(self, device: int) -> None:
        """What the runtime does on a thread on which it has not run yet."""
        context = ctypes.c_void_p()
        self._check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check(self.library.cuCtxSetCurrent(context))

    def error_text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode() + (
            _NOT_STARTED if status == _NOT_INITIALIZED else ""
        )

    def _check(self, status: int) -> None:
        if status:
            raise DriverError(
                f"{self.error_text(status)} (error {status} of a driver for CUDA {self.cuda()})",
                status,
            )


@functools.cache
def driver() -> Driver:
    return Driver()
