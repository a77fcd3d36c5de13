"""The wheel that needs no compiler: host code by zig, for any torch with the stable ABI, any Python, and a glibc of 2.28."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import REPOSITORY, child_environment

from flexops import settings
from flexops.op_builder import aot, catalog, kernel_names, manifest
from flexops.toolchain import zig
from flexops.toolchain.model import TorchBuild, Version

RUN = """
import torch, flexops
from flexops.op_builder import loader
assert loader.ensure("lion", "cpu"), flexops.status()
(lion,) = (one for one in flexops.status() if (one.op, one.device) == ("lion", "cpu"))
assert lion.backend == "aot", lion
ours, theirs = [torch.ones(5, requires_grad=True)], [torch.ones(5)]
for parameter in ours:
    parameter.grad = torch.full_like(parameter, 2.0)
flexops.optim.Lion(ours, lr=0.25).step()
assert torch.equal(ours[0], torch.full((5,), 0.75)), ours
wrong = torch.zeros(4, dtype=torch.int32)
try:
    torch.ops.flexops.lion_([wrong], [wrong], [wrong], 1e-3, 0.9, 0.99, 0.0, False, None, None, None, [], False)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _zig(require: Callable[..., None]) -> None:
    require(importlib.util.find_spec("ziglang") is not None, "zig", f"pip install {zig.REQUIREMENT}")


def build(machine: settings.Machine, package: Path) -> dict[str, Path]:
    """The libraries of one family, by device type."""
    chosen = settings.Settings.from_environ({**child_environment(), "FLEXOPS_WHEEL": machine, "FLEXOPS_CACHE_DIR": str(package.parent / "cache")})
    return {path.name.rpartition("-")[2]: next(path.glob("*.so")) for path in aot.build_into_package(("lion",), chosen, package)}


def readelf(library: Path, option: str) -> str:
    return subprocess.run(["readelf", "-W", option, str(library)], capture_output=True, text=True, check=True).stdout


def test_what_zig_compiles_runs_without_a_compiler_and_throws_what_torch_catches(tmp_path: Path, require: Callable[..., None]) -> None:
    from flexops import toolchain

    torch = toolchain.torch_build()
    require(torch is not None and torch.stable_abi, "a torch with the stable ABI", "pip install torch==2.13.0")
    package = tmp_path / "site" / "flexops"
    shutil.copytree(REPOSITORY / "flexops", package, ignore=shutil.ignore_patterns("__pycache__", "_aot"))
    shutil.copytree(REPOSITORY / "csrc", package / "_csrc")
    built = build("x86_64", package)
    environment = child_environment(PYTHONPATH=str(package.parent), PATH="/nonexistent", FLEXOPS_JIT="0", FLEXOPS_CACHE_DIR=str(tmp_path / "empty"))
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "params[0] must be float32, bfloat16 or float16, got int32" in done.stdout
    names = kernel_names.names_in(built["cuda"])
    assert any(name.startswith("flexops::lion::") for name in names), "it names the kernels that it launches"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_libraries_need_nothing_of_the_machine_that_built_them(tmp_path: Path, machine: settings.Machine) -> None:
    for device, library in build(machine, tmp_path / "flexops").items():
        known = manifest.Manifest.from_json((library.parent / manifest.FILE_NAME).read_text())
        assert known.torch_abi == "stable-2.11"
        assert Version.parse(known.glibc) <= Version.parse(zig.GLIBC)
        assert known.glibcxx == ""
        assert known.isa_levels == (() if device == "cuda" else ("baseline",) if machine == "aarch64" else ("baseline", "avx2", "avx512"))
        needed = set(re.findall(r"NEEDED.*\[(.+)\]", readelf(library, "-d")))
        assert needed - {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"} <= {"libtorch_cpu.so", "libstdc++.so.6", "libc.so.6", "libm.so.6", "libdl.so.2"}
        assert ("AArch64" if machine == "aarch64" else "X86-64") in readelf(library, "-h")
        for later in ("2.11.0", "2.15.0+cu132"):
            torch = TorchBuild(later, later.partition("+cu")[2] or None, None, "", cxx11_abi=True, root=tmp_path)
            assert manifest.judge(known, torch) is None


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_script_makes_the_whole_wheel(tmp_path: Path, machine: str) -> None:
    command = ["bash", str(REPOSITORY / "scripts/build_wheel.sh"), "--arch", machine, "--out", str(tmp_path)]
    environment = child_environment(PYTHON=sys.executable, FLEXOPS_CACHE_DIR=str(tmp_path / "cache"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.whl")
    assert file.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    assert file.stat().st_size < 8 * 2**20
    libraries = [name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")]
    assert len(libraries) == sum(len(spec.devices) for spec in catalog.CATALOG), "each family, for the CPU and for CUDA"


def test_the_tests_have_the_zig_that_builds() -> None:
    assert zig.REQUIREMENT in (REPOSITORY / "tests/requirements.txt").read_text().splitlines()


@pytest.mark.slow
def test_the_aarch64_wheel_computes_what_it_should(tmp_path: Path, require: Callable[..., None]) -> None:
    """Under emulation: every family's self-check, and one family's tests."""
    there = shutil.which("qemu-aarch64-static") and shutil.which("mmdebstrap")
    require(there, "an emulator of aarch64", "apt-get install qemu-user-static mmdebstrap")
    tests = ["tests/ops/test_rope.py", "-k", "native_is_what or strides"]
    command = [sys.executable, str(REPOSITORY / "scripts/prove_aarch64.py"), "--work", str(tmp_path), "--", *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    families = len(catalog.CATALOG)
    assert re.search(rf"^{families} of {families} families right; [1-9]\d* tests passed, 0 failed", done.stdout, re.MULTILINE), done.stdout
