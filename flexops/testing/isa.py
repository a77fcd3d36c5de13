"""The CPU's levels of instructions: each has kernels of its own, compiled from the same source, and
a machine runs only one of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import flexops

ISA_LEVELS = ("baseline", "avx2", "avx512")


def _libraries() -> list[ctypes.CDLL]:
    return [
        ctypes.CDLL(str(one.path)) for one in flexops.status() if one.device == "cpu" and one.path
    ]


@contextmanager
def isa_limit(level: str) -> Iterator[int]:
    """Inside, CPU kernels use no more than this; gives the number of the level that they do use on
    this machine."""
    libraries = _libraries()
    try:
        used = {library.flexops_cpu_isa(level.encode()) for library in libraries}
        assert len(used) == 1, "load the library first"
        yield used.pop()
    except AssertionError as error:
        error.args = (f"with kernels of level {level}: {error}",)
        raise
    finally:
        for library in libraries:
            library.flexops_cpu_isa(ISA_LEVELS[-1].encode())


def levels() -> list[str]:
    """Those that this machine has, the best one last."""
    best = max(library.flexops_cpu_isa(None) for library in _libraries())
    return list(ISA_LEVELS[: best + 1])


def at_each_isa(device: str) -> Iterator[AbstractContextManager[object]]:
    """On the CPU a context for each level that the machine has, the best one last; elsewhere one
    for what there is."""
    yield from map(isa_limit, levels()) if device == "cpu" else [nullcontext()]


def every_level(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that takes a device: on the CPU it runs with the kernels of each level, because
    the machine's own level says nothing of the others."""

    @functools.wraps(test)
    def run_at_each(*args: Any, device: str, **kwargs: Any) -> None:
        for isa in at_each_isa(device):
            with isa:
                test(*args, device=device, **kwargs)

    return run_at_each
