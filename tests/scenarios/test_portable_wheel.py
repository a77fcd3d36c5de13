"""The wheel that needs no compiler: host code by zig, for any torch with the stable ABI, any
Python, and a glibc of 2.28."""

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
from marks import first_of
from processes import completed

from flexops import settings
from flexops.build.deliver import aot
from flexops.build.describe import catalog
from flexops.build.plan import kernel_names
from flexops.build.store import manifest
from flexops.toolchain import zig
from flexops.toolchain.model import TorchBuild, Version

RUN = """
import torch, flexops
from flexops.build.load import loader
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
    torch.ops.flexops.lion_([wrong], [wrong], [wrong], [], 1e-3, 0.9, 0.99, 0.0, False, None, None, None, False)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _zig(require: Callable[..., None]) -> None:
    require(
        importlib.util.find_spec("ziglang") is not None, "zig", f"pip install {zig.REQUIREMENT}"
    )


def build(machine: settings.Machine, package: Path) -> dict[str, Path]:
    """The libraries of one family, by device type."""
    chosen = settings.Settings.from_environ(
        {
            **child_environment(),
            "FLEXOPS_WHEEL": machine,
            "FLEXOPS_CACHE_DIR": str(package.parent / "cache"),
        }
    )
    return {
        path.name.rpartition("-")[2]: next(path.glob("*.so"))
        for path in aot.build_into_package(("lion",), chosen, package)
    }


def readelf(library: Path, option: str) -> str:
    return completed(["readelf", "-W", option, str(library)]).stdout


@pytest.mark.extra
def test_what_zig_compiles_runs_without_a_compiler_and_throws_what_torch_catches(tmp_path, require):
    from flexops import toolchain

    torch = toolchain.torch_build()
    require(
        torch is not None and torch.stable_abi,
        "a torch with the stable ABI",
        "pip install torch==2.13.0",
    )
    package = tmp_path / "site" / "flexops"
    shutil.copytree(
        REPOSITORY / "flexops", package, ignore=shutil.ignore_patterns("__pycache__", "_aot")
    )
    shutil.copytree(REPOSITORY / "csrc", package / "_csrc")
    built = build("x86_64", package)
    environment = child_environment(
        PYTHONPATH=str(package.parent), PATH="/nonexistent", FLEXOPS_JIT="0", FLEXOPS_AOT_DIR=None,
        FLEXOPS_CACHE_DIR=str(tmp_path / "empty"),
    )  # fmt: skip
    done = completed([sys.executable, "-c", RUN], env=environment, cwd=tmp_path)
    assert "params[0] must be float32, bfloat16 or float16, got int32" in done.stdout
    names = kernel_names.names_in(built["cuda"])
    assert any(name.startswith("flexops::lion::") for name in names), (
        "it names the kernels that it launches"
    )


@pytest.fixture(scope="module", params=first_of("x86_64", "aarch64"))
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[settings.Machine, dict[str, Path]]:
    return request.param, build(request.param, tmp_path_factory.mktemp(request.param) / "flexops")


def test_the_libraries_need_nothing_of_the_machine_that_built_them(tmp_path, built):
    machine, libraries = built
    for device, library in libraries.items():
        known = manifest.Manifest.from_json((library.parent / manifest.FILE_NAME).read_text())
        assert known.torch_abi == "stable-2.11"
        assert Version.parse(known.glibc) <= Version.parse(zig.GLIBC)
        assert known.glibcxx == ""
        assert known.isa_levels == (
            ()
            if device == "cuda"
            else ("baseline",)
            if machine == "aarch64"
            else ("baseline", "avx2", "avx512")
        )
        needed = set(re.findall(r"NEEDED.*\[(.+)\]", readelf(library, "-d")))
        assert needed - {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"} <= {
            "libtorch_cpu.so",
            "libstdc++.so.6",
            "libc.so.6",
            "libm.so.6",
            "libdl.so.2",
        }
        assert ("AArch64" if machine == "aarch64" else "X86-64") in readelf(library, "-h")
        for later in ("2.11.0", "2.15.0+cu132"):
            torch = TorchBuild(
                later, later.partition("+cu")[2] or None, None, "", cxx11_abi=True, root=tmp_path
            )
            assert manifest.judge(known, torch) is None


def audit(wheel: Path, *libraries: Path) -> subprocess.CompletedProcess[str]:
    """What CI's check says of a wheel with these libraries."""
    record = f"{wheel.name.partition('-py3')[0]}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{record}/WHEEL",
            f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {wheel.stem.partition('-1-')[2]}\n",
        )
        for number, library in enumerate(libraries):
            archive.write(library, f"flexops/_aot/{number}/{library.name}")
        archive.writestr(f"{record}/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    command = [sys.executable, str(REPOSITORY / "scripts/ci/audit_wheel.py"), str(wheel)]
    return completed(command, code=None)


def test_a_wheels_tag_is_true_or_the_check_fails(tmp_path, built):
    """A newer glibc's symbol and another project's library are what a build machine leaves in a
    wheel."""
    machine, libraries = built
    wheel = tmp_path / f"some-1-py3-none-manylinux_2_28_{machine}.whl"
    done = audit(wheel, *libraries.values())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "true to its tag" in done.stdout
    assert audit(wheel).returncode, "without a library there is nothing to be true of"

    def compile_library(name: str, text: str, *options: str) -> Path:
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.28",
            "-shared", "-nostdlib", str(source), *options]  # fmt: skip
        subprocess.run([*command, f"-Wl,-soname,{name}", "-o", str(tmp_path / name)], check=True)
        return tmp_path / name

    (tmp_path / "future.map").write_text("GLIBC_2.34 { global: later; };")
    for needed, options, said in [
        ("libother.so.1", [], "libraries that the tag does not promise: libother.so.1"),
        (
            "libc.so.6",
            [f"-Wl,--version-script={tmp_path / 'future.map'}"],
            f"its symbols are manylinux_2_34_{machine}'s",
        ),
    ]:
        of = compile_library(needed, "int later(void) { return 1; }", *options)
        user = compile_library(
            "libuser.so", "int later(void); int use(void) { return later(); }", str(of)
        )
        done = audit(wheel, *libraries.values(), user)
        assert done.returncode == 1
        assert said in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_script_makes_the_whole_wheel(tmp_path, machine):
    command = [
        "bash",
        str(REPOSITORY / "scripts/build_wheel.sh"),
        "--arch",
        machine,
        "--out",
        str(tmp_path),
    ]
    environment = child_environment(
        PYTHON=sys.executable, FLEXOPS_CACHE_DIR=str(tmp_path / "cache")
    )
    completed(command, env=environment)
    (file,) = tmp_path.glob("*.whl")
    assert file.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    assert file.stat().st_size < 8 * 2**20
    completed([sys.executable, str(REPOSITORY / "scripts/ci/audit_wheel.py"), str(file)])
    libraries = [name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")]
    assert len(libraries) == sum(len(spec.devices) for spec in catalog.CATALOG), (
        "each family, for the CPU and for CUDA"
    )


def test_the_tests_have_the_zig_that_builds():
    assert zig.REQUIREMENT in (REPOSITORY / "tests/requirements.txt").read_text().splitlines()


@pytest.mark.slow
def test_the_aarch64_wheel_computes_what_it_should(tmp_path, require):
    """Under emulation: every family's self-check, and one family's tests."""
    there = shutil.which("qemu-aarch64-static") and shutil.which("mmdebstrap")
    require(there, "an emulator of aarch64", "apt-get install qemu-user-static mmdebstrap")
    tests = ["tests/ops/test_rope.py", "-k", "native_is_what or strides"]
    command = [
        sys.executable,
        "-m",
        "flexops_tools.proving.aarch64",
        "--work",
        str(tmp_path),
        "--",
        *tests,
    ]
    done = completed(command)
    families = len(catalog.CATALOG)
    assert re.search(
        rf"^{families} of {families} families right; [1-9]\d* tests passed, 0 failed",
        done.stdout,
        re.MULTILINE,
    ), done.stdout
