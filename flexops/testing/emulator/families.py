"""CUDA kernels of families on the CPU: the library for CUDA, launchers and binding included, is
built with ``emulated.h``, and calls in ``OnEmulator`` go to it. Its kernels run as
``flexops.testing.emulate`` runs one."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from flexops import settings, toolchain
from flexops._torch import CUDA_KEYS, TorchDispatchMode, tree_leaves
from flexops.build.compile import building, device_code
from flexops.build.describe import catalog
from flexops.build.load import loader, provider
from flexops.compute_capability import parse_arch_list
from flexops.errors import ToolchainError

from . import EmulationError, Loaded, extent, fault, run, translated

_HEADER = Path(__file__).with_name("emulated.h")
_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
CAPABILITY, MULTIPROCESSORS = 80, 108
"""What launchers see; kernels are compiled for 9.0a if it is 90, else for 8.0."""
_SHARED = {80: 166912, 86: 101376, 90: 232448}
_BYTES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 15: 2, 23: 1, 24: 1}
"""Of an element of each dtype, by c10::ScalarType."""
_PROVIDE = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
)
_SYMBOL = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
_NOTE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)


class _Driver:
    """The functions of the driver that launchers call, by name; the kernels that were loaded."""

    def __init__(self) -> None:
        self.kernels: list[Loaded] = []
        self.memory: list[tuple[int, int]] = []
        self.failed: Exception | None = None
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._functions = {
            name: ctypes.CFUNCTYPE(number, *types)(function)
            for name, types, function in (
                ("cuLaunchKernelEx", (pointer,) * 4, self._launch),
                ("cuKernelSetAttribute", (number, number, pointer, number), lambda *_: 0),
                ("cuKernelGetAttribute", (pointer, number, pointer, number), _give(80)),
                ("cuKernelGetFunction", (pointer, pointer), _give_kernel),
                ("cuOccupancyMaxActiveClusters", (pointer, pointer, pointer), _give(16)),
                ("cuMemsetD32Async", (pointer, number, ctypes.c_size_t, pointer), _fill),
                ("cuDeviceGetAttribute", (pointer, number, number), _attribute),
                ("cuDevicePrimaryCtxRetain", (pointer, number), lambda *_: 0),
                ("cuCtxSetCurrent", (pointer,), lambda *_: 0),
                ("cuTensorMapEncodeTiled", (pointer,), lambda *_: 1),
                ("cuGetErrorString", (number, pointer), _error_text),
                ("aoti_torch_get_current_cuda_stream", (number, pointer), lambda *_: 0),
            )
        }
        self.symbol = _SYMBOL(
            lambda name: ctypes.cast(self._functions[name.decode()], ctypes.c_void_p).value
        )
        self.note = _NOTE(self._note)

    def _note(self, begin: int | None, numel: int, dtype: int) -> None:
        """A new tensor's memory, none if it is empty: of NaN, in case it holds old results."""
        if begin:
            size = numel * _BYTES[dtype]
            ctypes.memset(begin, 0xFF, size)
            self.memory.append((begin, begin + size))

    def _launch(self, config: int, kernel: int, arguments: int, extra: int) -> int:
        try:
            packed = (ctypes.c_void_p * 2).from_address(extra)[1] if extra else None
            loaded = self.kernels[kernel - 1]
            said = run(loaded, config, arguments, packed, self.memory)
            if not said:
                return 0
            self.failed = fault(loaded.symbol, said, loaded)
        except Exception as error:  # nothing can be raised through C
            self.failed = error
        return _FAILED


def _give(value: int) -> Any:
    def give(out: int, *_: Any) -> int:
        ctypes.c_int.from_address(out).value = value
        return 0

    return give


def _give_kernel(out: int, kernel: int) -> int:
    ctypes.c_void_p.from_address(out).value = kernel
    return 0


def _attribute(out: int, which: int, _: int) -> int:
    """CUdevice_attribute: multiprocessors, capability, shared memory, threads."""
    major, minor = divmod(CAPABILITY, 10)
    shared = _SHARED[CAPABILITY]
    known = {16: MULTIPROCESSORS, 75: major, 76: minor, 81: shared, 97: shared, 39: 2048}
    return int(_give(known.get(which, 0))(out))


def _fill(begin: int, value: int, count: int, _: int) -> int:
    ctypes.memmove(begin, value.to_bytes(4, "little", signed=value < 0) * count, 4 * count)
    return 0


_TEXT = ctypes.create_string_buffer(b"the emulated launch failed")


def _error_text(_: int, out: int) -> int:
    ctypes.c_void_p.from_address(out).value = ctypes.addressof(_TEXT)
    return 0


driver = functools.cache(_Driver)
_kept: list[Any] = []


@functools.cache
def open_library(family: str) -> None:
    """Build and open a family's library for the emulated GPU.

    Raises:
        ToolchainError: there is no NVRTC, no C++ compiler, or a torch without the stable ABI.
        FlexopsError: the launchers do not compile.
    """
    torch_build = toolchain.torch_build()
    if torch_build is None or not torch_build.stable_abi or torch_build.hip:
        raise ToolchainError(
            f"{family} cannot be emulated",
            found=f"torch {torch.__version__}",
            required="torch 2.11 or newer, for the CPU or for CUDA",
            fix="test it on a GPU",
        )
    spec, chosen = catalog.find(family), settings.current()
    (architecture,) = parse_arch_list("compute_90a" if CAPABILITY == 90 else "compute_80")
    compiler = provider.compiler_for(chosen, (), asked=architecture.code).compiler
    plan = loader.local_plan(spec, "cuda", chosen)
    place = ("-include", str(_HEADER))
    steps = tuple(
        step._replace(
            shared_header="",
            command=tuple(
                part
                for word in step.command
                for part in ((*place, word) if word == "-c" else (word,))
            ),
        )
        for step in plan.steps
    )
    plan = plan._replace(name=f"{plan.name}-emulated", steps=steps)
    cache = loader.open_cache(chosen)
    library = building.obtain([plan], cache)[0].require().library

    def provide(name: bytes, _: int, error: int, size: int) -> int | None:
        try:
            kernel = provider._called(spec, name, ())
            code = kernel.plan(architecture, compiler)
            (result,) = device_code.obtain([code], cache, time_limit=chosen.compile_timeout)
            entry = result.require()
            driver().kernels.append(translated(entry.library, entry.manifest.symbol))
            return len(driver().kernels)
        except Exception as problem:  # C++ raises it
            text = str(problem).encode(errors="replace")[: size - 1] + b"\0"
            ctypes.memmove(error, text, len(text))
            return None

    opened, callback = ctypes.CDLL(str(library)), _PROVIDE(provide)
    opened.flexops_emulate(driver().symbol, driver().note)
    opened.flexops_set_provider(callback)
    _kept.append((opened, callback))


class OnEmulator(TorchDispatchMode):
    """Operators that are called in it on tensors of the CPU compute what their CUDA kernels do.

    Args:
        families: the labels of those that are emulated, such as ``mylib.scale``; without any, all
            of them, each opened in its first call.
    """

    def __init__(self, *families: str) -> None:
        super().__init__()
        for family in families:
            open_library(family)
        self._families = {
            f"{spec.project.name}::{op}": spec.name
            for spec in (map(catalog.find, families) if families else catalog.specs())
            for op in spec.ops
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        family = self._families.get(func.name().partition(".")[0])
        if family is None:
            return func(*args, **(kwargs or {}))
        open_library(family)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        driver().memory, driver().failed = [extent(one) for one in given], None
        try:
            return func.redispatch(CUDA_KEYS, *args, **(kwargs or {}))
        except RuntimeError:
            raise driver().failed or EmulationError(f"{func.name()} failed") from None
