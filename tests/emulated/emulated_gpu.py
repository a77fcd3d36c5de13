"""For pytest, ``-p emulated_gpu``: what tests call of flexops' operators on the CPU's tensors, CUDA's kernels compute, by a driver that runs them.

The process has ``tests/build/stand_in``'s libraries, and STAND_IN_TRANSLATOR (``test_emulated_kernels.py`` starts it so).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build" / "stand_in"))
from launch import OnGpu

from flexops.op_builder import loader, provider
from flexops.testing import isa

_ensure = loader.ensure


def _ensure_cuda(family: str, _: str) -> bool:
    return _ensure(family, "cuda")


# NVRTC's PTX of the very plans whose machine code a GPU of capability 8.0 would run.
provider.compiler_for = functools.partial(provider.compiler_for, asked="compute_80")
provider.machine_code = lambda _: iter(())
loader.ensure = _ensure_cuda
isa.levels, isa.isa_limit = (lambda: ["emulated"]), nullcontext


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    with OnGpu():
        yield
