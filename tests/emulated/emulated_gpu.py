"""For pytest, ``-p emulated_gpu``: what tests call of flexops' operators on the CPU's tensors,
CUDA's kernels compute, on the emulator; and what tests of GPUs call ``cuda`` is the CPU. Launchers
see a GPU of the capability in ``STAND_IN_GPUS`` with ``STAND_IN_SMS`` multiprocessors, by default
80 and 108."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flexops.build.load import loader
from flexops.testing import isa
from flexops.testing.emulator import families


def _ensure(family: str, _: str) -> bool:
    families.open_library(family)
    return True


loader.ensure = _ensure
isa.levels, isa.isa_limit = (lambda: ["emulated"]), nullcontext
families.CAPABILITY = int(os.environ.get("STAND_IN_GPUS", "80"))
families.MULTIPROCESSORS = int(os.environ.get("STAND_IN_SMS", "108"))
torch.cuda.get_device_capability = lambda *_: divmod(families.CAPABILITY, 10)


class OnCpu(TorchFunctionMode):
    """``device="cuda"`` is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def place(value: Any) -> Any:
            names_it = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return "cpu" if names_it else value

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
    with OnCpu(), families.OnEmulator():
        yield


def pytest_sessionfinish() -> None:
    symbols = [one.symbol for one in families.driver().kernels]
    print(f"\n{len(symbols)} kernels ran: {' '.join(symbols)}")
