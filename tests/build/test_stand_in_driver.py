"""Native kernels for CUDA where there is no GPU: flexops' real bindings, launchers and provider, NVRTC's real code, and a driver that runs nothing.

``stand_in/libcuda.c`` refuses what the real driver would refuse (code for another GPU, PTX of a newer CUDA, a grid, block, cluster or shared memory that no
GPU has, a call without a context), and writes down what it is asked for. To libraries of flexops' the CPU's tensors are on a GPU
(``stand_in/libtorch_cuda.c``). So what is shown here is all that happens before a kernel runs; that it is right, tests/gpu shows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builds import child_environment

from flexops import settings
from flexops.toolchain import capabilities as capabilities_module
from flexops.toolchain import gpus
from flexops.toolchain.model import HostCompiler

SOURCES = Path(__file__).resolve().parent / "stand_in"


class Launch(NamedTuple):
    symbol: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int
    gpu: int
    status: int


class Answer(NamedTuple):
    """What a program said, what the driver was asked for, and what went to standard error."""

    said: dict[str, Any]
    log: list[str]
    errors: str

    @property
    def launches(self) -> list[Launch]:
        pattern = r"launch (\S+) grid (\d+) (\d+) (\d+) block (\d+) (\d+) shared (\d+) cluster (\d+) gpu (\d+) status (\d+)"
        found = (re.fullmatch(pattern, line) for line in self.log)
        numbers = ((one[1], [int(part) for part in one.groups()[1:]]) for one in found if one)
        return [Launch(symbol, (n[0], n[1], n[2]), n[3] * n[4], *n[5:]) for symbol, n in numbers]

    @property
    def loads(self) -> list[str]:
        return [line.removeprefix("load ") for line in self.log if line.startswith("load ")]


Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory, host_compiler: HostCompiler) -> Path:
    """The folder of the libraries."""
    folder = tmp_path_factory.mktemp("stand-in")
    for source, library in (("libcuda.c", "libcuda.so.1"), ("libtorch_cuda.c", "libtorch_cuda.so"), ("libnvidia-ml.c", "libnvidia-ml.so.1")):
        command = [str(host_compiler.path), "-x", "c", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(folder / library), str(SOURCES / source)]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def run(stand_ins: Path) -> Run:
    """``run(program, STAND_IN_GPUS="80")``: the program (see ``stand_in/launch.py``) on a machine with such GPUs."""
    folder = stand_ins

    def start(program: str, **environment: str) -> Answer:
        log = folder / "log"
        log.write_text("")
        known = {"LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": str(folder / "libtorch_cuda.so"), "STAND_IN_LOG": str(log)}
        known |= {"FLEXOPS_CACHE_DIR": str(settings.current().cache_dir), **environment}
        command = [sys.executable, str(SOURCES / "launch.py"), json.dumps({"program": program})]
        done = subprocess.run(command, env=child_environment(**known), capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return Answer(json.loads(done.stdout.splitlines()[-1]), log.read_text().splitlines(), done.stderr)

    return start


# ---- what the driver answers -------------------------------------------------------------------------------------------------------------------

ATTEMPTS = """
import os
def attempt(name, dtype=torch.float32, **driver):
    os.environ.update(driver)
    try:
        with OnGpu():
            flexops.rms_norm(torch.randn(5, 1000).to(dtype), None)
        said[name] = "fine"
    except RuntimeError as error:
        said[name] = str(error)
    for setting in driver:
        del os.environ[setting]
"""


def test_an_error_of_the_drivers_is_said_once_and_leaves_nothing_behind(run: Run) -> None:
    answer = run(f"""{ATTEMPTS}
attempt("first")
attempt("crash", STAND_IN_REFUSE="cuLaunchKernelEx=719")
attempt("unknown", STAND_IN_REFUSE="cuLaunchKernelEx=987")
attempt("after both")
attempt("load", torch.bfloat16, STAND_IN_REFUSE="cuLibraryLoadData=2")
attempt("symbol", torch.bfloat16, STAND_IN_REFUSE="cuLibraryGetKernel=500")
attempt("after those", torch.bfloat16)
def on_a_thread():
    attempt("no context", STAND_IN_REFUSE="cuDevicePrimaryCtxRetain=2")
    attempt("a context")
thread = threading.Thread(target=on_a_thread)
thread.start()
thread.join()
""")
    said = answer.said
    assert [name for name, text in said.items() if text == "fine"] == ["first", "after both", "after those", "a context"]
    assert said["crash"] == "flexops::rms_norm: CUDA error: unspecified launch failure"
    assert "error 987, which this driver has no text for" in said["unknown"]
    assert "out of memory (error 2 of a driver for CUDA 13.0)" in said["load"]
    assert "forward_held<flexops::bf16" in said["load"]
    assert "named symbol not found (error 500" in said["symbol"]
    assert "unload" in answer.log
    assert said["no context"].endswith("out of memory")


def test_a_driver_that_is_too_old_for_the_code(run: Run) -> None:
    """Of NVRTC 13.0's: what is needed is named, what there is, and the mend; a driver that is updated takes it."""
    answer = run(f"""{ATTEMPTS}
attempt("old", STAND_IN_CUDA="12040")
attempt("updated")
""")
    assert "is of CUDA 13.0, which needs the NVIDIA driver 580 or newer; this one runs CUDA 12.4" in answer.said["old"]
    assert "fix: update the driver, or take a torch of an older CUDA" in answer.said["old"]
    assert answer.said["updated"] == "fine"


def test_a_gpu_newer_than_the_compiler_gets_ptx(run: Run) -> None:
    """And a driver that is older than that PTX says so."""
    answer = run(f"""{ATTEMPTS}
attempt("old driver", STAND_IN_GPUS="150", STAND_IN_CUDA="12080")
attempt("new GPU", STAND_IN_GPUS="150")
""")
    assert "which needs the NVIDIA driver 580 or newer; this one runs CUDA 12.8" in answer.said["old driver"]
    assert answer.said["new GPU"] == "fine"
    assert [one.partition(" ")[0] for one in answer.loads] == ["ptx"]
    assert "the driver will compile it from PTX" in answer.errors


# ---- which GPUs there are ------------------------------------------------------------------------------------------------------------------


def test_nvml_tells_of_mig_slices(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ctypes, from a library with NVML's entry points: a sliced GPU, three of whose seven slices are there, and one that knows no MIG."""
    monkeypatch.setattr(gpus, "_NVML", (str(stand_ins / "libnvidia-ml.so.1"),))
    found = gpus._from_nvml()
    assert found
    assert [(gpu.name, str(gpu.capability), gpu.slices) for gpu in found.gpus] == [
        ("NVIDIA A100", "8.0", ("MIG-0", "MIG-3", "MIG-6")),
        ("NVIDIA L40S", "8.9", None),
    ]
    assert found.gpus[0].memory_bytes == 0
    for devices, capabilities in (("MIG-3", ["8.0"]), ("MIG-1", []), (None, ["8.0", "8.9"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices) if devices else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(capabilities_module, "has_device_node", lambda: True)
        monkeypatch.setattr(gpus, "machine", lambda: found)
        settings.current.cache_clear()
        assert [str(one) for one in capabilities_module.local_capabilities()] == capabilities
    settings.current.cache_clear()
