"""CUDA kernels on the CPU: ``emulate`` runs a kernel of ``flexops.kernel`` without a GPU.

NVRTC compiles the kernel to PTX (for 8.0, or another architecture), ``ptx.py`` translates that to
C++, whose functions are in ``device.h``, g++ compiles it, and a block's threads run as fibers of
one thread. Slow and exact: every access is verified against the memory of the call, its alignment,
and what was written to shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexops import _torch, settings, toolchain
from flexops.build.compile.diagnose import diagnose
from flexops.build.store.entry import Entry
from flexops.build.store.manifest import Manifest, file_crc32
from flexops.build.store.opening import open_cache
from flexops.compute_capability import parse_arch_list
from flexops.errors import FlexopsError
from flexops.kernels import launch, limits
from flexops.kernels.code import KernelCode
from flexops.kernels.definition import Kernel

from . import ptx

_NAME = "emulated"
"""Of entries of the build cache."""
_WORDS = struct.Struct("=" + launch.CONFIG)
_ERROR_BYTES = 2048


class EmulationError(FlexopsError, RuntimeError):
    """A kernel did what is an error on a GPU, or is undefined there."""


def emulate(
    kernel: Kernel, *args: Any, reverse: bool = False, arch: str = "8.0", **kwargs: Any
) -> Any:
    """Run a kernel on the CPU as a GPU would run it.

    Each combination of dtypes is compiled once, in some seconds. Threads run on one core: use small
    tensors.

    Args:
        kernel: what ``flexops.kernel`` returned.
        args, kwargs: its arguments; tensors are on the CPU. What the schema writes is written.
        reverse: threads of a block run in the opposite order. A result that differs shows a race.
        arch: what it is compiled for; of a list, the newest. ``9.0a`` adds mbarriers and bulk
            copies to shared memory.

    Returns:
        What the kernel returns. Sums of ``mma`` are rounded once, and ``approx`` instructions are
        exact; otherwise results have a GPU's bits.

    Raises:
        EmulationError: a thread accessed memory that is not the call's or is misaligned, read
            shared memory that was not written, or waits at a barrier that others do not reach. The
            error names the block, the thread and the line of the source.
        ArchitectureError: ``arch`` is not understood.
        CompileError: the source does not compile.
        ToolchainError: there is no NVRTC, or no g++.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"emulate: kernel must be what flexops.kernel returned, got {type(kernel).__name__}"
        )
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if elsewhere := [str(one.device) for one in given if one.device.type != "cpu"]:
        raise ValueError(f"emulate: tensors must be on the CPU, got one on {elsewhere[0]}")
    kernel._code.check_tensors(kernel._code.names["complete"](*args, **kwargs))
    with torch.no_grad(), order_of_threads(reverse=reverse), _memory_without_old_results():
        return _Emulated.of(kernel._code.candidates[0], arch).run(*args, **kwargs)


@contextlib.contextmanager
def order_of_threads(*, reverse: bool) -> Iterator[None]:
    """A block's threads run in the opposite order, or as before."""
    before = os.environ.get("STAND_IN_ORDER", "")
    os.environ["STAND_IN_ORDER"] = "reversed" if reverse else before
    try:
        yield
    finally:
        os.environ["STAND_IN_ORDER"] = before


@contextlib.contextmanager
def _memory_without_old_results() -> Iterator[None]:
    """New tensors hold NaN and the largest integers: memory may hold the results of an earlier
    call, which a kernel that writes too little would seem to have computed."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # fills what torch.empty returns
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


_ON_A_GPU = "test this kernel on a GPU"
_CALLS = {
    "__assertfail": 'leave assert() out of this compilation: options=["-DNDEBUG"]',
    "vprintf": "remove printf, or test this kernel on a GPU",
    ".func": "have the function inlined (__forceinline__; sin, cos and pow of float are)",
}
"""The fix for what kernels use, the first that is found in the error."""


class Loaded(NamedTuple):
    """A translated kernel: the function that runs it, its symbol, and the PTX."""

    run: Any
    symbol: str
    text: Path


class _Emulated(KernelCode):
    """A kernel whose launches run here."""

    def __init__(self, arch: str, *parts: Any) -> None:
        own: Any = (*parts[:-1], tuple(self.of(one, arch) for one in parts[-1]))
        super().__init__(*own)
        self.ptx = parse_arch_list(arch)[-1].capability.compute
        self.flags = (*self.flags, "-lineinfo")  # for the line of an error
        self._here: list[Loaded] = []
        self.names |= {
            "_launch": self._run_here,
            "_allow": lambda *_: None,
            "_current_device": lambda: -1,  # what a tensor of the CPU says of its device
            "_index_of": lambda _: -1,
            "_stream": lambda _: 0,
            "_failed": self._say,
        }

    @classmethod
    def of(cls, code: KernelCode, arch: str) -> _Emulated:
        known: dict[str, _Emulated] = code.__dict__.setdefault("emulated", {})
        if arch not in known:
            known[arch] = cls(arch, *code.parts)
        return known[arch]

    def load(self, expression: str, _: int) -> int:
        (entry,) = self.compiled(expression, self.ptx)
        self._here.append(translated(entry.library, entry.manifest.symbol))
        return len(self._here)

    def _run_here(self, config: Any, kernel: Any, _: None, __: Any) -> int:
        loaded = self._here[kernel.value - 1]
        memory = [extent(one) for one in _tensors_of_the_call()]
        packed = config.value + _WORDS.size
        said = run(
            loaded, config.value, None, packed, memory, self.signature.bounds, self.schema.name
        )
        if said:
            raise fault(self.schema.name, said, loaded)
        return 0

    def _say(self, *_: Any) -> None:
        raise AssertionError  # a launch here returns 0 or raises


def translated(code: Path, symbol: str) -> Loaded:
    """A kernel's PTX as a function of this process.

    Raises:
        EmulationError: it has an instruction that is not emulated, or g++ failed.
        ToolchainError: there is no g++.
        CacheError: the build cache cannot be written.
    """
    tools = toolchain.discover(settings.current(), device="cpu")
    if lacking := toolchain.missing(tools, "cpu"):
        raise lacking
    assert tools.host is not None
    try:
        entry = _obtain(ptx.read(code), symbol, str(tools.host.path))
    except ptx.UnknownPtx as error:
        raise EmulationError(
            f"{symbol} cannot be emulated",
            found=str(error),
            required="instructions that flexops.testing.emulator translates",
            fix=next((fix for call, fix in _CALLS.items() if call in str(error)), _ON_A_GPU),
        ) from None
    except ptx.CompilerError as error:
        cause = diagnose(str(error))
        what = f"{symbol} cannot be emulated: {cause.cause}"
        raise EmulationError(what, found=cause.error, fix=cause.fix) from None
    return Loaded(ctypes.CDLL(str(entry.library)).emulate, symbol, code)


def _obtain(text: str, symbol: str, compiler: str) -> Entry:
    """The entry of the build cache with the library of a PTX text; it is made if it is missing."""
    cache, key = open_cache(settings.current()), ptx.digest(text, compiler)
    if entry := cache.read(_NAME, key):
        return entry
    cache.require_writable()
    with cache.compile_lock(f"{_NAME}-{key}"), cache.workspace() as workspace:
        if entry := cache.read(_NAME, key):
            return entry
        library = workspace / "kernel" / "kernel.so"
        library.parent.mkdir()
        ptx.compile_library(text, library, compiler)
        manifest = Manifest(
            name=_NAME,
            key=key,
            base=key,
            device="cpu",
            library=library.name,
            size=library.stat().st_size,
            crc32=file_crc32(library),
            torch_abi="",
            symbol=symbol,
            compiler=compiler,
        )
        entry = cache.store(library.parent, manifest)
    cache.prune(keep=(entry.directory,))
    return entry


def run(
    loaded: Loaded,
    config: int,
    arguments: int | None,
    packed: int | None,
    memory: list[tuple[int, int]],
    bounds: str = "",
    name: str = "",
) -> str:
    """Run a launch; what it did wrong, or "".

    Args:
        config: address of the driver's CUlaunchConfig.
        arguments, packed: addresses of the parameters' addresses, or of the parameters.
        memory: begin and end of what the kernel may access.
        bounds: as for :func:`flexops.kernels.limits.launch_error`.
        name: for errors; the symbol by default.
    """
    words = _WORDS.unpack(ctypes.string_at(config, _WORDS.size))
    grid, block, shared = words[:3], words[3:6], words[6]
    found, required = limits.launch_error(grid, block, bounds)
    attributes = _attributes(words[8], words[9])
    if attributes.get(launch.CLUSTER, (1, 1, 1)) != (1, 1, 1):
        found, required = "a launch with a cluster", "a launch without, as GPUs before 9.0 run it"
    if found:
        what = f"{name or loaded.symbol} cannot be launched"
        raise EmulationError(what, found=found, required=required)
    ranges = (ctypes.c_uint64 * (2 * len(memory)))(*(end for pair in memory for end in pair))
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    failed = loaded.run(
        loaded.symbol.encode(),
        str(loaded.text).encode(),
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*block),
        ctypes.c_uint64(shared),
        ctypes.c_int(launch.COOPERATIVE in attributes),
        ctypes.c_void_p(arguments),
        ctypes.c_void_p(packed),
        ranges,
        ctypes.c_uint64(len(memory)),
        error,
        ctypes.c_size_t(_ERROR_BYTES),
    )
    return error.value.decode(errors="replace") if failed else ""


def _attributes(address: int, count: int) -> dict[int, tuple[int, ...]]:
    """Of a launch, by kind."""
    packed = ctypes.string_at(address, count * launch.ATTRIBUTE.size)
    return {kind: tuple(value) for kind, *value in launch.ATTRIBUTE.iter_unpack(packed)}


def fault(name: str, said: str, loaded: Loaded) -> EmulationError:
    """The error for what a kernel did wrong."""
    what, _, place = said.partition(f", at {loaded.text}:")
    if not place:  # of the launch
        return EmulationError(f"{name} cannot be launched", found=what.partition(": ")[2] or said)
    line = int(re.match(r"\d*", place)[0] or 0)  # type: ignore[index]
    return EmulationError(
        f"{name}: {what.partition(': ')[2] or said}",
        found=f"{_source_line(loaded.text, line)}the instruction {place.partition(': ')[2]}",
        required="what is defined on a GPU",
        fix="correct the kernel, or what the call passes to it",
    )


def _tensors_of_the_call() -> list[torch.Tensor]:
    """The arguments and results of the generated function that launches: its local variables."""
    frame = sys._getframe(2)
    return [one for one in _torch.tree_leaves(frame.f_locals) if isinstance(one, torch.Tensor)]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _source_line(path: Path, line: int) -> str:
    """The place in the source that an instruction of the PTX belongs to, if the PTX is there
    still."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    files: dict[str, str] = {
        match[1]: match[2]
        for one in text
        if (match := re.match(r'\s*\.file\s+(\d+)\s+"([^"]+)"', one))
    }
    for one in reversed(text[:line]):
        if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", one):
            return f"{Path(files.get(match[1], '')).name}, line {match[2]}: "
    return ""
