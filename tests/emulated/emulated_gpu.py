"""For pytest, ``-p emulated_gpu``: what tests call of flexops' operators on the CPU's tensors,
CUDA's kernels compute, by a driver that runs them; and what tests of GPUs call ``cuda`` is the CPU.

The process has ``tests/support/stand_in``'s libraries, and STAND_IN_TRANSLATOR
(``test_emulated_kernels.py`` starts it so).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support" / "stand_in"))
from launch import OnGpu

from flexops.build.load import loader, provider
from flexops.testing import isa

_ensure = loader.ensure


def _ensure_cuda(family: str, _: str) -> bool:
    return _ensure(family, "cuda")


# NVRTC's PTX of the very plans whose machine code a GPU of capability 8.0 would run.
provider.compiler_for = functools.partial(provider.compiler_for, asked="compute_80")
provider.machine_code = lambda _: iter(())
loader.ensure = _ensure_cuda
isa.levels, isa.isa_limit = (lambda: ["emulated"]), nullcontext
torch.cuda.get_device_capability = lambda *_: (8, 0)


class OnCpu(TorchFunctionMode):
    """``device="cuda"`` is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def place(value: Any) -> Any:
            return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

        return (
            args[0]
            if func is torch.Tensor.cuda
            else func(
                *map(place, args), **{name: place(value) for name, value in (kwargs or {}).items()}
            )
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    conftest = next(
        plugin
        for plugin in config.pluginmanager.get_plugins()
        if str(getattr(plugin, "__file__", "")).endswith("tests/conftest.py")
    )
    conftest._gpu = lambda: True


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with OnCpu(), OnGpu():
        yield
